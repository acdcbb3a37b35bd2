"""What a sharded run saves and loads."""
