"""DeepSpeed as users of Accelerate spell it: `DeepSpeedPlugin`, beside a config or instead of one, and wrappers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...state import AcceleratorState, DistributedType
from ...state.utils import named_arguments
from ..common.config import (
    FromVariable,
    as_bool,
    as_int,
    as_names,
    classes_by_name,
    source,
    warn_once,
    wrong_type,
    wrong_value,
)
from .ds_config import (
    AUTO,
    HfDeepSpeedConfig,
    Precision,
    PrecisionSections,
    check_features,
    differ,
    is_auto_value,
    mismatch_error,
)
from .zero_optimizer import switch_mode

_NONE = "none"
CONFIG_KEYS: Mapping[str, str] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""The plugin's fields that are keys of a DeepSpeed config, too."""
_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": 2,
    "offload_optimizer_device": _NONE,
    "offload_param_device": _NONE,
    "offload_optimizer_nvme_path": _NONE,
    "offload_param_nvme_path": _NONE,
    "zero3_save_16bit_model": False,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}
_ABSENT = {**_DEFAULTS, "zero_stage": 0}  # what DeepSpeed does where its config lacks the key


@named_arguments
@dataclass
class DeepSpeedPlugin:
    """The settings of training with DeepSpeed, in Accelerate's words.

    A field that is left None comes from its environment variable (see `VARIABLES`), else from the default.
    With a config, fields fill what it leaves out or has as ``"auto"``. A value in the config that contradicts an
    argument is an error; a variable yields to the config. Afterwards the fields say what the config says.

    Raises:
        ValueError: If a value is not allowed, or arguments and the config differ: all of them in one error.
        TypeError: If a value has a type that the field does not take.
        NotImplementedError: If MS-AMP is asked for with ZeRO stage 3.
        ModuleNotFoundError: If MS-AMP is asked for and not installed.

    Source: accelerate 1.15 ``utils/dataclasses.py``. Different here: an argument that contradicts the config, or that
    the config has no key for, is not dropped silently; ``gradient_accumulation_steps`` that nobody gives stays
    ``"auto"`` with a config, too, and so follows the Trainer; a config object given is copied; ``steps_per_print`` in
    the config stays. Offloading to NVMe needs its path.
    """

    hf_ds_config: str | os.PathLike[str] | dict[str, Any] | HfDeepSpeedConfig | None = None
    """A DeepSpeed config: path, dict (never modified), JSON or base64 text, or `HfDeepSpeedConfig`; then that."""
    gradient_accumulation_steps: int | str | None = None
    """Micro-batches per optimizer step. ``"auto"`` (the default) follows the Trainer."""
    gradient_clipping: float | str | None = None
    """Largest norm of the gradients, 0 for none. ``"auto"`` (the default) follows the Trainer."""
    zero_stage: int | None = None
    """ZeRO stage, 0 to 3. 2 by default."""
    is_train_batch_min: bool = True
    """Whether the smaller of the training and evaluation batch sizes fills ``train_micro_batch_size_per_gpu``."""
    offload_optimizer_device: str | None = None
    """``"none"`` (the default), ``"cpu"`` or ``"nvme"``, for stages 1 to 3."""
    offload_param_device: str | None = None
    """``"none"`` (the default), ``"cpu"`` or ``"nvme"``, for stage 3."""
    offload_optimizer_nvme_path: str | None = None
    """Folder on NVMe for the optimizer's state; ``"none"`` by default."""
    offload_param_nvme_path: str | None = None
    """Folder on NVMe for parameters; ``"none"`` by default."""
    zero3_init_flag: bool | None = None
    """Whether modules are partitioned while they are built, for stage 3. True by default there."""
    zero3_save_16bit_model: bool | None = None
    """Whether saving also writes the consolidated 16-bit weights, for stage 3. False by default."""
    transformer_moe_cls_names: str | None = None
    """Comma-separated class names of mixture-of-experts layers, which stage 3 gathers as a whole."""
    enable_msamp: bool | None = None
    """Whether MS-AMP trains in FP8. False by default."""
    msamp_opt_level: Literal["O1", "O2"] | None = None
    """MS-AMP's optimization level. ``"O1"`` by default."""

    def __post_init__(self) -> None:
        found = fields_from_env(os.environ)
        explicit = {name for name in CONFIG_KEYS if getattr(self, name) is not None}
        explicit |= fields_asked_for(os.environ) & set(CONFIG_KEYS) & set(found)
        self._by_variable = {name for name in CONFIG_KEYS if name in found and getattr(self, name) is None}
        """Fields that stand in the config because a variable says so."""
        for name in PARSERS:
            self._parse(name, found.get(name))
        self.dschf: HfDeepSpeedConfig | None = None
        self._selected = False
        self._precision = PrecisionSections()
        if self.hf_ds_config is None:
            self._make_config()
        else:
            self._merge_config(explicit)
        self._check_offload()
        self.deepspeed_config.setdefault("steps_per_print", float("inf"))  # DeepSpeed's own progress lines
        self._resolve_zero3_init()
        self._resolve_msamp()

    # ------------------------------------------------------------------ the config
    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed config in use."""
        return self._config.config

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key of the config is left open with ``"auto"``."""
        return self._config.is_auto(ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key of the config, or ``default`` where it is not set."""
        return self._config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill one ``"auto"`` of the config from ``kwargs``, or check its value against them.

        Args:
            ds_key_long: The key, for example ``"optimizer.params.lr"``.
            mismatches: Where a mismatch is noted; without it, a mismatch is an error at once.
            must_match: Whether a value that is not ``"auto"`` has to be that of ``kwargs``, if they have one.
            **kwargs: Values by key.

        Raises:
            ValueError: If the key is ``"auto"`` and ``kwargs`` lack it, or on a mismatch.
        """
        node, ds_key = self._config.find_config_node(ds_key_long)
        value = None if node is None else node.get(ds_key)
        if node is None or value is None:
            return
        if is_auto_value(value):
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"{ds_key_long!r} is 'auto' in the DeepSpeed config, but no argument fills it (given: "
                    f"{', '.join(kwargs) or 'nothing'}). Set it in the config, or pass it."
                )
            node[ds_key] = kwargs[ds_key_long]
        elif must_match and ds_key_long in kwargs and differ(value, kwargs[ds_key_long]):
            found = [f"- {ds_key_long}: {value!r} in the DeepSpeed config, {kwargs[ds_key_long]!r} as argument"]
            if mismatches is None:
                raise mismatch_error(found)
            mismatches += found

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every ``"auto"`` of the config from ``kwargs``, and check the other values against them.

        Args:
            prefix: Where in the config to begin, with a dot at its end.
            mismatches: Where mismatches are noted. They are an error in the end unless there is a ``prefix``, too.
            config: The part of the config at ``prefix``; by default all of it.
            must_match: Whether values that are not ``"auto"`` have to be those of ``kwargs``, where they have one.
            **kwargs: Values by key, for example ``**{"optimizer.params.lr": 1e-4}``.

        Raises:
            ValueError: If an ``"auto"`` cannot be filled, or on mismatches: all of them in one error.
        """
        noted = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", noted, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, noted, must_match, **kwargs)
        if noted and (prefix == "" or mismatches is None):
            raise mismatch_error(noted)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch on what computes in this precision, where the config leaves it open.

        What an earlier call has filled is open again: a plugin can serve several Trainers.

        Args:
            mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``, which computes in bf16 around FP8.

        Raises:
            ValueError: If the config switches on the other half precision.
        """
        self._precision.fill(self._config, mixed_precision)

    def own_precision(self) -> Precision:
        """Return the half precision that the config itself switches on, whatever has been filled in since."""
        return self._precision.own(self._config)

    def config_for_trainer(self, *, clips: bool) -> HfDeepSpeedConfig:
        """Return a copy of the config that leaves open what the Trainer decides.

        That is what variables alone have put there: accumulation steps, and the clipping if the Trainer ``clips``.
        """
        config = HfDeepSpeedConfig(self._config)
        for name in ("gradient_accumulation_steps", *(["gradient_clipping"] if clips else [])):
            key = CONFIG_KEYS[name]
            if name in self._by_variable and config.get_value(key) == getattr(self, name):  # else changed since by hand
                config.set_value(key, AUTO)
        return config

    # ------------------------------------------------------------------ construction under stage 3
    def set_deepspeed_weakref(self) -> None:
        """Tell transformers to partition models while it builds them, as ``zero3_init_flag`` says.

        transformers keeps a weak reference to a config object that this plugin holds.
        """
        config = HfDeepSpeedConfig(self._config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get_value(key, AUTO) == AUTO:
                config.set_value(key, 1)  # `deepspeed.zero.Init` wants numbers, and does not use these
        if config.is_auto("train_batch_size"):
            config.del_config_sub_tree("train_batch_size")
        self.dschf = config if self.zero3_init_flag or not config.is_zero3() else None
        set_transformers_config(self.dschf)

    def is_zero3_init_enabled(self) -> bool:
        """Whether modules are partitioned while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Build modules partitioned, or (by default) unpartitioned, inside this context."""
        before = self.zero3_init_flag
        self._switch_zero3_init(enable)
        try:
            yield
        finally:
            self._switch_zero3_init(before)

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make stage 3 gather the layers named in ``transformer_moe_cls_names`` as a whole.

        Raises:
            ValueError: If the model has no submodule of a named class.
            ModuleNotFoundError: If DeepSpeed is not installed.
        """
        if self.transformer_moe_cls_names is not None:
            set_leaf_modules(model, as_names("transformer_moe_cls_names", self.transformer_moe_cls_names))

    # ------------------------------------------------------------------ one of several
    @property
    def selected(self) -> bool:
        """Whether this is the active plugin of `AcceleratorState`."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            "Select a plugin with AcceleratorState().select_deepspeed_plugin(name), which deselects the others."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Become the active plugin; called by `AcceleratorState`, which knows the others.

        Raises:
            ValueError: If somebody else calls it.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "Select a plugin with AcceleratorState().select_deepspeed_plugin(name), which deselects the others."
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False
        if self.dschf is not None:  # what is trained next may not be partitioned
            self.dschf = None
            set_transformers_config(None)

    # ------------------------------------------------------------------ making
    @property
    def _config(self) -> HfDeepSpeedConfig:
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            raise TypeError(
                f"hf_ds_config must remain the HfDeepSpeedConfig that it was converted to; got {self.hf_ds_config!r}."
            )
        return self.hf_ds_config

    def _parse(self, name: str, unset: str | None) -> None:
        value = getattr(self, name)
        value = unset if value is None else value
        if value is not None:
            setattr(self, name, PARSERS[name](name, value))

    def _make_config(self) -> None:
        for name, default in _DEFAULTS.items():
            self._default(name, default)
        config = HfDeepSpeedConfig({"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO})
        for name, key in CONFIG_KEYS.items():
            value = getattr(self, name)
            if not (name.endswith("nvme_path") and value == _NONE) and not (name == "gradient_clipping" and not value):
                config.set_value(key, value)
        self.hf_ds_config = config

    def _merge_config(self, explicit: set[str]) -> None:
        """Complete the config from the fields, and the fields from the config."""
        self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)  # type: ignore[arg-type]
        check_features(self.hf_ds_config)
        if "zero_optimization" not in self.deepspeed_config and self.zero_stage is None:
            raise ValueError(
                "The DeepSpeed config has no 'zero_optimization', and zero_stage is not given. Add "
                '{"zero_optimization": {"stage": 2}} to it, or use stage 0 for no sharding.'
            )
        mismatches: list[str] = []
        for name, key in CONFIG_KEYS.items():
            value, there = getattr(self, name), self._config.get_value(key)
            if there is not None and not is_auto_value(there):
                self._by_variable.discard(name)
            if there is None or is_auto_value(there):
                self._fill(name, key, value, is_open=there is not None)
            elif name in explicit and value not in (None, AUTO) and differ(value, there):
                mismatches.append(f"- {key}: {there!r} in the DeepSpeed config, {name}={value!r} as argument")
            there = self._config.get_value(key)
            label = f"{key} (DeepSpeed config)"
            setattr(self, name, _ABSENT[name] if there is None else PARSERS[name](label, there))
        if mismatches:
            raise mismatch_error(mismatches)
        for name in ("enable_msamp", "msamp_opt_level"):
            self._default(name, _DEFAULTS[name])

    def _fill(self, name: str, key: str, value: Any, *, is_open: bool) -> None:
        """Write a field into a key that is absent or (``is_open``) ``"auto"``."""
        value = _DEFAULTS[name] if value is None and is_open else value
        if is_open and value == _NONE and name.endswith("nvme_path"):
            self._config.del_config_sub_tree(key)
        elif is_open or value not in (None, AUTO, _ABSENT[name]):
            self._config.set_value(key, value)

    def _default(self, name: str, default: Any) -> None:
        if getattr(self, name) is None:
            setattr(self, name, default)

    def _check_offload(self) -> None:
        for what in ("optimizer", "param"):
            if (
                getattr(self, f"offload_{what}_device") == "nvme"
                and getattr(self, f"offload_{what}_nvme_path") == _NONE
            ):
                raise ValueError(
                    f"offload_{what}_device='nvme' needs a folder on it: set offload_{what}_nvme_path "
                    f"(or {CONFIG_KEYS[f'offload_{what}_nvme_path']!r} in the DeepSpeed config), for example '/nvme'."
                )

    def _resolve_zero3_init(self) -> None:
        stage3 = self._config.is_zero3()
        if self.zero3_init_flag and not stage3:
            warn_once("zero3_init_flag", f"zero3_init_flag needs ZeRO stage 3 and is ignored: stage {self.zero_stage}.")
        self.zero3_init_flag = stage3 if self.zero3_init_flag is None else self.zero3_init_flag and stage3

    def _resolve_msamp(self) -> None:
        if not self.enable_msamp:
            return
        if self.zero_stage == 3:
            raise NotImplementedError("MS-AMP does not work with ZeRO stage 3. Use stage 0, 1 or 2 with enable_msamp.")
        if importlib.util.find_spec("msamp") is None:
            raise ModuleNotFoundError(
                "enable_msamp=True needs MS-AMP, which is not installed: see https://github.com/Azure/MS-AMP."
            )
        self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})

    def _switch_zero3_init(self, enable: bool | None) -> None:
        if self.zero3_init_flag != enable:
            self.zero3_init_flag = enable
            self.set_deepspeed_weakref()


