"""What is measured against the peers; see ``python -m benchmarks --help``."""
