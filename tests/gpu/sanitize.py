"""Touch every Plan class of this device on a small grid and check the results, for compute-sanitizer:

    python tests/gpu/sanitize.py --build
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitize.py

and so with racecheck, initcheck and synccheck. Exits with 1 on a wrong result. Kernels come from the store.
Tensors are made and checked on the host, so that the sanitizer watches hardly any kernel but ours. A line tells of
every class as it is done, the smallest first, so that a run that is cut off has touched most of them.

    --maths softmax softmax_backward logsumexp amax sum    --dtypes bf16 fp32    --part 0/3 (a third of all)
"""

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

BEGIN = time.perf_counter()  # importing torch is part of what a sanitizer slows down

import torch  # noqa: E402

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

import checking  # noqa: E402
import classes  # noqa: E402

from cute_softmax import launch  # noqa: E402
from cute_softmax.precompile import precompile  # noqa: E402

GUARD = checking.GUARD


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
        for edges, width in forms:
            for interval in classes.intervals(math, arch, dtypes, edges=edges, width=width, online=online):
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Every Plan class on a small grid, for compute-sanitizer.")
    parser.add_argument("--maths", nargs="+", default=[*classes.PAIRS_OF])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16", "fp32"])
    parser.add_argument("--part", default="0/1", help="i/n: every n-th class from the i-th on")
    parser.add_argument("--build", action="store_true", help="only fill the store, in all cores")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tools and parts run side by side, as many as there are cores
    arch = launch.device_facts(0).architecture.name
    part, parts = map(int, options.part.split("/"))
    # By size, so that parts take about as long.
    wanted = sorted(
        cases(arch, options.maths, options.dtypes), key=lambda case: rows_of(case[0]) * columns_of(case[0])
    )[part::parts]
    if options.build:
        print(
            len([*precompile([interval.row_class for interval, _, _ in wanted])]), "classes are in the store"
        )
        return 0
    print(f"{len(wanted)} classes, started in {time.perf_counter() - BEGIN:.1f} s", flush=True)
    wrong = 0
    for number, (interval, dtypes, online) in enumerate(wanted, 1):
        c, begin = interval.row_class, time.perf_counter()
        what = f"{c.math} {'/'.join(dtypes)} {c.name}, {rows_of(interval)} x {columns_of(interval)}"
        try:
            verdict, told = "ok", f"{check(interval, dtypes, online):.2f} s of it the kernel"
        except Exception as error:
            wrong += 1
            verdict, told = "WRONG", error
        taken = time.perf_counter() - begin
        print(f"{verdict:5} {number}/{len(wanted)} {taken:6.2f} s  {what}: {told}", flush=True)
    print(f"{len(wanted)} classes in {time.perf_counter() - BEGIN:.1f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
