"""The bits of fixed inputs: recorded for a GPU, and compared with what was recorded.

python -m benchmarks bits --save     write benchmarks/results/<gpu>/checks/bits.json
python -m benchmarks bits            compare with it; 1 where a bit differs, 2 where there is nothing to compare with
python -m benchmarks bits --launches 1000000     and launch so often beside other work: 1 where one gives other bits

An input is made of integers alone, so that no generator of random numbers decides it: the same for every version of
torch and every GPU. Of each result the file has a digest, within `batch_invariant` and outside. Bits that a version
changes are no error; it says so where it says what has changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import cute_softmax
from cute_softmax.plan.table import table_of
from cute_softmax.runtime import launch
from cute_softmax.runtime.precompile import precompile

from .launches import CALLS, Counted, Repeated, repeat
from .operations import DTYPES
from .parsers import of_bits
from .results import gpu_folder, make_header
from .run import current_device

FORMAT = 1
# Lengths on both sides of every decision: scalars, one vector, a warp, few rows, odd, clusters, split rows.
SHAPES = (
    (3, 7), (64, 33), (64, 1001), (64, 9000), (3, 32000), (64, 32000), (64, 50257), (8, 151936), (2, 1048577),
)  # fmt: skip
_DEPTH = 64  # columns of the values of a product
_MULTIPLIER = 6364136223846793005  # Knuth's, of a linear congruential generator modulo 2 ** 64


class Function(NamedTuple):
    """One function of (rows, N): its results, whose bits are recorded. longest: elements of a row."""

    call: Callable[[Tensor], tuple[Tensor, ...]]
    longest: int = 1 << 31


def fixed(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """A tensor of multiples of 1/64 from -8 to 8, by integers alone: every dtype has these numbers."""
    count = 1
    for size in shape:
        count *= size
    state = (torch.arange(count, dtype=torch.int64) + 1) * _MULTIPLIER + seed
    state = (state ^ (state >> 29)) * _MULTIPLIER
    numbers = ((state >> 33) % 1025 - 512).to(torch.float32) / 64
    return numbers.view(*shape).to(dtype).to(device)


def _index(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return rows * 7919 % x.shape[1]


def _with_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = function(x)
        (d,) = torch.autograd.grad(y, x, fixed(y.shape, y.dtype, y.device, seed=1))
        return y.detach(), d

    return both


def _product(x: Tensor) -> tuple[Tensor, ...]:
    values = fixed((x.shape[1], _DEPTH), torch.bfloat16, x.device, seed=2)
    return cute_softmax.softmax_matmul(x.to(torch.bfloat16), values, return_lse=True)


FUNCTIONS = {
    "softmax": Function(_with_gradient(cute_softmax.softmax)),
    "softmax to float32": Function(lambda x: (cute_softmax.softmax(x, dtype=torch.float32),)),
    "softmax of scores": Function(_with_gradient(lambda x: cute_softmax.softmax(x, scale=0.3, mask=x > -7))),
    "softmax over columns": Function(lambda x: (cute_softmax.softmax(x.mT.contiguous(), 0),), longest=50257),
    "log_softmax": Function(_with_gradient(cute_softmax.log_softmax)),
    "logsumexp": Function(_with_gradient(lambda x: cute_softmax.logsumexp(x, -1))),
    "sum": Function(lambda x: (cute_softmax.sum(x, -1),)),
    "entropy": Function(_with_gradient(cute_softmax.entropy)),
    "selective_log_softmax": Function(
        _with_gradient(lambda x: cute_softmax.selective_log_softmax(x, _index(x)))
    ),
    "cross_entropy": Function(
        _with_gradient(lambda x: cute_softmax.cross_entropy(x, _index(x), reduction="none"))
    ),
    "kl_div": Function(
        _with_gradient(lambda x: cute_softmax.kl_div(x, x.detach().flip(-1), reduction="none"))
    ),
    "topk_softmax": Function(lambda x: tuple(cute_softmax.topk_softmax(x, 5)), longest=1024),
    "topk_log_softmax": Function(lambda x: tuple(cute_softmax.topk_log_softmax(x, 5, _index(x)))),
    "softmax_matmul": Function(_product, longest=50257),
}


def digest(tensor: Tensor) -> str:
    """Sixteen digits that tell the bits of a tensor apart."""
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


class Input(NamedTuple):
    """A function and the matrix that it gets."""

    name: str
    shape: tuple[int, int]
    dtype: str


def inputs() -> list[Input]:
    """All that is recorded."""
    every = [Input(name, shape, d) for shape in SHAPES for d in ("bf16", "fp32") for name in FUNCTIONS]
    return [one for one in every if one.shape[1] <= FUNCTIONS[one.name].longest]


def both(one: Input, device: torch.device | str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results outside `batch_invariant`, and within."""
    call, x = FUNCTIONS[one.name].call, fixed(one.shape, DTYPES[one.dtype], device)
    outside = call(x)
    with cute_softmax.batch_invariant():
        return outside, call(x)


