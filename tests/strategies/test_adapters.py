"""PEFT's adapters: merged folders are those that PEFT itself would save, whoever sharded the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelight.callbacks import MergeShardedCheckpoint
from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from accelight.checkpoint.cli import main
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer

TARGETS = ["q_proj", "v_proj"]
CONFIGS: dict[str, Any] = {
    "lora": LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "dora": LoraConfig(r=4, target_modules=TARGETS, use_dora=True, task_type="CAUSAL_LM"),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "head": LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
}


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Tuning(LightningModule):
    def __init__(self, kind: str, second: bool = False) -> None:
        super().__init__()
        self.net: Any = get_peft_model(base(), CONFIGS[kind])
        if second:
            self.net.add_adapter("other", CONFIGS["dora"])

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def strategy_of(engine: str, kind: str = "lora") -> Any:
    if engine.startswith("zero"):
        config = {"zero_optimization": {"stage": int(engine[-1])}, "train_micro_batch_size_per_gpu": 2}
        # PEFT saves the frozen embedding beside an adapter of it; DeepSpeed leaves out all that is frozen.
        return AccelDeepSpeedStrategy(hf_ds_config=config, save_trainable_only=kind != "embedding")
    return AccelFSDPStrategy(
        fsdp_version=int(engine[-1]), state_dict_type="sharded_state_dict", save_trainable_only=True,
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip


def data() -> DataLoader[Tensor]:
    rows: Any = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=2)


def tune(engine: str, kind: str, path: str, second: bool = False) -> dict[str, Tensor]:
    """Train, save, and return what PEFT would save of the trained weights, from a model that is not sharded."""
    trainer, module = quiet_trainer(strategy_of(engine, kind), 2, max_epochs=1), Tuning(kind, second)
    trainer.fit(module, data())
    trainer.save_checkpoint(path)
    trained = {name: value.cpu() for name, value in full_state_dict(trainer.strategy).items()}
    plain = Tuning(kind, second)
    plain.load_state_dict(trained)
    saved: dict[str, Tensor] = get_peft_model_state_dict(plain.net)
    return {name: value.clone() for name, value in saved.items()}


CELLS = [(kind, engine) for kind in CONFIGS for engine in ("fsdp1", "fsdp2", "zero2", "zero3")]


@pytest.mark.parametrize(
    ("kind", "engine"),
    [pytest.param(*cell, marks=[] if "lora" in cell or "fsdp2" in cell else pytest.mark.exhaustive) for cell in CELLS],
)
def test_folders_are_those_of_peft(kind: str, engine: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = run_on_ranks(2, tune, engine, kind, path, timeout_s=120, init_group=False)[0]
    assert main(["merge-weights", path, str(tmp_path / "adapter"), "--adapter", "--verify"]) == 0
    torch.testing.assert_close(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), expected, rtol=0, atol=0)
    plain = Tuning(kind)
    plain.net.save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("adapter", "theirs"))
    for config in (ours, theirs):
        config.update({key: sorted(value) for key, value in config.items() if isinstance(value, list)})  # PEFT has sets
    assert ours == theirs
    loaded = PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    torch.testing.assert_close(get_peft_model_state_dict(loaded), expected, rtol=0, atol=0)


def test_one_of_several_adapters_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    expected = run_on_ranks(2, tune, "fsdp2", "lora", str(path), True, timeout_s=120, init_group=False)[0]
    with pytest.raises(CheckpointError, match=r"the checkpoint has \['default', 'other'\]"):
        merge_fsdp_weights(path, tmp_path / "adapter", adapter=True)
    merge_fsdp_weights(path, tmp_path / "adapter", adapter="default")
    torch.testing.assert_close(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), expected, rtol=0, atol=0)


def tune_and_merge(folder: str) -> None:
    merging = MergeShardedCheckpoint(f"{folder}/adapter", adapter=True)
    quiet_trainer(strategy_of("fsdp2"), 2, max_epochs=1, callbacks=[merging]).fit(Tuning("lora"), data())


def test_the_merge_callback_writes_adapters(tmp_path: Path) -> None:
    run_on_ranks(2, tune_and_merge, str(tmp_path), timeout_s=120, init_group=False)
    loaded: Any = PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    layer = loaded.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_B["default"].weight.abs().sum() > 0


def test_adapters_of_other_checkpoints_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, save_without_adapters, str(tmp_path / "saved.ckpt"), init_group=False)
    with pytest.raises(CheckpointError, match="describes no adapters of PEFT"):
        merge_fsdp_weights(tmp_path / "saved.ckpt", tmp_path / "adapter", adapter=True)
    with pytest.raises(ValueError, match="omit strip_prefix"):
        merge_fsdp_weights(tmp_path / "saved.ckpt", tmp_path / "adapter", adapter=True, strip_prefix="net")


def save_without_adapters(path: str) -> None:
    from tests.strategies.oracle import Case, Outcome, TinyModule, rank_loader

    trainer = quiet_trainer(AccelFSDPStrategy(state_dict_type="sharded_state_dict"), 2, max_epochs=1)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    trainer.save_checkpoint(path)
