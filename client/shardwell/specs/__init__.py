"""The declarations of users: parameters, tables, optimizers, initializers, and their names."""