def arguments_of(one: Repeated, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Of a call that is repeated: the matrix, an index of each row, values of a product."""
    x = fixed(one.shape, DTYPES[one.dtype], device)
    return x, _index(x), fixed((one.shape[1], _DEPTH), x.dtype, device, seed=2)


def called(one: Input | Repeated) -> None:
    """Has in the store what a call compiles. In a process of its own, on a GPU."""
    device = current_device()
    if isinstance(one, Input):
        both(one, device)
        return
    arguments = arguments_of(one, device)
    one.call(*arguments)
    with cute_softmax.batch_invariant():
        one.call(*arguments)


def measured(device: torch.device | str) -> Iterator[tuple[str, str]]:
    """(what, digest) of every result of every function, outside `batch_invariant` and within."""
    for given in inputs():
        what = f"{given.name}, {given.shape[0]} x {given.shape[1]}, {given.dtype}"
        for i, (one, other) in enumerate(zip(*both(given, device), strict=True)):
            yield f"{what}, result {i}", digest(one)
            yield f"{what}, result {i}, batch-invariant", digest(other)


def recorded(device: torch.device | str, argv: Sequence[str], launches: Counted | None) -> dict:
    """What a file has: the header of a run, the package's version, the digests of the tables, and those of results, and
    what many launches gave."""
    index = torch.device(device).index or 0
    tables = {
        name: table_of(launch.facts_for(index, invariant).table).title
        for name, invariant in (("table", False), ("shipped_table", True))
    }
    versions = {"format": FORMAT, "version": cute_softmax.__version__, **tables}
    return {
        "header": make_header(argv) | versions,
        "bits": dict(measured(device)),
        "launches": None if launches is None else launches._asdict(),
    }


def load(path: Path) -> dict:
    """The contents of a file. Raises OSError where there is none, ValueError for one of another kind."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or set(found) != {"header", "bits", "launches"}:
        raise ValueError(f'{path.name} is no record of bits: an object of "header", "bits" and "launches"')
    if found["header"].get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {found['header'].get('format')!r}, not {FORMAT}")
    return found


def differences(before: dict, now: dict) -> list[str]:
    """What differs between two records, a line each: bits, and results that one of them lacks."""
    lines = []
    for what in sorted({*before["bits"], *now["bits"]}):
        old, new = before["bits"].get(what), now["bits"].get(what)
        if old != new:
            lines.append(f"{what}: {old or 'not recorded'} -> {new or 'not there any more'}")
    return lines


def main(argv: Sequence[str]) -> int:
    """The exit status of `python -m benchmarks bits`."""
    parser = of_bits()
    given = parser.parse_args(argv)
    if given.launches < 0:
        parser.error("--launches must be at least 0")
    if not torch.cuda.is_available():
        print("bits are those of an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    path = given.folder / gpu_folder(torch.cuda.get_device_name()) / "checks" / "bits.json"
    before = None
    if not given.save:
        try:
            before = load(path)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    device, counted = current_device(), None
    calls = CALLS if given.launches else ()
    for _ in precompile([*inputs(), *calls], called):
        pass
    if calls:
        counted = repeat(calls, arguments_of, given.launches, device)
        for label, times in counted.differing.items():
            print(f"{label}: {times} calls gave other bits than the first")
        print(
            f"{counted.launches:,} calls beside other work in {counted.seconds:.1f} s, "
            f"{sum(counted.differing.values())} with other bits"
        )
    now, failed = recorded(device, ["bits", *argv], counted), bool(counted and counted.differing)
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        print(f"saved {len(now['bits'])} digests in {path}")
        return int(failed)
    lines = differences(before, now)
    for line in lines:
        print(line)
    for key in ("version", "table", "shipped_table", "torch", "cutlass_dsl"):
        if before["header"].get(key) != now["header"].get(key):
            print(f"{key}: {before['header'].get(key)} -> {now['header'].get(key)}")
    print(f"{len(lines)} of {len(now['bits'])} differ")
    return int(failed or bool(lines))
