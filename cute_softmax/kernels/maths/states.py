"""The state of a part of a row as results, for a merge with other parts: see `Prologue.state`."""

from cutlass import Float32

from ..common import online
from ..common.index import select
from .entropy import Entropy
from .maths import RowMath


def names_of(prologue, math: RowMath) -> tuple[str, ...]:
    """The numbers of a state, as results."""
    more = ("weighted",) * isinstance(math, Entropy) + ("score",) * bool(math.group_inputs)
    return ("max", "sum", *more, *("fallen", "count") * prologue.even)


def numbers_of(prologue, math: RowMath, state: tuple, *chosen: Float32) -> list[Float32]:
    """What they are: of the scores themselves, whatever the exponentials are of; a part that has seen nothing has sums
    of 0. chosen: the score at the index."""
    seen, total, *others = state
    total = math.exp.relative(total, online.reference(seen))
    found = [math.exp.score(seen), total]
    if isinstance(math, Entropy):
        found.append(select(total == 0.0, Float32(0.0), math.mean(state) * total))
    found += chosen
    return [*found, math.exp.score(others[0]), others[1]] if prologue.averages else found
