"""Copies of the model that several processes share: their sizes, and what divides layers and sequences."""
