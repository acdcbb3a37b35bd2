"""Which submodules of a model become units of their own, and which are left alone."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ....checkpoint.names import clean_name
from ...common.classes_by_name import classes_by_name
from .environment import source, wrong_type
from .settings import FSDP1Settings, FSDP2Settings, WrapSettings

if TYPE_CHECKING:
    from ...upstream.torch_fsdp1 import _Policy

# Where torch (2.6 to 2.13) keeps the module inside an activation wrapper and inside a compiled module. The names stand
# for the classes, because importing `torch._dynamo` for an `isinstance` costs seconds.
_TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")
_MAX_CANDIDATES = 8


class WithSettings(Protocol):
    """A `FullyShardedDataParallelPlugin`."""

    def settings(self) -> FSDP1Settings | FSDP2Settings:
        """Return what the engines are told."""


def units_to_wrap(
    model: nn.Module,
    wrap: WrapSettings,
    ignored: set[nn.Module],
    *,
    also: Callable[[nn.Module], bool] = lambda module: False,
) -> list[tuple[str, nn.Module]]:
    """Return the submodules of ``model`` that are gathered and freed on their own.

    A module inside an activation-checkpoint or ``torch.compile`` wrapper is judged by what it is itself, and its
    outermost wrapper is what is returned.

    Args:
        model: The root, which is never part of the answer.
        wrap: The policy.
        ignored: Modules that are left alone, with everything in them.
        also: What is a unit whatever the policy says.

    Returns:
        Name and module, children before parents, otherwise in the order of registration; a module that is reachable
        under two names comes once, under the first.

    Raises:
        ValueError: If a class name is not found in ``model``, if there is no class name at all, or if a policy object
            asks for arguments that differ from unit to unit.

    Source: torch 2.13 ``distributed/fsdp/wrap.py`` (``_recursive_wrap``); accelerate 1.15 ``utils/fsdp_utils.py``.
    """
    ignored = {submodule for module in ignored for submodule in module.modules()}
    is_chosen = _choice(model, wrap, ignored)
    return [
        (name, module)
        for name, module in _bottom_up(model, ignored)
        if is_chosen(module) or is_chosen(_inside(module)) or also(_inside(module))
    ]


def _choice(model: nn.Module, wrap: WrapSettings, ignored: set[nn.Module]) -> Callable[[nn.Module], bool]:
    if wrap.kind == "no_wrap":
        return lambda module: False
    if wrap.kind == "transformer_based_wrap":
        classes = layer_classes(model, wrap.transformer_cls_names)
        return lambda module: isinstance(module, classes)
    if wrap.kind == "size_based_wrap":
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

        policy: Any = functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    else:
        policy = wrap.policy
    if hasattr(policy, "_run_policy"):  # `ModuleWrapPolicy`, `CustomPolicy` and what users derive from their base
        chosen = _chosen_by_object(policy, model, ignored)
    else:
        chosen = _chosen_by_call(policy, model, ignored)
    return chosen.__contains__


def resolve_ignored(model: nn.Module, ignored_modules: tuple[nn.Module, ...] | str | None) -> set[nn.Module]:
    """Return the modules of ``model`` to leave unsharded, each with all its submodules.

    Args:
        model: The root; names are counted from it, without the traces of wrappers.
        ignored_modules: The modules, or a regular expression that has to match a whole name.

    Raises:
        ValueError: If the expression is invalid or matches nothing, or if a module is not a submodule of ``model``.

    Source: accelerate 1.15 ``accelerator.py`` (``prepare_model``: ``re.fullmatch`` on the names).
    """
    if ignored_modules is None:
        return set()
    if isinstance(ignored_modules, str):
        roots = _modules_matching(model, ignored_modules)
    else:
        roots = list(ignored_modules)
        inside = set(model.modules()) - {model}
        for module in roots:
            if module not in inside:
                where = "the whole model" if module is model else f"not a part of {type(model).__name__}"
                raise ValueError(
                    f"ignored_modules holds a {type(module).__name__} that is {where}. Give submodules of the model "
                    "that is trained, or a regular expression for their names."
                )
    return {submodule for module in roots for submodule in module.modules()}


def layer_classes(model: nn.Module, names: Iterable[str] | None) -> tuple[type[nn.Module], ...]:
    """Return the classes of submodules of ``model`` with these names.

    Args:
        model: The root.
        names: None takes ``_no_split_modules`` of every Hugging Face model in it (or that it is).

    Raises:
        ValueError: If there is no name, or no submodule of a class of that name.
    """
    classes = classes_by_name(_submodules(model))
    names = _no_split_names(model, classes) if names is None else list(names)
    if not names:
        raise ValueError(
            "auto_wrap_policy='transformer_based_wrap' needs class names: transformer_cls_names_to_wrap is empty or "
            "unset, and no part of the model has _no_split_modules. Set transformer_cls_names_to_wrap (or "
            f"FSDP_TRANSFORMER_CLS_TO_WRAP) to the repeated layer's class: {_candidates(model)}."
        )
    for name in names:
        if name not in classes:
            raise ValueError(
                f"transformer_cls_names_to_wrap holds {name!r}, but the model has no submodule of that class. "
                f"Classes in the model: {_candidates(model)}."
            )
    return tuple(cls for name in names for cls in classes[name])


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: WithSettings, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return whether a module of ``model`` is to be sharded on its own, or None where the plugin wraps nothing.

    Unlike Accelerate's, the function knows every kind of policy, and is true of the very modules of ``model`` as it is
    now (prepare it after wrappers have been put in).

    Raises:
        ValueError: As `units_to_wrap` and `resolve_ignored`.
    """
    settings = fsdp2_plugin.settings()
    if settings.wrap.kind == "no_wrap":
        return None
    ignored = resolve_ignored(model, settings.ignored_modules)
    units = {module for _, module in units_to_wrap(model, settings.wrap, ignored)}
    return lambda module: module in units


