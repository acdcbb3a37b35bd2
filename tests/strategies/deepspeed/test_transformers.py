"""transformers models under ZeRO stage 3: partitioned while they are loaded, experts gathered as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accelight.state import AcceleratorState
from accelight.strategies import DeepSpeedPlugin
from accelight.strategies.deepspeed import DeepSpeedEngineWrapper
from accelight.strategies.deepspeed.ds_config import HfDeepSpeedConfig, TrainingFacts, hidden_size_of, resolve
from tests.ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="needs transformers")
CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,  # partition the smallest parameter, too
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}


def small_mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=1,  # the ranks' tokens go to different experts
            max_position_embeddings=32,
        )
    )


def tokens(rank: int) -> Tensor:
    return (torch.arange(8) * (rank + 1) + rank).reshape(1, 8)


def train_partitioned(folder: Path) -> dict[str, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import get_z3_leaf_modules

    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG, transformer_moe_cls_names="MixtralSparseMoeBlock")
    AcceleratorState(deepspeed_plugin=plugin)
    # What the strategies do before a module is built: DeepSpeed's communication on the group that there is.
    deepspeed.init_distributed("gloo", dist_init_required=False)
    with plugin.zero3_init_context_manager(enable=False):
        whole = transformers.MixtralForCausalLM.from_pretrained(folder)
    model = transformers.MixtralForCausalLM.from_pretrained(folder)
    found: dict[str, Any] = {
        "whole": sum(parameter.numel() for parameter in whole.parameters()),
        "held": sum(parameter.ds_tensor.numel() for parameter in model.parameters()),
        "visible": sum(parameter.numel() for parameter in model.parameters()),
    }
    plugin.set_moe_leaf_modules(model)
    found["leaves"] = [type(module).__name__ for module in get_z3_leaf_modules(model)]
    facts = TrainingFacts(world_size=dist.get_world_size(), micro_batch_size=1, hidden_size=hidden_size_of(model))
    raw, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=resolve(HfDeepSpeedConfig(plugin.deepspeed_config), facts).config,
        dist_init_required=False,
    )
    engine = DeepSpeedEngineWrapper(raw)
    ids = tokens(dist.get_rank())
    loss = raw(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    found |= {"loss": loss.item(), "norm": engine.get_global_grad_norm()}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found["weights"] = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    raw.destroy()
    return found


def test_a_mixture_of_experts_is_loaded_partitioned_and_trains_as_a_whole_one(tmp_path: Path) -> None:
    model = small_mixtral()
    model.save_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [model(input_ids=tokens(rank), labels=tokens(rank)).loss for rank in range(2)]
    (sum(losses) / 2).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    optimizer.step()
    size = sum(parameter.numel() for parameter in model.parameters())

    for rank, found in enumerate(run_on_ranks(2, train_partitioned, tmp_path, timeout_s=180)):
        assert (found["whole"], found["visible"]) == (size, 0)
        assert size / 2 <= found["held"] < 0.51 * size  # half, and the padding of odd sizes
        assert found["leaves"] == ["MixtralSparseMoeBlock"] * 2
        assert found["loss"] == pytest.approx(losses[rank].item(), rel=1e-6)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(found["weights"][name], weight.detach(), rtol=1e-5, atol=1e-6)
