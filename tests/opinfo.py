"""PyTorch's own samples and error inputs (its OpInfo database) as the judge of our functions and of `accelerate`.

::

    python tests/opinfo.py           judge on the GPU (on the CPU where there is none) and print a table
    python tests/opinfo.py --save    and write it to benchmarks/results/<gpu>/checks/opinfo.json
    python tests/opinfo.py --jobs 16 by so many processes

Every sample is checked as it is (forward), with its tensors laid out with gaps (strided), for the gradient of its
input, and with `out`. A result must have torch's dtype and shape, under `accelerate` its strides, too, and infinities
and NaN where torch has them. It must be as close to float64 as torch's own result on the same device, within a factor
of 2, or within 2 units in the last place of the largest element (gradients: or of the largest gradient that is
handed in).
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
try:
    import expecttest  # noqa: F401
except ImportError:  # torch's testing modules derive a class from its TestCase, which nothing here uses
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo, SampleInput  # noqa: E402

# Those modules freeze torch's flags for the whole process, which is not theirs here.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

from remembered import forget_calls  # noqa: E402

import cute_softmax  # noqa: E402
from benchmarks import results  # noqa: E402
from cute_softmax.runtime import launch  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROUTES = ("functions", "accelerate")
CHECKS = ("forward", "strided", "gradient", "out")
BACKWARD = "_softmax_backward_data"
SAFE = "torch.ops.aten._safe_softmax.default"
NOT_REPLACED = ("amax", "sum")  # by `accelerate`


def _masked(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """In the arguments of torch.masked."""
    return lambda input, dim, *, dtype=None, mask=None: function(input, dim, dtype, mask=mask)


def _safe(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return cute_softmax.softmax(input, dim, dtype, empty_rows="zero")


# By the OpInfo's name: what stands for it here, in the same arguments.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": cute_softmax.softmax,
    "log_softmax": cute_softmax.log_softmax,
    "logsumexp": cute_softmax.logsumexp,
    "amax": cute_softmax.amax,
    "sum": cute_softmax.sum,
    "masked.softmax": _masked(cute_softmax.softmax),
    "masked.log_softmax": _masked(cute_softmax.log_softmax),
    BACKWARD: cute_softmax.softmax_backward,
    SAFE: _safe,
}


class Skip(Exception):
    """Why a check does not apply."""


@dataclass
class Verdict:
    """What came of the checks of one operator, dtype and route.

    handed_on: of those that passed, how many ATen computed alone, by reason.
    """

    operator: str
    dtype: str
    route: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    handed_on: Counter[str] = field(default_factory=Counter)

    def count(self, what: str, check: Callable[[], str]) -> None:
        """Do a check, which returns why it was handed on ("" if it was not)."""
        try:
            why = check()
        except Skip as skip:
            self.skipped[str(skip)] += 1
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"[:300])
        else:
            self.passed += 1
            if why:
                self.handed_on[why] += 1


def tasks() -> list[tuple[int, torch.dtype]]:
    """What is judged, one by one: (place in torch's database, dtype)."""
    return [(i, dtype) for i, op in enumerate(op_db) if op.name in FUNCTIONS for dtype in DTYPES]


def judge(device: str, wanted: Sequence[tuple[int, torch.dtype]] | None = None) -> list[Verdict]:
    """The checks of some tasks (all, unless given) on a device, "cuda" or "cpu"."""
    with warnings.catch_warnings(), _launches() as launched:
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        return [
            verdict
            for i, dtype in (tasks() if wanted is None else wanted)
            for verdict in _judge(op_db[i], device, dtype, launched)
        ]


def judge_by(jobs: int, device: str) -> list[Verdict]:
    """All checks, by several processes: most of the time goes into kernels that compile for the first time."""
    shares = [tasks()[i::jobs] for i in range(jobs)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        found = [v for share in pool.map(judge, [device] * jobs, shares) for v in share]
    order = [(_name(op_db[i]), _name_of(dtype), route) for i, dtype in tasks() for route in ROUTES]
    return sorted(found, key=lambda v: order.index((v.operator, v.dtype, v.route)))


def _name(op: OpInfo) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _judge(op: OpInfo, device: str, dtype: torch.dtype, launched: list) -> list[Verdict]:
    """Of each route, with the same samples and random numbers."""
    verdicts = [Verdict(_name(op), _name_of(dtype), route) for route in ROUTES]
    ways = [(verdict, _Way(op, verdict.route, launched)) for verdict in verdicts]
    for i, sample in enumerate(_samples(op, device, dtype)):
        for verdict, way in ways:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                for check in CHECKS:
                    verdict.count(f"{check} of sample {i}", partial(getattr(way, check), sample))
    for i, error in enumerate(op.error_inputs(device) if op.error_inputs_func is not None else ()):
        for verdict, way in ways:
            verdict.count(f"error {i}", partial(way.error, error))
    return verdicts


def _samples(op: OpInfo, device: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    """Torch's samples. Where they ask for results in float64, the same once more for each of our dtypes."""
    torch.manual_seed(0)
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        if op.name == SAFE:  # its samples are float32, whatever is asked for
            sample = sample.transform(lambda t: _leaf(t, dtype) if isinstance(t, torch.Tensor) else t)
        yield sample
        if sample.kwargs.get("dtype") is torch.float64:
            for wanted in DTYPES:
                yield sample.transform(lambda t, d=wanted: d if isinstance(t, torch.dtype) else t)


def _leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


@contextmanager
def _launches() -> Iterator[list]:
    """What is launched meanwhile: one entry a launch."""
    launched: list = []
    found = launch.function_of

    def counting(kernel):
        function = found(kernel)

        def launching(*arguments):
            launched.append(kernel)
            return function(*arguments)

        return launching

    forget_calls()
    launch.function_of = counting
    try:
        yield launched
    finally:
        launch.function_of = found
        forget_calls()


class _Way:
    """One operator by one route; every check returns why it was handed on, "" if our kernels took part."""

    def __init__(self, op: OpInfo, route: str, launched: list):
        self.op, self.route, self.launched = op, route, launched
        self.ours = FUNCTIONS[op.name] if route == "functions" else op.op

    def forward(self, sample: SampleInput) -> str:
        sample = sample.transform(lambda t: t.detach() if isinstance(t, torch.Tensor) else t)
        torchs, given = self._torchs(sample), sample.input.clone()
        ours, why = self._run(lambda: _call(self.ours, sample), sample)
        torch.testing.assert_close(sample.input, given, rtol=0, atol=0, equal_nan=True, msg="input changed")
        largest = sample.input.abs().max().item() if self.op.name == BACKWARD else 0.0
        self._compare(ours, torchs, _call(self.op.op, _wide(sample)), sample, largest)
        if self.route == "accelerate":
            assert ours.stride() == torchs.stride(), f"strides {ours.stride()}, torch's {torchs.stride()}"
        return why

    def strided(self, sample: SampleInput) -> str:
        return self.forward(sample.noncontiguous())

    def gradient(self, sample: SampleInput) -> str:
        def gradient(function: Callable[..., torch.Tensor], sample: SampleInput, upstream=None):
            result = _call(function, sample)
            if upstream is None:
                upstream = torch.randn_like(result)
            (found,) = torch.autograd.grad(result, sample.input, upstream.to(result.dtype))
            return found, upstream

        self._torchs(sample)
        torchs, upstream = gradient(self.op.op, sample)
        keep = _keep(sample)
        if keep is not None:
            upstream = torch.where(keep, upstream, 0)
            torchs, _ = gradient(self.op.op, sample, upstream)
        (ours, _), why = self._run(lambda: gradient(self.ours, sample, upstream), sample)
        exact, _ = gradient(self.op.op, _wide(sample), upstream)
        largest = upstream.abs().max().item() if upstream.numel() else 0
        self._compare(ours, torchs, exact, sample, largest)
        return why

    def out(self, sample: SampleInput) -> str:
        if not self.op.supports_out:
            raise Skip("torch has no out here")
        if not self._takes_out():
            raise Skip("no out here")
        sample = sample.transform(lambda t: t.detach() if isinstance(t, torch.Tensor) else t)
        torchs, exact = self._torchs(sample), _call(self.op.op, _wide(sample))
        gaps = torch.empty(*torchs.shape, 2, dtype=torchs.dtype, device=torchs.device)[..., 0]
        outs = [torch.empty_like(torchs), gaps, torchs.new_empty(0)]
        whys = []
        for out in outs:
            result, why = self._run(lambda o=out: _call(self.ours, sample, out=o), sample)
            assert result is out
            self._compare(out, torchs, exact, sample)
            whys.append(why)
        return "" if "" in whys else whys[0]

    def error(self, error) -> str:
        """The same kind of error: torch's own type, or the ones that we promise for wrong arguments."""
        sample = error.sample_input
        promised = (error.error_type,) if self.route == "accelerate" else (TypeError, ValueError, IndexError)
        if "out" in sample.kwargs and not self._takes_out():
            raise Skip("no out here")
        if self.route == "functions" and sample.input.dim() > 64 and sample.input.is_cuda:
            raise Skip("no limit of 64 dimensions here")
        try:
            self._run(lambda: _call(self.ours, sample), sample)
        except (error.error_type, *promised):
            return "errors are ATen's" if self.route == "accelerate" else ""
        raise AssertionError(f"no {error.error_type.__name__}")

    def _torchs(self, sample: SampleInput) -> torch.Tensor:
        try:
            return _call(self.op.op, sample)
        except RuntimeError as error:
            raise Skip("torch itself refuses it") from error

    def _takes_out(self) -> bool:
        return self.route == "accelerate" or "out" in inspect.signature(self.ours).parameters

    def _run(self, call: Callable, sample: SampleInput) -> tuple:
        """(result, why it was handed on)."""
        before = len(self.launched)
        if self.route == "functions":
            result, why = call(), _unserved(sample)
        else:
            with cute_softmax.accelerate() as acceleration:
                result = call()
            report = acceleration.report()
            whys = [reason for _, reason in report.handed_on]
            why = whys[0] if whys else _unserved(sample)
            if self.op.name in NOT_REPLACED:
                why = "not an operator that accelerate replaces"
            elif sample.input.is_cuda:
                assert report.served or whys, "neither served nor handed on"
        if len(self.launched) > before:
            return result, ""
        if self.op.name == BACKWARD and sample.input.requires_grad:
            why = "a second derivative"
        assert why, "our kernels did not run, and nothing says why"
        return result, why

    def _compare(self, ours, torchs, exact, sample: SampleInput, largest: float = 0.0) -> None:
        """Raise AssertionError where our result is not as good as torch's."""
        assert (ours.dtype, tuple(ours.shape)) == (torchs.dtype, tuple(torchs.shape)), (
            f"{ours.dtype} of {tuple(ours.shape)} instead of {torchs.dtype} of {tuple(torchs.shape)}"
        )
        eps = max(torch.finfo(t.dtype).eps for t in (ours, sample.input) if t.dtype.is_floating_point)
        keep = _keep(sample)
        ours, torchs, exact = (t.detach().double() for t in (ours, torchs, exact))
        if keep is not None:  # torch.masked says nothing of the others
            keep = keep.expand(ours.shape)
            ours, torchs, exact = ours[keep], torchs[keep], exact[keep]
        assert torch.equal(ours.isnan(), torchs.isnan()), "NaN elsewhere than torch's"
        infinite, finite = torchs.isinf(), torchs.isfinite()
        assert torch.equal(ours[infinite], torchs[infinite]), "infinities elsewhere than torch's"
        ours, torchs, exact = ours[finite], torchs[finite], exact[finite]
        if not ours.numel():
            return
        error, torch_error = ((t - exact).abs().max().item() for t in (ours, torchs))
        allowed = max(2 * torch_error, 2 * eps * max(exact.abs().max().item(), largest))
        assert error <= allowed, f"off by {error:.3g}, torch by {torch_error:.3g}; allowed is {allowed:.3g}"


def _call(function: Callable[..., torch.Tensor], sample: SampleInput, **more: object) -> torch.Tensor:
    return function(sample.input, *sample.args, **sample.kwargs, **more)


def _wide(sample: SampleInput) -> SampleInput:
    """The same values in float64, with results in float64."""

    def wide(t):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            return _leaf(t, torch.float64)
        return torch.float64 if isinstance(t, torch.dtype) else t

    return sample.transform(wide)


def _keep(sample: SampleInput) -> torch.Tensor | None:
    """The mask of a sample of torch.masked."""
    return sample.kwargs.get("mask")


def _unserved(sample: SampleInput) -> str:
    """Why our functions leave a sample to ATen, if they do."""
    if not sample.input.is_cuda:
        return "a CPU tensor"
    if not sample.input.numel():
        return "an empty tensor"
    asked = [sample.input.dtype, *(t for t in sample.kwargs.values() if isinstance(t, torch.dtype))]
    return next((str(d).removeprefix("torch.") for d in asked if d not in launch.DTYPE_NAMES), "")


def table(verdicts: list[Verdict]) -> str:
    """One line per operator, dtype and route, and what failed."""
    lines = []
    for v in verdicts:
        counts = [f"{v.passed:4} passed", f"{len(v.failed)} failed"]
        counts += [f"{n} skipped: {why}" for why, n in v.skipped.items()]
        counts += [f"{n} handed on: {why}" for why, n in v.handed_on.items()]
        lines.append(f"{v.operator:<40} {v.dtype:<9} {v.route:<11} {', '.join(counts)}")
        lines += [f"    {failure}" for failure in v.failed]
    passed, failed, skipped = (
        sum(n) for n in zip(*((v.passed, len(v.failed), v.skipped.total()) for v in verdicts), strict=True)
    )
    on = sum(v.handed_on.total() for v in verdicts)
    return "\n".join([*lines, f"{passed} passed ({on} of them by ATen), {failed} failed, {skipped} skipped"])


def save(verdicts: list[Verdict], arguments: list[str]) -> Path:
    """Write the committed file of this GPU; its header is that of any results file."""
    header = results.make_header(arguments) | {"command": " ".join(["python tests/opinfo.py", *arguments])}
    path = results.FOLDER / results.gpu_folder(header["gpu"]) / "checks" / "opinfo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n    ".join(json.dumps(vars(v)) for v in verdicts)
    text = json.dumps(header, indent=2).replace("\n", "\n  ")
    path.write_text(f'{{\n  "header": {text},\n  "rows": [\n    {rows}\n  ]\n}}\n', encoding="utf-8")
    return path


def load(path: Path) -> tuple[dict[str, object], list[Verdict]]:
    """The header and the verdicts of a file that `save` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["header"], [Verdict(**row) for row in found["rows"]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write the committed results of this GPU")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.save and device == "cpu":
        parser.error("--save writes the results of an NVIDIA GPU; there is none here")
    if asked.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {asked.jobs}")
    verdicts = judge_by(asked.jobs, device) if asked.jobs > 1 else judge(device)
    print(table(verdicts))
    if asked.save:
        print(save(verdicts, arguments))
    return int(any(v.failed for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
