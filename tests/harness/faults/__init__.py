"""What goes wrong: disks, wires, processes that are killed, stopped or interrupted at random."""
