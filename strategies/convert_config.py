"""Accelerate's config file as arguments of a Trainer, for ``accelight convert-config``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .common.config import as_names
from .deepspeed.plugin import VARIABLES as DEEPSPEED_VARIABLES
from .deepspeed.plugin import DeepSpeedPlugin
from .fsdp.plugin import OBSOLETE_IN_FSDP2, FullyShardedDataParallelPlugin
from .fsdp.settings import VARIABLES as FSDP_VARIABLES

_PACKAGE = __name__.partition(".")[0]
DEFAULT_PATH = Path("~/.cache/huggingface/accelerate/default_config.yaml")
"""The file that ``accelerate config`` writes."""
_PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_STRATEGIES = {
    "FSDP": "AccelFSDPStrategy",
    "DEEPSPEED": "AccelDeepSpeedStrategy",
    **dict.fromkeys(["MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_NPU", "MULTI_XPU"], "ddp"),
    "NO": "auto",
}
_FSDP_FIELDS = {
    **{variable.lower(): name for name, variable in FSDP_VARIABLES.items()},
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "fsdp_backward_prefetch_policy": "backward_prefetch",
}
_DEEPSPEED_FIELDS = {
    **{name: name for name in DEEPSPEED_VARIABLES},
    "deepspeed_config_file": "hf_ds_config",
    "deepspeed_moe_layer_cls_names": "transformer_moe_cls_names",
}
_OF_THE_TRAINER = {"gradient_accumulation_steps": "accumulate_grad_batches", "gradient_clipping": "gradient_clip_val"}
_OF_LAUNCHERS = (
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function"),
    *("compute_environment", "debug", "enable_cpu_affinity", "commands", "command_file", "deepspeed_hostfile"),
    *("deepspeed_multinode_launcher", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
)
"""Settings that a Trainer's launcher, torchrun or SLURM gives instead."""
_OFF: tuple[Any, ...] = (False, None, "no", "No", "NO", 0, {}, [], "")  # False is also 0
_DEFAULTS = {
    "compute_environment": "LOCAL_MACHINE",
    "main_training_function": "main",
    "rdzv_backend": "static",
    "same_network": True,
}
"""Values that ``accelerate config`` writes without asking."""


@dataclass
class Converted:
    """The settings of a file, in a Trainer's words."""

    strategy: str
    """The name of a strategy of accelight's, or of Lightning's."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Arguments of accelight's strategy."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the Trainer."""
    notes: list[str] = field(default_factory=list)
    """Settings that have no argument there."""

    def __str__(self) -> str:
        """Return Python code that makes the Trainer."""
        is_ours = self.strategy.startswith("Accel")
        lines = ["from lightning.pytorch import Trainer", ""]
        made = repr(self.strategy)
        if is_ours:
            lines += [f"from {_PACKAGE}.strategies import {self.strategy}", ""]
            made = _call(self.strategy, self.fields)
        lines += textwrap.wrap(" ".join(self.notes), 110, initial_indent="# ", subsequent_indent="# ")
        arguments = [f"strategy={made}", *(f"{name}={value!r}" for name, value in self.trainer.items())]
        return "\n".join(
            [*lines, "trainer = Trainer(", *(textwrap.indent(f"{one},", "    ") for one in arguments), ")"]
        )


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    if not arguments:
        return f"{name}()"
    return "\n".join([f"{name}(", *(f"    {argument}={value!r}," for argument, value in arguments.items()), ")"])


def read_config(path: Path) -> dict[str, Any]:
    """Read a file that ``accelerate config`` has written, YAML or JSON.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is no config file.
    """
    if path == DEFAULT_PATH.expanduser() and not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a config file, or let accelerate config write this one.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict) or not content.keys() & {"distributed_type", "compute_environment"}:
        raise ValueError(f"{path} is no config file of Accelerate's: it has no distributed_type.")
    return content


