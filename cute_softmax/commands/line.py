"""The command line: what commands there are and what they take. Neither torch nor cutlass is needed to read it.

An unusable argument is reported before either is loaded; each command's own module has what it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ..plan.describe import OPERATIONS
from ..plan.hardware import ARCHITECTURES
from ..plan.problem import FLOATS
from ..version import __version__
from .asked import Asked, Scores

NAME = "cute-softmax"
# Where to get what a command lacks.
EXTRAS = {"rich": "cli", "drawsvg": "draw"}


class Shape(click.ParamType):
    """A shape written as 4096x8192."""

    name = "AxBxC"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(int(part) for part in value.lower().split("x"))
        except ValueError:
            sizes = (-1,)
        if min(sizes) < 0:
            self.fail(f"a shape is written 4096x8192, not {value!r}", param, ctx)
        return sizes


class Dims(click.ParamType):
    """One dimension or several, written as -1 or 0,2."""

    name = "D[,D...]"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"dimensions are written -1 or 0,2, not {value!r}", param, ctx)


class Scale(click.ParamType):
    """A number, or the shape of a tensor with one number for each row."""

    name = "NUMBER|SHAPE"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            return float(value)
        except ValueError:
            return Shape().convert(value, param, ctx)


class Dtypes(click.ParamType):
    """Element types, separated by commas."""

    name = "DTYPE[,DTYPE...]"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        return tuple(click.Choice(FLOATS).convert(part, param, ctx) for part in value.split(","))

    def shell_complete(self, ctx, param, incomplete):
        return click.Choice(FLOATS).shell_complete(ctx, param, incomplete)


SHAPE = Shape()
ARCH = click.option(
    "--arch",
    type=click.Choice(list(ARCHITECTURES)),
    help="Default: this GPU's, or sm_90a.",
)
DTYPE = click.option(
    "--dtype", type=click.Choice(FLOATS), default="bf16", show_default=True, help="Element type."
)
MATRIX_DIM = click.option("--dim", type=int, default=-1, show_default=True, help="Dimension to reduce.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
@click.pass_context
def line(context: click.Context) -> None:
    """Run, explain, draw and measure CuTe DSL softmax kernels for NVIDIA GPUs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def call(function: Callable) -> Callable:
    """The options that say which call is meant, gathered in an `Asked`."""

    def gathered(shape, dim, dtype, arch, op, backward, matmul, topk, **others):
        scores = Scores(**{name: others.pop(name) for name in Scores._fields})
        dims = tuple(d for part in dim for d in part) or None
        return function(Asked(shape, dims, dtype, arch, op, backward, matmul, topk, scores), **others)

    gathered.__name__, gathered.__doc__ = function.__name__, function.__doc__
    gathered.__click_params__ = getattr(function, "__click_params__", [])
    options = [
        click.argument("shape", type=SHAPE),
        click.option("--dim", type=Dims(), multiple=True, help="Dimensions to reduce, such as 0,2.  [-1]"),
        DTYPE,
        ARCH,
        click.option("--op", type=click.Choice(OPERATIONS), default="softmax", show_default=True),
        click.option("--backward", is_flag=True, help="The gradient instead."),
        click.option("--matmul", type=int, metavar="D", help="softmax(S) @ V: S has the shape, V has D columns."),
        click.option("--topk", type=int, metavar="K", help="The K largest of each row and their probabilities."),
        click.option("--scale", type=Scale(), help="Multiplies the input."),
        click.option("--bias", type=SHAPE, metavar="SHAPE", help="A tensor added to the scores."),
        click.option("--mask", type=SHAPE, metavar="SHAPE", help="A boolean tensor, True where elements count."),
        click.option("--causal", type=int, metavar="OFFSET", help="Element j of row i counts if j <= i + OFFSET."),
        click.option("--alpha", type=float, help="Multiplies the result."),
        click.option("--empty-rows", type=click.Choice(("nan", "zero")), help="Rows in which no element counts."),
        click.option("--sink", type=SHAPE, metavar="SHAPE", help="An extra score per row, in the sum only."),
    ]  # fmt: skip
    for option in reversed(options):
        gathered = option(gathered)
    return gathered


@line.command()
@click.option(
    "--ranks",
    type=click.IntRange(1),
    metavar="N",
    help="Ranks that share the rows; SHAPE is one rank's slice.",
)
@call
def explain(asked: Asked, ranks: int | None) -> int:
    """Tell how a call would run, on this GPU or an H200."""
    from . import plans

    return plans.explain(asked.by_ranks(ranks) if ranks else asked)


