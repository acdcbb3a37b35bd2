"""What optimizers may train, and how they step on shards."""
