"""What a merge writes: planned before anything is written, copied, and given its name when it is complete."""
