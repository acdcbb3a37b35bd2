"""Sharded tensors in users' code: each operation has the meaning that it has for whole ones."""
