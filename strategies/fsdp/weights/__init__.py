"""First values of a sharded model, and full weights into it."""
