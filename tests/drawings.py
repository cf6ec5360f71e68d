"""Plans of every kind, which the tests of figures draw, and what these tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from cute_softmax.plan import PanelPlan, Plan, describe, plan
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.matmul import MatmulPlan
from cute_softmax.plan.matmul_backward import MatmulBackwardPlan
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical
from layouts.figures.scene import Facts
from layouts.html import Step

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "online": {},
    "two_pass": {"online": False},
    "backward": {"math": "softmax_backward"},
    "fp32": {"dtype": "fp32"},
    "logsumexp": {"math": "logsumexp"},
    "sum": {"math": "sum", "dtype": "fp32"},
}
SHORT_COLUMNS = (1, 3, 33, 48)
COLUMNS = (66, 72, 127, 1000, 1023, 4096, 8192, 50257, 65536, 151936, 1000000)


def in_turns(lengths: Sequence[int]) -> dict[str, tuple]:
    """(shape, options of `plan_shape`) of the first way for all lengths, and of each other one for every second."""
    return {
        f"{way} {n}": ((100, n), options)
        for i, (way, options) in enumerate(WAYS.items())
        for n in (lengths[i % 2 :: 2] if i else lengths)
    }


ROWS, SHORT = in_turns(COLUMNS), in_turns(SHORT_COLUMNS)
# Of which a cluster does not hold a row.
LONGER = {f"{way} 1000000": ((100, 1000000), WAYS[way]) for way in ("fp32", "logsumexp", "sum")}
ROWS = {name: case for name, case in ROWS.items() if name not in LONGER}
PANELS = {
    "columns": ((33, 40), {"dim": 0}),
    "odd": ((1000, 7), {"dim": 0, "math": "softmax_backward"}),
    "few": ((3, 100_000), {"dim": 0}),
    "alone": ((4, 1000), {"dim": 0}),
    "middle": ((3, 100, 24), {"dim": 1, "dtype": "fp32"}),
    "cluster": ((1024, 4096), {"dim": 0}),
    "two trips": ((4000, 16384), {"dim": 0}),
    "two modes": ((64, 50, 1000), {"dim": (0, 2)}),
    "outer modes": ((5, 30, 7, 64), {"dim": (0, 2)}),
    "split": ((20000, 1000), {"dim": 0, "architecture": "sm_80"}),
    "long": ((2, 4000000), {"math": "logsumexp"}),
    "long odd": ((1, 5000001), {"dtype": "fp32"}),
    "ahead": ((8, 3000000), {}),
    "sum": ((3000000, 24), {"dim": 0, "math": "sum"}),
    "shifted": ((300, 131), {"dim": 0}),
    "shifted modes": ((3, 200, 77), {"dim": 1, "math": "softmax_backward"}),
    "shifted, alone": ((7, 5001), {"dim": 0, "dtype": "fp32"}),
    "shifted, streamed": ((20000, 801), {"dim": 0}),
    "few columns": ((3001, 9), {"dim": 0}),
    "few columns, in parts": ((40007, 19), {"dim": 0, "dtype": "fp32", "math": "softmax_backward"}),
    "shifted numbers": ((300, 131), {"dim": 0, "math": "logsumexp"}),
    **LONGER,
}
SWEEPS = {
    "swept": ((20000, 2049), {"dim": 0}),
    "swept gradient": ((3, 30008, 1003), {"dim": 1, "math": "softmax_backward", "dtype": "fp32"}),
    "swept, without outputs": ((30000, 1024), {"dim": 0, "math": "logsumexp"}),
}
# ((rows, columns of a slice), options of `plan_shared`): in clusters or not, kept in registers or not.
SHARED = {
    "shared": ((4096, 75968), {}),
    "shared fp32": ((100, 30000), {"dtype": "fp32"}),
    "shared odd": ((200, 50001), {}),
    "shared short": ((5000, 333), {}),
    "shared log": ((300, 20000), {"math": "log_softmax"}),
    "shared backward": ((100, 60000), {"math": "softmax_backward"}),
}
# (shape, depth, options of `plan_matmul_shape`)
MATMULS = {
    "usual": ((32, 4096, 4096), 128, {}),
    "one block": ((4, 100, 1000), 256, {"dtype": "fp16"}),
    "few rows": ((32, 16, 131072), 128, {}),
    "fp32 scores": ((8, 4096, 4096), 64, {"scores": "fp32", "scale": 0.5}),
    "lines": ((4, 1000, 1001), 128, {"causal": 0}),
    "chunks": ((2, 300, 512), 320, {}),
    "mma": ((32, 4096, 4096), 128, {"instruction": "mma"}),
    "mma fp32 scores": ((2, 200, 1000), 64, {"instruction": "mma", "scores": "fp32"}),
    "mma lines": ((2, 200, 1001), 65, {"instruction": "mma"}),
    "backward": ((32, 4096, 4096), 128, {"backward": True}),
    "backward causal": ((4, 512, 512), 64, {"backward": True, "causal": 0}),
    "backward deep": ((4, 512, 512), 512, {"backward": True}),
    "backward lines": ((4, 512, 501), 128, {"backward": True}),
    "backward fp32 scores": ((4, 512, 512), 256, {"backward": True, "scores": "fp32"}),
}
EVERY = {
    **{name: partial(describe.plan_shape, shape, **options) for name, (shape, options) in ROWS.items()},
    **{name: partial(describe.plan_shape, shape, **options) for name, (shape, options) in SHORT.items()},
    **{name: partial(describe.plan_shape, shape, **how) for name, (shape, how) in (PANELS | SWEEPS).items()},
    **{name: partial(describe.plan_shared, *shape, **options) for name, (shape, options) in SHARED.items()},
    **{
        name: partial(describe.plan_matmul_shape, shape, depth, **options)
        for name, (shape, depth, options) in MATMULS.items()
    },
}


def made(name: str) -> Plan | PanelPlan | MatmulPlan | MatmulBackwardPlan:
    """The plan of this name."""
    return EVERY[name]()


def strided(
    math: str, shape: Sequence[int], dims: Sequence[int], strides: Sequence[Sequence[int]], offsets=(0, 0)
) -> Plan | PanelPlan:
    """The plan of bf16 operands that begin and lie at given elements."""
    item = ITEM_SIZE["bf16"]
    operands = [Operand("bf16", s, o * item) for s, o in zip(strides, offsets, strict=True)]
    return plan(math, canonical(shape, dims, operands), H200)


def taking_part(page: dict) -> list[tuple[Step, list[Facts]]]:
    """Each step of a page's walk that names a figure, with the facts of the cells that it lights: some, always."""
    found = []
    for step in page["steps"]:
        if step.figure:
            cells = page["figures"][step.figure].cells
            found.append((step, [c.facts for c in cells if c.facts != Facts() and step.where(c.facts)]))
            assert found[-1][1], f"step {step.title!r} lights nothing"
    assert found
    return found


def reached(requests: Iterable[Sequence[int | None]], item: int, width: int) -> Counter[int]:
    """How often requests of `width` elements a lane reach each element."""
    return Counter(a // item + i for lanes in requests for a in lanes if a is not None for i in range(width))


def run(script: str, architecture: str, *arguments: str) -> dict:
    """What a test's file prints, run as a script that traces kernels for an architecture: the DSL takes it from the
    environment, so that each one needs a process of its own. Tracing stops before the compiler."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = dict(os.environ, CUTE_DSL_ARCH=architecture, CUTE_DSL_DRYRUN="1", PYTHONPATH=path)
    done = subprocess.run(
        [sys.executable, script, architecture, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
