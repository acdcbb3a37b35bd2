"""A small Llama trained under FSDP2: the merge writes what the run itself gathered, and transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelight.checkpoint import merge_fsdp_weights, write_manifest
from tests.checkpoint.saving import save
from tests.ranks import run_on_ranks


def config(tied: bool) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=tied)


def train_and_save(folder: str, tied: bool) -> None:
    """Take one step on each rank, save the shards, and beside them what ``state_dict()`` gathers."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config(tied))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(8).reshape(1, 8) + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    save(Path(folder, "in"), {"state_dict": get_model_state_dict(model)})
    full: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({name: value.clone() for name, value in full.items()}, Path(folder, "gathered.pt"))
        if tied:
            ties = {"lm_head.weight": "model.embed_tokens.weight"}
            write_manifest(Path(folder, "in"), model_prefix="state_dict", ties=ties)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_llama_of_two_processes(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    run_on_ranks(2, train_and_save, str(tmp_path), tied)
    gathered = torch.load(tmp_path / "gathered.pt")
    config(tied).save_pretrained(tmp_path / "out")
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    merged = load_file(tmp_path / "out/model.safetensors")
    assert set(gathered) - set(merged) == ({"lm_head.weight"} if tied else set())
    assert set(report.ties) == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(value, gathered[name]) for name, value in merged.items())
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert all(torch.equal(value, gathered[name]) for name, value in loaded.state_dict().items())
