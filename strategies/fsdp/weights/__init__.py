"""First values of a sharded model, and whole weights into it."""
