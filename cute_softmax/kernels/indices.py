"""Indices that choose an element of a row: which count, and the end of a kernel that meets one out of range.

launch: what a thread knows of its launch, with `columns` of a row and `numbers` of the prologue, by name.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..plan import Prologue
from .common.index import wide

INDEX_ERROR = "cute_softmax.{}: index %lld in row %lld is out of range: a row has %d elements"


def counts(prologue: Prologue, launch: object, index: Int64) -> Boolean:
    """Whether an index is that of an element of the row, of all ranks together, and not what is ignored."""
    found = (index >= 0) & (index < (launch.numbers["size"] if prologue.ranks else launch.columns))
    if prologue.target == "loss":
        found = found & (index != launch.numbers["ignore"])
    return found


def is_wrong(prologue: Prologue, launch: object, index: Int64, exists: Boolean) -> Boolean:
    """Whether an index is out of range, and not what is ignored. exists: whether it `counts`."""
    if prologue.target == "loss":
        return (exists ^ True) & (index != launch.numbers["ignore"])
    return exists ^ True


@cute.jit
def complain(prologue: Prologue, launch: object, index: Int64, row: Int64, exists: Boolean):
    """Stop the kernel at an index of a row that is wrong."""
    function = "cross_entropy" if const_expr(prologue.target == "loss") else "selective_log_softmax"
    size = Int32(launch.numbers["size"]) if const_expr(prologue.ranks) else launch.columns
    if is_wrong(prologue, launch, index, exists):
        cute.printf(INDEX_ERROR.format(function), index, wide(row), Int32(size))
        cute.arch.inline_ptx("trap;")
