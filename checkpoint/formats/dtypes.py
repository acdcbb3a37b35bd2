"""Dtypes by their torch names: element size, safetensors code, and place in a safetensors file. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A torch dtype without torch."""

    name: str
    """As in ``torch.<name>``."""
    itemsize: int
    """Bytes of one stored element."""
    code: str | None
    """Name in a safetensors header; None where safetensors has none."""
    rank: int = -1
    """Place in the safetensors library's enumeration: files hold higher ranks first."""
    packed: int = 1
    """Values in one stored element; safetensors counts values in the last dimension."""


# Order of the `Dtype` enumeration in the safetensors library, lowest first; its `prepare` sorts by it, descending.
# Source: safetensors 0.8 `src/tensor.rs`. Older releases know fewer names, in the same order.
_RANKED = (
    ("bool", 1, "BOOL"),
    ("float4_e2m1fn_x2", 1, "F4"),
    ("uint8", 1, "U8"),
    ("int8", 1, "I8"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    ("int16", 2, "I16"),
    ("uint16", 2, "U16"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("int32", 4, "I32"),
    ("uint32", 4, "U32"),
    ("float32", 4, "F32"),
    ("complex64", 8, "C64"),
    ("float64", 8, "F64"),
    ("int64", 8, "I64"),
    ("uint64", 8, "U64"),
)

DTYPES: dict[str, DType] = {
    name: DType(name, itemsize, code, rank, 2 if name.endswith("_x2") else 1)
    for rank, (name, itemsize, code) in enumerate(_RANKED)
}
# torch has these and safetensors does not.
DTYPES |= {name: DType(name, size, None) for name, size in (("complex32", 4), ("complex128", 16))}

CONVERSION_TARGETS = ("float32", "float16", "bfloat16", "float64")
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"} | {
    "float": "float32",
    "half": "float16",
    "double": "float64",
}

STORAGE_CLASSES: dict[str, str | None] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": None,
}
"""torch's storage classes and their element dtype; None for bytes, whose dtype stands beside the storage."""


def is_floating(dtype: DType) -> bool:
    """Whether a dtype conversion of the merge applies: real floating point with one value an element."""
    return dtype.name.startswith(("float", "bfloat")) and dtype.packed == 1


def conversion_target(dtype: object) -> DType | None:
    """Return the dtype that a ``dtype`` argument asks for; None keeps every tensor's own.

    Args:
        dtype: None, a name (``"bfloat16"``, ``"bf16"``, ``"torch.bfloat16"``) or a ``torch.dtype``.

    Raises:
        ValueError: If it is none of the real floating-point dtypes wider than one byte.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.").lower()
    name = _SHORT_NAMES.get(name, name)
    if name not in CONVERSION_TARGETS:
        raise ValueError(
            f"dtype must be one of {', '.join(CONVERSION_TARGETS)} (or fp32, fp16, bf16, fp64), got {dtype!r}."
        )
    return DTYPES[name]
