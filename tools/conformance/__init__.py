"""The parts of ``python -m tools.lightning_conformance``."""
