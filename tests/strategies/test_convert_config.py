"""``accelight convert-config``: the Trainer that it prints has what Accelerate's launcher would have told it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from lightning.pytorch import Trainer

from accelight.command import main
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.convert_config import convert, read_config

MACHINE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_POST",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_forward_prefetch": True,
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "Block,Head",
    "fsdp_use_orig_params": False,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 1000,
    "fsdp_activation_checkpointing": True,
    "fsdp_reshard_after_forward": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
ZERO = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}


def _file(folder: Path, **content: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**MACHINE, **content}))
    return path


def _printed(path: Path, capsys: pytest.CaptureFixture[str]) -> Trainer:
    """Run the command, then what it has printed, on this machine's CPU."""
    assert main(["convert-config", str(path)]) == 0
    found: dict[str, Any] = {}
    exec(capsys.readouterr().out.replace("accelerator='auto'", "accelerator='cpu'"), found)
    trainer: Trainer = found["trainer"]
    return trainer


def _launched(path: Path) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets."""
    parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, *_ = _validate_launch_command(parsed)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(ZERO)
        return dict(prepare_deepspeed_cmd_env(arguments)[1])
    return dict(prepare_multi_gpu_env(arguments))


@pytest.mark.parametrize("section", [FSDP1, FSDP2], ids=["fsdp1", "fsdp2"])
def test_fsdp(
    section: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, distributed_type="FSDP", mixed_precision="bf16", fsdp_config=section)
    trainer = _printed(path, capsys)
    strategy = trainer.strategy
    assert isinstance(strategy, AccelFSDPStrategy)
    assert trainer.precision == "bf16-mixed"
    assert trainer.num_devices == 2
    for name, value in _launched(path).items():
        if name.startswith("FSDP_") and os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    launched = AccelFSDPStrategy()
    assert strategy.fsdp_plugin == launched.fsdp_plugin


def test_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, distributed_type="DEEPSPEED", mixed_precision="no", deepspeed_config=ZERO)
    trainer = _printed(path, capsys)
    strategy = trainer.strategy
    assert isinstance(strategy, AccelDeepSpeedStrategy)
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (4, 0.5)
    for name, value in _launched(path).items():
        if name.startswith("ACCELERATE_") and os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    launched = AccelDeepSpeedStrategy()
    for name in ("zero_stage", "offload_optimizer_device", "zero3_save_16bit_model", "zero3_init_flag"):
        assert getattr(strategy.deepspeed_plugin, name) == getattr(launched.deepspeed_plugin, name), name


def test_a_config_of_deepspeeds_own(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    path = _file(
        tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(tmp_path / "ds.json")}
    )
    assert convert(read_config(path)).fields == {"hf_ds_config": str(tmp_path / "ds.json")}


def test_processes_and_notes(tmp_path: Path) -> None:
    content = {
        **MACHINE,
        "distributed_type": "FSDP",
        "num_machines": 2,
        "num_processes": 8,
        "main_process_ip": "10.0.0.1",
        "fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True, "fsdp_min_num_params": 0},
        "deepspeed_config": {"zero_stage": 2},
    }
    found = convert(content)
    assert found.trainer == {"accelerator": "auto", "devices": 4, "num_nodes": 2, "precision": "32-true"}
    assert found.fields == {"fsdp_version": 2}
    text = str(found)
    for part in ("main_process_ip='10.0.0.1'", "use_orig_params=True", "deepspeed_config has no effect"):
        assert part in " ".join(text.replace("# ", "").split())
    assert convert({**MACHINE, "distributed_type": "MULTI_GPU", "gpu_ids": "1,3"}).trainer["devices"] == [1, 3]
    assert convert({**MACHINE, "distributed_type": "MULTI_GPU", "gpu_ids": "1,3,5"}).trainer["devices"] == [1, 3]
    assert convert({**MACHINE, "distributed_type": "NO", "gpu_ids": 0, "num_processes": 1}).trainer["devices"] == [0]
    assert convert({**MACHINE, "distributed_type": "MULTI_GPU"}).strategy == "ddp"
    assert convert({**MACHINE, "machine_rank": 1}).notes == [
        "machine_rank=1 is for the launcher: torchrun or SLURM, see 'Many machines' in the documentation."
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM has no counterpart. Allowed are FSDP"),
        ({"mixed_precision": "fp8"}, "mixed_precision=fp8 has no counterpart"),
        ({"num_processes": 3, "num_machines": 2}, "must be a multiple of num_machines=2"),
        ({"fsdp_config": {"fsdp_shards": 2}}, "has the key 'fsdp_shards', which is not Accelerate's"),
        ({"fsdp_config": {"fsdp_version": 3}}, "fsdp_version"),
        ({"fsdp_config": {"fsdp_version": "two"}}, "fsdp_version"),
        ({"fsdp_config": "fsdp.yaml"}, "fsdp_config must be a section of keys, got 'fsdp.yaml'"),
        ({"num_processes": "two"}, "num_processes must be a whole number of at least 1, got 'two'"),
        ({"gpu_ids": "a,b"}, "gpu_ids must be 'all' or the numbers of at least 2 GPUs"),
        ({"gpu_ids": 0}, "gpu_ids must be 'all' or the numbers of at least 2 GPUs, such as '0,1', got '0'"),
        ({"tpu_use_cluster": True}, "tpu_use_cluster=True has no counterpart in a Trainer"),
        ({"ipex": True}, "ipex=True has no counterpart in a Trainer"),
        ({"tricks": "many"}, "tricks='many' has no counterpart in a Trainer"),
    ],
)
def test_what_has_no_counterpart_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert({**MACHINE, "distributed_type": "FSDP", "fsdp_config": {}, **changed})


def test_files_that_are_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("a: [1")
    assert main(["convert-config", str(other)]) != 0
    assert "is neither YAML nor JSON" in capsys.readouterr().err
    other.write_text("a: 1")
    assert main(["convert-config", str(other)]) != 0
    assert "is no config file of Accelerate's" in capsys.readouterr().err
    other.write_bytes(b"\xd3\x00")
    assert main(["convert-config", str(other)]) != 0
    assert "is neither YAML nor JSON" in capsys.readouterr().err
    assert main(["convert-config", str(tmp_path / "none.yaml")]) != 0
    assert "none.yaml: No such file or directory." in capsys.readouterr().err


def test_without_a_path_and_without_accelerates_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["convert-config"]) != 0
    assert "default_config.yaml does not exist: name a config file" in capsys.readouterr().err
