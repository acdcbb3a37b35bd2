"""Saves that continue while training does; the strategies bring what is saved and how it is written."""
