"""Compiled units train as a plain loop, and leave no trace in names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelight.strategies import AccelFSDPStrategy, unwrap_model
from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    Block,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    quiet_trainer,
    rank_loader,
    train_plain,
    train_sharded,
)

WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True, **WRAP},
    "fsdp2": {"fsdp_version": 2, **WRAP},
}
CASE = Case(accumulate=3, clip_norm=0.5, epochs=1)


def _train(options: dict[str, Any]) -> tuple[Outcome, int]:
    torch._dynamo.reset()  # the processes serve other tests, too
    graphs = 0

    def count(graph: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    outcome = train_sharded(CASE, {**options, "compile": {"backend": count, "fullgraph": True}})
    return outcome, graphs


@pytest.mark.core("checkpointing-fsdp2", "kept_gathered-fsdp1", "offloading-fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"reshard_during_accumulation": False},
        {"cpu_ram_efficient_loading": True},
    ],
    ids=["alone", "checkpointing", "offloading", "kept_gathered", "ram_efficient"],
)
def test_compiled_units_train_as_a_plain_loop(engine: str, options: dict[str, Any]) -> None:
    outcomes = run_on_ranks(2, _train, {**ENGINES[engine], **options})
    assert_same(outcomes[0][0], train_plain(CASE, 2))
    assert all(graphs > 0 for _, graphs in outcomes), "nothing was compiled"


def _look(options: dict[str, Any]) -> tuple[list[bool], list[str], list[str]]:
    torch._dynamo.reset()
    trainer = quiet_trainer(AccelFSDPStrategy(**options, compile={"backend": "aot_eager"}), 2, max_steps=1)
    module = TinyModule(CASE, Outcome())
    trainer.fit(module, rank_loader(2))
    blocks = [unwrap_model(block) for block in module.model.blocks]
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in module.named_parameters()]
    return [isinstance(block, Block) for block in blocks], names, list(trainer.strategy.lightning_module_state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_units_keep_their_class_and_their_names(engine: str) -> None:
    """Code that asks ``isinstance(module, Block)`` or sorts parameters by name finds what it finds without compile."""
    plain = [name for name, _ in TinyModule(CASE, Outcome()).named_parameters()]
    classes, names, saved = run_on_ranks(2, _look, ENGINES[engine])[0]
    assert classes == [True, True]
    assert sorted(names) == sorted(saved) == sorted(plain)


def _resume(folder: str, saving: dict[str, Any], loading: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    world_size = dist.get_world_size()
    compiled = {"compile": {"backend": "aot_eager"}, "state_dict_type": "sharded_state_dict"}
    outcome = Outcome()
    for options, path, epochs in ((saving, None, 1), (loading, folder, 2)):
        trainer = quiet_trainer(AccelFSDPStrategy(**{**compiled, **options}), world_size, max_epochs=epochs)
        trainer.fit(TinyModule(CASE, outcome), rank_loader(world_size), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(folder)
    return outcome.losses


@pytest.mark.parametrize(("first", "then"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_checkpoints_of_compiled_models_have_plain_names(first: str, then: str, tmp_path: Any) -> None:
    losses = run_on_ranks(2, _resume, str(tmp_path / "saved"), ENGINES[first], {**ENGINES[then], "compile": False})[0]
    expected = train_plain(Case(), 2).losses
    assert losses == pytest.approx(expected, rel=1e-5)


def _refused(options: dict[str, Any]) -> str:
    trainer = quiet_trainer(AccelFSDPStrategy(compile=True, **options), 1, max_steps=1)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller matches it)
        trainer.fit(TinyModule(CASE, Outcome()), rank_loader(1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fsdp_version": 1, "use_orig_params": False, **WRAP}, "needs use_orig_params=True"),
        ({"fsdp_version": 2}, "compile compiles unit by unit, but the wrap policy creates no unit"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options: dict[str, Any], match: str) -> None:
    assert match in run_on_ranks(1, _refused, options)[0]
