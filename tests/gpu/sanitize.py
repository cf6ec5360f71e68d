"""Touch every Plan class of this device on a small grid and check the results, for compute-sanitizer:

    python tests/gpu/sanitize.py --build
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/sanitize.py

and so with racecheck, initcheck and synccheck (API errors are those of CUDA's Python bindings, which try functions
that a driver may lack). Exits with 1 on a wrong result. Kernels come from the store.
Tensors are made and checked on the host, so that the sanitizer watches hardly any kernel but ours. A line tells of
every class as it is done, the smallest first, so that a run that is cut off has touched most of them.

    --maths softmax softmax_backward logsumexp amax sum    --dtypes bf16 fp32    --movements row panel
    --movements prologue matmul (rows of the softmax family and of masked scores; softmax_matmul and its gradient)
    --movements heads (entropies, log-probabilities of chosen elements and cross entropies, with their gradients)
    --movements short (rows of a few elements that lie one behind another)
    --movements stream (long rows that are only read, tile after tile)
    --movements sweep (columns in two passes)
    --movements shifted (columns that begin off vector boundaries)
    --movements abreast (few columns, of which several rows lie side by side)
    --movements losses (losses in one visit, the kernels around them, routers)
    --movements scores (columns and rows that several CTAs share, of scores)
    --movements shards (rows that ranks share, one rank after another)
    --movements ring (rows that ranks share and keep on chip, of one rank)
    --movements ladder (the rungs of cute_softmax.ladder)
    --match lines (a pattern of what a class is told as)
    --skip 1000 (without the 1000 smallest classes)    --part 0/3 (a third of what is left)

Without torch's cache of memory (PYTORCH_NO_CUDA_MEMORY_CACHING=1) each tensor has bounds of its own.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

BEGIN = time.perf_counter()  # importing torch is part of what a sanitizer slows down

import torch  # noqa: E402

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

import checking  # noqa: E402
import classes  # noqa: E402
import panels  # noqa: E402
import sanitize_family  # noqa: E402
import sanitize_heads  # noqa: E402
import sanitize_ladder  # noqa: E402
import sanitize_losses  # noqa: E402
import sanitize_matmul  # noqa: E402
import sanitize_ring  # noqa: E402
import sanitize_shards  # noqa: E402
import sanitize_short  # noqa: E402
import sanitize_stream  # noqa: E402
import sanitize_sweep  # noqa: E402
import scored_panels  # noqa: E402
from families import Case  # noqa: E402
from sanitizing import Job  # noqa: E402

from cute_softmax import ladder  # noqa: E402
from cute_softmax.plan import MATHS, PanelPlan, plan_panel  # noqa: E402
from cute_softmax.plan.catalogue import ctas_counts  # noqa: E402
from cute_softmax.plan.panel_configs import SHIFTED_FROM, PanelConfig  # noqa: E402
from cute_softmax.plan.problem import ITEM_SIZE  # noqa: E402
from cute_softmax.plan.table import table_of  # noqa: E402
from cute_softmax.runtime import launch  # noqa: E402
from cute_softmax.runtime.precompile import precompile  # noqa: E402

GUARD = checking.GUARD
TABLE = table_of()
PANELS = ("softmax", "softmax_backward", "logsumexp", "log_softmax", "log_softmax_backward")


def cases(arch: str, maths: list[str], names: list[str]):
    """(class and lengths, dtypes, online), each class once.

    bf16 with whole vectors, aligned and ragged, and read one element at a time; fp32 with whole vectors; of other
    dtypes and of two passes the ragged classes, whose code holds that of the aligned ones.
    """
    seen = set()
    for (math, online), pair in product(classes.MATHS, classes.PAIRS):
        if math not in maths or pair not in classes.PAIRS_OF[math] or not set(pair) <= set(names):
            continue
        dtypes = classes.operands(math, pair)
        widths = classes.widths(math, dtypes, online)
        whole = widths[0]
        one = (1,) * len(whole) if len(widths) > 1 else whole
        if pair == ("bf16", "bf16") and online:
            forms = [*product((False, True), {whole, one, (one[0], *whole[1:])})]
        else:
            forms = [(True, whole)] + [(False, whole)] * (pair == ("fp32", "fp32") and online)
        for (edges, width), ctas in product(forms, ctas_counts()):
            for interval in classes.own_intervals(
                math, arch, dtypes, ctas, edges=edges, width=width, online=online
            ):
                if interval.row_class not in seen:
                    seen.add(interval.row_class)
                    yield interval, dtypes, online


def columns_of(interval) -> int:
    """A length of the class, a few vectors past its shortest one: each warp and each CTA of a row has some of it."""
    c = interval.row_class
    columns = interval.first + min((interval.last - interval.first) // 8, 64)
    return (
        columns if c.edges else max(-(-interval.first // c.vector) * c.vector, columns // c.vector * c.vector)
    )


def rows_of(interval) -> int:
    """More than one tile, the last one ragged; three for a persistent kernel's only CTA or cluster (see `check`): of
    its two reduction buffers the third tile uses the first again."""
    c = interval.row_class
    return 3 if c.persistent else 2 if c.cluster_n > 1 else c.tiler[0] + 1 if c.tiler[0] > 1 else 2


class Buffer:
    """Host and device memory of a tensor whose rows lie `offset` elements past a boundary, `stride` apart."""

    def __init__(self, rows: int, columns: int, stride: int, offset: int, dtype: torch.dtype):
        self.first, self.place = GUARD + offset, ((rows, columns), (stride, 1), GUARD + offset)
        size = torch.empty((), dtype=dtype).element_size()
        bits = torch.full((2 * GUARD + offset + rows * stride,), checking.POISON[size])
        self.host = bits.to(checking._INTEGERS[size]).view(dtype)
        self.values = self.host.as_strided(*self.place)
        self.device: torch.Tensor | None = None

    def send(self) -> torch.Tensor:
        self.device = self.host.to("cuda")
        return self.device.as_strided(*self.place)

    def receive(self) -> torch.Tensor:
        """The values; raises AssertionError if anything around them changed."""
        after, integer = self.device.cpu(), checking._INTEGERS[self.host.element_size()]
        values = after.as_strided(*self.place).clone()
        after.as_strided(*self.place).copy_(self.values)
        assert torch.equal(after.view(integer), self.host.view(integer)), "written outside the result"
        return values


def place(interval, index: int, rows: int, columns: int, dtypes) -> Buffer:
    """Operand `index` placed so that the plan takes this very class."""
    c = interval.row_class
    dtype = checking.DTYPES[dtypes[index]]
    if index >= c.facts.full:
        return Buffer(rows, 1, 1, 0, dtype)
    if not c.edges:
        stride, offset = -(-columns // c.vector) * c.vector, 0
    else:
        stride, offset = columns + 1, 1
        stride += stride % c.vector == 0
    if index != c.facts.reference:
        offset += c.access[index] % c.vector
    return Buffer(rows, columns, stride, offset, dtype)


def check(interval, dtypes, online: bool) -> float:
    """Launch the class and compare; the seconds from the launch, which loads the kernel, to its end.

    Raises AssertionError on a wrong result.
    """
    c = interval.row_class
    rows, columns = rows_of(interval), columns_of(interval)
    buffers = [place(interval, i, rows, columns, dtypes) for i in range(len(dtypes))]
    x = torch.randn(rows, columns)
    if c.math != "softmax_backward":
        x[-1, columns // 2 :] = float("-inf")
        buffers[0].values.copy_(x)
    else:
        buffers[0].values.copy_(x)
        buffers[1].values.copy_(torch.softmax(x.roll(1, -1), -1))
    tensors = [b.send() for b in buffers]
    if c.facts.group_outputs:  # an element per row
        tensors[-1] = tensors[-1].as_strided((rows, columns), (1, 0))
    with classes.given(interval.ctas):
        call = launch.call_of(c.math, tensors, (1,), online)
    assert call.plan.row_class == c, f"planned as {call.plan.row_class.name}"
    assert call.plan.share * (c.cluster_n - 1) < columns, "a CTA of the cluster has no columns"
    if c.persistent:  # one cluster takes all tiles
        call = launch.Call(replace(call.plan, ctas=1), call.function)
    begin = time.perf_counter()
    call(torch.cuda.current_stream().cuda_stream, *(t.data_ptr() for t in tensors))
    torch.cuda.synchronize()  # after every launch: an error is this class's
    seconds = time.perf_counter() - begin
    result = buffers[-1].receive()
    if c.facts.group_outputs:
        checking.check_reduction(c.math, result, buffers[0].values)
    elif c.math == "softmax":
        checking.check_softmax(result, buffers[0].values)
    else:
        checking.check_backward(result, buffers[0].values, buffers[1].values)
    return seconds


def row_jobs(arch: str, maths: list[str], names: list[str]) -> Iterator[Job]:
    for interval, dtypes, online in cases(arch, maths, names):
        c, rows, columns = interval.row_class, rows_of(interval), columns_of(interval)
        what = f"{c.math} {'/'.join(dtypes)} {c.name}, {rows} x {columns}"
        yield Job((c,), rows * columns, what, partial(check, interval, dtypes, online))


def panel_jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Each configuration of the panels, in columns and in rows; parts that exchange and parts that are read twice;
    vectors of one element in columns, scalars at the edges of rows. A length leaves the last step partly empty, a width
    the last panel."""
    device = launch.device_facts(0)
    forms = []  # (math, dtype, orientation, configuration, parts, tiles of a part, patience, narrow)
    for name in (n for n in PANELS if n in maths):
        inputs = len(MATHS[name, True].inputs)
        for orientation in ("column", "row"):
            for config in TABLE.held_of(inputs, bool(MATHS[name, True].outputs)):
                if config.cluster_n <= device.architecture.cluster_limit and not (
                    (config.alone or config.narrow) and orientation == "row"
                ):
                    forms.append((name, "bf16", orientation, config, 1, 1, None, config.threads == 128))
            config = TABLE.streaming[inputs]
            for parts, tiles in ((1, 3), (3, 1), (2, 2)):
                for dtype in ("bf16", "fp32"):
                    forms.append((name, dtype, orientation, config, parts, tiles, None, dtype == "fp32"))
            forms.append((name, "bf16", orientation, config, 4, 2, 0, False))
            if (orientation, inputs) in TABLE.deep and MATHS[name, True].outputs:
                for config in TABLE.deep[orientation, inputs]:
                    forms.append((name, "bf16", orientation, config, 2, 2, None, orientation == "row"))
                if (orientation, inputs) == ("row", 1):
                    for patience in (None, 0):
                        forms.append((name, "bf16", orientation, TABLE.ahead, 2, 1, patience, True))
    for name, dtype, orientation, config, parts, tiles, patience, narrow in forms:
        if dtype not in names:
            continue
        for ragged in (False, True) if narrow and not config.alone else (False,):
            single = ragged and orientation == "column"
            vector = 1 if single else (16 if ragged else config.vector_bytes) // ITEM_SIZE[dtype]
            across = config.threads if config.alone else panels.across_of_two_trips(config) or 4
            across = 1 if orientation == "row" else across
            unit = vector if orientation == "row" else 1
            tail = 3 if ragged and not single else 0
            length = unit * units_of(config, across, parts * tiles) + tail
            shape, dims = (
                ((2, length), (1,)) if orientation == "row" else ((length, (across + 1) * vector), (0,))
            )
            stride = shape[1] + ragged
            problem = panels.problem_of(name, (dtype,) * 2, shape, dims, (stride, 1), (int(ragged),) * 3)
            made = plan_panel(name, problem, device, False)
            if not ragged:
                made = replace(made, kernel=replace(made.kernel, vector=vector, access=(vector,) * inputs))
            c = made.kernel
            assert (c.orientation, c.vector, c.edges) == (orientation, vector, ragged and not single), c.name
            yield from forced_job(made, config, parts, across, patience, shape, dims, stride, int(ragged))