# ------------------------------------------------------------------------------------------------
# The ``ACCELERATE_*`` variables for the fields of `DeepSpeedPlugin`, and the values of each field.


VARIABLES: Mapping[str, str] = {
    "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "transformer_moe_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "enable_msamp": "ACCELERATE_FP8_BACKEND",
    "msamp_opt_level": "ACCELERATE_FP8_OPT_LEVEL",
}
"""The plugin's fields that a variable can fill."""

_ASKED_FOR = "ACCELERATE_CONFIG_DS_FIELDS"


def fields_from_env(env: Mapping[str, str]) -> dict[str, FromVariable]:
    """Return the plugin's fields that ``env`` sets, unparsed.

    An empty variable counts as unset, and so does ``none``, which Accelerate's launcher writes for what was not given.
    """
    values = {field: env.get(variable, "").strip() for field, variable in VARIABLES.items()}
    found = {
        field: FromVariable(value, VARIABLES[field])
        for field, value in values.items()
        if value.lower() not in ("", "none")
    }
    if "enable_msamp" in found:  # the variable names one of several FP8 libraries
        is_msamp = found["enable_msamp"].upper() == "MSAMP"
        found["enable_msamp"] = FromVariable(str(is_msamp), VARIABLES["enable_msamp"])
    return found


