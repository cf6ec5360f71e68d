"""The command line.

python -m cute_softmax demo [4096x8192] [--dim -1] [--dtype bf16]      run, check, explain, time and draw
python -m cute_softmax explain 8x512x64 [--dim 0 2] [--backward]       how a softmax of this shape would run
python -m cute_softmax diagrams 4096x8192 [--dim -1] [-o out]          the layouts of its kernel, as figures
python -m cute_softmax explain|diagrams 32x4096x4096 --matmul 128      the same of softmax(S) @ V, D = 128
python -m cute_softmax ladder 3 1024x4096 [--dtype bf16]               a rung of the ladder on a tensor of this shape
python -m cute_softmax classes [--arch sm_90a] [--dtype bf16]          what there is to compile
python -m cute_softmax precompile [--arch sm_90a] [--dtype bf16 ...]   compile it all, into the store on disk
python -m cute_softmax cache [path|list|clear]                         that store
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product as product_of
from pathlib import Path

from .plan import RowClass, table_of
from .plan.catalogue import classes, longest_row, of_few_rows, operand_dtypes
from .plan.describe import plan_matmul_shape
from .plan.hardware import ARCHITECTURES, H200, Device
from .plan.matmul import MatmulPlan
from .plan.matmul_backward import MatmulBackwardPlan
from .plan.problem import FLOATS
from .plan.topk import TopkPlan


def shape(text: str) -> tuple[int, ...]:
    """The shape written as "4096x8192"."""
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = (-1,)
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"a shape is written 4096x8192, not {text!r}")
    return sizes


def dims(text: str) -> tuple[int, ...]:
    """The dimension or dimensions written as "-1" or "1,2"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"dimensions are written -1 or 1,2, not {text!r}") from None


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    whole = argparse.ArgumentParser("python -m cute_softmax", description="Softmax kernels in the CuTe DSL.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    demo = command(
        "demo", run_demo, "One softmax, forward and backward: checked, explained, timed and drawn."
    )
    demo.add_argument("shape", nargs="?", type=shape, default=(4096, 8192), metavar="MxN", help="(4096x8192)")
    demo.add_argument("--dim", type=int, default=-1, help="the reduced dimension (-1)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="the diagrams' folder (out)")

    explain = command(
        "explain", run_explain, "How a softmax of this shape would run, on this GPU or else an H200."
    )
    diagrams = command(
        "diagrams",
        run_diagrams,
        "The layouts of the kernel of this shape as figures, and a page to explore them.",
    )
    for added in (explain, diagrams):
        added.add_argument("shape", type=shape, metavar="AxBxC", help="such as 4096x8192")
        added.add_argument(
            "--dim", type=dims, nargs="+", default=[(-1,)], help="the reduced dimensions: -1, or 0 2 (-1)"
        )
        added.add_argument("--backward", action="store_true", help="the backward pass instead")
        added.add_argument(
            "--matmul", type=int, metavar="D", help="softmax(S) @ V for S of the shape and D columns of V"
        )
        added.add_argument("--topk", type=int, metavar="K", help="the K largest of each row instead")
    diagrams.add_argument(
        "--two-pass", action="store_true", help="maximum, then sum, instead of both at once"
    )
    diagrams.add_argument("--arch", choices=ARCHITECTURES, default=H200.architecture.name)
    diagrams.add_argument("--thread", type=int, help="the thread to follow")
    diagrams.add_argument("--png", action="store_true", help="PNG beside every SVG (needs cairosvg)")
    diagrams.add_argument("-o", "--output", type=Path, default=Path("diagrams"), help="folder to write into")

    rung = command(
        "ladder", run_ladder, "One rung of the ladder on a tensor: checked and timed beside torch and a copy."
    )
    rung.add_argument("rung", type=int, help="0, the naive form, to 7")
    rung.add_argument("shape", nargs="?", type=shape, default=(1024, 4096), metavar="MxN", help="(1024x4096)")
    rung.add_argument("--dim", type=int, default=-1, help="the reduced dimension (-1; of rung 0 also 0)")

    listed = command(
        "classes", run_classes, "The Plan classes: what there is to compile, and the rows that each takes."
    )
    ahead = command(
        "precompile", run_precompile, "Compile every Plan class of a dtype, of all row maths, into the store."
    )
    for added in (listed, ahead):
        added.add_argument(
            "--arch", choices=ARCHITECTURES, default=None, help="architecture (this GPU's, else sm_90a)"
        )
    for added in (demo, explain, diagrams, rung, listed):
        added.add_argument("--dtype", choices=FLOATS, default="bf16", help="element type (bf16)")
    ahead.add_argument("--dtype", nargs="+", choices=FLOATS, default=["bf16"], help="element types (bf16)")
    told = "what a program used with CUTE_SOFTMAX_RECORD=FILE, instead of all of a dtype"
    ahead.add_argument("--recorded", type=Path, metavar="FILE", help=told)

    store = command("cache", run_cache, "The store of compiled kernels: its path, a list of it, or clear it.")
    store.add_argument("action", nargs="?", choices=("path", "list", "clear"), default="list")
    return whole


def matrix(given: argparse.Namespace, what: str) -> tuple[int, int]:
    """The shape, of a matrix that is not empty."""
    if len(given.shape) != 2 or 0 in given.shape:
        raise ValueError(f"{what} takes MxN of at least 1x1, not {'x'.join(map(str, given.shape))}")
    return given.shape


def run_demo(given: argparse.Namespace) -> int:
    from .commands import demo

    return demo.run(matrix(given, "the demo"), given.dtype, given.out, given.dim)


def run_ladder(given: argparse.Namespace) -> int:
    from .commands import ladder

    return ladder.run(given.rung, matrix(given, "a rung"), given.dtype, given.dim)


def reduced(given: argparse.Namespace) -> tuple[int, ...]:
    """All dimensions that are named."""
    return tuple(d for part in given.dim for d in part)


def product(given: argparse.Namespace, device: Device) -> MatmulPlan | MatmulBackwardPlan:
    """The plan of softmax(S) @ V or of its gradients."""
    if reduced(given) != (-1,):
        raise ValueError("--matmul is softmax(S) @ V over the last dimension of S: without --dim")
    return plan_matmul_shape(given.shape, given.matmul, given.dtype, backward=given.backward, device=device)


def choice(given: argparse.Namespace, gpu: Device) -> TopkPlan:
    """The plan of the largest of each row, or of their gradient."""
    from .api.topk import plan_topk_softmax
    from .runtime.launch import TORCH_DTYPES

    if given.matmul is not None or reduced(given) != (-1,):
        raise ValueError("--topk is over the last dimension: without --matmul and --dim")
    dtype = TORCH_DTYPES[given.dtype]
    return plan_topk_softmax(given.shape, given.topk, dtype, backward=given.backward, device=gpu)


def run_explain(given: argparse.Namespace) -> int:
    from .api.explain import explain as explained

    gpu = device(None)
    if given.topk is not None:
        print(choice(given, gpu).explain())
    elif given.matmul is None:
        print(explained(given.shape, reduced(given), given.dtype, backward=given.backward, device=gpu))
    else:
        print(product(given, gpu).explain())
    return 0


def run_diagrams(given: argparse.Namespace) -> int:
    from .api.explain import plan_softmax
    from .draw import write

    gpu = device(given.arch)
    if given.two_pass and (given.backward or (given.matmul, given.topk) != (None, None)):
        raise ValueError("--two-pass is a way of the softmax alone: without --backward, --matmul and --topk")
    if 0 in given.shape:
        raise ValueError(f"{'x'.join(map(str, given.shape))} is empty: nothing is launched, nothing is drawn")
    if given.topk is not None:
        made = choice(given, gpu)
    elif given.matmul is None:
        how = {"backward": given.backward, "online": not given.two_pass, "device": gpu}
        made = plan_softmax(given.shape, reduced(given), given.dtype, **how)
    else:
        made = product(given, gpu)
    try:
        paths = write(made, given.output, given.png, given.thread)
    except RuntimeError as error:  # without cairosvg
        raise ValueError(error) from error
    print(made.explain(), *paths, sep="\n")
    return 0


def device(arch: str | None) -> Device:
    """A GPU of the architecture that is named, or this one, or an H200 where there is none."""
    if arch is not None:
        return replace(H200, architecture=ARCHITECTURES[arch])
    import torch

    from .runtime import launch

    return launch.device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else H200


def class_table(gpu: Device, dtype: str) -> Iterable[tuple[str, ...]]:
    """The rows of the list of classes, under a head, math by math."""
    yield "math", "class", "longest row", "CTAs x threads a row", "vectors a thread", "smem a CTA"
    table = table_of(gpu.table)
    for math in table.many:
        which = math, gpu.architecture, operand_dtypes(math, dtype)
        for c in (*classes(*which, table=table), *of_few_rows(*which, table=table)):
            threads = f"{c.cluster_n} x {c.threads_per_row}"
            yield math, c.name, f"{longest_row(c):,}", threads, str(c.steps), f"{c.shared_memory:,} B"


def run_classes(given: argparse.Namespace) -> int:
    gpu = device(given.arch)
    rows = list(class_table(gpu, given.dtype))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    print(
        f"\n{gpu.architecture.name}, {given.dtype}. Those that follow a math's longest are for few rows. Each "
        "with vectors exists a second time, as NAME_edges, for rows that begin or end off a vector boundary."
    )
    return 0


def run_precompile(given: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .runtime import record
    from .runtime.cache import Store
    from .runtime.precompile import precompile

    wanted = (
        record.read(given.recorded) if given.recorded else list(of_dtypes(device(given.arch), given.dtype))
    )
    compiled = precompile(wanted)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(wanted))
        for c in compiled:
            bar.update(task, advance=1, description=f"{c.math} {c.dtypes[0]} {c.name}")
    architectures = ", ".join(dict.fromkeys(c.architecture for c in wanted)) or "no architecture"
    print(f"{len(wanted)} kernels for {architectures} in {Store().root}")
    return 0


def of_dtypes(gpu: Device, dtypes: list[str]) -> Iterable[RowClass]:
    """All classes of some dtypes, of all row maths."""
    table = table_of(gpu.table)
    for dtype, math in product_of(dict.fromkeys(dtypes), table.many):
        which = math, gpu.architecture, operand_dtypes(math, dtype)
        for edges, kind in product_of((False, True), (classes, of_few_rows)):
            yield from kind(*which, edges=edges, table=table)


def run_cache(given: argparse.Namespace) -> int:
    from .commands import cache

    return cache.run(given.action)


def main(arguments: list[str] | None = None) -> int:
    """The exit status of a command line: 0, 1 for a wrong result, 2 for what cannot be done."""
    given = parser().parse_args(arguments)
    try:
        return given.run(given)
    except (ValueError, IndexError, OSError) as error:  # a NotPlanned is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
