"""What is replaced in classes and modules of other libraries during a fit is as before afterwards."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.upstream import patches
from accelight.strategies.upstream.patches import TABLE, Patch, Patches, replace_for_good
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config
from tests.strategies.oracle import quiet_trainer

OWNERS = (
    *("torch.Tensor", "torch.UntypedStorage", "torch.nn.Module", "torch.nn.Parameter"),
    "torch.nn.utils.clip_grad",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "torch.distributed.fsdp._flat_param.FlatParamHandle",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    *("lightning.pytorch.LightningModule", "lightning.pytorch.Trainer"),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector",
    "transformers.PreTrainedModel",
    "threading.Thread",
    *("deepspeed.comm.torch", "deepspeed.ops.op_builder.CPUAdamBuilder", "deepspeed.runtime.engine.DeepSpeedEngine"),
    "deepspeed.runtime.zero.partition_parameters.Init",
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters",
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
)
"""Classes and modules with what stands in the table for the whole process, and those whose objects are in it."""
CLIPPING = ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_")


def _owner(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def _attributes() -> dict[str, Any]:
    found: dict[str, Any] = {"torch.load": torch.load}
    for path in OWNERS:
        own = {name: value for name, value in vars(_owner(path)).items() if not isinstance(value, int)}  # no counts
        found |= {f"{path.rsplit('.')[-1]}.{name}": value for name, value in own.items()}
    for name in CLIPPING:
        function: Any = getattr(clip_grad, name)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        found[f"cell of {name}"] = cells["func"].cell_contents
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    missing = object()
    return {name for name in before | after if before.get(name, missing) is not after.get(name, missing)}


class _Module(LightningModule):
    def __init__(self, before: dict[str, Any], raises: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.before, self.raises = before, raises
        self.replaced: set[str] = set()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.replaced |= _changed(self.before, _attributes())
        if self.raises and batch_idx == 1:
            raise ValueError("planned")
        return functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _strategy(kind: str) -> Any:
    if kind.startswith("zero"):
        return AccelDeepSpeedStrategy(hf_ds_config=ds_config(int(kind[-1])))
    return AccelFSDPStrategy(fsdp_version=int(kind[-1]), auto_wrap_policy={nn.Linear})


def _fit(kind: str, raises: bool) -> tuple[set[str], set[str], list[str], int]:
    """Return what was replaced in the fit, what is after it, what of the module's own then, and what is left."""
    PartialState()
    before, num_before = _attributes(), len(patches._places)
    module = _Module(before, raises)
    trainer = quiet_trainer(_strategy(kind), 2, max_epochs=1)
    loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 2)), 2)
    if raises:
        with pytest.raises(ValueError, match="planned"):
            trainer.fit(module, loader)
    else:
        trainer.fit(module, loader)
    replaced, own = module.replaced, [name for name in TABLE["user code"].names.split() if name in vars(module)]
    del trainer, module  # saves after a run call users' hooks as well, for which the Trainer's profiler stays replaced
    gc.collect()
    return replaced, _changed(before, _attributes()), own, len(patches._places) - num_before


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_a_fit_leaves_all_as_it_was(kind: str, raises: bool) -> None:
    expected = {*(f"cell of {name}" for name in CLIPPING), "Thread.start", "Module._apply", "Parameter.__new__"}
    expected.add("FullyShardedDataParallel._apply")
    expected |= {f"Tensor.{name}" for name in ("data", "numpy", "__array__", "__dlpack__")}
    if kind == "fsdp2":
        expected.add("_fsdp_param_group.record_function")
    if kind.startswith("zero"):
        expected |= {"DeepSpeedEngine._broadcast_model", "DeepSpeedEngine.clip_fp32_gradients", "Init._zero_init_param"}
        expected.add("GatheredParameters.__exit__")
    for replaced, after, own, num_left in run_on_ranks(2, _fit, kind, raises):
        assert replaced == expected
        assert after == set()
        assert own == []
        assert num_left == 0


class _Owner:
    def method(self) -> str:
        return "class"


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(TABLE, "a test", Patch("_Owner", "method value __class__", "to test", "always"))
    return "a test"


def test_replacements_go_in_any_order(row: str) -> None:
    owner: Any = _Owner()
    first, second = Patches(row), Patches(row)
    first.put(owner, "method", lambda: "first")
    second.put(owner, "method", lambda: "second")
    first.remove()
    assert owner.method() == "second"
    second.remove()
    assert owner.method() == "class"
    assert vars(owner) == {}


def test_what_is_shared_goes_with_the_last(row: str) -> None:
    own = _Owner.__dict__["method"]
    first, second = Patches(row), Patches(row)
    for each in (first, second):
        each.share(_Owner, "method", lambda before: lambda self: f"not {before(self)}")
    first.remove()
    assert _Owner().method() == "not class"
    second.remove()
    second.remove()
    assert _Owner.__dict__["method"] is own


def test_values_and_classes_come_back(row: str) -> None:
    owner: Any = _Owner()
    owner.value = 1
    with Patches(row) as some:
        some.put(owner, "value", 2)
        some.put(owner, "__class__", type("Other", (_Owner,), {}))
        assert (owner.value, type(owner).__name__) == (2, "Other")
    assert (owner.value, type(owner)) == (1, _Owner)


def test_what_others_put_in_stays(row: str) -> None:
    owner: Any = _Owner()
    with Patches(row) as some:
        some.put(owner, "method", lambda: "ours")
        owner.method = lambda: "theirs"
    assert owner.method() == "theirs"


def test_only_what_is_listed_is_replaced(row: str) -> None:
    with pytest.raises(KeyError, match="not listed"):
        Patches(row).put(_Owner(), "other", None)
    with pytest.raises(KeyError, match="not listed"):
        replace_for_good(row, _Owner(), other=None)


def test_each_row_says_why() -> None:
    assert len(TABLE) <= 15
    assert all(all(patch) for patch in TABLE.values())
