"""The ``accelight`` command in a process that fails as soon as anything imports torch."""

from __future__ import annotations

WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "safetensors", "lightning", "rich"):
            raise AssertionError(f"imported {name}")
sys.meta_path.insert(0, Block())
from accelight.checkpoint.cli import main
sys.exit(main(sys.argv[1:]))
"""
