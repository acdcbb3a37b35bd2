"""Names of the merged tensors: without wrappers and prefix, selected by patterns, ties resolved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .files import CheckpointError
from .manifest import MANIFEST_NAME, Manifest

WRAPPER_NAMES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that FSDP1, torch.compile and activation checkpointing add."""


@dataclass(frozen=True)
class Selection:
    """The names under which tensors of the source are written."""

    names: dict[str, str]
    """Name in the output to name in the source, in the source's order."""
    ties: dict[str, str] = field(default_factory=dict)
    """Alias to name, both as in the output."""
    duplicates: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Alias in the source to (its name, the tied tensor's name) there: stored twice, to be compared."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name in the source to the reason why it is left out."""


def clean_name(name: str) -> str:
    """Return ``name`` without the components that wrappers add."""
    if "_fsdp_wrapped" not in name and "_orig_mod" not in name and "_checkpoint_wrapped" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def patterns(value: str | Iterable[str] | None, argument: str) -> tuple[str, ...] | None:
    """Return the patterns of an ``include`` or ``exclude`` argument; None where none were given."""
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else tuple(value)
    if not found or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"{argument} must be one or more patterns such as 'encoder.*', got {value!r}.")
    return found


def checked_prefix(strip_prefix: str | None) -> str | None:
    """Return a ``strip_prefix`` argument, checked."""
    if strip_prefix is not None and (not isinstance(strip_prefix, str) or not strip_prefix.strip(".")):
        raise ValueError(f"strip_prefix must be an attribute's name, 'auto' or None, got {strip_prefix!r}.")
    return strip_prefix


def select(
    source_names: Sequence[str],
    manifest: Manifest | None,
    *,
    strip_prefix: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Selection:
    """Decide what is written under which name.

    Args:
        source_names: Names in the model, wrappers still in place.
        manifest: The checkpoint's own, for its ties and its module attribute.
        strip_prefix: See `merge_fsdp_weights`.
        include: Patterns over output names; a name must match one.
        exclude: Patterns over output names; a name may match none.

    Raises:
        CheckpointError: If two tensors get one name, a tie names nothing, or the prefix fits nothing.
    """
    names: dict[str, str] = {}
    for name in source_names:
        cleaned = clean_name(name)
        if cleaned in names:
            raise CheckpointError(f"Without wrapper names, {names[cleaned]!r} and {name!r} are both named {cleaned!r}.")
        names[cleaned] = name
    ties = _checked_ties(manifest, names)
    prefix = _prefix([*names, *ties], manifest, strip_prefix)
    if not ties and not prefix and include is None and exclude is None:
        return Selection(names)
    aliases: dict[str, list[str]] = {}
    for alias, fqn in ties.items():
        aliases.setdefault(fqn, []).append(alias)
    result = Selection({})
    for cleaned, name in names.items():
        if cleaned in ties:
            continue
        members = [cleaned, *aliases.get(cleaned, ())]
        inside = [member[len(prefix) :] for member in members if member.startswith(prefix)]
        chosen = [
            member
            for member in inside
            if (include is None or _matches(member, include)) and not _matches(member, exclude or ())
        ]
        if not chosen:
            result.skipped[name] = "not selected by include and exclude" if inside else f"outside the prefix {prefix!r}"
            continue
        result.names[chosen[0]] = name
        result.ties.update(dict.fromkeys(chosen[1:], chosen[0]))
        result.duplicates.update({alias: (names[alias], name) for alias in members[1:] if alias in names})
    return result


def _checked_ties(manifest: Manifest | None, names: Mapping[str, str]) -> dict[str, str]:
    ties = {clean_name(alias): clean_name(fqn) for alias, fqn in manifest.ties.items()} if manifest else {}
    left_out = set(map(clean_name, manifest.left_out)) if manifest else set()
    ties = {alias: fqn for alias, fqn in ties.items() if fqn in names or fqn not in left_out}
    for alias, fqn in ties.items():
        if fqn not in names:
            raise CheckpointError(f"{MANIFEST_NAME} ties {alias!r} to {fqn!r}, which the checkpoint does not hold.")
        if alias == fqn or fqn in ties:
            raise CheckpointError(f"{MANIFEST_NAME} ties {alias!r} to {fqn!r}, which is an alias itself.")
    return ties


def _prefix(names: Sequence[str], manifest: Manifest | None, strip_prefix: str | None) -> str:
    """Return the prefix to take off, with its dot; empty for none."""
    if strip_prefix is None:
        return ""
    heads: dict[str, int] = {}
    for name in names:
        head = name.partition(".")[0] if "." in name else ""
        heads[head] = heads.get(head, 0) + 1
    found = ", ".join(f"{head or 'no attribute'} ({count} names)" for head, count in list(heads.items())[:8])
    if strip_prefix != "auto":
        prefix = strip_prefix.rstrip(".") + "."
        if not any(name.startswith(prefix) for name in names):
            raise CheckpointError(f"No tensor's name begins with {prefix!r} (strip_prefix). They start with: {found}.")
        return prefix
    if manifest is not None and manifest.module_attribute is not None:
        return _prefix(names, None, manifest.module_attribute or None)
    if len(heads) != 1 or "" in heads:
        raise CheckpointError(
            f"strip_prefix='auto' needs one attribute that holds the whole model; names start with: {found}. "
            f"Pass the attribute, or omit strip_prefix."
        )
    return f"{next(iter(heads))}."


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in wanted)