def convert(config: Mapping[str, Any]) -> Converted:
    """Return the settings of a config file.

    Args:
        config: Its content.

    Raises:
        ValueError: If it asks for what neither Lightning nor accelight has, or has keys or values that are not
            Accelerate's.

    Source: accelerate 1.15 ``commands/config/config_args.py``, ``utils/launch.py``.
    """
    left = dict(config)
    kind = str(left.pop("distributed_type", "NO"))
    if kind not in _STRATEGIES:
        raise ValueError(
            f"distributed_type={kind} has no counterpart. Allowed are {', '.join(_STRATEGIES)}; tensor parallelism is "
            "AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=...))."
        )
    found = Converted(_STRATEGIES[kind])
    found.trainer.update(_processes(left), precision=_precision(left))
    for name, fields in (("fsdp_config", _FSDP_FIELDS), ("deepspeed_config", _DEEPSPEED_FIELDS)):
        section = left.pop(name, None) or {}
        if not isinstance(section, Mapping):
            raise ValueError(f"{name} must be a section of keys, got {section!r}.")
        if name.startswith(kind.lower()):
            _take_section(found, name, section, fields)
        elif section:
            found.notes.append(f"{name} has no effect with distributed_type={kind}.")
    if kind == "FSDP":
        _check_fsdp(found)
    elif kind == "DEEPSPEED":
        DeepSpeedPlugin(**found.fields)
    found.notes += _notes(left)
    return found


def _processes(left: dict[str, Any]) -> dict[str, Any]:
    num_machines, num_processes = _count(left, "num_machines"), _count(left, "num_processes")
    gpu_ids = left.pop("gpu_ids", None)
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes={num_processes} must be a multiple of num_machines={num_machines}: a Trainer starts as "
            "many on each."
        )
    devices: Any = num_processes // num_machines
    if gpu_ids not in (None, "", "all"):
        devices = _chosen(str(gpu_ids), devices)
    accelerator = "cpu" if left.pop("use_cpu", False) else "auto"
    return {"accelerator": accelerator, "devices": devices, "num_nodes": num_machines}


def _chosen(gpu_ids: str, count: int) -> list[int]:
    """Return the GPUs that the processes of a machine use: the first ``count`` of those listed."""
    listed = [one.strip() for one in gpu_ids.split(",")]
    if len(listed) < count or not all(one.isdigit() for one in listed):
        raise ValueError(
            f"gpu_ids must be 'all' or the numbers of at least {count} GPUs, such as '0,1', got {gpu_ids!r}."
        )
    return [int(one) for one in listed[:count]]


def _count(left: dict[str, Any], name: str) -> int:
    value = left.pop(name, None)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


def _precision(left: dict[str, Any]) -> str:
    given = left.pop("mixed_precision", "no") or "no"  # YAML reads a plain `no` as False
    if given not in _PRECISIONS:
        raise ValueError(f"mixed_precision={given} has no counterpart. Allowed are {', '.join(_PRECISIONS)}.")
    return _PRECISIONS[given]


def _take_section(found: Converted, name: str, section: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    for key, value in section.items():
        if key in _OF_THE_TRAINER:
            if value not in ("auto", None):
                found.trainer[_OF_THE_TRAINER[key]] = value
        elif key in fields:
            if value not in (None, "none"):
                found.fields[fields[key]] = value
        elif key in _OF_LAUNCHERS:
            found.notes += _notes({key: value})
        else:
            raise ValueError(f"{name} has the key {key!r}, which is not Accelerate's: {', '.join(sorted(fields))} are.")


def _check_fsdp(found: Converted) -> None:
    fields = found.fields
    if str(fields.get("fsdp_version")) == "2":
        for name in [name for name in fields if name in OBSOLETE_IN_FSDP2]:
            found.notes.append(f"FSDP2 has no use for {name}={fields.pop(name)!r}: {OBSOLETE_IN_FSDP2[name]}.")
    if fields.get("auto_wrap_policy") != "SIZE_BASED_WRAP":  # the file always names it
        fields.pop("min_num_params", None)
    for name in {"auto_wrap_policy", "state_dict_type"} & fields.keys():  # as the arguments' types spell them
        fields[name] = str(fields[name]).lower()
    if (classes := fields.get(name := "transformer_cls_names_to_wrap")) is not None:
        fields[name] = as_names(name, classes)
    FullyShardedDataParallelPlugin(**fields)


def _notes(left: Mapping[str, Any]) -> Iterator[str]:
    for key, value in left.items():
        if value in _OFF or _DEFAULTS.get(key) == value:
            continue
        if key in _OF_LAUNCHERS:
            yield f"{key}={value!r} is for the launcher: torchrun or SLURM, see 'Many machines' in the documentation."
        elif key == "dynamo_config":
            yield f"dynamo_config={value!r}: AccelFSDPStrategy(compile=...) compiles units, torch.compile() a module."
        elif key == "parallelism_config":
            yield f"parallelism_config={value!r}: AccelFSDPStrategy(parallelism_config=ParallelismConfig(...))."
        else:
            raise ValueError(f"{key}={value!r} has no counterpart in a Trainer. Remove it from the file.")
