"""Words that the figures of all movements share."""

from __future__ import annotations

FOLLOWED = "thread"  # the figure of one thread, which the explorer makes itself
# What each exchange carries, by math and whether it goes over the row once; maths that are not named here say
# "partial result".
EXCHANGED = {
    ("softmax", True): ("the maximum, and the sum of exponentials relative to it",),
    ("softmax", False): ("the maximum", "the sum of exponentials relative to the maximum"),
    ("softmax_backward", True): ("the sum of dy times y",),
    ("logsumexp", True): ("the maximum, and the sum of exponentials relative to it",),
    ("logsumexp", False): ("the maximum", "the sum of exponentials relative to the maximum"),
    ("amax", True): ("the maximum",),
    ("sum", True): ("the sum",),
}


def space(name: str, where: str = "g") -> str:
    """The name of an operand's part: gX in global memory, sX in shared memory."""
    return where + name.upper()


def count(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
