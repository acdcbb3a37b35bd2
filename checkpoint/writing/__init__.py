"""What a merge writes: planned as a whole, copied, and named when it is complete."""
