"""The jobs for compute-sanitizer hold every form of the classes that they are made for."""

import sys
from itertools import product
from math import prod
from pathlib import Path

import checking
import classes
import pytest

from cute_softmax.ladder import RUNGS
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.shards import MERGES, OF_SLICES
from cute_softmax.plan.short import short_class
from cute_softmax.plan.topk_long import HELD_K, NO_ROOM, ROOMS
from cute_softmax.runtime import launch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import sanitize_family
import sanitize_heads
import sanitize_ladder
import sanitize_losses
import sanitize_matmul
import sanitize_ring
import sanitize_shards
import sanitize_short
import sanitize_stream
import scored_panels
import simulated
import torch


@pytest.fixture(scope="module")
def kernels() -> list:
    """Of softmax_matmul."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "DEVICE", "cpu")
        patch.setattr(sanitize_matmul.launch, "device_facts", lambda index: H200)
        jobs = sanitize_matmul.jobs(H200, ["bf16", "fp16"])
        return list(dict.fromkeys(k for job in jobs for k in job.kernels))


def test_every_form_of_the_forward(kernels):
    found = [k for k in kernels if k.movement == "matmul" and k.instruction == "wgmma" and not k.stats]
    configs = {
        "turns": lambda k: k.alternate and k.cluster == 1 and not k.split,
        "parts of turns": lambda k: k.alternate and k.cluster == 1 and k.split,
        "clusters": lambda k: k.alternate and k.cluster > 1,
        "two blocks": lambda k: k.blocks == 2,
        "one block": lambda k: not (k.alternate or k.split or k.blocks == 2 or k.paired),
        "parts": lambda k: k.split and not k.alternate,
        "pairs": lambda k: k.paired,
    }
    forms = {
        name: (lambda k, name=name: bool(getattr(k, name))) for name in ("causal", "scaled", "zero", "lse")
    }
    forms |= {
        "plain": lambda k: k.name.count("_") <= 4 and k.vector == 8,
        "no vectors": lambda k: k.vector == 1,
        "fp16": lambda k: k.dtypes[1] == "fp16",
    }
    extras = {name: (lambda k, name=name: bool(getattr(k, name))) for name in ("mask", "bias", "lines")}
    extras["fp32"] = lambda k: k.dtypes[0] == "fp32"
    missing = [
        (config, form)
        for config, form in product(configs, forms | extras)
        if not any(configs[config](k) and (forms | extras)[form](k) for k in found)
    ]
    assert missing == [*(("two blocks", extra) for extra in extras), ("pairs", "mask")]  # which it never has
    assert {k.depth for k in found} == {64, 128, 192, 256} and {k.vector for k in found} == {1, 2, 8}


def test_every_form_with_sinks(kernels):
    found = [k for k in kernels if k.movement == "matmul" and k.sink]
    for instruction, names in (("wgmma", ("split", "paired", "wide")), ("mma", ("split",))):
        of_it = [k for k in found if k.instruction == instruction]
        for name in names:
            assert {bool(getattr(k, name)) for k in of_it} == {False, True}, (instruction, name)


def test_every_form_with_statistics(kernels):
    found = [k for k in kernels if k.movement == "matmul" and k.stats]
    for instruction in ("wgmma", "mma"):
        of_it = [k for k in found if k.instruction == instruction]
        for name in ("split", "scaled", "zero", "wide", "mask"):
            assert {bool(getattr(k, name)) for k in of_it} == {False, True}, (instruction, name)
        assert {k.blocks for k in of_it} == {1, 2}


def test_every_form_without_wgmma(kernels):
    found = [k for k in kernels if k.movement == "matmul" and k.instruction == "mma"]
    assert {(k.warpgroups, k.blocks) for k in found} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {k.depth for k in found} == {64, 128, 192, 256} and {k.vector for k in found} == {1, 2, 8}
    assert {k.access for k in found} >= {(16, 16), (16, 4), (16, 2), (4, 4)}
    for split in (False, True):
        for name in ("causal", "scaled", "zero", "lse", "mask", "bias", "lines", "stats", "wide"):
            some = {bool(getattr(k, name)) for k in found if k.split == split}
            assert some == {False, True}, (split, name)


def test_every_form_of_the_backward(kernels):
    found = [k for k in kernels if k.movement == "matmul_backward"]
    # Values in registers, in shared memory, and warpgroups that share them.
    for low, high in ((0, 128), (128, 256), (256, 512)):
        of_depth = [k for k in found if low < k.depth <= high]
        for name in ("causal", "mask", "lines", "bias"):
            assert {bool(getattr(k, name)) for k in of_depth} == {False, True}, (high, name)
        assert {k.sent for k in of_depth} == {True, False}
        assert {(k.dtypes[0], k.sent) for k in of_depth} >= {("fp32", True), ("fp32", False)}
        assert {k.dtypes[2] for k in of_depth} >= {"bf16", "fp32"}
    assert {k.depth for k in found} == {64, 128, 192, 256, 384, 512} and {k.rows for k in found} == {32, 64}
    deltas = [k for k in kernels if k.movement == "matmul_delta"]
    assert {k.lse_grad for k in deltas} == {k.sink for k in deltas} == {False, True} and {
        k.vector for k in deltas
    } >= {2, 4, 8}


def test_every_prologue_on_every_kind_of_configuration():
    forms = [*sanitize_family.forms(["softmax", "softmax_backward"], ["bf16", "fp32"])]
    for math in ("softmax", "softmax_backward"):
        found = {
            (f.made.kernel.prologue, sanitize_family.kind(f.made.row_class)) for f in forms if f.math == math
        }
        prologues = {p for p, _ in found}
        for name in ("scale", "causal", "alpha", "sink") + (
            ("bias", "mask", "zero") if math == "softmax" else ()
        ):
            assert any(getattr(p, name) for p in prologues), name
        for p in prologues:
            assert len({kind for other, kind in found if other == p}) >= 8, p


def test_forms_are_planned_as_their_calls_are(monkeypatch):
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    for form in sanitize_family.forms(["softmax", "logsumexp", "entropy"], ["bf16", "fp32"]):
        if prod(form.shape) < 1 << 17:
            case = sanitize_family.case_of(form)
            work = sanitize_family.work_of(form, case, case.placed()[0])
            with classes.given(1):
                assert work.plan(H200).kernel == form.made.kernel, form.made.kernel.name


def test_every_rung_of_the_ladder():
    forms = [form for job in sanitize_ladder.jobs("sm_90a", ["bf16", "fp32"]) for form in job.kernels]
    assert {(f.rung, f.rows) for f in forms} == {(0, False)} | {(step.number, True) for step in RUNGS}
    assert {f.alignment for f in forms if f.rung == 7} >= {2, 4, 16}


def test_every_kernel_of_losses():
    """Losses in registers and in shared memory, alone and in clusters; and each class that routers have."""
    jobs = list(sanitize_losses.jobs(H200, ["bf16", "fp32"]))
    kernels = {k for job in jobs for k in job.kernels}
    assert {k.movement for k in kernels} == {"row", "mean", "rescale", "topk", "topk_long"}
    losses = [k for k in kernels if k.movement == "row"]
    assert {(k.staging[0], k.cluster_n > 1) for k in losses} >= {
        ("direct", False),
        ("direct", True),
        ("shared", True),
    }
    assert {k.edges for k in losses} == {k.prologue.squares for k in losses} == {False, True}
    assert {(k.forward, k.queued) for k in kernels if k.movement == "topk"} == {
        (False, False),
        (True, False),
        (True, True),
    }
    long = [k for k in kernels if k.movement == "topk_long"]
    assert {k.edges for k in long} == {k.chosen for k in long} == {k.split for k in long} == {False, True}
    assert {(k.most, k.threads) for k in long if not k.held} == {
        (room.k, room.threads) for room in (*ROOMS, NO_ROOM)
    }
    held = [k for k in long if k.held]
    assert {k.most for k in held} == {room.k for room in (*ROOMS, NO_ROOM) if room.k <= HELD_K}
    assert {k.edges for k in held} == {k.chosen for k in held} == {False, True}


def test_every_class_of_streamed_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "DEVICE", "cpu")
        patch.setattr(sanitize_short.launch, "device_facts", lambda index: H200)
        jobs = [*sanitize_stream.jobs(["logsumexp", "entropy", "selective"], ["bf16"])]
    kernels = [kernel for job in jobs for kernel in job.kernels]
    assert {k.movement for k in kernels} == {"stream"} and {k.edges for k in kernels} == {False, True}
    assert {k.prologue.against for k in kernels} == {"", "loss", "weights"}
    assert len({*kernels}) == len(kernels) and {k.math for k in kernels} == {
        "logsumexp",
        "entropy",
        "selective",
    }


def test_every_kernel_of_shared_rows(monkeypatch):
    """What the jobs launch is what they say; their checks hold where kernels are simulated."""
    jobs, launched = list(sanitize_shards.jobs(H200, ["bf16", "fp32"])), []
    simulated.install(monkeypatch)
    monkeypatch.setattr(launch, "function_of", launched.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, where, *a: to(t, "cpu" if where == "cuda" else where, *a)
    )
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    for job in jobs:
        launched.clear()
        job.check()
        assert set(launched) == set(job.kernels), job.what
    kernels = {k for job in jobs for k in job.kernels}
    assert {k.movement for k in kernels} == {"row", "merge", "slice"}
    slices = [k for k in kernels if k.movement == "slice"]
    assert {k.math for k in slices} == set(OF_SLICES) and {k.edges for k in slices} == {False, True}
    assert {k.scaled for k in slices} == {k.smoothed for k in slices} == {False, True}
    assert {k.math for k in kernels if k.movement == "merge"} == set(MERGES)


def test_every_kind_of_ring(monkeypatch):
    """What the jobs launch is what they say; their checks hold where kernels are simulated."""
    launched = []
    simulated.install(monkeypatch)
    monkeypatch.setattr(launch, "function_of", launched.append)
    jobs = list(sanitize_ring.jobs(H200, ["bf16", "fp32"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, where, *a: to(t, "cpu" if where == "cuda" else where, *a)
    )
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    for job in jobs[::3]:
        launched.clear()
        job.check()
        assert set(launched) == set(job.kernels), job.what
    kernels = {k for job in jobs for k in job.kernels}
    assert len(kernels) == len(jobs) and all(k.ring for k in kernels)
    assert {k.math for k in kernels} == {*sanitize_ring.MATHS} - {sanitize_ring.LOSS}
    for of in (lambda k: k.edges, lambda k: bool(k.prologue.target), lambda k: k.exchanges):
        assert {of(k) for k in kernels} == {False, True}
    assert {k.cluster_n for k in kernels} >= {1, 2, 8} and {k.lag for k in kernels} == {1, 2, 3}
    assert max(k.ring + k.lag for k in kernels) <= sanitize_ring.TURNS


def test_heads_are_of_every_kind_of_configuration():
    """Several rows a thread, a warp, a block, a cluster a row; aligned and not."""
    for head in sanitize_heads.HEADS.values():
        found = [k for n in sanitize_heads.LENGTHS for k in sanitize_heads.classes_of(head, "bf16", (3, n))]
        assert len(found) == len(head.launches) * len(sanitize_heads.LENGTHS)
        rows = [k for k in found if k.movement == "row"]
        assert {min(k.cluster_n, 2) for k in rows} == {1, 2} == {min(k.rows_per_thread, 2) for k in rows}
        assert {k.edges for k in rows} == {True, False}


@pytest.mark.parametrize("name", sanitize_heads.HEADS)
def test_heads_launch_what_they_say(name, launches):
    head, x = sanitize_heads.HEADS[name], torch.randn(3, 1000).bfloat16().requires_grad_()
    y = head.ours(x, torch.tensor([5, 0, 999]))
    torch.autograd.grad(y, x, torch.ones_like(y))
    around = ("share", "mean", "total", "rescale")
    names = {**launch.DTYPE_NAMES, torch.int64: "int64"}
    called = {
        (n.math, n.prologue, tuple(sorted(names[d] for d in n.dtypes)))
        for n in launches
        if n.math not in around
    }
    kernels = sanitize_heads.classes_of(head, "bf16", (3, 1000))
    assert called >= {(k.math, k.prologue, tuple(sorted(k.dtypes))) for k in kernels}, name
    assert {(k.math, k.prologue) for k in kernels} == {*head.launches}


def test_every_class_of_short_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "DEVICE", "cpu")
        patch.setattr(sanitize_short.launch, "device_facts", lambda index: H200)
        found = [*sanitize_short.jobs(["softmax", "logsumexp"], ["bf16"])]
    kernels = {kernel for job in found for kernel in job.kernels}
    for math, access in (("softmax", (8, 8)), ("logsumexp", (8,))):
        dtypes = ("bf16", "bf16")
        every = {c for n in range(1, 65) if (c := short_class(math, "sm_90a", dtypes, n))}
        assert every <= kernels and {c.capacity for c in every} == {1, 2, 4, 8, 12, 16, 24, 32, 48, 64}
        assert any(k.math == math and k.access[: len(access)] != access for k in kernels)
    assert {how for k in kernels for how in k.laid} == {"dense", "apart", "single"}
    chosen = {k for k in kernels if k.prologue.target}
    assert {k.capacity for k in chosen} >= {4, 8, 12, 64, 96, 128} and {k.whole for k in chosen} == {
        True,
        False,
    }
    assert {k.prologue.target for k in chosen} == {"loss", "found"}
    assert {k.whole for k in kernels if k.prologue.mask} == {True, False}


def test_scores_in_every_kind_of_panel(monkeypatch):
    """Of one math, whose forms are those of the others."""
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    found = [
        kernel for job in scored_panels.jobs(H200, ["softmax"], ["bf16", "fp32"]) for kernel in job.kernels
    ]
    kinds = {
        "shifted": lambda k: k.shifted,
        "edges": lambda k: k.edges,
        "clusters": lambda k: k.cluster_n > 1,
        "parts": lambda k: k.exchange and not k.streaming,
        "read twice": lambda k: k.streaming and not k.ahead,
        "a row ahead": lambda k: k.ahead,
        "a resident bias": lambda k: any(not k.bits(i) for i in k.residents),
        "a resident mask": lambda k: any(map(k.bits, k.residents)),
        "words": lambda k: any(k.words(i) for i in k.facts.beside),
        "vectors": lambda k: any(not k.words(i) for i in k.facts.beside),
        "a mask alone": lambda k: k.prologue.name == "mask",
        "causal": lambda k: k.prologue.causal,
        "a sink": lambda k: k.prologue.name == "sink",
    }
    assert [kind for kind, of in kinds.items() if not any(map(of, found))] == []
    assert {k.orientation for k in found} == {"row", "column"} and len(found) == 58
