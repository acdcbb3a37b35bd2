"""Hugging Face Accelerate's semantics for PyTorch Lightning's Trainer.

The parts are imported by their names: ``accelight.state``, ``accelight.checkpoint``, ``accelight.strategies`` and
``accelight.callbacks``. This file imports none of them, so that each needs no more than it says.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
