"""Compiled panels, read without a GPU: registers, stack, shared memory and the width of every access.

On sm_90a each configuration, forward and backward, and each way of exchange and streaming; of shifted columns, of
reductions and of the other architectures a selection of that; and of all these so many that each configuration and any
two other properties are compiled together.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from itertools import product

import classes
import numpy as np
import pytest
from compiled import accesses, check_all, check_compiled, compile_and_read, compile_anew
from covering import check_covered, cost_of_class, covering, of_class
from panels import FEW_COLUMNS

from cute_softmax.kernels.common.reduce import two_sum
from cute_softmax.plan import MATHS, PanelClass
from cute_softmax.plan.describe import plan_shape
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.modes import MODES
from cute_softmax.plan.problem import ITEM_SIZE
from cute_softmax.plan.table import table_of

TABLE = table_of()
# Classes -> bytes of stack that they may use, with the reason. All others use none.
STACK = {
    "column*cluster*": (
        224,
        "three or four CTAs an SM overlap loading with storing and leave 64 or 80 registers",
    ),
    "row*cluster*": (152, "likewise, and a state for each CTA of the cluster"),
    "column*x8_*streaming2": (
        384,
        "two CTAs an SM leave 64 registers, of which running states take 16 and terms 64",
    ),
    "*_streaming*": (96, "two CTAs an SM leave 64 registers"),
    "column64x1x8x8*": (112, "a thread has eight columns for itself; twelve CTAs an SM leave 80 registers"),
    "column16x8x16x8_modes*": (
        56,
        "five CTAs an SM leave 96 registers, of which addresses of two modes take 32",
    ),
    "column16x8x20x8_modes*": (208, "likewise, and 20 vectors"),
    "column16x8x6x8_modes*": (
        200,
        "twelve CTAs an SM leave 40 registers, of which addresses of two modes take 12",
    ),
    "column16x8x5x8_modes*": (104, "likewise"),
    "column16x8x14x8_modes*_shifted": (8, "eight CTAs an SM leave 64 registers"),
    "column64x1x20x4_modes*": (
        280,
        "a thread has four columns for itself, 80 of the 128 registers that eight CTAs an SM leave",
    ),
    "column64x1x16x2_modes*_shifted": (
        80,
        "a thread has two columns for itself; ten CTAs an SM leave 96 registers",
    ),
    "column16x8x4x8_shifted": (24, "twelve CTAs of sm_120a leave 40 registers"),
    "row1x128x20x8_modes*": (8, "five CTAs an SM leave 96 registers"),
    "column16x16x8x4_modes*": (
        48,
        "three CTAs an SM leave 80 registers, of which addresses of two modes take 16",
    ),
    "column16x32x8x8_modes*": (8, "two CTAs an SM leave 64 registers"),
    "row1x128x16x8_modes1_2": (16, "five CTAs an SM leave 96 registers"),
    "column16x8x8x8*": (32, "eight CTAs an SM leave 64 registers"),
    "row1x128x8x8*": (16, "eight CTAs an SM leave 64 registers"),
    "*_exchange": (128, "two CTAs an SM leave 64 registers"),
    "row*_exchange_edges": (80, "likewise"),
}
# Where registers hold a part of the row, what is spilled is read and written again with every chunk (56 bytes more were
# 5 to 13% of the time).
STACK_OF_REGISTERS = 8
# Two of its stages use the same exponentials, which are spilled rather than evaluated again.
STACK_OF_ENTROPY = 256
# What a class has from its configuration.
CONFIG = ("threads", "steps", "cluster_n", "min_blocks", "ahead", "registers")
TURNS = 32
ACROSS = {"column": 16, "wide": 32, "row": 1}


def panel_class(config, math: str, pair: tuple[str, str], arch: str = "sm_90a", **fields) -> PanelClass:
    dtypes = classes.operands(math, pair)
    full = MATHS[math, True].full
    standard = {
        "orientation": "column",
        "vector": config.vector_bytes // max(ITEM_SIZE[d] for d in dtypes[:full]),
        "kept_modes": 1,
        "reduced_modes": 1,
        "exchange": False,
        "buffers": 1,
    }
    fields = standard | {"edges": False, "shifted": False} | fields
    across = ACROSS[fields["orientation"]]
    fields["orientation"] = "column" if fields["orientation"] == "wide" else fields["orientation"]
    fields.setdefault("access", (fields["vector"],) * len(MATHS[math, True].inputs))
    return PanelClass(
        math=math,
        architecture=arch,
        dtypes=dtypes,
        across=config.threads if config.alone and fields["orientation"] == "column" else across,
        threads=config.threads,
        steps=config.steps,
        cluster_n=config.cluster_n,
        min_blocks=config.min_blocks,
        **fields,
    )


def selection(arch: str, math: str, every: int) -> Iterator[PanelClass]:
    """Each `every`-th configuration of an architecture in columns and half as many in rows, dtypes and modes in turns;
    and what exchanges or streams in each combination."""
    inputs = len(MATHS[math, True].inputs)
    held = TABLE.held_of(inputs, bool(MATHS[math, True].outputs))
    configs = [t for t in held if t.cluster_n <= ARCHITECTURES[arch].cluster_limit]
    rows = [t for t in configs if not (t.alone or t.narrow)]
    taken = [*product(["column"], configs[-1::-every]), *product(["row"], rows[-2 :: -2 * every])]
    for turn, (orientation, config) in enumerate(taken):
        pair = ("fp32", "fp32") if turn % 3 == 2 else ("bf16", "bf16")
        modes = {"kept_modes": MODES[turn % 2], "reduced_modes": MODES[turn // 2 % 2]}
        c = panel_class(config, math, pair, arch, orientation=orientation, **modes)
        if config.has_registers(inputs * c.vector, ARCHITECTURES[arch]):
            yield c
    shifted = [t for t in TABLE.shifted[inputs] if t.cluster_n <= ARCHITECTURES[arch].cluster_limit]
    for turn, config in enumerate(shifted[-1 :: -every - 2]):
        pair = ("fp32", "fp32") if turn % 3 == 1 else ("bf16", "bf16")
        yield panel_class(config, math, pair, arch, shifted=True, kept_modes=MODES[turn % 2])
    ways = [("column", True, True), ("row", True, True), ("column", False, True), ("column", True, False)]
    for turn, (orientation, exchange, streaming) in enumerate(
        (*ways, ("row", True, False))[:: (every + 1) // 2]
    ):
        pair = ("fp32", "fp32") if turn % 2 else ("bf16", "bf16")
        buffers = TABLE.streaming[inputs].buffers if streaming else 1
        fields = {"orientation": orientation, "exchange": exchange, "buffers": buffers}
        fields |= {"edges": orientation == "row"}
        c = panel_class(TABLE.streaming[inputs], math, pair, arch, **fields)
        while c.min_blocks > ARCHITECTURES[arch].ctas_of(c.shared_memory):  # as `plan_panel` does
            c = replace(c, steps=c.steps // 2)
        yield c
    deep = [d for d in TABLE.deep if d[1] == inputs and MATHS[math, True].outputs]
    held = [(orientation, config) for orientation, _ in deep for config in TABLE.deep[orientation, inputs]]
    held += [("row", TABLE.ahead)] if ("row", inputs) in deep else []
    forms = [(orientation, config, False) for orientation, config in held]
    forms += [(orientation, config, True) for orientation, config in held if orientation != "column"]
    for (orientation, config, anywhere), dtype in product(forms, ["bf16", "fp32"][: 2 if every == 1 else 1]):
        fields = {"orientation": orientation, "exchange": True, "buffers": config.buffers}
        fields |= {"ahead": config.ahead, "registers": config.registers}
        fields["edges" if orientation == "row" else "shifted"] = anywhere
        c = panel_class(config, math, (dtype, dtype), arch, **fields)
        if config.min_blocks <= ARCHITECTURES[arch].ctas_of(c.shared_memory):
            yield c


def expected_accesses(c: PanelClass) -> Counter:
    """Loads and stores of tensors in global memory: those of one chunk at least."""
    facts, expected = c.facts, Counter()
    for i, dtype in enumerate(c.dtypes[: facts.full]):
        out, one = i >= len(facts.inputs), ITEM_SIZE[dtype]
        size = one * (c.vector if out else c.access[i])
        # A lane's block and one behind the line, unless they stay as they lie; results in blocks, and at the ends of
        # rows in scalars.
        if c.shifted:
            expected[f"{'st' if out else 'cp.async'} {size}"] += c.chunk_steps * (
                1 if out or c.aligned else 2
            )
            expected[f"st {one}"] += c.chunk_steps * c.vector * out
            continue
        # A mask whose bits are kept comes through registers.
        how = "st" if out else "ld" if size < 4 or c.bits(i) else "cp.async"
        expected[f"{how} {size}"] += c.chunk_steps * c.vector * one // size
        expected[f"{'st' if out else 'ld'} {one}"] += c.edge_scalars
    for dtype in c.dtypes[facts.full :]:
        expected[f"st {ITEM_SIZE[dtype]}"] += c.slots
    return +expected


def may_use_stack(c: PanelClass) -> int:
    if c.registers:
        return STACK_OF_REGISTERS
    allowed = max([n for names, (n, _) in STACK.items() if fnmatch(c.name, names)], default=0)
    return allowed + (STACK_OF_ENTROPY if c.math == "entropy" else 0)


def check_panels(found: Iterable[PanelClass], tmp_path, monkeypatch, stack: int = 0):
    """Everything that is asserted of classes of panels; stack: bytes that any of them may use."""

    def check(c: PanelClass):
        ptx = (made := compile_and_read(c, tmp_path, monkeypatch)).ptx
        check_compiled(c, made, max(may_use_stack(c), stack), padding=8)
        # The compiler may write a loop out more than once; it may not narrow anything.
        got, wanted = accesses(ptx), expected_accesses(c)
        assert got.keys() == wanted.keys() and got >= wanted, f"{got}, not {wanted}"
        states = ptx.count("st.relaxed.gpu.global.b64")
        assert states == (c.published_bytes // 8 if c.exchange else 0), "a pair of numbers at a time"

    check_all(found, check)


# Every so many-th configuration of sm_90a.
EVERY = {
    "softmax": 1,
    "softmax_backward": 1,
    "logsumexp": 3,
    **dict.fromkeys(("sum", "amax", "log_softmax", "log_softmax_backward", "entropy"), 5),
}


@cache
def sampled() -> tuple[PanelClass, ...]:
    found = [c for math, every in EVERY.items() for c in selection("sm_90a", math, every)]
    for first, arch in enumerate(ARCHITECTURES):
        if arch != "sm_90a":
            for math in ("softmax", "softmax_backward"):
                found += classes.sample([*selection(arch, math, 5)], 3, first)
    return tuple(dict.fromkeys(found))


@cache
def chosen() -> list[PanelClass]:
    """Those that are compiled: among them each configuration of each math of the samples."""
    return covering(sampled(), has, cost_of_class)


def has(c: PanelClass) -> set:
    return of_class(c, CONFIG)


def test_configurations_and_any_two_properties_are_compiled():
    check_covered(sampled(), chosen(), has)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(TURNS))
def test_classes(turn, tmp_path, monkeypatch):
    check_panels(chosen()[turn::TURNS], tmp_path, monkeypatch)


@pytest.mark.parametrize("vector", [4, 2, 1])
def test_narrow_vectors(vector, tmp_path, monkeypatch):
    config = next(config for config in TABLE.held[1] if not config.alone)
    found = [
        panel_class(config, math, pair, orientation=orientation, vector=vector)
        for math, pair, orientation in (
            ("softmax", ("bf16", "bf16"), "column"),
            ("softmax_backward", ("fp16", "fp16"), "row"),
            ("softmax", ("fp32", "bf16"), "column"),
        )
    ]
    check_panels(found, tmp_path, monkeypatch)


def test_few_columns(tmp_path, monkeypatch):
    """Vectors and panels narrower than any table says."""
    found = [plan_shape(shape, dtype, dim=0, math=math).kernel for math, dtype, shape, _ in FEW_COLUMNS]
    check_panels([c for c in found if not c.exchange], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("math", "dtype", "shape", "dim", "steps"),
    [
        ("softmax", "fp32", (5, 4_000_001), 0, 5),  # shifted
        ("softmax_backward", "bf16", (1100, 60_001), 0, 5),  # in blocks that stay as they lie
        ("softmax", "bf16", (300, 261, 57, 57), 1, 9),  # likewise
        ("softmax", "bf16", (40, 1283, 56, 56), 1, 21),
        ("log_softmax", "fp32", (40, 3136, 56, 56), 1, 13),
        ("softmax_backward", "bf16", (513, 60_000), 0, 9),
        ("logsumexp", "bf16", (324, 64_000), 0, 11),
    ],
)
def test_steps_that_no_configuration_has(math, dtype, shape, dim, steps, tmp_path, monkeypatch):
    c = plan_shape(shape, dtype, dim=dim, math=math).kernel
    assert c.steps == steps, c.name
    # Of 832 such classes 13 use 8 to 40 bytes, and aligned ones up to 64.
    check_panels([c], tmp_path, monkeypatch, stack=16)


def test_each_field_shapes_the_code(tmp_path, monkeypatch):
    config = next(config for config in TABLE.held[1] if not config.alone)
    c = panel_class(config, "softmax", ("bf16", "bf16"))
    base = compile_and_read(c, tmp_path, monkeypatch).ptx
    for change in (
        {"orientation": "row", "across": 1}, {"across": 8}, {"exchange": True}, {"buffers": 2},
        {"kept_modes": 2}, {"reduced_modes": 5},
    ):  # fmt: skip
        assert compile_and_read(replace(c, **change), tmp_path, monkeypatch).ptx != base, change
    assert compile_anew(c, tmp_path, monkeypatch).ptx == base


def test_two_sums_lose_nothing():
    """What the rounding of a float32 sum loses is found exactly, whichever number is the larger."""
    r = np.random.default_rng(0)
    a, b = (
        r.standard_normal(20000).astype(np.float32) * np.float32(2.0) ** r.integers(-20, 20, 20000)
        for _ in "ab"
    )
    a, b = a.astype(np.float32), b.astype(np.float32)
    total, lost = two_sum(a, b)
    assert total.dtype == lost.dtype == np.float32 and (total == a + b).all()
    assert (total.astype(np.float64) + lost == a.astype(np.float64) + b).all() and (lost != 0).any()
