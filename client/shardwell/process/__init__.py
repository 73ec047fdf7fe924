"""The resources of one process alone: owners, descriptors, memory and spans."""
