"""Layers that ZeRO stage 3 gathers as a whole, such as a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...common.classes_by_name import classes_by_name


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
