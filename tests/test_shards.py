"""The kernels of rows that ranks share, run on the CPU by their PTX: what ranks do one after another in one process,
beside the whole rows in float64."""

from __future__ import annotations

import math
from itertools import pairwise, product

import emulated
import pytest
import torch
from checking import Guarded, equal_bits
from compiled import compile_anew
from cutlass import Int32
from test_emulated import close, made

from cute_softmax.dispatch.sharded import kernels
from cute_softmax.dispatch.sharded.states import Shared
from cute_softmax.kernels.maths import states
from cute_softmax.kernels.shards import merge
from cute_softmax.kernels.shards import slice as slice_kernel
from cute_softmax.plan.shards import MergeClass, MergePlan

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CUTS = {"halves": (0, 640, 1280), "odd": (0, 77, 77, 1000, 1283), "one": (0, 1280)}
HALVES = (0, 640, 1280)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    return emulated.install(monkeypatch, tmp_path)


def parts_of(cut: tuple[int, ...], **asked: object) -> list[Shared]:
    """What each rank's call asks."""
    return [Shared("none", a, b - a, cut[-1], **asked) for a, b in pairwise(cut)]


def sliced(x: torch.Tensor, part: Shared) -> torch.Tensor:
    """A rank's slice, in memory of its own."""
    return x[..., part.start : part.start + part.width].clone()


def shared(x: torch.Tensor, index: torch.Tensor | None, parts: list[Shared]):
    """(what each rank keeps of whole rows, the results): of one rank, as all must have the same bits."""
    every = torch.stack([kernels.states(sliced(x, p), index, p) for p in parts])
    found = [kernels.merged(every, index, p) for p in parts]
    for whole, results in found[1:]:
        assert equal_bits(whole, found[0][0])
        assert all(equal_bits(results[name], found[0][1][name]) for name in results)
    return found[0]


def finished(math_name: str, x: torch.Tensor, whole, parts: list[Shared], dtype, *of_call) -> torch.Tensor:
    """What the ranks' slices become, side by side, each written into guarded memory that begins anywhere."""
    found = []
    for n, part in enumerate(parts):
        to = Guarded((*x.shape[:-1], part.width), dtype, offset=n, device="cpu")
        kernels.finished(math_name, [sliced(x, part)], to.tensor, whole, part, *of_call)
        to.check()
        found.append(to.tensor)
    return torch.cat(found, -1)


