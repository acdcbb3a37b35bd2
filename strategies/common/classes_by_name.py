"""Finding the classes of layers that users name, as in ``transformer_cls_names_to_wrap`` or for experts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def classes_by_name(modules: Iterable[nn.Module]) -> dict[str, list[type[nn.Module]]]:
    """Return the classes of these modules by name, in the order of the modules.

    Two classes of different files may have one name, such as ``Experts``: a user who gives the name means both.
    """
    found: dict[str, list[type[nn.Module]]] = {}
    for cls in dict.fromkeys(type(module) for module in modules):
        found.setdefault(cls.__name__, []).append(cls)
    return found
