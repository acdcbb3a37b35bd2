"""A merge that ``from_pretrained`` would load only in part is refused before training, whatever holds the names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_model
from torch import Tensor, nn

from accelight.callbacks import MergeShardedCheckpoint
from accelight.callbacks.merge_sharded_checkpoint import check_complete, check_loadable, find_pretrained
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer, rank_loader


class LowRank(nn.Module):
    """A layer with an adapter, under the names that PEFT gives them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        num_in, num_out = layer.weight.shape  # transformers' Conv1D has them in this order
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(num_in, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, num_out, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    """Around a model, as a PEFT model is: with a configuration of PEFT's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peft_config = {"default": "a prompt"}
        self.base_model = model


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16))


def with_adapters(model: Any) -> nn.Module:
    for layer in model.transformer.h:
        layer.attn.c_attn = LowRank(layer.attn.c_attn)
    return model


def without_norm(model: Any) -> nn.Module:
    model.transformer.ln_f = nn.Identity()
    return model


def with_further_head(model: Any) -> nn.Module:
    model.value_head = nn.Linear(8, 1)
    return model


def with_other_embedding(model: Any) -> nn.Module:
    """As after ``resize_token_embeddings``: the names stay."""
    model.resize_token_embeddings(13)
    return model


class Language(LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens = (batch[0].abs() * 5).long().clamp(max=10)
        return self.net(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check(change: Callable[[Any], nn.Module]) -> None:
    module = Language(change(gpt2()))
    files = find_pretrained(module, None)
    assert files is not None
    check_loadable(files, module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_adapters,
            r"it has no \S*0.attn.c_attn.base_layer.bias, .* 4 more, and would .*c_attn.weight, .* from scratch",
        ),
        (
            without_norm,
            r"has no further parameters, and would initialize transformer.ln_f.weight, \S*ln_f.bias from scratch",
        ),
        (with_further_head, "it has no value_head.bias, value_head.weight, and all others"),
        (Adapted, r"net.base_model \(GPT2LMHeadModel\) is trained through PEFT.*pretrained_files=False"),
    ],
)
def test_models_that_from_pretrained_would_load_in_part_are_refused(
    change: Callable[[Any], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(change)


def test_what_loads_is_let_pass_and_no_random_number_is_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    for change in (nn.Module.train, with_other_embedding):
        module = Language(change(gpt2()))
        files = find_pretrained(module, None)
        assert files is not None
        torch.manual_seed(3)
        check_loadable(files, module)
        assert torch.equal(torch.rand(1), expected)


def test_a_class_that_cannot_be_built_is_said_to_be_unchecked() -> None:
    from transformers import GPT2LMHeadModel

    class Named(GPT2LMHeadModel):
        def __init__(self, config: Any, name: str) -> None:
            super().__init__(config)

    with pytest.warns(
        UserWarning, match=r"whether from_pretrained can load net \(Named\).* raises TypeError: .*'name'"
    ):
        check(lambda model: Named(model.config, "one"))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp1": lambda: AccelFSDPStrategy(fsdp_version=1, state_dict_type="sharded_state_dict"),
    "fsdp1-flat": lambda: AccelFSDPStrategy(fsdp_version=1, use_orig_params=False, state_dict_type="sharded"),
    "fsdp2": lambda: AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100),
    "zero3": lambda: AccelDeepSpeedStrategy(zero_stage=3),
}


def fit(strategy: str, model: nn.Module, callback: MergeShardedCheckpoint) -> LightningModule:
    module = Language(model)
    trainer = quiet_trainer(STRATEGIES[strategy](), 2, max_epochs=1, limit_train_batches=1, callbacks=[callback])
    trainer.fit(module, rank_loader(2))
    return module


def test_frozen_weights_that_checkpoints_leave_out() -> None:
    module = Language(gpt2())
    files = find_pretrained(module, None)
    assert files is not None
    check_complete(files, module)
    files.model.transformer.wte.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"leaves net.transformer.wte.weight out of checkpoints.*initialize them from scratch"
    ):
        check_complete(files, module)


def refuse(strategy: str, folder: str) -> list[str]:
    callback = MergeShardedCheckpoint(Path(folder, "refused"))
    with pytest.raises(ValueError, match="from_pretrained could not load") as caught:
        fit(strategy, with_adapters(gpt2()), callback)
    fit(strategy, gpt2(), MergeShardedCheckpoint(Path(folder, "whole")))
    alone = MergeShardedCheckpoint(Path(folder, "alone"), strip_prefix="net", pretrained_files=False)
    fit(strategy, with_adapters(gpt2()), alone)
    return [str(caught.value)]


@pytest.mark.core("fsdp1-flat", "fsdp2")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_each_engine_on_all_processes(strategy: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for [message] in run_on_ranks(2, refuse, strategy, str(tmp_path), timeout_s=120):
        assert "net (GPT2LMHeadModel)" in message
        assert "would initialize transformer.h.0.attn.c_attn.weight, transformer.h.0.attn.c_attn.bias" in message
    assert not (tmp_path / "refused").exists()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["model.safetensors"]
    assert not any(load_model(with_adapters(gpt2()), tmp_path / "alone" / "model.safetensors"))
