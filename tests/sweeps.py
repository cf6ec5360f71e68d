"""Calls on columns that are swept over, of any length and number: `forced` lets all that can be so planned be so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import checking
import torch
from checking import DTYPES, Guarded, check_backward, check_reduction, check_softmax, random
from families import Case
from remembered import forget_calls

from cute_softmax.plan import MATHS, Prologue, panel, panel_configs
from cute_softmax.plan.catalogue import operand_dtypes
from cute_softmax.runtime.launch import Work

INF = math.inf
SWEPT = [name for (name, online), facts in MATHS.items() if online and not facts.group_inputs]
SCORED = ("softmax", "log_softmax", "logsumexp", "entropy")  # that take a bias and a mask
BESIDE = (("mask",), ("bias",), ("bias", "mask"))
# (matrices, rows, columns): rows that are whole vectors and rows that are not; whole lines, a rest behind them, nothing
# but a rest; matrices one behind another; panels that end within a vector of threads; parts of one line.
SHAPES = (
    (1, 70, 64),
    (1, 67, 11),
    (2, 48, 40),
    (3, 64, 13),
    (1, 7, 9),
    (1, 40, 2049),
    (1, 19, 12),
    (2, 9, 4104),
)


def forced(monkeypatch) -> None:
    """Columns of any length and number are the sweep movement's, wherever they begin."""
    monkeypatch.setattr(panel, "SWEPT", dict.fromkeys(panel.SWEPT, panel_configs.Least(1, 1, 1)))
    monkeypatch.setattr(panel, "_held", lambda groups: None)
    monkeypatch.setattr(panel, "CACHE_LINE", INF)
    forget_calls()


@dataclass(frozen=True)
class Columns:
    """A math over the middle dimension of contiguous tensors.

    shape: (matrices, rows, columns); dtype: of all full tensors, "fp32" of the result if `wide`. scale: of the
    scores, a number, with a factor of 2 on the results of a softmax. beside: "bias" and "mask", as there are, of one
    element for each row of memory, the same for all matrices if these are an odd number.
    """

    math: str
    shape: tuple[int, int, int]
    dtype: str
    wide: bool = False
    in_place: bool = False
    scale: float | None = None
    beside: tuple[str, ...] = ()

    @property
    def inputs(self) -> int:
        """How many operands are read."""
        return len(MATHS[self.math, True].inputs) + len(self.beside)

    @property
    def case(self) -> dict[str, float]:
        """What a `families.Case` says of the scale."""
        alpha = {"alpha": 2.0} if self.math.startswith("softmax") else {}
        return {} if self.scale is None else {"scale": self.scale, **alpha}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of all operands."""
        facts, names = MATHS[self.math, True], operand_dtypes(self.math, self.dtype)
        wide = range(len(facts.inputs), facts.full) if self.wide else ()
        found = [torch.float32 if i in wide else DTYPES[name] for i, name in enumerate(names)]
        there = {"bias": torch.bfloat16, "mask": torch.bool}
        found[len(facts.inputs) : len(facts.inputs)] = [there[name] for name in self.beside]
        return found

    def guarded(self) -> list[Guarded]:
        """All operands: columns with -inf, with nothing else, with +inf and NaN, and with numbers far apart."""
        facts, (outer, length, columns) = MATHS[self.math, True], self.shape
        x = random(self.shape, self.dtypes[0], 1, 3.0)
        if self.math in ("softmax", "log_softmax", "logsumexp", "amax"):
            x[0, :, 1], x[0, length // 2 :, 2], x[-1, -1, 3], x[-1, 0, 4] = -INF, -INF, 90.0, -80.0
            x[0, length // 3, 5], x[-1, -1, -1] = INF, math.nan
        inputs = [x]
        if len(facts.inputs) > 1:
            logs = torch.log_softmax(random(self.shape, self.dtypes[0], 2, 3.0).double(), 1)
            inputs.append((logs if self.math.startswith("log") else logs.exp()).to(self.dtypes[1]))
        for i, name in enumerate(self.beside):
            numbers = random((outer if outer % 2 == 0 else 1, length, 1), torch.float32, 3 + i, 2.0)
            inputs.append(numbers.bfloat16() if name == "bias" else numbers < 1.0)
        found = [Guarded.of(values) for values in inputs]
        if self.in_place:
            return [*found, found[0]]
        for i, dtype in enumerate(self.dtypes[len(inputs) :], len(inputs)):
            full = i < facts.full + len(self.beside)
            found.append(Guarded(self.shape if full else (outer, 1, columns), dtype))
        return found

    def work(self, tensors: list[torch.Tensor]) -> Work:
        """The launch."""
        tensors, case = tuple(t.expand(self.shape) for t in tensors), self.case
        numbers = [*case.values()]
        if self.math.endswith("_backward") and "alpha" in case:
            numbers[1] = 1 / case["alpha"]
        prologue = Prologue(**dict.fromkeys(case, "number"), **dict.fromkeys(self.beside, True))
        return Work(self.math, tensors, (1,), True, prologue, numbers)

    def check(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Raise AssertionError on a wrong result."""
        if self.scale is not None or self.beside:
            along = [t.expand(self.shape).movedim(1, -1) for t in results]
            whole = self.math not in ("logsumexp", "entropy")
            given = [t.movedim(1, -1) for t in inputs]
            count = len(given) - len(self.beside)
            beside = dict(zip(self.beside, given[count:], strict=True))
            Case(self.math, *given[:count], dtype=results[0].dtype, **self.case, **beside).check(
                along if whole else [t[..., 0] for t in along]
            )
        elif self.math in ("amax", "sum", "logsumexp"):
            check_reduction(self.math, results[0].flatten(), inputs[0], 1)
        elif self.math == "softmax":
            check_softmax(results[0], inputs[0], 1)
        elif self.math == "softmax_backward":
            check_backward(results[0], *inputs, 1)
        else:
            along = [t.expand(self.shape).movedim(1, -1) for t in results]
            Case(self.math, *[t.movedim(1, -1) for t in inputs], dtype=results[0].dtype).check(
                along if self.math != "entropy" else [t[..., 0] for t in along]
            )

    def run(self, launched) -> None:
        """Launch by a function of a `Work`, and check the results, and that nothing else was written."""
        buffers, full = self.guarded(), self.inputs
        inputs = [b.tensor.clone() for b in buffers[:full]]
        launched(self.work([b.tensor for b in buffers]))
        self.check(inputs, [b.tensor for b in buffers[full:]])
        for i, buffer in enumerate(buffers):
            buffer.check()
            if i < full and not self.in_place:
                assert checking.equal_bits(buffer.tensor, inputs[i]), "an input was written"


def calls(dtype: str) -> Iterator[Columns]:
    """Each math with each shape; results in float32 of 16-bit elements, and in the place of elements."""
    for i, shape in enumerate(SHAPES):
        for j, name in enumerate(SWEPT):
            outputs = MATHS[name, True].outputs
            wide = bool(outputs) and dtype != "fp32" and (i + j) % 3 == 1
            yield Columns(name, shape, dtype, wide, bool(outputs) and (i + j) % 3 == 2)
            if name not in ("amax", "sum") and (i + j) % 2:
                yield Columns(name, shape, dtype, wide, scale=(0.5, -2.0, 0.0)[i % 3])
            if name in SCORED:
                scale = (None, None, 0.5, -2.0)[(i + j) % 4]
                yield Columns(name, shape, dtype, wide, scale=scale, beside=BESIDE[(i + j) % 3])