def as_policy(field: str, policy: Any) -> Any:
    """Return a wrap policy of torch: a set of module classes becomes one, as in Lightning, a policy stays.

    Args:
        field: What errors call it.
        policy: Classes, a policy object, or a function that is called as torch calls wrap policies.

    Raises:
        TypeError: If it is something else.
    """
    from ...upstream.torch_fsdp1 import _Policy

    if isinstance(policy, set | frozenset | list | tuple):
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        others = [each for each in policy if not (isinstance(each, type) and issubclass(each, nn.Module))]
        if others or not policy:
            raise wrong_type(field, others[0] if others else policy, "a set of module classes")
        return ModuleWrapPolicy(policy)
    if policy is None or isinstance(policy, _Policy):
        return policy
    if not callable(policy):
        raise wrong_type(field, policy, "a str, a set of module classes or a wrap policy of torch")
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a builtin has none
        return policy
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise TypeError(
            f"{field} is called as policy(module=..., recurse=..., nonwrapped_numel=...), which {policy!r} "
            f"does not take: {error}. For a function of the module alone use torch.distributed.fsdp.wrap.CustomPolicy."
        ) from error
    return policy


def _inside(module: nn.Module) -> nn.Module:
    """Return what transparent wrappers hide; a module without them is returned itself."""
    for attribute in _TRANSPARENT:
        hidden = module._modules.get(attribute)
        if hidden is not None:
            return _inside(hidden)
    return module


def _bottom_up(model: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every proper submodule once, wrappers and what they hide as one (the wrapper), children first."""
    names = {module: name for name, module in model.named_modules()}
    seen = {_inside(model)}

    def visit(parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child in parent.children():
            inside = _inside(child)
            if inside not in seen and not {child, inside} & ignored:
                seen.add(inside)
                yield from visit(inside)
                yield names[child], child

    yield from visit(_inside(model))


def _chosen_by_call(policy: Callable[..., bool], model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    """Ask ``policy`` from the root downwards and decide from the leaves upwards, with the counts that FSDP1 uses."""
    ignored_params = {parameter for module in ignored for parameter in module.parameters()}
    chosen: set[nn.Module] = set()
    wrapped_numel: dict[nn.Module, int] = {}  # of modules visited before: one under two names is asked about once

    def visit(wrapper: nn.Module) -> int:
        module = _inside(wrapper)
        if module in wrapped_numel:
            return wrapped_numel[module]
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_params)
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            wrapped = sum(visit(child) for child in module.children() if not {child, _inside(child)} & ignored)
            if wrapper is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
                chosen.add(module)
                wrapped = numel
        wrapped_numel[module] = wrapped
        return wrapped

    visit(model)
    return chosen


def _chosen_by_object(policy: _Policy, model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    chosen = policy._run_policy(model, ignored, {})
    for module, overrides in chosen.items():
        if overrides:
            raise ValueError(
                f"auto_wrap_policy {policy!r} asks for {sorted(overrides)} of its own for a {type(module).__name__}. "
                "All units share one setup here: let the policy return True or False."
            )
    return set(chosen)


def _no_split_names(model: nn.Module, present: Container[str]) -> list[str]:
    """Return what the Hugging Face models at any depth ask for, less what they list but go without."""
    wanted = (name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ())
    return [name for name in dict.fromkeys(wanted) if name in present]


def _candidates(model: nn.Module) -> str:
    """List the classes of submodules: first layers repeated in a ModuleList or Sequential, then the most frequent."""
    repeated: Counter[str] = Counter()
    for container in (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)):
        layers = (module for module in map(_inside, container) if any(module.children()))
        counts = Counter(type(module).__name__ for module in layers)
        repeated.update({name: count for name, count in counts.items() if count > 1})
    frequent = Counter(type(module).__name__ for module in _submodules(model))
    names = list(dict.fromkeys(name for counts in (repeated, frequent) for name, _ in counts.most_common()))
    return ", ".join(names[:_MAX_CANDIDATES]) + (", ..." if len(names) > _MAX_CANDIDATES else "")


def _submodules(model: nn.Module) -> list[nn.Module]:
    return [_inside(module) for _, module in _bottom_up(model, set())]


def _modules_matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    given = f"{source('ignored_modules', pattern)}={pattern!r}"
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{given} is not a valid regular expression: {error}.") from error
    named = [(clean_name(name), m) for name, m in model.named_modules(remove_duplicate=False)]
    matching = [module for name, module in named if name and regex.fullmatch(name)]
    if not matching:
        examples = ", ".join(list(dict.fromkeys(name for name, _ in named if name))[:_MAX_CANDIDATES])
        raise ValueError(
            f"{given} fully matches no module name of {type(model).__name__}. "
            f"Names look like: {examples or '(there are no submodules)'}."
        )
    return matching
