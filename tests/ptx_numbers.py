"""The numbers of PTX: types, operands and raw bits."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import torch

BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NUMBERS = {
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
    "bf16": np.float32, "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
}  # fmt: skip


@cache
def literal(operand: str) -> int | None:
    """The bits of a number; None of a register."""
    if operand[0] == "%":
        return None
    if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
        return int(found[1], 16)
    if re.fullmatch(r"-?\d+\.\d+", operand):
        return int(np.float32(operand).view(np.uint32))
    return int(operand.rstrip("U"), 0)


@cache
def width(kind: str) -> int:
    """Bits of a type."""
    digits = re.search(r"(\d+)(x2)?$", kind)
    return int(digits[1]) * (2 if digits[2] else 1)


def wider(kind: str) -> type:
    """What holds a product of two numbers of a type."""
    return np.int64 if kind[0] == "s" else np.uint64


def high_of_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the bits of the products of integers."""
    bits, signed = a.dtype.itemsize * 8, a.dtype.kind == "i"
    if bits < 64:
        a, b = (x.astype(np.int64 if signed else np.uint64) for x in (a, b))
        return a * b >> bits
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    (a1, a0), (b1, b0) = ((x.view(np.uint64) >> half, x.view(np.uint64) & low) for x in (a, b))
    middle = (a0 * b0 >> half) + (a1 * b0 & low) + (a0 * b1 & low)
    found = a1 * b1 + (a1 * b0 >> half) + (a0 * b1 >> half) + (middle >> half)
    if signed:
        return found.view(np.int64) - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return found


def listed(operand: str) -> list[str]:
    """The registers of a vector, or the one that there is."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def typed(value: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits as numbers. Pairs of 16-bit floats are (thread, 2) of float32."""
    if kind == "bf16":
        return (value.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "bf16x2":
        return (np.stack([value << np.uint32(16), value & np.uint32(0xFFFF0000)], 1)).view(np.float32)
    if kind == "f16x2":
        return value.reshape(-1, 1).view(np.float16).astype(np.float32)
    return value.astype(BITS[width(kind)], copy=False).view(NUMBERS[kind])


def raw(value: np.ndarray, kind: str) -> np.ndarray:
    """The opposite; of what is no number the one that GPUs have for it."""
    if kind == "bf16":
        return rounded(value.astype(np.float32), "bf16")
    if kind in ("bf16x2", "f16x2"):
        halves = rounded(value, kind[:-2]).astype(np.uint32)
        return halves[:, 0] | halves[:, 1] << np.uint32(16)
    bits = np.ascontiguousarray(value, NUMBERS[kind]).view(BITS[width(kind)])
    if kind == "f32" and (nan := np.isnan(value)).any():
        bits = np.where(nan, np.uint32(0x7FFFFFFF), bits)
    return bits


def rounded(value: np.ndarray, kind: str) -> np.ndarray:
    """float32 to the nearest 16-bit floats, as bits."""
    if kind == "f16":
        halves = value.astype(np.float16).view(np.uint16)
    else:
        halves = torch.from_numpy(np.ascontiguousarray(value, np.float32)).to(torch.bfloat16)
        halves = halves.view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), halves)
