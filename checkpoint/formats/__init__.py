"""Every format that a checkpoint may have, read without trusting it."""
