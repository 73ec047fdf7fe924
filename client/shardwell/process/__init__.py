"""What belongs to this process alone: who made what, its descriptors, memory and spans."""
