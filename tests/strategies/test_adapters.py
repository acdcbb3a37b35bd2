"""PEFT's adapters: merged folders are those that PEFT itself would save, whoever sharded the model."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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
    "patterns": LoraConfig(
        r=4, target_modules=TARGETS, rank_pattern={"0.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 3},
        use_rslora=True, layers_to_transform=[0], task_type="CAUSAL_LM",
    ),
    "all_biases": LoraConfig(r=4, target_modules=TARGETS, bias="all", lora_bias=True, task_type="CAUSAL_LM"),
    "pissa": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa", task_type="CAUSAL_LM"),
    "conv1d": LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    "twice": LoraConfig(r=4, target_modules=["wte", "lm_head"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    "tokens": LoraConfig(
        r=4, target_modules=TARGETS, trainable_token_indices={"embed_tokens": [1, 2]}, task_type="CAUSAL_LM"
    ),
    "tied": LoraConfig(r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
}  # fmt: skip
GPT2 = ("conv1d", "tied", "twice")
FOLDERS = ["lora", "dora", "ia3", "head", "embedding"]


def base(kind: str = "lora") -> Any:
    torch.manual_seed(0)
    if kind in GPT2:
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attention_bias=kind == "all_biases",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Tuning(LightningModule):
    def __init__(self, kind: str, second: bool = False) -> None:
        super().__init__()
        self.net: Any = get_peft_model(base(kind), CONFIGS[kind])
        if second:
            self.net.add_adapter("other", CONFIGS["dora"])

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def load(folder: Path) -> Any:
    """Return the model of a folder that has all of its weights and no others."""
    loading: Any = AutoModelForCausalLM
    model, report = loading.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model


def strategy_of(engine: str, kind: str = "lora", trainable_only: bool = True) -> Any:
    if engine.startswith("zero"):
        config = {"zero_optimization": {"stage": int(engine[-1])}, "train_micro_batch_size_per_gpu": 2}
        # PEFT saves the frozen embedding beside an adapter of it; DeepSpeed leaves out all that is frozen.
        return AccelDeepSpeedStrategy(hf_ds_config=config, save_trainable_only=trainable_only and kind != "embedding")
    return AccelFSDPStrategy(
        fsdp_version=int(engine[-1]), state_dict_type="sharded_state_dict", save_trainable_only=trainable_only,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block" if kind in GPT2 else "LlamaDecoderLayer"],
    )  # fmt: skip


def data() -> DataLoader[Tensor]:
    rows: Any = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=2)


def tune(engine: str, kind: str, path: str, second: bool = False, *, merged: bool = False) -> dict[str, Tensor]:
    """Train, save, and return what PEFT would save of the trained weights, from a model that is not sharded.

    Args:
        engine: Of the strategy.
        kind: Of adapter.
        path: Where it saves.
        second: Whether there is a second adapter.
        merged: Whether it saves all weights, and returns those of the base that PEFT has merged the adapter into.
    """
    strategy = strategy_of(engine, kind, trainable_only=not merged)
    trainer, module = quiet_trainer(strategy, 2, max_epochs=1), Tuning(kind, second)
    trainer.fit(module, data())
    trainer.save_checkpoint(path)
    trained = {name: value.cpu() for name, value in full_state_dict(trainer.strategy).items()}
    plain = Tuning(kind, second)
    plain.load_state_dict(trained)
    saved: dict[str, Tensor] = (
        plain.net.merge_and_unload().state_dict() if merged else get_peft_model_state_dict(plain.net)
    )
    return {name: value.clone() for name, value in saved.items()}


CELLS = [(kind, engine) for kind in FOLDERS for engine in ("fsdp1", "fsdp2", "zero2", "zero3")]


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


def tune_in_bf16(path: str) -> dict[str, Tensor]:
    return {name: value.bfloat16() for name, value in tune("fsdp2", "all_biases", path, merged=True).items()}


def test_merged_adapters_are_converted_split_and_pickled(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    expected = run_on_ranks(2, tune_in_bf16, str(path), timeout_s=120, init_group=False)[0]
    for is_safe in (True, False):
        merge_fsdp_weights(
            path, tmp_path / "out", is_safe, dtype="bf16", max_shard_size=5000, merge_adapter=True, verify=True
        )
        files = sorted((tmp_path / "out").glob("model-*.safetensors" if is_safe else "pytorch_model-*.bin"))
        assert len(files) > 2
        found: dict[str, Tensor] = {}
        for file in files:
            found.update(load_file(file) if is_safe else torch.load(file))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.core("lora-fsdp1", "dora-fsdp2", "tied-fsdp2", "ia3-zero3")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("twice", "tokens")])
def test_a_base_with_a_merged_adapter_is_that_of_peft(kind: str, engine: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    tune_all = partial(tune, merged=True)
    expected = run_on_ranks(2, tune_all, engine, kind, path, timeout_s=120, init_group=False)[0]
    assert main(["merge-weights", path, str(tmp_path / "merged"), "--merge-adapter", "--verify", "--threads=1"]) == 0
    base(kind).config.save_pretrained(tmp_path / "merged")
    loaded = load(tmp_path / "merged")
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)


def test_models_with_adapters_are_not_merged_under_names_that_nothing_loads(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    run_on_ranks(2, tune, "fsdp2", "lora", str(path), timeout_s=120, init_group=False)
    with pytest.raises(CheckpointError, match=r"adapter=True \(--adapter\) writes the folder that PEFT loads"):
        merge_fsdp_weights(path, tmp_path / "out")
    assert main(["merge-weights", str(path), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
    assert main(["merge-weights", str(path), str(tmp_path / "out"), "--no-adapter"]) == 0
    assert any(".lora_A.default." in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    with pytest.raises(
        CheckpointError, match="no base to merge the adapter into: it was saved with save_trainable_only"
    ):
        merge_fsdp_weights(path, tmp_path / "out", merge_adapter=True)
    with pytest.raises(ValueError, match="were both given"):
        merge_fsdp_weights(path, tmp_path / "out", adapter=True, merge_adapter=True)


class Pictures(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        self.net: Any = get_peft_model(layers, LoraConfig(r=2, target_modules=["0"]))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(torch.ones(2, 3, 4, 4) * batch.float().mean()).square().mean()
        return loss

    configure_optimizers = Tuning.configure_optimizers


def save_what_is_refused(kind: str, path: str) -> None:
    strategy = AccelFSDPStrategy(fsdp_version=2, state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=1)
    trainer.fit(Pictures() if kind == "convolution" else Tuning(kind), data())
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("convolution", r"^0 is no linear layer and no embedding in floating point"),
        ("twice", r"belong to no layer of the base: \['lm_head.lora_A"),
        ("tokens", r"^PEFT does not merge the adapter into model.embed_tokens.token_adapter"),
    ],
)
def test_adapters_that_are_not_merged_are_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    run_on_ranks(2, save_what_is_refused, kind, str(tmp_path / "saved.ckpt"), timeout_s=120, init_group=False)
    with pytest.raises(CheckpointError, match=message) as raised:
        merge_fsdp_weights(tmp_path / "saved.ckpt", tmp_path / "out", merge_adapter=True)
    assert "call merge_and_unload()" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_one_of_several_adapters_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    expected = run_on_ranks(2, tune, "fsdp2", "lora", str(path), True, timeout_s=120, init_group=False)[0]
    with pytest.raises(CheckpointError, match=r"several adapters: \['default', 'other'\]"):
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


def tune_and_merge_into_base(folder: str) -> None:
    merging = MergeShardedCheckpoint(f"{folder}/merged", merge_adapter=True)
    strategy = strategy_of("fsdp2", trainable_only=False)
    quiet_trainer(strategy, 2, max_epochs=1, callbacks=[merging]).fit(Tuning("lora"), data())


@pytest.mark.exhaustive
def test_the_merge_callback_merges_adapters(tmp_path: Path) -> None:
    run_on_ranks(2, tune_and_merge_into_base, str(tmp_path), timeout_s=120, init_group=False)
    loaded = load(tmp_path / "merged")
    layer = loaded.model.layers[0].self_attn.q_proj
    assert (layer.weight - base().model.layers[0].self_attn.q_proj.weight).abs().max() > 1e-6


def test_the_merge_callback_refuses_what_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="were both given"):
        MergeShardedCheckpoint("merged", adapter=True, merge_adapter=True)
    with pytest.raises(ValueError, match="omit strip_prefix"):
        MergeShardedCheckpoint("merged", merge_adapter=True, strip_prefix="net")
    assert run_on_ranks(2, tune_without_base, init_group=False) == [0, 0]


def tune_without_base() -> int:
    trainer = quiet_trainer(
        strategy_of("fsdp2"), 2, max_epochs=1, callbacks=[MergeShardedCheckpoint("merged", merge_adapter=True)]
    )
    with pytest.raises(ValueError, match="needs the base, which save_trainable_only=True leaves out"):
        trainer.fit(Tuning("lora"), data())
    return trainer.global_step


def tune_pictures_and_merge(folder: str) -> None:
    strategy = AccelFSDPStrategy(fsdp_version=2, state_dict_type="sharded_state_dict")
    merging = MergeShardedCheckpoint(f"{folder}/merged")
    quiet_trainer(strategy, 2, max_epochs=1, callbacks=[merging]).fit(Pictures(), data())


def test_adapters_of_no_hugging_face_model_keep_the_modules_names(tmp_path: Path) -> None:
    run_on_ranks(2, tune_pictures_and_merge, str(tmp_path), timeout_s=120, init_group=False)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == Pictures().state_dict().keys()


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
