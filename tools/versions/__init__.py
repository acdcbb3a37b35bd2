"""Environments, areas and the table of tools.matrix."""
