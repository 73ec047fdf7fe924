"""Processes of the service: those that it starts and supervises, and what each does itself."""