def fields_asked_for(env: Mapping[str, str]) -> set[str]:
    """Return the fields that the user's Accelerate config file sets itself, and not its launcher by default."""
    return {name.strip() for name in env.get(_ASKED_FOR, "").split(",")} & set(VARIABLES)


def _micro_batches(field: str, value: object) -> int | str:
    if is_auto_value(value):
        return AUTO
    number = as_int(field, value)
    if number < 1:
        raise ValueError(f"{source(field, value)} must be at least 1 (no accumulation), or 'auto'; got {value!r}.")
    return number


def _norm(field: str, value: object) -> float | str:
    if is_auto_value(value):
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong_type(field, value, "a number or 'auto'")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{source(field, value)} must be a number or 'auto'; got {value!r}.") from None
    if not number >= 0:  # NaN, too
        raise ValueError(f"{source(field, value)} must be at least 0 (no clipping), or 'auto'; got {value!r}.")
    return number


def _stage(field: str, value: object) -> int:
    stage = as_int(field, value)
    if stage not in range(4):
        raise wrong_value(field, value, range(4))
    return stage


def _device(field: str, value: object) -> str:
    return _one_of(field, value, ("none", "cpu", "nvme")).lower()


def _level(field: str, value: object) -> str:
    return _one_of(field, value, ("O1", "O2")).upper()


