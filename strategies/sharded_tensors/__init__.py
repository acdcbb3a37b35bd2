"""What users' code may do with sharded tensors: each operation has the meaning that it has for whole ones."""
