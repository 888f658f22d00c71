"""The number formats of safetensors files, and exact conversion between them.

A float is widened to float64 without loss and narrowed with one rounding (to nearest, ties to
even). numpy has no bfloat16, and float64 → float32 → bfloat16 would round twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float64 = NDArray[np.float64]

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGERS = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
OTHERS = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8}
SIZES = FLOATS | INTEGERS | OTHERS
"""Bytes of one number in each format of safetensors."""
FLOAT_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of float formats in torch and numpy → names in safetensors."""
ALL_NAMES = FLOAT_NAMES | {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
"""Names of all formats in torch and numpy → names in safetensors."""
BITS: dict[str, Any] = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
"""The integers that hold the bits of each float format."""
NUMPY_TYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def widen(raw: Bytes, dtype: str) -> Float64:
    """Convert little-endian bytes to float64, exactly.

    >>> widen(np.array([0x80, 0x3F], np.uint8), "BF16")
    array([1.])
    """
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(NUMPY_TYPES[dtype]).astype(np.float64)


def from_bits(words: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Floats from their bits, without a copy where numpy has the format; bfloat16 as float32.

    >>> from_bits(np.array([0x3F80], np.uint16), "BF16")
    array([1.], dtype=float32)
    """
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(NUMPY_TYPES[dtype])


def narrow(values: Float64, dtype: str) -> Bytes:
    """Round float64 once to a format, and return the bytes.

    >>> narrow(np.array([1.0]), "BF16")
    array([128,  63], dtype=uint8)
    """
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "BF16":
            return _to_bfloat16(values).view(np.uint8)
        return values.astype(NUMPY_TYPES[dtype]).view(np.uint8)


def _to_bfloat16(values: Float64) -> NDArray[np.uint16]:
    """Round to float32 with round-to-odd first, so that the result is correctly rounded."""
    single = values.astype(np.float32)
    bits = single.view(np.uint32).copy()
    back = single.astype(np.float64)
    finite = np.isfinite(values)
    bits -= (np.abs(back) > np.abs(values)) & finite
    bits |= (back != values) & finite
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