def _one_of(field: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str):
        raise wrong_type(field, value, "a str")
    if value.lower() not in {name.lower() for name in allowed}:
        raise wrong_value(field, value, allowed)
    return value


def _path(field: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise wrong_type(field, value, "a path")
    return str(os.fspath(value))


def _names(field: str, value: object) -> str:
    return ",".join(as_names(field, value))


def _config(field: str, value: object) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value  # Accelerate's word, too


PARSERS: Mapping[str, Callable[[str, object], Any]] = {
    "hf_ds_config": _config,
    "gradient_accumulation_steps": _micro_batches,
    "gradient_clipping": _norm,
    "zero_stage": _stage,
    "is_train_batch_min": as_bool,
    "offload_optimizer_device": _device,
    "offload_param_device": _device,
    "offload_optimizer_nvme_path": _path,
    "offload_param_nvme_path": _path,
    "zero3_init_flag": as_bool,
    "zero3_save_16bit_model": as_bool,
    "transformer_moe_cls_names": _names,
    "enable_msamp": as_bool,
    "msamp_opt_level": _level,
}
"""Functions that convert a given value to the field's own type, or say what is allowed; by field."""


# ------------------------------------------------------------------------------------------------
# The active `DeepSpeedPlugin`.


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the active plugin.

    Args:
        state: Accelight's `AcceleratorState`.

    Raises:
        ValueError: If DeepSpeed is not enabled.

    Source: accelerate 1.15 ``utils/deepspeed.py``.
    """
    plugin = state.deepspeed_plugin
    if state.distributed_type != DistributedType.DEEPSPEED or plugin is None:
        raise ValueError(
            f"DeepSpeed is not enabled: distributed_type is {state.distributed_type!s}. Train with "
            "AccelDeepSpeedStrategy, or create AcceleratorState(deepspeed_plugin=...) before accessing its plugin."
        )
    return plugin


# ------------------------------------------------------------------------------------------------
# Layers that ZeRO stage 3 gathers as a whole, such as a mixture of experts.


def set_leaf_modules(model: nn.Module, class_names: Sequence[str]) -> None:
    """Mark every submodule of these classes: stage 3 gathers all its parameters at once, used in this batch or not.

    Raises:
        ValueError: If the model has no submodule of a named class; the message lists the classes that it has.
        ModuleNotFoundError: If DeepSpeed is not installed.
    """
    classes = classes_by_name(model.modules())
    missing = [name for name in class_names if name not in classes]
    if missing:
        raise ValueError(
            f"transformer_moe_cls_names: the model has no layer of class {', '.join(map(repr, missing))}. "
            f"It has {', '.join(sorted(classes))}."
        )
    try:
        from deepspeed.utils import set_z3_leaf_modules
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Leaf modules need DeepSpeed: pip install 'accelight[deepspeed]'.") from error
    set_z3_leaf_modules(model, [cls for name in class_names for cls in classes[name]])


# ------------------------------------------------------------------------------------------------
# The DeepSpeed config that transformers reads: ``from_pretrained``, ``generate`` and others ask for it.


_MODULE = "transformers.integrations.deepspeed"


def set_transformers_config(config: HfDeepSpeedConfig | None) -> None:
    """Make ``config`` the one that transformers sees, or none.

    transformers keeps a weak reference only: the caller keeps ``config`` alive. Where transformers is not installed, or
    not imported and stage 3 (which decides how it builds models) is not asked for, nothing is done.
    """
    module = _transformers(needed=config is not None and config.is_zero3())
    if module is None:
        return
    if config is None:
        module.unset_hf_deepspeed_config()
    else:
        module.set_hf_deepspeed_config(config)


def _transformers(*, needed: bool) -> Any:
    loaded: ModuleType | None = sys.modules.get(_MODULE)
    if loaded is not None or not needed:
        return loaded
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return None


# ------------------------------------------------------------------------------------------------
# Wrappers that let a conventional training loop drive an engine, its optimizer and its schedule.


class DeepSpeedEngineWrapper:
    """Lets the caller, not DeepSpeed's own counter, say where a window of micro-batches ends.

    Args:
        engine: What ``deepspeed.initialize`` returned.

    Source: accelerate 1.15 ``utils/deepspeed.py``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run backward and, at the end of a window, everything of a step: clip, optimizer, zero, schedule.

        Args:
            loss: The micro-batch's loss. DeepSpeed divides it by the config's ``gradient_accumulation_steps``.
            sync_gradients: Whether the window ends here.
            **kwargs: For ``engine.backward``, for example ``retain_graph`` or ``scale_wrt_gas``.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the gradients' norm over all ranks at the last step, before clipping.

        None before the first step, and where DeepSpeed does not compute it (stage 0 in fp32).
        """
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing: `DeepSpeedEngineWrapper.backward` has done both.

    Args:
        optimizer: DeepSpeed's optimizer, as ``deepspeed.initialize`` returned it.

    Source: accelerate 1.15 ``utils/deepspeed.py``, ``optimizer.py``.
    """

    def __init__(self, optimizer: Any) -> None:  # no super().__init__: the parameters are the inner optimizer's
        self.optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults, as far as it has any."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return getattr(inner, "defaults", {})

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has stepped.

        Raises:
            ValueError: If there is a closure, which nobody would call.
        """
        if closure is not None:
            raise ValueError(
                "DeepSpeed does not accept a closure: run backward through DeepSpeedEngineWrapper.backward."
            )

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine has zeroed the gradients after its step."""

    def train(self) -> None:
        """Set the user's optimizer to training mode, where it has modes (schedule-free ones do)."""
        self._switch("train")

    def eval(self) -> None:
        """Set the user's optimizer to evaluation mode, where it has modes."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        inner = getattr(self.optimizer, "optimizer", None)
        if callable(switch := getattr(self.optimizer, mode, None)):
            switch()
        elif callable(getattr(inner, mode, None)):
            switch_mode(self.optimizer, mode)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hand the group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state on this rank."""
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand this rank's state to the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.optimizer).__name__})"


class DeepSpeedSchedulerWrapper:
    """A schedule whose ``step`` does nothing: the engine has advanced it, unless it skipped the step.

    Everything else is the inner schedule's.

    Args:
        scheduler: The engine's schedule, as ``deepspeed.initialize`` returned it.
        optimizers: The optimizer or optimizers that it drives.

    Source: accelerate 1.15 ``utils/deepspeed.py``, ``scheduler.py``.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has advanced the schedule."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.scheduler, name)
