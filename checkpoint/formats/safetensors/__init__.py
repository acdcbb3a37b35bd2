"""Safetensors files."""
