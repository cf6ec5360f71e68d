"""Which call a command line asks about, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..plan.describe import HEADS, SOFTMAXES


class Scores(NamedTuple):
    """What is asked of scores; of tensors their shapes. None: nothing."""

    scale: float | tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    causal: int | None = None
    alpha: float | None = None
    empty_rows: str | None = None
    sink: tuple[int, ...] | None = None

    @property
    def given(self) -> dict[str, object]:
        """Those that are asked for, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


@dataclass(frozen=True)
class Asked:
    """A call on a contiguous tensor of `shape`; dims None: the last one. matmul: columns of V of softmax(S) @ V. topk:
    how many of each row are chosen. ranks: how many share its rows, a slice of each in such a tensor."""

    shape: tuple[int, ...]
    dims: tuple[int, ...] | None
    dtype: str
    arch: str | None
    op: str
    backward: bool
    matmul: int | None
    topk: int | None
    scores: Scores
    ranks: int | None = None

    def by_ranks(self, ranks: int) -> Asked:
        """The same call where so many ranks share the rows. Raises ValueError for what they do not share."""
        if self.matmul is not None or self.topk is not None:
            raise ValueError(
                "--ranks share rows of softmaxes and of numbers of rows: without --matmul and --topk"
            )
        scores = self.scores.given
        if isinstance(scores.pop("scale", None), tuple) or scores:
            raise ValueError("--ranks takes a number as --scale, and nothing else of scores")
        return replace(self, ranks=ranks)

    def __post_init__(self) -> None:
        """Raise ValueError for what does not go together."""
        if self.matmul is not None:
            if self.dims is not None:
                raise ValueError("--matmul is softmax(S) @ V over the last dimension of S: without --dim")
            if self.op != "softmax" or self.topk is not None:
                raise ValueError(f"--matmul is softmax(S) @ V: without --op {self.op} and --topk")
            allowed = {"scale", "causal"}
            if wrong := [name for name in self.scores.given if name not in allowed]:
                raise ValueError(
                    f"--matmul takes --scale and --causal: without --{wrong[0].replace('_', '-')}"
                )
            if isinstance(self.scores.scale, tuple):
                raise ValueError("--matmul takes a number as --scale, not a shape")
            return
        if self.topk is not None:
            if self.dims is not None or self.op not in SOFTMAXES or self.scores.given:
                raise ValueError(
                    "--topk is over the last dimension, of no scores: without --dim, with --op softmax or log_softmax"
                )
            if self.op == "log_softmax" and self.backward:
                raise ValueError(
                    "the gradient of the largest log-probabilities is that of selective_log_softmax: --op that"
                )
            return
        allowed = set(Scores._fields) if self.op in SOFTMAXES else {"scale"} if self.op in HEADS else set()
        if wrong := [name for name in self.scores.given if name not in allowed]:
            raise ValueError(f"--op {self.op} has no --{wrong[0].replace('_', '-')}")
        if self.op in HEADS and isinstance(self.scores.scale, tuple):
            raise ValueError(f"--op {self.op} takes a number as --scale, not a shape")
        if self.backward and self.op in ("amax", "sum"):
            raise ValueError(f"the gradient of {self.op} has no kernel of its own: without --backward")
