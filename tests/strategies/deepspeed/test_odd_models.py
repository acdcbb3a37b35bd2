"""ZeRO-3 with models whose layers return objects without ``__dict__``, and with modules among the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, whole_weights
from tests.strategies.oracle import (
    WIDTH,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    quiet_trainer,
    rank_loader,
    train_plain,
)


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: Tensor
    order: Tensor
    name: str


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH) / 2)

    def forward(self, x: Tensor) -> Graph:
        return Graph(torch.tanh(self.embed(x)) * self.scale, torch.arange(len(x)), "graph")


class Counter(nn.Module):
    def forward(self, graph: Graph) -> int:
        return len(graph.order)


class Graphs(nn.Module):
    """The encoder has parameters of its own, which backward needs again; the others only hand objects on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.transform, self.count = Encoder(), nn.Identity(), Counter()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        graph = self.transform(self.encoder(x))
        assert (type(graph), graph.name, self.count(graph)) == (Graph, "graph", len(x))
        return self.head(graph.nodes)


class GraphModule(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.model: Any = Graphs()


def train_graphs() -> Outcome:
    """In two fits with an evaluation between them: each engine's hooks go with it."""
    case, outcome = Case(epochs=1), Outcome()
    module = GraphModule(case, outcome)
    num_steps = 0
    for _ in range(2):
        trainer = quiet_trainer(AccelDeepSpeedStrategy(hf_ds_config=ds_config(3)), 2, max_epochs=1)
        trainer.fit(module, rank_loader(2))
        trainer.validate(module, rank_loader(2), verbose=False)
        num_steps += trainer.global_step
    hooks = [len(layer._forward_hooks) for layer in module.model.modules()]
    assert max(hooks) <= 4, hooks  # two of DeepSpeed's, two around them
    outcome.weights, outcome.global_step = whole_weights(module), num_steps
    return outcome


def test_layers_that_return_objects_with_slots() -> None:
    expected = train_plain(Case(epochs=1), 2, model=Graphs())
    once = Graphs()
    once.load_state_dict(expected.weights)
    again = train_plain(Case(epochs=1), 2, model=once)  # a new optimizer, as in the second fit
    whole = Outcome(expected.losses + again.losses, [], again.weights, 2 * expected.global_step)
    for outcome in run_on_ranks(2, train_graphs):
        assert_same(outcome, whole)


class WithLoss(TinyModule):
    def __init__(self, loss: nn.Module, metrics: list[nn.Module]) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.save_hyperparameters("loss", "metrics")
        self.loss, self.metrics = loss, nn.ModuleList(metrics)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.model(batch[0])
        return self.loss(found, batch[1]) + sum(metric(found, batch[1]) for metric in self.metrics)


def hook(module: nn.Module, args: Any, output: Tensor) -> None:
    """A user's own."""


def save_hyperparameters(folder: str) -> dict[str, Any]:
    loss = nn.MSELoss()
    loss.register_forward_hook(hook)
    module = WithLoss(loss, [nn.L1Loss()])
    trainer = quiet_trainer(AccelDeepSpeedStrategy(zero_stage=3), 2, max_epochs=1)
    trainer.fit(module, rank_loader(2))
    hooks = [list(one._forward_hooks) for one in (loss, module.metrics[0])]
    trainer.save_checkpoint(Path(folder, "saved"))
    assert [list(one._forward_hooks) for one in (loss, module.metrics[0])] == hooks
    assert hasattr(loss, "ds_id")
    trainer.validate(module, rank_loader(2), verbose=False)
    again = quiet_trainer(AccelDeepSpeedStrategy(zero_stage=3, weights_only=False), 2, max_epochs=2)
    again.fit(WithLoss(nn.MSELoss(), [nn.L1Loss()]), rank_loader(2), ckpt_path=str(Path(folder, "saved")))
    [file] = Path(folder, "saved").rglob("zero_pp_rank_0_mp_rank_00_model_states.pt")
    saved = torch.load(file, weights_only=False)["hyper_parameters"]
    kept = list(saved["loss"]._forward_hooks.values())
    return {
        "loss": type(saved["loss"]).__name__,
        "hooks": [one.__name__ for one in kept],
        "added": [name for name in vars(saved["metrics"][0]) if name.startswith(("ds_", "pre_bwd"))],
        "value": saved["loss"](torch.ones(2), torch.zeros(2)).item(),
    }


def test_a_loss_among_the_hyperparameters_is_saved_as_it_was(tmp_path: Path) -> None:
    for found in run_on_ranks(2, save_hyperparameters, str(tmp_path), timeout_s=120):
        assert found == {"loss": "MSELoss", "hooks": ["hook"], "added": [], "value": 1.0}


class Remembering(nn.MSELoss):
    """As metrics do, keeps the last loss, with its graph and the hooks that are put on it."""

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        self.last = super().forward(found, wanted)
        return self.last


def save_what_a_loss_remembers(folder: str, stage: int) -> bool:
    loss = Remembering()
    trainer = quiet_trainer(AccelDeepSpeedStrategy(zero_stage=stage), 2, max_epochs=1, limit_train_batches=1)
    trainer.fit(WithLoss(loss, []), rank_loader(2))
    trainer.save_checkpoint(Path(folder, "saved"))
    file = min(Path(folder, "saved").rglob("*mp_rank_00_model_states.pt"))
    saved = torch.load(file, weights_only=False)["hyper_parameters"]["loss"].last
    return bool(saved.isfinite()) and not saved.requires_grad and loss.last.requires_grad


def test_a_loss_that_remembers_what_it_returned(tmp_path: Path) -> None:
    assert all(run_on_ranks(2, save_what_a_loss_remembers, str(tmp_path), 2))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        return (self.weight * (found - wanted).abs()).mean()


def refuse(folder: str) -> str:
    trainer = quiet_trainer(AccelDeepSpeedStrategy(zero_stage=3), 2, max_epochs=1, limit_train_batches=1)
    trainer.fit(WithLoss(nn.MSELoss(), [Weighted()]), rank_loader(2))
    with pytest.raises(ValueError, match="save_hyperparameters") as caught:
        trainer.save_checkpoint(Path(folder, "saved"))
    return str(caught.value)


def test_a_module_with_parameters_among_them_is_refused_by_name(tmp_path: Path) -> None:
    for message in run_on_ranks(2, refuse, str(tmp_path)):
        assert message.startswith("hyper_parameters['metrics'][0] is saved in the checkpoint and holds parameters")
        assert "Weighted" in message
    assert not (tmp_path / "saved").exists()
