"""MMA and copy atoms by the names that CUTLASS gives them, as thread-value layouts.

Fragments of an MMA atom are those of A (M, K), B (N, K) and C (M, N). A copy atom moves matrices of 8 rows of 8 16-bit
numbers, a row of which is 16 bytes. Source: PTX, mma.sync, wgmma and ldmatrix; a test compares them with cutlass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .algebra import Layout

_C_WARP = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
_A_8 = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))  # 16 x 8
_B_8 = Layout(((4, 8), 2), ((16, 1), 8))  # 8 x 8
_A_16 = Layout(((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128)))  # 16 x 16
_B_16 = Layout(((4, 8), (2, 2)), ((16, 1), (8, 64)))  # 8 x 16
_A_TF32 = Layout(((4, 8), (2, 2)), ((16, 1), (8, 64)))  # 16 x 8
_B_TF32 = Layout(((4, 8), 2), ((8, 1), 32))  # 8 x 8
_ROW = 8  # elements of a matrix's row
_WGMMA = re.compile(r"SM90_64x(\d+)x16_(F32|F16)(F16|BF16)\3_(SS|RS)")


@dataclass(frozen=True, slots=True)
class Mma:
    """An MMA atom: M x N x K, and who holds which element."""

    name: str
    shape_mnk: tuple[int, int, int]
    a: Layout
    b: Layout
    c: Layout


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy atom of a warp: source and destination over ``tiler`` (elements of a row, rows), 16 bits each."""

    name: str
    source: Layout
    destination: Layout
    tiler: tuple[int, int]


def _warp_mmas() -> dict[str, Mma]:
    found = {}
    for result, operand in (("F32", "F16"), ("F32", "BF16"), ("F16", "F16")):
        types = f"{result}{operand}{operand}{result}"
        for k, a, b in ((8, _A_8, _B_8), (16, _A_16, _B_16)):
            name = f"SM80_16x8x{k}_{types}_TN"
            found[name] = Mma(name, (16, 8, k), a, b, _C_WARP)
    name = "SM80_16x8x8_F32TF32TF32F32_TN"
    return found | {name: Mma(name, (16, 8, 8), _A_TF32, _B_TF32, _C_WARP)}


def _ldmatrix() -> dict[str, Copy]:
    found = {}
    for matrices in (1, 2, 4):
        threads = 8 * matrices
        # Thread t names the address of row t; those beyond are not looked at.
        source = Layout((threads, _ROW), (_ROW, 1))
        values = (2, matrices) if matrices > 1 else 2
        plain = Layout((32, values), (2, (1, 64) if matrices > 1 else 1))
        turned = Layout(
            ((4, 8), values), ((16, 1), (8, 64) if matrices > 1 else 8)
        )  # rows and columns of each matrix exchanged
        for name, destination in (
            (f"SM75_U32x{matrices}_LDSM_N", plain),
            (f"SM75_U16x{2 * matrices}_LDSM_T", turned),
        ):
            found[name] = Copy(name, source, destination, (_ROW, threads))
    return found


ATOMS: dict[str, Mma | Copy] = _warp_mmas() | _ldmatrix()
# Any N that is a multiple of 8, up to 256; B, and A of SS, are read from shared memory by every thread.
WARPGROUP = tuple(
    f"SM90_64xNx16_{types}_{a}" for types in ("F32F16F16", "F32BF16BF16", "F16F16F16") for a in ("SS", "RS")
)


def atom(name: str) -> Mma | Copy:
    """The atom of a name. Raises ``ValueError`` for one that is not known here."""
    if name in ATOMS:
        return ATOMS[name]
    match = _WGMMA.fullmatch(name)
    if match is None or match[2] + match[3] == "F16BF16":
        raise ValueError(f"no atom {name!r}: the known ones are {', '.join((*ATOMS, *WARPGROUP))}")
    n = int(match[1])
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"{name}: N is {n}, and a warpgroup's is a multiple of 8 from 8 to 256")
    registers = Layout(((4, 8, 4), (2, 2, 2)), ((128, 1, 16), (64, 8, 512)))  # 64 x 16
    a = registers if match[4] == "RS" else Layout((128, (64, 16)), (0, (1, 64)))
    b = Layout((128, (n, 16)), (0, (1, n)))
    c = Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))
    return Mma(name, (64, n, 16), a, b, c)


def is_atom(text: str) -> bool:
    """Whether a text is written as an atom's name, and not as a layout."""
    return re.fullmatch(r"SM\d+_\w+", text) is not None
