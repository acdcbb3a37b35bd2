"""LoRA on bases that bitsandbytes holds in 4 and 8 bits: adapters train as in a plain loop, and the base stays.

The plain loop never evaluates: on CPUs, that packs weights of 4 bits in another way, and computes in another precision.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accelight.checkpoint import inspect_checkpoint
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict, load_from_checkpoint
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer

BATCH, STEPS = 6, 4
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
BASES: dict[str, dict[str, Any]] = {
    "4 bits": {**_FOUR_BITS, "bnb_4bit_quant_storage": torch.float32},
    "4 bits in bytes": _FOUR_BITS,
    "8 bits": {"load_in_8bit": True},
}
_QUANTIZED = r".*_proj(\.base_layer)?"


def build(base: str, folder: str) -> Any:
    """Build a model of transformers on a base, whose weights are saved in the folder, with adapters."""
    quiet = logging.getLogger("bitsandbytes"), logging.getLogger("transformers")
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**BASES[base]), device_map="cpu", dtype=torch.float32
    )
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("weights"))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def batches() -> Tensor:
    return torch.randint(64, (STEPS, BATCH, 8), generator=torch.Generator().manual_seed(1))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.3, momentum=0.9)


class Module(LightningModule):
    """Sees the same batches whatever the number of processes is, and validates after each."""

    def __init__(self, base: str, folder: str) -> None:
        super().__init__()
        self.net = build(base, folder)

    def _loss(self, batch_idx: int) -> Tensor:
        share = BATCH // self.trainer.world_size
        batch = batches()[batch_idx, self.global_rank * share : (self.global_rank + 1) * share]
        return self.net(input_ids=batch, labels=batch).loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.trainer.current_epoch * STEPS // 2 + batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self._loss(batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net)


@cache
def trained_alone(base: str, folder: str) -> dict[str, Tensor]:
    model = build(base, folder)
    optimizer = optimizer_of(model)
    for batch in batches():
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return _tensors(model.state_dict(), "")


def _tensors(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    return {name.removeprefix(prefix): one.detach().cpu().clone() for name, one in tensors.items()}


def strategy(engine: str, **options: Any) -> Any:
    if engine.startswith("zero"):
        return AccelDeepSpeedStrategy(zero_stage=int(engine[-1]), **options)
    return AccelFSDPStrategy(
        fsdp_version=int(engine[4]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="full_state_dict" if engine.endswith("full") else "sharded_state_dict",
        **options,
    )


def fit(
    base: str, weights: str, engine: str, epochs: int, saved: str, *, resumes: bool, options: dict[str, Any]
) -> dict[str, Tensor]:
    trainer = quiet_trainer(
        strategy(engine, **options), dist.get_world_size(), max_epochs=epochs, use_distributed_sampler=False
    )
    module = Module(base, weights)
    data = DataLoader([0] * (STEPS // 2))  # type: ignore[arg-type, var-annotated]
    trainer.fit(module, data, data, ckpt_path=saved if resumes else None)
    if not resumes:
        trainer.save_checkpoint(saved)
    return _tensors(full_state_dict(trainer.strategy, module), "net.")


def _fit(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return fit(**arguments)


ADAPTERS = {"save_trainable_only": True}
IGNORED = {"ignored_modules": _QUANTIZED}
CELLS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "4 bits, fsdp1 to fsdp2": ("4 bits", "fsdp1", "fsdp2", ADAPTERS),
    "4 bits, fsdp2 to fsdp1": ("4 bits", "fsdp2", "fsdp1", ADAPTERS),
    "4 bits, fsdp2": ("4 bits", "fsdp2", "fsdp2", {}),
    "4 bits, fsdp1-full to fsdp2": ("4 bits", "fsdp1-full", "fsdp2", {}),
    "4 bits, fsdp2-full to fsdp1, adapters": ("4 bits", "fsdp2-full", "fsdp1", ADAPTERS),
    "4 bits, zero2": ("4 bits", "zero2", "zero2", {}),
    "4 bits, zero3, adapters": ("4 bits", "zero3", "zero3", ADAPTERS),
    "4 bits in bytes, fsdp2": ("4 bits in bytes", "fsdp2", "fsdp2", {**ADAPTERS, **IGNORED}),
    "4 bits in bytes, zero3": ("4 bits in bytes", "zero3", "zero3", {}),
    "8 bits, fsdp1": ("8 bits", "fsdp1", "fsdp1", {**ADAPTERS, **IGNORED}),
    "8 bits, fsdp2": ("8 bits", "fsdp2", "fsdp2", IGNORED),
    "8 bits, zero2, adapters": ("8 bits", "zero2", "zero2", ADAPTERS),
    "8 bits, zero3": ("8 bits", "zero3", "zero3", {}),
}


@pytest.mark.core("4 bits, fsdp2]", "4 bits, zero3")
@pytest.mark.parametrize("cell", CELLS)
def test_adapters_train_and_resume_on_a_base_that_stays(cell: str, weights: str, tmp_path: Path) -> None:
    base, engine, next_engine, options = CELLS[cell]
    shared = {"base": base, "weights": weights, "saved": str(tmp_path / "saved.ckpt"), "options": options}
    expected = trained_alone(base, weights)
    saved = run_on_ranks(2, _fit, {**shared, "engine": engine, "epochs": 1, "resumes": False})[0]
    if not engine.endswith("full"):
        loaded = load_from_checkpoint(Module, tmp_path / "saved.ckpt", base=base, folder=weights)
        for name, value in _tensors(loaded.state_dict(), "net.").items():
            assert value.numpy().tobytes() == saved[name].numpy().tobytes(), name
    num_ranks = 2 if engine.startswith("zero") else 3
    for found in run_on_ranks(num_ranks, _fit, {**shared, "engine": next_engine, "epochs": 2, "resumes": True}):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if ".lora_" in name:
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # sums in another order
            else:
                assert found[name].dtype == value.dtype
                assert found[name].numpy().tobytes() == value.numpy().tobytes(), name
    if options is ADAPTERS and not engine.endswith("full"):
        assert all(".lora_" in tensor.name for tensor in inspect_checkpoint(tmp_path / "saved.ckpt").tensors)


def _refusal(base: str, weights: str, engine: str) -> str:
    with pytest.raises(ValueError, match="cannot train this") as error:
        fit(base, weights, engine, 1, "never", resumes=False, options={})
    return str(error.value)


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_integers_are_not_sharded(engine: str, weights: str) -> None:
    for refusal in run_on_ranks(2, _refusal, "8 bits", weights, engine):
        assert "layers.0.mlp.up_proj: 8-bit weights cannot be sharded. Add the module to ignored_modules" in refusal
    for refusal in run_on_ranks(2, _refusal, "4 bits in bytes", weights, engine):
        assert "4-bit weights stored as torch.uint8 cannot be sharded" in refusal


def _resume_on(weights: str, engine: str, saved: str, options: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        fit("4 bits", weights, engine, 2, saved, resumes=True, options=options)
    return str(error.value)


OTHER_BASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "fsdp2": ("fsdp2", {}, "quantized weights with another"),
    "fsdp2, in one file": ("fsdp2-full", {}, "quantized weights with another"),
    "fsdp1, adapters": ("fsdp1", ADAPTERS, r"absmax has other values"),
    "zero2": ("zero2", {}, "quantized weights with another"),
    "zero3, adapters": ("zero3", ADAPTERS, r"absmax has other values"),
}


@pytest.mark.core("fsdp2]", "zero3")
@pytest.mark.parametrize("cell", OTHER_BASES)
def test_the_same_numbers_at_another_scale_are_another_base(cell: str, weights: str, tmp_path: Path) -> None:
    engine, options, message = OTHER_BASES[cell]
    saved, doubled = str(tmp_path / "saved.ckpt"), str(tmp_path / "doubled")
    model = LlamaForCausalLM.from_pretrained(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(2)
    model.save_pretrained(doubled)
    shared = {"base": "4 bits", "weights": weights, "saved": saved, "options": options}
    run_on_ranks(2, _fit, {**shared, "engine": engine, "epochs": 1, "resumes": False})
    for refusal in run_on_ranks(2, _resume_on, doubled, engine, saved, options):
        assert re.search(message, refusal)
