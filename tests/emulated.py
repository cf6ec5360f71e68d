"""Launches on the CPU by the compiled code itself: the PTX of a plan's class, run by `ptx` on the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import simulated
import torch
from compiled import compile_and_read
from ptx import Grid, Memory, Program, parse

from cute_softmax.plan.problem import ITEM_SIZE
from cute_softmax.runtime import launch


class Emulated(simulated.Launches):
    """As simulated, but that what `launch` launches is run; what was is (math, plan). folder: of compiled classes."""

    def __init__(self, folder: Path, monkeypatch):
        super().__init__()
        self.folder, self.monkeypatch = folder, monkeypatch
        self.programs: dict[object, Program] = {}

    def call(self, name, device, shape, dims, operands, *rest):
        found = super().call(name, device, shape, dims, operands, *rest)
        if isinstance(found, str):
            return found

        def function(stream, *arguments):
            self.append(SimpleNamespace(math=name, plan=found.plan))
            places = [
                (arguments[place], size_of(shape, operand.dtype, strides))
                for place, operand, strides in zip(
                    found.places, operands, strides_of(found, operands), strict=True
                )
            ]
            if found.plan.scratch:
                places.append((arguments[found.scratch], found.plan.scratch))
            self.run(found.plan, arguments, places)

        found.function = function
        return found

    def program(self, c) -> Program:
        if c not in self.programs:
            self.programs[c] = parse(compile_and_read(c, self.folder, self.monkeypatch).ptx)
        return self.programs[c]

    def run(self, plan, arguments: Sequence[int], places: Iterable[tuple[int, int]]):
        """places: (address, bytes) of all that the launch may touch."""
        c, numbers = plan.kernel, list(arguments)
        # What the launch takes and the kernel does not: how many CTAs there are.
        counted = {"row": 2, "short": 3}.get(plan.movement)
        if counted is not None:
            del numbers[counted]
        grid, cluster = (plan.ctas * c.cluster_n, 1), (c.cluster_n, 1)
        if plan.movement == "row":
            grid, cluster = (plan.ctas, c.cluster_n), (1, c.cluster_n)
        Grid(self.program(c), Memory(places), grid, cluster, c.shared_memory).run(numbers)


def strides_of(found: launch.Call, operands) -> list[tuple[int, ...]]:
    """Of the operands as they are launched: some are laid out anew."""
    laid = dict(zip(found.plan.laid_out, found.plan.laid_strides, strict=True))
    return [laid.get(i, operand.strides) for i, operand in enumerate(operands)]


def size_of(shape: Sequence[int], dtype: str, strides: Sequence[int]) -> int:
    """Bytes from the first element to the last."""
    sizes = {"bool": 1, "int32": 4, "int64": 8, **ITEM_SIZE}
    if 0 in shape:
        return 0
    return sizes[dtype] * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))


class _Torch:
    """torch, whose scratch memory is the host's."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def zeros(self, *size, device=None, **options):
        return torch.zeros(*size, **options)


def install(monkeypatch, folder: Path) -> Emulated:
    """CPU tensors of the kernels' dtypes count as CUDA ones, and their kernels run here."""
    launches = Emulated(folder, monkeypatch)
    simulated.install(monkeypatch, launches)
    monkeypatch.setattr(launch, "torch", _Torch())
    return launches
