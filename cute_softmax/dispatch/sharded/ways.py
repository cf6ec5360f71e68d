"""How a call on rows that ranks share is served: decided from what all ranks know alike, so that all decide alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Bytes of the states of all ranks from which on the rows of a softmax are cut in two pieces, so that the all-gather of
# one runs beside the read of the other. It hides half of the collective and costs about 16 us more of launches, so it
# pays where an all-gather takes about 35 us: of 6 MB (docs/sharded.md has both, on two GPUs).
PIECES_FROM = 6 << 20
STATE_BYTES = 8  # of a row and a rank: a maximum and a sum in float32
PIECES = 2
# Dtypes of which a cross entropy writes its gradient with the loss unless it is told not to, on chip: of float32 the
# kernels around an all-gather are as fast or faster (docs/experiments.md).
VISITS_PAY = (torch.bfloat16,)


class Facts(NamedTuple):
    """What all ranks know alike of a call.

    function: "numbers", "loss", "visit" (a loss whose gradient is written with it), "softmax" or "log_softmax".
    ranks: how many share the rows; rows: how many there are;
    columns: elements of a slice, on an average where they are unequal, 0 where no rank knows that; shortest: of the
    shortest slice, 0 where no rank knows that. invariant: whether rows are reduced by blocks of a given size. kernels:
    whether our kernels take the dtypes on the device.
    """

    function: str
    ranks: int
    rows: int
    columns: int
    shortest: int
    dtype: torch.dtype
    device: torch.device
    invariant: bool
    kernels: bool


class Way(NamedTuple):
    """How a call is served.

    kernels: by our kernels, or by torch's operations. pieces: of the rows, each with a collective of its own. on_chip:
    instead of a collective between two reads, if the ranks reach each other's memory.
    """

    kernels: bool
    pieces: int = 1
    on_chip: bool = False


def way_of(facts: Facts) -> Way:
    """The way of a call."""
    if not facts.kernels:
        return Way(False)
    matrices = facts.function in ("softmax", "log_softmax")
    states = facts.rows * facts.ranks * STATE_BYTES
    cut = matrices and states >= PIECES_FROM and facts.rows >= PIECES
    known = facts.ranks > 1 and facts.shortest > 0 and not facts.invariant
    kept = (matrices or facts.function == "visit") and known and facts.device.type == "cuda"
    return Way(True, PIECES if cut else 1, kept)
