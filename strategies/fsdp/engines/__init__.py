"""FSDP1 and FSDP2 behind one small interface."""
