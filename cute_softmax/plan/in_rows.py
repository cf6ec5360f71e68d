"""Operands as contiguous rows: what a batch-invariant plan takes, whatever their strides are.

The order in which a row is added up follows from where its elements lie in a thread's vectors. A batch-invariant plan
has one such order for every tensor of a row's length, so its vectors begin where rows do, and neighbours in a row are
neighbours in memory. Operands that lie otherwise are copied: `laid_out` says which, and to which strides. Of other
plans those are a bias or a mask that would be read one by one: `beside_laid_out`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from .maths import Math
from .modes import MODES, step_of
from .problem import Operand, Problem
from .row import vector_of


def invariant_vector(dtypes: tuple[str, ...], columns: int) -> int:
    """Elements of a vector of which rows of so many elements have whole ones, wherever a row begins in a matrix.

    dtypes: of the full operands.
    """
    return math.gcd(vector_of(dtypes, columns), columns)


def rows_strides(shape: Sequence[int], dims: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides (elements) of a tensor laid out as rows: the reduced dimensions last, in their order, and before them the
    kept ones in theirs; but those along which the tensor is broadcast stay so."""
    broadcast = [d for d in range(len(shape)) if d not in dims and shape[d] > 1 and strides[d] == 0]
    order = [d for d in range(len(shape)) if d not in dims and d not in broadcast] + list(dims)
    steps = accumulate((max(shape[d], 1) for d in reversed(order)), int.__mul__, initial=1)
    found = dict(zip(reversed(order), steps, strict=False))
    return tuple(found.get(d, 0) for d in range(len(shape)))


def laid_out(
    shape: Sequence[int],
    dims: tuple[int, ...],
    operands: Sequence[Operand],
    names: Sequence[str],
    facts: Math,
) -> tuple[tuple[Operand, ...], tuple[int, ...]]:
    """(the operands as a batch-invariant plan has them, which of them must be copied for that).

    operands: of a call of `shape` that reduces `dims`; names: what the math calls each, see `plan.facts_of`.
    """
    full = (*facts.inputs, *facts.outputs)
    columns = math.prod(shape[d] for d in dims)
    dtypes = dict(zip(names, (o.dtype for o in operands), strict=True))
    vector = invariant_vector(tuple(dtypes[name] for name in full), columns)
    found, copied = [], []
    for i, (name, operand) in enumerate(zip(names, operands, strict=True)):
        if name in full and not _lies_well(shape, dims, operand, name, vector, name in facts.outputs):
            operand = Operand(operand.dtype, rows_strides(shape, dims, operand.strides))
            copied.append(i)
        found.append(operand)
    return tuple(found), tuple(copied)


def beside_strides(shape: Sequence[int], steps: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a bias or a mask whose neighbours lie next to each other where those of the elements do.

    steps: how far apart neighbours of each dimension lie in the main operand where they lie furthest: another may be
        expanded. strides: of the tensor now; where it is broadcast it stays so.
    """
    nearest = min((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: steps[d])
    return rows_strides(shape, (nearest,), strides)


def whole_strides(shape: Sequence[int], steps: Sequence[int], dims: Sequence[int] = ()) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in the order of these steps; 0 in `dims`."""
    order = sorted((d for d in range(len(shape)) if d not in dims), key=lambda d: steps[d])
    dense = accumulate((max(shape[d], 1) for d in order), int.__mul__, initial=1)
    found = dict(zip(order, dense, strict=False))
    return tuple(found.get(d, 0) for d in range(len(shape)))


def beside_laid_out(
    shape: Sequence[int],
    dims: tuple[int, ...],
    operands: Sequence[Operand],
    order: Sequence[int],
    problem: Problem,
    facts: Math,
) -> tuple[tuple[Operand, ...], tuple[int, ...]]:
    """(the operands as panels and rows take them, which of them must be copied for that).

    A bias or a mask whose neighbours lie apart where those of the elements do not would be read one by one. Where they,
    or factors, are broadcast in so many ways that there are too many modes, they are whole tensors instead.
    order, problem: which operand is each of the plan's, and the problem with the operands as they are.
    """
    main, found = [operands[order[i]].strides for i in facts.main], list(operands)
    apart = [max(abs(strides[d]) for strides in main) for d in range(len(shape))]
    copied = [order[i] for i in spread(problem, facts)]
    for i in copied:
        found[i] = Operand(found[i].dtype, beside_strides(shape, apart, found[i].strides))
    if max(len(problem.kept), len(problem.reduced)) > MODES[-1]:
        groups = [order[facts.full + j] for j in range(len(facts.group_inputs))]
        copied = [*(order[i] for i in facts.beside), *groups]
        for i in copied:
            strides = whole_strides(shape, apart, dims if i in groups else ())
            found[i] = Operand(found[i].dtype, strides)
    return tuple(found), tuple(sorted(copied))


def spread(problem: Problem, facts: Math) -> tuple[int, ...]:
    """Inputs beside the elements whose neighbours lie apart along the mode that the elements' vectors lie along."""
    modes = [*problem.reduced, *problem.kept]
    inner = min(modes, key=lambda m: step_of(m, facts), default=None)
    if inner is None or any(inner.strides[i] != 1 for i in facts.main):
        return ()  # an element at a time
    return tuple(i for i in facts.beside if inner.size > 1 and inner.strides[i] not in (0, 1))


def _lies_well(
    shape: Sequence[int], dims: tuple[int, ...], operand: Operand, name: str, vector: int, written: bool
) -> bool:
    """Whether rows are contiguous and, where they are written, begin at multiples of a vector. Loads may be narrower
    than vectors are, stores not; a bias or a mask may have one element for a whole row."""
    strides = operand.strides
    along = [(shape[d], strides[d]) for d in dims if shape[d] > 1]
    if name in ("bias", "mask") and not any(stride for _, stride in along):
        return True
    step = 1
    for size, stride in reversed(along):
        if stride != step:
            return False
        step *= size
    starts = [strides[d] for d in range(len(shape)) if d not in dims and shape[d] > 1]
    return not written or not any(n % vector for n in (operand.offset, *starts))
