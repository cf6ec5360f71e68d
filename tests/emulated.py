"""Launches on the CPU by the compiled code itself: the PTX of a plan's class, run by `ptx` on the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import emulated_products as products
import simulated
import torch
from compiled import compile_and_read
from ptx import Grid, Memory, Program, parse

from cute_softmax.dispatch.matmul import kernels
from cute_softmax.runtime import launch

# By movement, which of a launch's numbers the kernel does not take: how many CTAs, or rows, there are.
COUNTED = {"row": 2, "stream": 2, "short": 3, "topk": 3, "topk_long": 0, "rescale": 1, "mean": 0}


class Emulated(simulated.Launches):
    """As simulated, but that kernels run; what was launched has its plan, too.

    instruction: of products. folder: of compiled classes. seed: of which warps run before others, or None.
    residue, in_turn: see `Grid`.
    """

    instruction: str = "wgmma"
    seed: int | None = None
    residue: int = 0x7F
    in_turn: bool = False

    def __init__(self, folder: Path, monkeypatch):
        super().__init__()
        self.folder, self.monkeypatch = folder, monkeypatch
        self.programs: dict[object, tuple[Program, int]] = {}

    def call(self, *asked):
        return self.emulated(super().call(*asked))

    def product(self, *asked):
        return self.emulated(super().product(*asked))

    def gradients(self, *form):
        made = super().gradients(*form)
        self.emulated(made.first)
        self.emulated(made.second)
        return made

    def choice(self, *asked):
        return self.emulated(super().choice(*asked))

    def largest(self, *asked):
        return self.emulated(super().largest(*asked))

    def of_shards(self, *asked):
        return self.emulated(super().of_shards(*asked))

    def around_losses(self, *asked):
        return tuple(map(self.emulated, super().around_losses(*asked)))

    def emulated(self, found: launch.Call | str):
        """The call with the kernel in the place of its simulation, which says only what tensors there are."""
        if isinstance(found, str):
            return found
        simulation = found.function

        def function(stream, *arguments):
            places = [(arguments[found.scratch], found.plan.scratch)] if found.plan.scratch else []
            places += products.left_behind(found, arguments)

            def copied(address, shape, operand):
                tensor = simulated_at(address, shape, operand)
                places.append((address, tensor.untyped_storage().nbytes()))
                return tensor.clone()

            with self.monkeypatch.context() as patched:
                patched.setattr(simulated, "at", copied)
                simulation(stream, *arguments)
            if self:
                self[-1].plan = found.plan
            self.run(found.plan, arguments, places)

        found.function = function
        return found

    def program(self, c, kernel: str = "") -> tuple[Program, int]:
        """What a class compiles to, and the bytes of shared memory that a launch asks for. kernel: in its name."""
        if (c, kernel) not in self.programs:
            found = compile_and_read(c, self.folder, self.monkeypatch, to_run=True)
            self.programs[c, kernel] = parse(found.ptx, kernel), found.shared
        return self.programs[c, kernel]

    @contextmanager
    def mutated(self, name: str, other: str = "fence", movement: str = "", operands: tuple | None = None):
        """Within, instructions that begin so are others, or do nothing: of each kernel that has run, of a movement, but
        not of those that merge."""
        before = self.programs.copy()
        for (c, part), (program, shared) in before.items():
            if movement in ("", c.movement) and part != "Merge":
                code = [
                    replace(i, name=other, operands=operands or i.operands) if i.name.startswith(name) else i
                    for i in program.code
                ]
                assert code != program.code, {i.name for i in program.code}
                self.programs[c, part] = replace(program, code=code), shared
        yield
        self.programs |= before

    def run(self, plan, arguments: Sequence[int], places: Iterable[tuple[int, int]]):
        """places: (address, bytes) of all that the launch may touch."""
        c, numbers = plan.kernel, list(arguments)
        if c.movement.startswith("matmul"):
            for kernel, grid, parameters in products.launches_of(plan, numbers):
                cluster = 1 if kernel == "Merge" else getattr(c, "cluster", 1)
                self.run_kernel(c, kernel, places, (grid, (cluster, 1)), parameters)
            return
        if c.movement == "sweep":
            _, *of_lines, found, scratch = numbers[:10]
            parameters = [*of_lines, scratch, scratch + found, *numbers[10:]]
            for kernel, grid in zip(("statistics", "merge", "results"), plan.grids, strict=False):
                self.run_kernel(c, kernel, places, ((grid, 1), (1, 1)), parameters)
            return
        if c.movement in COUNTED:
            del numbers[COUNTED[c.movement]]
        ctas, cluster = getattr(plan, "ctas", 1), getattr(c, "cluster_n", 1)
        shapes = (
            ((ctas, cluster), (1, cluster))
            if c.movement in ("row", "stream")
            else ((ctas * cluster, 1), (cluster, 1))
        )
        self.run_kernel(c, "", places, shapes, numbers)

    def run_kernel(self, c, name: str, places: Iterable[tuple[int, int]], shapes, parameters: list):
        program, shared = self.program(c, name)
        how = {"residue": self.residue, "in_turn": self.in_turn}
        Grid(program, Memory(places), *shapes, shared, self.seed, **how).run(parameters)


simulated_at = simulated.at


class _Torch:
    """torch, whose scratch memory is the host's."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def zeros(self, *size, device=None, **options):
        return torch.zeros(*size, **options)

    def empty(self, *size, device=None, dtype=torch.float32, **options):
        """With what was there before: bytes of NaN."""
        return torch.full(size, 255, dtype=torch.uint8).view(dtype)


def install(monkeypatch, folder: Path) -> Emulated:
    """CPU tensors of the kernels' dtypes count as CUDA ones, and their kernels run here."""
    launches = Emulated(folder, monkeypatch)
    simulated.install(monkeypatch, launches)
    monkeypatch.setattr(kernels, "instruction_of", lambda architecture: launches.instruction)
    monkeypatch.setattr(launch, "torch", _Torch())
    return launches
