"""Private names of torch's checkpoints (2.13) that this package uses. Importing this file imports torch."""

from __future__ import annotations

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

__all__ = [
    "ExtensionRegistry",  # makes a record's transforms (compression) from the descriptors in .metadata
    "StreamTransformExtension",  # distinguishes transforms of streams, which can be undone here, from other extensions
]
