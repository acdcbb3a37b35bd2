"""Writing a merge: planned first, then copied, and renamed when it is complete."""
