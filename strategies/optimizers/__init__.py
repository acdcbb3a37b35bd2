"""Optimizers: the parameters that they may train, and their steps on shards."""
