"""Private names of torch's c10d (2.13): stores, which it has no public names for, and the default group's own."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = [
    "HashStore",  # a group of one process needs no network
    "PrefixStore",  # keys of our own in the group's store
    "Store",  # what all stores are
    "TCPStore",  # who holds it has to stay until the others are through
    "_get_default_store",  # processes meet there without a collective
]

ATTRIBUTES = {
    "_get_backend": ("torch.distributed.ProcessGroup", "the timeout that a group was made with"),
}