def units_of(config: PanelConfig, across: int, cuts: int) -> int:
    """Units of a group that fill so many tiles of each CTA of a cluster, but for a part of the last step."""
    units = config.threads // across * config.steps  # of a CTA
    return units * (cuts * config.cluster_n - 1) + max(units - config.threads // across // 2, 1)


def forced_job(
    made: PanelPlan,
    config: PanelConfig,
    parts: int,
    across: int,
    patience: int | None,
    shape: tuple[int, int],
    dims: tuple[int, ...],
    stride: int,
    offset: int,
) -> Iterator[Job]:
    """A plan on another configuration, if the architecture has room for that."""
    # As if the GPU held no more CTAs: one that streams takes parts of both panels.
    made = panels.forced(made, config, parts, across=across, resident=parts)
    made = made if patience is None else replace(made, patience=patience)
    c, device = made.kernel, launch.device_facts(0)
    if c.shared_memory <= device.architecture.shared_memory:  # not so of a deep configuration
        what = f"{c.math} {c.dtypes[0]} {c.name}, {shape[0]} x {shape[1]} over {dims[0]}"
        run = partial(check_panel, made, shape, dims, stride, offset)
        yield Job((c,), shape[0] * shape[1], what, run)


def shifted_jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Each configuration of columns that begin anywhere: rows of memory of odd lengths at odd places, two panels and a
    bit."""
    device = launch.device_facts(0)
    for name in (n for n in PANELS if n in maths):
        inputs, outputs = len(MATHS[name, True].inputs), MATHS[name, True].outputs
        forms = [(config, 1, 1, None) for config in TABLE.shifted[inputs]]
        forms += [
            (TABLE.streaming[inputs], *cut) for cut in ((1, 3, None), (3, 1, None), (2, 2, None), (4, 2, 0))
        ]
        forms += [(config, 2, 2, None) for config in (TABLE.deep["column", inputs] if outputs else ())]
        for (config, parts, tiles, patience), dtype in product(forms, names):
            if config.cluster_n > device.architecture.cluster_limit:
                continue
            across = config.threads if config.alone else panels.across_of_two_trips(config) or 8
            length = units_of(config, across, parts * tiles)
            shape = (length, max(2 * across * config.vector_bytes // ITEM_SIZE[dtype], SHIFTED_FROM) + 5)
            stride = shape[1] + 2
            problem = panels.problem_of(name, (dtype,) * 2, shape, (0,), (stride, 1), (1, 1, 1))
            made = plan_panel(name, problem, device, False)
            assert made.kernel.shifted, made.kernel.name
            yield from forced_job(made, config, parts, across, patience, shape, (0,), stride, 1)


def abreast_jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Few columns, several rows side by side, the last of which ends anywhere: in clusters, and in parts of which none
    waits, too."""
    device = launch.device_facts(0)
    for name in (n for n in PANELS if n in maths and MATHS[n, True].outputs):
        for shape, dtype in product(((301, 9), (2001, 5), (40007, 19)), names):
            made = plan_panel(name, panels.problem_of(name, (dtype,) * 2, shape, (0,)), device, False)
            assert made.kernel.rows_abreast > 1, made.kernel.name
            for patience in (made.patience, 0) if made.kernel.exchange else (made.patience,):
                run = partial(check_panel, replace(made, patience=patience), shape, (0,), shape[1], 0)
                what = f"{name} {dtype} {made.kernel.name}, {shape[0]} x {shape[1]}, patience {patience}"
                yield Job((made.kernel,), shape[0] * shape[1], what, run)


def check_panel(
    made: PanelPlan, shape: tuple[int, int], dims: tuple[int, ...], stride: int, offset: int
) -> float:
    """As `check`, of a plan of panels."""
    c = made.kernel
    dtype = checking.DTYPES[c.dtypes[0]]
    places = [(*shape, stride, offset)] * c.facts.full + [(1, shape[1 - dims[0]], shape[1 - dims[0]], 0)]
    buffers = [Buffer(*place, dtype) for place in places[: len(c.dtypes)]]
    x = torch.randn(shape)
    if c.math.endswith("_backward"):
        forward = torch.log_softmax if c.math.startswith("log") else torch.softmax
        buffers[0].values.copy_(x)
        buffers[1].values.copy_(forward(x.roll(1, -1), dims[0]))
    else:
        x[shape[0] // 2 :, -1] = float("-inf")
        buffers[0].values.copy_(x)
    tensors = [b.send() for b in buffers]
    call = launch.Call(made, launch.function_of(c))
    begin = time.perf_counter()
    call(torch.cuda.current_stream().cuda_stream, *(t.data_ptr() for t in tensors))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    result = buffers[-1].receive()
    if c.facts.group_outputs:
        checking.check_reduction(c.math, result.view(-1), buffers[0].values, dims)
    elif c.math.startswith("log"):
        Case(c.math, *(b.values.movedim(dims[0], -1) for b in buffers[:-1])).check(
            [result.movedim(dims[0], -1)]
        )
    elif c.math == "softmax":
        checking.check_softmax(result, buffers[0].values, dims)
    else:
        checking.check_backward(result, buffers[0].values, buffers[1].values, dims)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Every Plan class on a small grid, for compute-sanitizer.")
    parser.add_argument("--maths", nargs="+", default=[*classes.PAIRS_OF])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16", "fp32"])
    parser.add_argument("--movements", nargs="+", default=["row", "panel"])
    parser.add_argument("--match", default="", help="only classes whose line matches this pattern")
    parser.add_argument("--skip", type=int, default=0, help="how many of the smallest classes to leave out")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th class from the i-th on")
    parser.add_argument("--build", action="store_true", help="only fill the store, in all cores")
    options = parser.parse_args()
    checking.DEVICE = "cpu"  # where tensors are made
    torch.set_num_threads(1)  # tools and parts run side by side, as many as there are cores
    arch = launch.device_facts(0).architecture.name
    part, parts = map(int, options.part.split("/"))
    own = [math for math in options.maths if math not in classes.FAMILY]
    found = [*row_jobs(arch, own, options.dtypes)] if "row" in options.movements else []
    if "short" in options.movements:
        found += sanitize_short.jobs(options.maths, options.dtypes)
    if "stream" in options.movements:
        found += sanitize_stream.jobs(options.maths, options.dtypes)
    if "prologue" in options.movements:
        found += sanitize_family.jobs(launch.device_facts(0), options.maths, options.dtypes)
    if "heads" in options.movements:
        found += sanitize_heads.jobs(options.dtypes)
    if "panel" in options.movements:
        found += panel_jobs(options.maths, options.dtypes)
    if "shifted" in options.movements:
        found += shifted_jobs(options.maths, options.dtypes)
    if "abreast" in options.movements:
        found += abreast_jobs(options.maths, options.dtypes)
    if "sweep" in options.movements:
        found += sanitize_sweep.jobs(options.maths, options.dtypes)
    if "losses" in options.movements:
        found += sanitize_losses.jobs(launch.device_facts(0), options.dtypes)
    if "shards" in options.movements:
        found += sanitize_shards.jobs(launch.device_facts(0), options.dtypes)
    if "ring" in options.movements:
        found += sanitize_ring.jobs(launch.device_facts(0), options.dtypes)
    if "scores" in options.movements:
        found += scored_panels.jobs(launch.device_facts(0), options.maths, options.dtypes)
    if "matmul" in options.movements:
        found += sanitize_matmul.jobs(launch.device_facts(0), options.dtypes)
    if "ladder" in options.movements:
        found += sanitize_ladder.jobs(arch, options.dtypes)
    found = [job for job in found if re.search(options.match, job.what)]
    # By size, so that parts take about as long.
    wanted = sorted(found, key=lambda job: job.size)[options.skip :][part::parts]
    if options.build:
        kernels = [*dict.fromkeys(kernel for job in wanted for kernel in job.kernels)]
        rungs = [kernel for kernel in kernels if isinstance(kernel, ladder.Form)]
        done = [*precompile([k for k in kernels if k not in rungs]), *precompile(rungs, ladder.function_of)]
        print(len(done), "classes are in the store")
        return 0
    print(f"{len(wanted)} classes, started in {time.perf_counter() - BEGIN:.1f} s", flush=True)
    wrong = 0
    for number, job in enumerate(wanted, 1):
        begin = time.perf_counter()
        try:
            verdict, told = "ok", f"{job.check():.2f} s of it the kernel"
        except Exception as error:
            wrong += 1
            verdict, told = "WRONG", error
        taken = time.perf_counter() - begin
        print(f"{verdict:5} {number}/{len(wanted)} {taken:6.2f} s  {job.what}: {told}", flush=True)
    print(f"{len(wanted)} classes in {time.perf_counter() - BEGIN:.1f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
