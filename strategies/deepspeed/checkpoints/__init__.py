"""What a run with DeepSpeed saves and loads."""
