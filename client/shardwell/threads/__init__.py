"""Threads of this process: they run calls, cancel them, and share the work of one."""
