"""`DeepSpeedPlugin`: DeepSpeed as users of Accelerate spell it, beside or instead of a DeepSpeed config."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ....state.arguments import named_arguments
from . import environment as env
from .auto_values import TrainingFacts, resolve
from .config_precision import Precision, PrecisionSections
from .hf_config import AUTO, HfDeepSpeedConfig, is_auto_value
from .leaf_modules import set_leaf_modules
from .mismatches import differ, mismatch_error
from .misspelled_keys import check_top_level
from .settings import DeepSpeedSettings
from .transformers_link import tell_transformers

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
    """How to train with DeepSpeed, in Accelerate's words.

    A field that is left None comes from its environment variable (see `environment.VARIABLES`), else from the default.
    With a config, fields fill what it leaves out or has as ``"auto"``. A value in the config that contradicts an
    argument is an error; a variable yields to the config. Afterwards the fields say what the config says.

    Raises:
        ValueError: If a value is not allowed, or arguments and the config differ: all of them in one error.
        TypeError: If a value has a type that the field does not take.
        NotImplementedError: If MS-AMP is asked for with ZeRO stage 3.
        ModuleNotFoundError: If MS-AMP is asked for and not installed.

    Source: accelerate 1.15 ``utils/dataclasses.py``. Different here: an argument that contradicts the config, or that
    the config has no key for, is not dropped without a word; ``gradient_accumulation_steps`` that nobody gives stays
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
        found = env.fields_from_env(os.environ)
        explicit = {name for name in CONFIG_KEYS if getattr(self, name) is not None}
        explicit |= env.fields_asked_for(os.environ) & set(CONFIG_KEYS) & set(found)
        self._by_variable = {name for name in CONFIG_KEYS if name in found and getattr(self, name) is None}
        """Fields that stand in the config because a variable says so."""
        for name in env.PARSERS:
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
                    f"{ds_key_long!r} is 'auto' in the DeepSpeed config, and nothing given fills it (given: "
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

    def settings(self, facts: TrainingFacts) -> DeepSpeedSettings:
        """Return what the strategy is told: the config with every ``"auto"`` filled. The plugin keeps its own.

        Raises:
            ValueError: If the config and ``facts`` contradict each other, or an ``"auto"`` cannot be filled.
        """
        return resolve(self._config, facts)

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
        tell_transformers(self.dschf)

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
        """Let stage 3 gather the layers named in ``transformer_moe_cls_names`` as a whole.

        Raises:
            ValueError: If the model has no submodule of a named class.
            ModuleNotFoundError: If DeepSpeed is not installed.
        """
        if self.transformer_moe_cls_names is not None:
            set_leaf_modules(model, env.as_names("transformer_moe_cls_names", self.transformer_moe_cls_names))

    # ------------------------------------------------------------------ one of several
    @property
    def selected(self) -> bool:
        """Whether this is the active plugin of `AcceleratorState`."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            "A plugin is selected through AcceleratorState().select_deepspeed_plugin(name), which unselects the others."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Become the active plugin; called by `AcceleratorState`, which knows the others.

        Raises:
            ValueError: If somebody else calls it.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "Select a plugin with AcceleratorState().select_deepspeed_plugin(name), which unselects the others."
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False
        if self.dschf is not None:  # what is trained next may not be partitioned
            self.dschf = None
            tell_transformers(None)

    # ------------------------------------------------------------------ making
    @property
    def _config(self) -> HfDeepSpeedConfig:
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            raise TypeError(f"hf_ds_config must stay the HfDeepSpeedConfig that it became; got {self.hf_ds_config!r}.")
        return self.hf_ds_config

    def _parse(self, name: str, unset: str | None) -> None:
        value = getattr(self, name)
        value = unset if value is None else value
        if value is not None:
            setattr(self, name, env.PARSERS[name](name, value))

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
        """Let the config and the fields complete each other."""
        self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)  # type: ignore[arg-type]
        check_top_level(self.hf_ds_config.config)
        if "zero_optimization" not in self.deepspeed_config and self.zero_stage is None:
            raise ValueError(
                "The DeepSpeed config has no 'zero_optimization', and zero_stage is not given. Add "
                '{"zero_optimization": {"stage": 2}} to it, or stage 0 for no sharding.'
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
            setattr(self, name, _ABSENT[name] if there is None else env.PARSERS[name](label, there))
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
            env.warn_once(
                "zero3_init_flag", f"zero3_init_flag needs ZeRO stage 3 and is ignored: stage {self.zero_stage}."
            )
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
