"""Embeddings with sparse gradients, which no sharding can reduce."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...checkpoint.names import clean_name


def sparse_embeddings(model: nn.Module) -> Iterator[str]:
    """Yield what to say of each embedding that is trained with sparse gradients.

    Args:
        model: Not sharded yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield (
                f"{clean_name(name)}: {type(module).__name__}(sparse=True) has sparse gradients, which cannot be "
                "reduced into shards. Leave sparse=True out, or train with Trainer(strategy='ddp')."
            )