@line.command()
@click.option("--two-pass", is_flag=True, help="Exchange the maximum first, then the sum.")
@click.option("--thread", type=int, help="Thread to highlight.")
@click.option("--png", is_flag=True, help="Also write PNGs (needs cairosvg).")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("diagrams"), show_default=True)
@call
def diagrams(asked: Asked, two_pass: bool, thread: int | None, png: bool, output: Path) -> int:
    """Draw the layouts of a call's kernel, to look at and explore."""
    from . import plans

    return plans.diagrams(asked, output, two_pass=two_pass, thread=thread, png=png)


@line.command()
@click.argument("shape", type=SHAPE, default=(4096, 8192))
@DTYPE
@MATRIX_DIM
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    help="Folder for figures.",
)
def demo(shape: tuple[int, ...], dtype: str, dim: int, out: Path) -> int:
    """Check, explain, time and draw one softmax and its gradient."""
    check_matrix(shape, "the demo")
    from . import demo as command

    return command.run(shape, dtype, out, dim)


@line.command()
@click.argument("rung", type=int)
@click.argument("shape", type=SHAPE, default=(1024, 4096))
@DTYPE
@MATRIX_DIM
def ladder(rung: int, shape: tuple[int, ...], dtype: str, dim: int) -> int:
    """Check a rung of the ladder, 0 to 7, and time it next to torch."""
    check_matrix(shape, "a rung")
    from . import ladder as command

    return command.run(rung, shape, dtype, dim)


def check_matrix(shape: tuple[int, ...], what: str) -> None:
    """Raise ValueError for what is no matrix, or empty."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{what} takes MxN of at least 1x1, not {'x'.join(map(str, shape))}")


@line.command()
@ARCH
@DTYPE
def classes(arch: str | None, dtype: str) -> int:
    """List the classes that can be compiled, and the rows of each."""
    from . import classes as command

    return command.show(arch, dtype)


@line.command()
@ARCH
@click.option(
    "--dtype", type=Dtypes(), multiple=True, default=("bf16",), show_default=True, help="Element type."
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compile only what a program recorded with CUTE_SOFTMAX_RECORD=FILE.",
)
def precompile(arch: str | None, dtype: tuple[tuple[str, ...], ...], recorded: Path | None) -> int:
    """Compile all classes of some dtypes ahead of time.

    Needs no GPU.
    """
    from . import classes as command

    return command.compile_all(arch, [d for part in dtype for d in part], recorded)


@line.command()
@click.argument("action", type=click.Choice(("path", "list", "clear")), default="list")
def cache(action: str) -> int:
    """Show, list or clear the store of compiled kernels."""
    from . import cache as command

    return command.run(action)


@line.command()
def info() -> int:
    """Describe this machine, and check whether kernels work on it.

    GPU, versions and store; whether kernels compile, load, run and agree with float64. The status is 1 for a fault.
    """
    from . import info as command

    return command.run()


def of_checkout(name: str, leading: tuple[str, ...], text: str) -> None:
    """A command that the benchmarks of a checkout have; all its arguments are theirs."""

    @line.command(name, add_help_option=False, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> int:
        from .checkout import benchmarks

        return benchmarks([*leading, *arguments])


of_checkout("bench", (), "Run the benchmarks against peers (in a checkout).")
of_checkout("tune", ("tune",), "Measure configurations for this GPU (in a checkout).")


@line.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> int:
    """Print a shell script that completes commands.

    As in: eval "$(cute-softmax completion bash)"
    """
    from click.shell_completion import get_completion_class

    variable = f"_{NAME}_COMPLETE".replace("-", "_").upper()
    click.echo(get_completion_class(shell)(line, {}, NAME, variable).source())
    return 0


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line; what cannot be done is one line on the error output, and 2."""
    try:
        return line.main(arguments, prog_name=NAME, standalone_mode=False) or 0
    except click.ClickException as error:
        message = " ".join(error.format_message().split()).removesuffix(".")
        at = getattr(error, "ctx", None)
        print(f"error: {message}.", *([f"See '{at.command_path} --help'."] if at else []), file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        hint = f": pip install 'cute-softmax[{extra}]'" if extra and "pip install" not in str(error) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    except (ValueError, IndexError, OSError) as error:  # a NotPlanned is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 2
