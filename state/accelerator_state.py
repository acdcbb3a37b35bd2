"""``AcceleratorState``: precision and sharding plugins, beside everything of ``PartialState``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from typing import Any

from . import triggers
from .gradient_state import GradientState
from .partial_state import PartialState
from .process_record import DistributedType, precision_from_env, shared
from .utils import flag_from_env

PRECISIONS = ("no", "fp16", "bf16", "fp8")
_FP8_LIBRARIES = {"transformer_engine": "transformer-engine[pytorch]", "torchao": "torchao", "msamp": "msamp"}


class _Settings:
    """The state that all ``AcceleratorState`` instances share, in addition to that of ``PartialState``."""

    def __init__(self) -> None:
        self.initialized = False
        self.values: dict[str, Any] = {}
        self.by_hand: set[str] = set()
        self.deepspeed_plugins: dict[str, Any] = {}
        self.active_plugin: str | None = None


_settings = _Settings()


class AcceleratorState(PartialState):
    """Facts about how training runs. All instances share one state.

    A strategy fills it when its Trainer starts, and it can be made by hand: then the first instance fixes the values.
    A later instance may repeat them, not change them; a strategy that would need others raises as well, naming both.
    What a strategy has filled in, the next Trainer's strategy replaces.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; None takes ``ACCELERATE_MIXED_PRECISION``, else
            ``"no"``. Under DeepSpeed the active plugin's config decides, where it does.
        cpu: As in :class:`PartialState`.
        dynamo_plugin: Kept for code that reads it.
        deepspeed_plugin: A plugin, or several by name; the first is active.
        fsdp_plugin: A plugin; its ``fsdp_version`` decides :attr:`is_fsdp2`.
        torch_tp_plugin: Kept for code that reads it.
        parallelism_config: Kept for code that reads it; ``AccelFSDPStrategy`` puts its own here.
        megatron_lm_plugin: Kept for code that reads it: nothing here runs Megatron-LM.
        _from_accelerator: Takes what Accelerate's callers pass; without meaning here.
        **kwargs: As in :class:`PartialState`.

    Raises:
        ValueError: If a value is not known, or contradicts the live state.
        ModuleNotFoundError: If ``"fp8"`` finds no library that can do it.

    Source: accelerate 1.15 ``state.py`` (``AcceleratorState``), which can only be made through ``Accelerator``.
    """

    __slots__ = ()

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        if fsdp_plugin is not None and deepspeed_plugin is not None:
            raise ValueError(
                "fsdp_plugin and deepspeed_plugin exclude each other: only one can shard a model. Pass only one."
            )
        given = {
            "mixed_precision": None if mixed_precision is None else check_precision(mixed_precision),
            "dynamo_plugin": dynamo_plugin,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        given = {name: value for name, value in given.items() if value is not None}
        default_precision = check_precision(precision_from_env(), "ACCELERATE_MIXED_PRECISION")
        super().__init__(cpu, **kwargs)
        if _settings.initialized:
            self._check_unchanged(given)
            return
        _settings.initialized = True
        _settings.by_hand = set(given)
        _settings.values = {"mixed_precision": default_precision, **given}
        shared.read_mixed_precision = _effective_precision
        try:
            self._take_plugins()
        except BaseException:
            self._reset_state()
            raise

    @property
    def initialized(self) -> bool:
        """Whether an ``AcceleratorState`` has been made, by hand or by a strategy."""
        return _settings.initialized

    @property
    def dynamo_plugin(self) -> Any:
        """The plugin given, or None."""
        return _settings.values.get("dynamo_plugin")

    @property
    def fsdp_plugin(self) -> Any:
        """The FSDP plugin in use, or None."""
        return _settings.values.get("fsdp_plugin")

    @property
    def torch_tp_plugin(self) -> Any:
        """The plugin given, or None."""
        return _settings.values.get("torch_tp_plugin")

    @property
    def parallelism_config(self) -> Any:
        """The sizes of all dimensions of parallelism, where a strategy or the caller has given any; or None."""
        return _settings.values.get("parallelism_config")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The plugin given, or None."""
        return _settings.values.get("megatron_lm_plugin")

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded by FSDP, version 2."""
        plugin = self.fsdp_plugin
        return self.distributed_type == DistributedType.FSDP and plugin is not None and plugin.fsdp_version == 2

    @property
    def deepspeed_plugins(self) -> dict[str, Any]:
        """All DeepSpeed plugins by name; one given alone is ``"default"``."""
        return dict(_settings.deepspeed_plugins)

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, or None."""
        return _settings.deepspeed_plugins[_settings.active_plugin] if _settings.active_plugin is not None else None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin of that name.

        Raises:
            ValueError: If there is none; the message has the names there are.
        """
        if name not in _settings.deepspeed_plugins:
            known = ", ".join(map(repr, _settings.deepspeed_plugins)) or "none (no DeepSpeed plugin was given)"
            raise ValueError(f"There is no DeepSpeed plugin {name!r}. Known: {known}.")
        return _settings.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make the DeepSpeed plugin of that name the active one, and the others inactive.

        Raises:
            ValueError: If there is none; the message has the names there are.
        """
        chosen = self.get_deepspeed_plugin(name)
        _unselect(plugin for plugin in _settings.deepspeed_plugins.values() if plugin is not chosen)
        _settings.active_plugin = name
        if hasattr(chosen, "select"):
            chosen.select(_from_accelerator_state=True)

    def __repr__(self) -> str:
        text = f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"
        if self.distributed_type == DistributedType.DEEPSPEED:
            text += f"ds_config: {_config_of(self.deepspeed_plugin)}\n"
        return text

    def _check_unchanged(self, given: dict[str, Any]) -> None:
        for name, new in given.items():
            old = self.mixed_precision if name == "mixed_precision" else _settings.values.get(name)
            if not _same(old, new):
                raise _changed(name, old, new)

    def _take_plugins(self) -> None:
        """Take the distributed type from plugins given by hand, and set their precision."""
        values = _settings.values
        env_fsdp = flag_from_env(os.environ, "ACCELERATE_USE_FSDP")
        if "deepspeed_plugin" in values:
            shared.distributed_type = DistributedType.DEEPSPEED
        elif "fsdp_plugin" in values or (env_fsdp and self.distributed_type != DistributedType.NO):
            shared.distributed_type = DistributedType.FSDP
        precision = values["mixed_precision"]
        _take_deepspeed_plugins(values.get("deepspeed_plugin"))
        plugins_to_set = list(_settings.deepspeed_plugins.values()) if "mixed_precision" in _settings.by_hand else []
        if precision != "no":  # a default that nobody gave leaves the plugins open for the Trainer's precision
            plugins_to_set = [*_settings.deepspeed_plugins.values(), values.get("fsdp_plugin")]
        for plugin in plugins_to_set:
            if hasattr(plugin, "set_mixed_precision"):
                plugin.set_mixed_precision(precision)
        if _settings.active_plugin is not None:
            self.select_deepspeed_plugin(_settings.active_plugin)

    @classmethod
    def _fill(
        cls,
        *,
        mixed_precision: str,
        distributed_type: DistributedType,
        fsdp_plugin: Any = None,
        deepspeed_plugin: Any = None,
        parallelism_config: Any = None,
    ) -> AcceleratorState:
        """Take a strategy's values, replacing what an earlier strategy filled in.

        Raises:
            ValueError: If they contradict what the user has fixed by hand, naming both.
        """
        new = {"mixed_precision": check_precision(mixed_precision)}
        if fsdp_plugin is not None:
            new["fsdp_plugin"] = fsdp_plugin
        if deepspeed_plugin is not None:
            new["deepspeed_plugin"] = deepspeed_plugin
        if parallelism_config is not None:
            new["parallelism_config"] = parallelism_config
        for name in sorted({"mixed_precision", "fsdp_plugin", "deepspeed_plugin"} & _settings.by_hand):
            old, wanted = _settings.values[name], new.get(name)
            same = _are_among(wanted, old) if name == "deepspeed_plugin" else _same(old, wanted)
            if not same:
                raise _changed(name, old, wanted)
        state = cls()
        kept = {name: value for name, value in _settings.values.items() if name in _settings.by_hand}
        _settings.values = {**new, **kept}
        shared.distributed_type = distributed_type
        shared.set_non_data_parallel_size(getattr(parallelism_config, "non_data_parallel_size", 1))
        if "deepspeed_plugin" not in _settings.by_hand:  # else the user's own names, and the one they have selected
            _unselect(_settings.deepspeed_plugins.values())
            _take_deepspeed_plugins(deepspeed_plugin)
        if _settings.active_plugin is not None:
            state.select_deepspeed_plugin(_settings.active_plugin)
        return state

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the shared state, for tests."""
        global _settings
        _unselect(_settings.deepspeed_plugins.values())
        _settings = _Settings()
        shared.distributed_type = DistributedType.NO
        shared.set_non_data_parallel_size(1)
        shared.read_mixed_precision = precision_from_env
        if reset_partial_state:
            PartialState._reset_state()


def check_precision(value: str, name: str = "mixed_precision") -> str:
    """Return the precision in lower case.

    Args:
        value: In any case.
        name: What errors call it.

    Raises:
        ValueError: If it is not one of :data:`PRECISIONS`.
        ModuleNotFoundError: If it is ``"fp8"`` and no library can do it.
    """
    precision = str(value).lower()
    if precision not in PRECISIONS:
        raise ValueError(f"{name} must be one of {', '.join(PRECISIONS)}, got {value!r}.")
    if precision == "fp8" and not any(importlib.util.find_spec(name) for name in _FP8_LIBRARIES):
        packages = " or ".join(f"pip install '{package}'" for package in _FP8_LIBRARIES.values())
        raise ModuleNotFoundError(f"{name}='fp8' needs a library that computes in FP8: {packages}.")
    return precision


def _effective_precision() -> str:
    """Return the precision; under DeepSpeed the one its config switches on."""
    own: str = _settings.values.get("mixed_precision", "no")
    if shared.distributed_type != DistributedType.DEEPSPEED or _settings.active_plugin is None or own == "fp8":
        return own
    config = _config_of(_settings.deepspeed_plugins[_settings.active_plugin])
    enabled = {name: config.get(name, {}).get("enabled", "auto") for name in ("fp16", "bf16")}
    on = next((name for name, value in enabled.items() if value is True), None)
    if on is not None:
        return on
    return own if enabled.get(own, "auto") == "auto" else "no"  # left open to the Trainer, where our own value is from


def _unselect(plugins: Iterable[Any]) -> None:
    for plugin in plugins:
        if hasattr(plugin, "_unselect"):
            plugin._unselect()


def _config_of(plugin: Any) -> Mapping[str, Any]:
    config = getattr(plugin, "deepspeed_config", None)
    return config if isinstance(config, Mapping) else {}


def _take_deepspeed_plugins(plugin: Any) -> None:
    _settings.deepspeed_plugins = _by_name(plugin)
    _settings.active_plugin = next(iter(_settings.deepspeed_plugins), None)


def _by_name(plugin: Any) -> dict[str, Any]:
    """Return DeepSpeed plugins by name: several, one or none."""
    return dict(plugin) if isinstance(plugin, Mapping) else {} if plugin is None else {"default": plugin}


def _are_among(wanted: Any, known: Any) -> bool:
    """Whether a strategy's DeepSpeed plugins (at least one) are all of those that the user has given, by any name."""
    known_ones = list(_by_name(known).values())
    wanted_ones = list(_by_name(wanted).values())
    return bool(wanted_ones) and all(any(_same(one, known_one) for known_one in known_ones) for one in wanted_ones)


def _same(old: Any, new: Any) -> bool:
    return old is new or bool(old == new)


def _changed(name: str, old: Any, new: Any) -> ValueError:
    return ValueError(
        f"AcceleratorState has {name}={old!r}, which cannot become {new!r}: other code may have read it. Pass "
        f"{name}={new!r} where the state is first created (or to the Trainer), or omit it there."
    )


def reset_state() -> None:
    """Forget all states and triggers of this process, so that the next instances begin anew. For tests.

    A process group stays as it is, and is adopted by the next ``PartialState()``.
    """
    triggers.reset()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
