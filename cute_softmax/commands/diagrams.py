"""The command line of the figures."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..draw import write
from ..plan.describe import plan_matmul_shape, plan_shape
from ..plan.hardware import ARCHITECTURES, H200
from ..plan.problem import FLOATS


def main(argv: Sequence[str] | None = None) -> int:
    """`diagrams 4096x65536 --dtype bf16 -o out/`: write a problem's figures; 0, or 2 for bad input."""
    options = parser().parse_args(argv)
    try:
        if options.two_pass and options.backward:
            raise ValueError("--two-pass is a way of the forward: without --backward")
        if options.matmul is None:
            made = plan_shape(
                options.shape,
                options.dtype,
                dim=options.dim,
                math="softmax_backward" if options.backward else "softmax",
                online=not options.two_pass,
                architecture=options.arch,
            )
        elif options.dim != [-1] or options.two_pass:
            raise ValueError(
                "--matmul is softmax(S) @ V over the last dimension of S: without --dim and --two-pass"
            )
        else:
            made = plan_matmul_shape(
                options.shape,
                options.matmul,
                options.dtype,
                backward=options.backward,
                device=replace(H200, architecture=ARCHITECTURES[options.arch]),
            )
        paths = write(made, options.output, options.png, options.thread)
    except (ValueError, NotImplementedError, RuntimeError, IndexError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(made.explain())
    print(*paths, sep="\n")
    return 0


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)+", text):
        raise argparse.ArgumentTypeError(f"expected a shape, ROWSxCOLUMNS such as 4096x65536, got {text!r}")
    return tuple(map(int, re.split("[x,]", text)))


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser(
        prog="python -m cute_softmax diagrams",
        description="Draw the layouts of a softmax: SVG files and a page of them.",
    )
    found.add_argument("shape", type=_shape, help="such as 4096x65536, or 8x512x64")
    found.add_argument(
        "--dim", type=int, nargs="+", default=[-1], help="the reduced dimensions: -1, or 0 2 (-1)"
    )
    found.add_argument("--dtype", choices=FLOATS, default="bf16", help="of all operands")
    found.add_argument(
        "--matmul", type=int, metavar="D", help="softmax(S) @ V for S of the shape and D columns of V"
    )
    found.add_argument("--backward", action="store_true", help="the gradient's kernel")
    found.add_argument("--two-pass", action="store_true", help="maximum, then sum, instead of both at once")
    found.add_argument("--arch", choices=tuple(ARCHITECTURES), default=H200.architecture.name)
    found.add_argument("--thread", type=int, help="the thread to follow")
    found.add_argument("--png", action="store_true", help="PNG beside every SVG (needs cairosvg)")
    found.add_argument("-o", "--output", type=Path, default=Path("diagrams"), help="folder to write into")
    return found
