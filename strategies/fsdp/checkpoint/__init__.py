"""Checkpoints of FSDP: full, sharded and local ones, written while training waits or continues."""
