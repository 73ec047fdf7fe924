"""What users declare: parameters, tables, optimizers, initializers, and their names."""
