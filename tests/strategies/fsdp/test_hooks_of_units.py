"""FSDP2's hooks: kept out of torch.compile once for each unit, and labelled at a price only where somebody reads it.

What torch and others have hooked stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from packaging.version import Version
from torch import nn
from torch.autograd import profiler
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.upstream.torch_fsdp2 import disabled_once
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, train_plain

WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
CASE = Case(accumulate=3, clip_norm=0.5, epochs=1)


class _CountsDisabled(Callback):
    """Counts how often torch makes a function that dynamo does not trace, after the first batch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.num_made = patch, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > 0 and self.num_made == 0:
            make = torch._dynamo.disable

            def counting(*args: Any, **kwargs: Any) -> Any:
                self.num_made += 1
                return make(*args, **kwargs)

            self.patch.setattr(torch._dynamo, "disable", counting)


def _count() -> tuple[int, Outcome]:
    outcome = Outcome()
    with pytest.MonkeyPatch.context() as patch:
        counts = _CountsDisabled(patch)
        strategy = AccelFSDPStrategy(fsdp_version=2, **WRAP)
        trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[counts])
        trainer.fit(TinyModule(Case(epochs=1), outcome), rank_loader(2), rank_loader(2))
    return counts.num_made, outcome


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older torch does it another way")
def test_no_hook_is_made_anew_in_a_step() -> None:
    for num_made, outcome in run_on_ranks(2, _count):
        assert num_made == 0
        assert outcome.losses == pytest.approx(train_plain(Case(epochs=1), 2).losses, rel=1e-5)


class _Hooked(TinyModule):
    """With hooks on a unit from before and after it was sharded, which tell in which form they find its weights."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.seen: list[str] = []
        self._hook("before")

    def _hook(self, when: str) -> None:
        block: nn.Module = self.model.blocks[0]

        def see(what: str) -> Callable[..., None]:
            def hook(module: nn.Module, *_: Any) -> None:
                form = type(next(module.parameters())).__name__
                self.seen.append(f"{when} {what}: {form}")

            return hook

        block.register_forward_pre_hook(see("pre"))
        block.register_forward_pre_hook(see("first"), prepend=True)
        block.register_forward_hook(see("post"))

    def on_fit_start(self) -> None:
        self._hook("after")


def _order_of_hooks(keep_torchs: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if keep_torchs:
            patch.setattr("accelight.strategies.fsdp.fsdp2.disable_dynamo_once", lambda state: None)
        module = _Hooked(CASE, Outcome())
        quiet_trainer(AccelFSDPStrategy(fsdp_version=2, **WRAP), 2, max_steps=1).fit(module, rank_loader(2))
    return module.seen


def test_hooks_run_in_the_order_of_torchs_own() -> None:
    seen, expected = run_on_ranks(2, _order_of_hooks, False), run_on_ranks(2, _order_of_hooks, True)
    assert seen == expected
    assert "before pre: Parameter" in seen[0]
    assert "after post: DTensor" in seen[0]


class _Compiled(TinyModule):
    """What it compiles calls units."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.num_graphs = 0
        self.model.forward = torch.compile(self.model.forward, backend=self._count)  # type: ignore[method-assign]

    def _count(self, graph: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def _train_compiled() -> tuple[int, Outcome]:
    torch._dynamo.reset()  # the processes serve other tests, too
    outcome = Outcome()
    module = _Compiled(CASE, outcome)
    trainer = quiet_trainer(
        AccelFSDPStrategy(fsdp_version=2, state_dict_type="full_state_dict", **WRAP),
        2,
        max_epochs=1,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, rank_loader(2))
    weights = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.clone() for name, tensor in weights.items()}
    return module.num_graphs, outcome


def test_a_compiled_function_with_units_in_it_trains_as_a_plain_loop() -> None:
    expected, outcomes = train_plain(CASE, 2), run_on_ranks(2, _train_compiled)
    assert all(num_graphs > 0 for num_graphs, _ in outcomes), "nothing was compiled"
    assert [outcome.losses for _, outcome in outcomes] == [pytest.approx(expected.losses, rel=1e-5)] * 2
    weights = outcomes[0][1].weights  # in full on rank 0
    assert weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def test_what_is_not_torchs_is_left_alone() -> None:
    def hook() -> None: ...

    assert disabled_once(hook) is hook


class _Labels(Callback):
    """Keeps what a profiler sees of FSDP2 in the second step, and how many labels the third has, without one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.profiled, self.num_later = patch, Counter[str](), 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            self.profiler.start()
        if trainer.global_step == 2:
            self.patch.setattr(profiler.record_function, "__enter__", self._count(profiler.record_function.__enter__))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.profiler.stop()
            self.profiled.update(one.name for one in self.profiler.events() if one.name.startswith("FSDP::"))

    def _count(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting(label: Any) -> Any:
            self.num_later += label.name.startswith("FSDP::")
            return enter(label)

        return counting


def _labels(torchs: bool) -> tuple[Counter[str], int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "record_function", profiler.record_function)
        if torchs:
            patch.setattr("accelight.strategies.fsdp.fsdp2.label_quickly", lambda patches: None)
        labels = _Labels(patch)
        trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2, **WRAP), 2, max_steps=3, callbacks=[labels])
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return labels.profiled, labels.num_later


def test_a_profiler_sees_torchs_own_labels() -> None:
    ours, torchs = run_on_ranks(2, _labels, False), run_on_ranks(2, _labels, True)
    for (seen, num_later), (expected, num_of_torch) in zip(ours, torchs, strict=True):
        assert seen == expected
        assert sum("post_backward_reduce" in name for name in seen) == 3, seen
        assert 0 <= num_later < num_of_torch / 4  # a few of the root's alone