def numbers(x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is asked of rows, in float64."""
    log_p = torch.log_softmax(x, -1)
    p = log_p.exp()
    return {
        "found": log_p.gather(-1, index[:, None])[:, 0],
        "lse": torch.logsumexp(x, -1),
        "entropy": -torch.where(p == 0, 0.0, p * log_p).sum(-1),
        "even": log_p.mean(-1),
    }


@pytest.mark.parametrize(("scale", "cut"), [(1.0, "halves"), (1.0, "odd"), (-0.5, "odd")])
@pytest.mark.parametrize("results", ["lse", "found", "entropy", "found entropy", "found lse even"])
def test_numbers_and_their_gradients(results, scale, cut, launches):
    cut = CUTS[cut]
    dtype = fp32 if scale == 1 else bf16
    x = made((5, cut[-1]), dtype)
    if results != "found lse even" and scale > 0:
        x[1, : cut[1]] = -math.inf
    index = torch.tensor([0, cut[-1] - 1, 700, 76, 77])
    index[1] = cut[1] + 3 if cut[1] < cut[-1] else 5
    if x[1, index[1]] == -math.inf:
        x[1, index[1]] = 0.0
    parts, names = parts_of(cut, scale=scale, results=results, dtype=fp32), results.split()
    chosen = index if "found" in names else None
    whole, found = shared(x, chosen, parts)
    leaf = x.double().requires_grad_()
    exact = numbers(leaf * scale, index)
    assert list(found) == names and all(close(found[n], exact[n].detach(), cut[-1]) for n in names)
    upstream = {n: made(5, fp32, 3 + i) for i, n in enumerate(names)}
    total = sum((exact[n] * upstream[n].double()).sum() for n in names)
    if "entropy" in names:  # of which torch has none beside -inf
        leaf.data.nan_to_num_(neginf=-1e4)
        exact = numbers(leaf * scale, index)
        total = sum((exact[n] * upstream[n].double()).sum() for n in names)
    (slope,) = torch.autograd.grad(total, leaf)
    given = finished("gradient", x, whole, parts, dtype, chosen, upstream)
    assert close(given, slope, cut[-1])
    assert {work.math for work in launches} >= {"state", "gradient"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("smoothing", "squares"), [(0.0, 0.0), (0.2, 0.1)])
def test_losses(smoothing, squares, reduction, launches):
    x, target = made((6, 1280), bf16), torch.tensor([0, 1279, -100, 640, 639, 77])
    asked = dict(reduction=reduction, ignore=-100, smoothing=smoothing, squares=squares)
    parts = parts_of(HALVES, results="loss lse", **asked)
    whole, found = shared(x, target, parts)
    leaf, counts = x.double().requires_grad_(), target != -100
    exact = torch.nn.functional.cross_entropy(leaf, target, reduction="none", label_smoothing=smoothing)
    lse = torch.logsumexp(leaf, -1)
    exact = exact + torch.where(counts, squares * lse.square(), 0.0)
    assert close(found["loss"], exact.detach(), 1280) and close(found["lse"], lse.detach(), 1280)
    share = torch.tensor([0.2]) if reduction == "mean" else None
    (slope,) = torch.autograd.grad(exact.sum() * 1.5 * (0.2 if reduction == "mean" else 1) + lse.sum(), leaf)
    upstream = {"lse": torch.ones(6), "loss": torch.tensor(1.5)}
    given = finished("gradient", x, whole, parts, bf16, target, upstream, share)
    assert close(given, slope, 1280)


def test_an_index_that_no_rank_has(launches):
    x = made((3, 1280), bf16)
    for wrong, ignore in ((1280, -1), (-1, -100), (-100, -1)):
        parts = parts_of(HALVES, results="found" if ignore == -1 else "loss", ignore=ignore)
        with pytest.raises(RuntimeError, match="trap"):
            shared(x, torch.tensor([3, wrong, 5]), parts)


@pytest.mark.parametrize(
    ("dtype", "wider", "cut"),
    [
        (bf16, bf16, "halves"),
        (bf16, bf16, "odd"),
        (fp16, fp16, "odd"),
        (fp32, fp32, "odd"),
        (fp32, fp32, "one"),
        (bf16, fp32, "odd"),
    ],
    ids=str,
)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_slices_of_a_softmax_and_their_gradients(log, dtype, wider, cut, launches):
    cut = CUTS[cut]
    x, scale = made((4, cut[-1]), dtype), 0.5 if dtype is fp16 else 1.0
    x[2, : cut[1]] = -math.inf
    if len(cut) == 2:
        x[2, -3:] = 1.0
    parts, name = parts_of(cut, scale=scale, dtype=wider, log=log), "log_softmax" if log else "softmax"
    whole, _ = shared(x, None, parts)
    function = torch.log_softmax if log else torch.softmax
    leaf = x.double().requires_grad_()
    exact = function(leaf * scale, -1)
    y = finished(name, x, whole, parts, wider)
    assert close(y, exact.detach(), cut[-1])
    dy = made(y.shape, wider, 7)
    dy = torch.where(y == -math.inf, 0.0, dy)
    every = torch.stack([kernels.sums(sliced(dy, p), sliced(y, p), p) for p in parts])
    total = kernels.total(every).unsqueeze(0)
    found = []
    for part in parts:
        d = Guarded((4, part.width), dtype, offset=3, device="cpu")
        kernels.finished(f"{name}_backward", [sliced(dy, part), sliced(y, part)], d.tensor, total, part)
        d.check()
        found.append(d.tensor)
    p = y.double().exp() if log else y.double()
    right = (
        dy.double() - p * dy.double().sum(-1, keepdim=True)
        if log
        else p * (dy.double() - (dy.double() * p).sum(-1, keepdim=True))
    )
    assert close(torch.cat(found, -1), right * scale, cut[-1])


def test_special_values(launches):
    """NaN, +inf, and rows of nothing but -inf, wherever they lie."""
    x = made((5, 1280), fp32)
    x[0, 700], x[1, 3], x[2, :] = math.nan, math.inf, -math.inf
    x[3, 640:] = -math.inf
    x[4, 0] = 3e38
    parts = parts_of(HALVES, results="lse", dtype=fp32)
    whole, found = shared(x, None, parts)
    assert close(found["lse"], torch.logsumexp(x.double(), -1), 1280)
    y = finished("softmax", x, whole, parts, fp32)
    assert close(y, torch.softmax(x.double(), -1), 1280)


def test_a_slice_with_gaps_between_rows(launches):
    """Rows of a wider matrix, and results between others: nothing else is touched."""
    wide = made((3, 2000), bf16)
    parts = parts_of((0, 501, 1001))
    whole, _ = shared(wide[:, 7:1008], None, parts)
    y = Guarded((3, 501), bf16, strides=(503, 1), offset=3, device="cpu")
    kernels.finished("softmax", [wide[:, 7:508]], y.tensor, whole, parts[0])
    y.check()
    assert close(y.tensor, torch.softmax(wide[:, 7:1008].double(), -1)[:, :501], 1001)


@pytest.mark.parametrize("columns", [1, 3, 8, 15, 5000, 20001])
def test_every_segment_is_written_once(columns, launches):
    x = made((3, columns), bf16)
    (part,) = parts_of((0, columns))
    whole, _ = shared(x, None, [part])
    assert close(finished("softmax", x, whole, [part], bf16), torch.softmax(x.double(), -1), columns)


def test_blocks_give_the_same_bits_on_any_number_of_ranks(launches):
    """Within `batch_invariant`: one, two and three ranks, with slices of blocks."""
    x, index = made((3, 1000), bf16), torch.tensor([0, 999, 500])
    found = []
    for cut in ((0, 1000), (0, 512, 1000), (0, 0, 256, 1000)):
        parts = parts_of(cut, results="found entropy", block=128, blocks=8)
        whole, results = shared(x, index, parts)
        y = finished("softmax", x, whole, parts, bf16)
        found.append((whole, *results.values(), y))
    assert all(equal_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert close(found[0][-1], torch.softmax(x.double(), -1), 1000)


def test_states_lie_as_the_plan_says():
    """What a launch computes is the plan's layout."""
    kernel = MergeClass("state", "sm_90a", ("fp32",), weighted=True)
    states = MergePlan(kernel, 5, 3, 2).states
    for row, block, rank, i in product(range(5), range(2), range(3), range(3)):
        assert merge.place_of(row, rank, block, i, 5, 2, 3) == states((row, (block, rank), i))
    assert states.cosize == 5 * 2 * 3 * 3


# -- Mutants -----------------------------------------------------------------------------------------------------------


def numbers_are_right(launches) -> None:
    test_numbers_and_their_gradients("found entropy", 1.0, "halves", launches)


def slices_are_right(launches) -> None:
    test_slices_of_a_softmax_and_their_gradients(False, fp32, fp32, "odd", launches)


def own_state(kernel, address, row, rank, *others):
    return MERGED(kernel, address, row, 0 * rank, *others)


MERGED = merge.MergeKernel.number
LOADED, PLACED = slice_kernel.SliceKernel.load, slice_kernel.SliceKernel.of_row
# (what is wrong, where, what stands there, what sees it).
MUTANTS = {
    "sums not moved": (merge.Online, "seen_from", lambda op, state, top: state[1:], slices_are_right),
    "weights not moved": (merge.Weighted, "seen_from", lambda op, state, top: state[1:], numbers_are_right),
    "the first rank's state alone": (merge.MergeKernel, "number", own_state, slices_are_right),
    "the sum of parts left as it is in a slice": (
        states,
        "numbers_of",
        lambda prologue, math, state, *chosen: [state[0], 1.01 * state[1], *state[2:], *chosen],
        slices_are_right,
    ),
    "nothing apart for the target": (
        slice_kernel.SliceKernel,
        "at_target",
        lambda kernel, score, known: known["alpha"],
        numbers_are_right,
    ),
    "a target one element off": (
        slice_kernel.SliceKernel,
        "of_row",
        lambda kernel, *row: (known := PLACED(kernel, *row)) | {"target": known.get("target", Int32(0)) + 1},
        numbers_are_right,
    ),
    "zeros in the place of what is read": (
        slice_kernel.SliceKernel,
        "load",
        lambda kernel, i, address, rX, *place: rX.fill(kernel.dtypes[i](0.0)),
        slices_are_right,
    ),
}


@pytest.mark.parametrize(("where", "name", "wrong", "seen"), MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_seen(where, name, wrong, seen, launches, monkeypatch):
    monkeypatch.setattr(emulated, "compile_and_read", compile_anew)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        seen(launches)
