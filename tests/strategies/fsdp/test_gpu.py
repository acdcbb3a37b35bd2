"""What the oracle grid leaves out, on CUDA with NCCL: checkpoints, first weights, compilation, fp16, two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor

from accelight.checkpoint import merge_fsdp_weights
from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy
from tests.gpu import ACCELERATOR, NUM_DEVICES, share_a_device
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, build_model, quiet_trainer, rank_loader, train_plain

pytestmark = pytest.mark.gpu

WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True, **WRAP},
    "fsdp2": {"fsdp_version": 2, **WRAP},
}
_RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
_RECOMPUTES_AS_COMPILED = torch.__version__ >= "2.13"  # compared as versions
CASE = Case(accumulate=3, clip_norm=0.5)
RTOL = 1e-4
"""fp32 sums of CUDA kernels have another order than those of the CPU; errors grow over some ten steps."""


def _fit(
    options: dict[str, Any],
    epochs: int,
    *,
    save_to: str = "",
    resume_from: str | None = None,
    world_size: int = NUM_DEVICES,
    **trainer_options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    outcome, first_weights = Outcome(), build_model().state_dict()
    strategy = AccelFSDPStrategy(**options)
    trainer = quiet_trainer(
        strategy,
        world_size,
        max_epochs=epochs,
        accumulate_grad_batches=CASE.accumulate,
        gradient_clip_val=CASE.clip_norm,
        **{"accelerator": ACCELERATOR, **trainer_options},
    )

    class Module(TinyModule):
        def __init__(self) -> None:
            super().__init__(CASE, outcome)
            del self.model
            self.num_saved = 0

        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = build_model()
                self.model.load_state_dict(first_weights)  # half precision may draw others

        def on_train_batch_end(self, *_: Any) -> None:
            if save_to and self.trainer.global_step == 3 and not self.num_saved:
                self.num_saved += 1
                self.trainer.save_checkpoint(save_to)

    trainer.fit(Module(), rank_loader(world_size), ckpt_path=resume_from)
    weights: dict[str, Any] = strategy.lightning_module_state_dict()
    whole = {name: (value.full_tensor() if hasattr(value, "full_tensor") else value) for name, value in weights.items()}
    return outcome.losses, {name: tensor.cpu().clone() for name, tensor in whole.items()}


def _on_gpus(options: dict[str, Any], epochs: int, **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    return run_on_ranks(NUM_DEVICES, _fit_with, {"options": options, "epochs": epochs, **more}, init_group=False)[0]


def _fit_with(arguments: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    return _fit(arguments.pop("options"), arguments.pop("epochs"), **arguments)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"state_dict_type": "sharded_state_dict"},
        {"state_dict_type": "sharded_state_dict", "async_save": True},
        {"state_dict_type": "full_state_dict", "cpu_offload": True},
    ],
    ids=["sharded", "in_the_background", "full_offloaded"],
)
def test_a_resume_goes_on(engine: str, options: dict[str, Any], tmp_path: Path) -> None:
    path, given = str(tmp_path / "checkpoint.ckpt"), {**ENGINES[engine], **options}
    _, weights = _on_gpus(given, 1, save_to=path)
    expected = train_plain(CASE, NUM_DEVICES).losses
    losses, _ = _on_gpus(given, 2, resume_from=path)
    assert losses == pytest.approx(expected[len(expected) // 2 :], rel=RTOL)
    if options["state_dict_type"] == "sharded_state_dict":
        merge_fsdp_weights(path, tmp_path / "merged")
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"cpu_ram_efficient_loading": True},
        {"pretrained_weights": "model.safetensors"},
        {"compile": True},
        _RECOMPUTED,
        {"compile": True, **_RECOMPUTED},
        {"cpu_ram_efficient_loading": True, "cpu_offload": True},
        {"pretrained_weights": "model.safetensors", "cpu_offload": True},
    ],
    ids=[
        *("from_rank_zero", "from_files", "compiled", "recomputed", "compiled_and_recomputed"),
        *("from_rank_zero_offloaded", "from_files_offloaded"),
    ],
)
def test_first_weights_and_compilation(
    engine: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "fsdp1" and options.get("compile") and len(options) > 1 and not _RECOMPUTES_AS_COMPILED:
        pytest.skip("FSDP1, offloading and compilation together need a newer torch: 2.11 recomputes in another order")
    monkeypatch.chdir(tmp_path)
    save_model(build_model(), "model.safetensors")
    if "pretrained_weights" in options:
        options = {**options, "pretrained_weights": str(tmp_path / "model.safetensors")}
    losses, _ = _on_gpus({**ENGINES[engine], **options, "state_dict_type": "full_state_dict"}, 2)
    assert losses == pytest.approx(train_plain(CASE, NUM_DEVICES).losses, rel=RTOL)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_trains(engine: str, precision: str) -> None:
    losses, weights = _on_gpus({**ENGINES[engine], "state_dict_type": "full_state_dict"}, 2, precision=precision)
    expected = train_plain(CASE, NUM_DEVICES).losses
    first = 3 if precision == "16-mixed" else len(losses)  # its scaler skips steps until it has found its scale
    assert losses[:first] == pytest.approx(expected[:first], rel=0.1)  # bf16 keeps three digits; ten steps lose one
    stored = {"16-mixed": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    assert {tensor.dtype for tensor in weights.values()} == {stored}


@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_with_offload_trains(engine: str) -> None:
    options = {**ENGINES[engine], "state_dict_type": "full_state_dict", "cpu_offload": True}
    losses, _ = _on_gpus(options, 2, precision="16-mixed")
    expected = train_plain(CASE, NUM_DEVICES).losses
    assert losses[:3] == pytest.approx(expected[:3], rel=0.1)  # the scaler skips steps until it has found its scale


def _hybrid(engine: str) -> list[list[float]]:
    shape = (2, NUM_DEVICES // 2) if NUM_DEVICES % 2 == 0 and NUM_DEVICES > 2 else (1, NUM_DEVICES)
    options = {**ENGINES[engine], "device_mesh": shape, "state_dict_type": "full_state_dict"}
    if engine == "fsdp1":
        options["sharding_strategy"] = "HYBRID_SHARD"
    return [_fit(options, 2)[0] for _ in range(2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_hybrid_sharding_twice_in_a_process(engine: str) -> None:
    for losses in run_on_ranks(NUM_DEVICES, _hybrid, engine, init_group=False)[0]:
        assert losses == pytest.approx(train_plain(CASE, NUM_DEVICES).losses, rel=RTOL)


class _WithBuffer(TinyModule):
    """Has a persistent buffer and a layer that is not sharded."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(CASE, Outcome())
        self.register_buffer("scale", torch.tensor(1.0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


def _saved_with_buffers(engine: str, offload: bool, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for epochs, path in ((1, None), (2, f"{folder}/full.ckpt")):
        options: dict[str, Any] = {**ENGINES[engine], "cpu_offload": offload, "state_dict_type": "full_state_dict"}
        strategy = AccelFSDPStrategy(ignored_modules="model.head", **options)
        trainer = quiet_trainer(strategy, NUM_DEVICES, accelerator=ACCELERATOR, max_epochs=epochs)
        trainer.fit(_WithBuffer(), rank_loader(NUM_DEVICES), ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/full.ckpt")
        strategy.save_safetensors(f"{folder}/model.safetensors")
        found.append({name: tensor.cpu().clone() for name, tensor in strategy.lightning_module_state_dict().items()})
        assert all(tensor.device.type == "cpu" for tensor in strategy.lightning_module_state_dict().values())
    return found[0], found[1]


@pytest.mark.parametrize("offload", [False, True], ids=["on_the_device", "offloaded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_and_ignored_modules_are_saved_and_resumed(engine: str, offload: bool, tmp_path: Path) -> None:
    """In full checkpoints, all of whose tensors are in host memory, and as safetensors."""
    arguments = engine, offload, str(tmp_path)
    first, second = run_on_ranks(NUM_DEVICES, _saved_with_buffers, *arguments, init_group=False)[0]
    assert set(first) == set(second)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in second.items())
    assert not torch.equal(first["model.head.weight"], second["model.head.weight"])


def _as_a_node(engine: str, folder: str, offload: bool) -> tuple[list[float], str]:
    options = {**ENGINES[engine], "state_dict_type": "sharded_state_dict", "process_group_backend": "gloo"}
    options["cpu_offload"] = offload
    nodes = {"world_size": 2, **share_a_device()}
    losses, _ = _fit(options, 1, save_to=f"{folder}/nodes", **nodes)
    more, _ = _fit(options, 2, resume_from=f"{folder}/nodes", **nodes)
    device = str(PartialState().device)
    return losses + more, device


@pytest.mark.parametrize("offload", [False, True], ids=["on_the_device", "offloaded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_on_one_device(engine: str, offload: bool, tmp_path: Path) -> None:
    """What one GPU cannot show otherwise: shards, and FSDP1's too, which become NO_SHARD on one process."""
    for losses, device in run_on_ranks(2, _as_a_node, engine, str(tmp_path), offload, init_group=False):
        assert losses == pytest.approx(train_plain(CASE, 2).losses, rel=RTOL)
        assert device == {"gpu": "cuda:0"}.get(ACCELERATOR, ACCELERATOR)
