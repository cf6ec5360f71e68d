"""The benchmarks' plain data: cases and suites."""

from __future__ import annotations

import pytest

from benchmarks import cases, operations, report, requirements
from benchmarks.cases import LADDER, PROVIDERS, SPECIALISTS, Case
from benchmarks.suites import SUITES


def test_the_seed_shapes_are_all_there():
    shapes = {case.shape for case in SUITES["rows-forward"].cases}
    assert len(shapes) == 13
    assert {(32768, 1024), (32768, 6144), (8192, 8192), (4096, 8192), (4096, 131072)} <= shapes


def test_traffic_counts_every_input_and_output_once():
    assert Case("softmax", (4, 8), "bf16").traffic == 2 * 4 * 8 * 2
    assert Case("softmax_backward", (4, 8), "fp32").traffic == 3 * 4 * 8 * 4


def test_traffic_of_masks():
    scores = 2 * 3 * 4 * 8 * 2 * 2
    for mode, more in (
        (cases.SCALED, 0), (cases.MASK, 2 * 3 * 4 * 8), (cases.ROW_MASK, 8), (cases.SHARED_MASK, 32),
        (cases.BATCH_MASK, 64), (cases.GROUP_MASK, 8), (cases.GROUP_BIAS, 16),
    ):  # fmt: skip
        assert Case("masked_softmax", (2, 3, 4, 8), mode=mode).traffic == scores + more, mode
    # Of 4 x 8 scores 1 + 2 + 3 + 4 are read, and all written.
    assert Case("masked_softmax", (2, 3, 4, 8), mode=cases.CAUSAL).traffic == 6 * (32 + 10) * 2


def test_traffic_of_a_product_and_its_gradients():
    mode = f"{cases.DEPTH}3"
    assert Case("softmax_matmul", (2, 4, 8), mode=mode).traffic == 2 * (4 * 8 + (4 + 8) * 3) * 2
    # Scores, values and what comes in are read, gradients of scores and values written.
    case = Case("softmax_matmul_backward", (2, 4, 8), "fp32", mode=mode)
    assert case.traffic == 2 * (2 * 4 * 8 + (4 + 2 * 8) * 3) * 4 and case.output_shape == (2, 4, 8)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
def test_suites_are_made_of_known_parts(suite):
    assert suite.cases and len(set(suite.cases)) == len(suite.cases)
    assert set(suite.providers) <= {*PROVIDERS, *SPECIALISTS, *LADDER} and "cute_softmax" in suite.providers
    for case in suite.cases:
        assert case.op in operations.OPERATIONS and case.op in cases.STREAMS
        # Inputs, output and the check's copies fit a GPU of 40 GB.
        assert case.traffic < 20e9
    assert {r.suite for r in requirements.REQUIREMENTS} <= set(SUITES)
    # A type that is always the same is the suite's: that of cases is replaced by the one that is asked for.
    assert {case.dtype for case in suite.cases} == {"bf16"}


def test_another_dtype_is_another_suite_but_for_fixed_ones():
    forward = SUITES["rows-forward"].with_dtype("fp16")
    assert forward.name == "rows-forward-fp16" and {c.dtype for c in forward.cases} == {"fp16"}
    assert SUITES["rows-forward"].with_dtype("bf16") == SUITES["rows-forward"]
    fixed = SUITES["fp32-rows"].with_dtype("bf16")
    assert fixed.name == "fp32-rows" and {c.dtype for c in fixed.cases} == {"fp32"}
    results_of = {
        dtype: {c.result for c in SUITES["vocabularies"].with_dtype(dtype).cases}
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert results_of == {"bf16": {"bf16", "fp32"}, "fp16": {"fp16", "fp32"}, "fp32": {"fp32", "bf16"}}
    assert report.suite_title("rows-forward-fp16") == SUITES["rows-forward"].title
    assert report.suite_title("matmul-backward") == SUITES["matmul-backward"].title
    assert report.suite_title("matmul-fp16") == SUITES["matmul"].title


def test_other_shapes_keep_the_modes_of_a_suite():
    suite = SUITES["overhead"].with_shapes([(2, 3), (4, 5)])
    assert len(suite.cases) == 8 and len({c.mode for c in suite.cases}) == 4


@pytest.mark.parametrize("text", ["", "4x", "0x4", "4xfour", "-1x2"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError):
        cases.parse_shape(text)


def test_shapes_parse():
    assert cases.parse_shape("4096x8192") == (4096, 8192)


def test_a_reduction_reads_its_input_and_returns_the_kept_dimensions():
    case = Case("logsumexp", (4, 8, 2), dim=(0, -1))
    assert case.traffic == 4 * 8 * 2 * 2 and case.output_shape == (8,)
    assert Case("softmax", (4, 8, 2), dim=(0, -1)).output_shape == (4, 8, 2)


def test_labels_tell_the_cases_apart():
    assert Case("softmax", (4, 8)).label == "4 x 8"
    assert Case("softmax", (4, 8), dim=(0,), view=cases.TRANSPOSED).label == "4 x 8, transposed, dim 0"
    assert Case("softmax", (4, 8, 2), dim=(1, 2), mode="grad").label == "4 x 8 x 2, dim 1, 2, grad"
    for suite in SUITES.values():
        assert len(set(cases.labels(suite.cases))) == len(suite.cases)
    assert cases.labels(SUITES["reductions"].cases)[1] == "32768 x 50304, amax"


@pytest.mark.parametrize(
    ("suite", "wanted"),
    [
        ("columns-forward", {((128, 1048576), (0,)), ((1024, 262144), (0,)), ((4096, 65536), (0,))}),
        ("columns-tall", {((65536, 4096), (0,)), ((262144, 1024), (0,)), ((1048576, 64), (0,))}),
        (
            "any-dims",
            {
                ((32, 512, 56, 56), (1,)),
                ((8, 1000, 128, 128), (1,)),
                ((64, 128, 32, 256), (1, 3)),
                ((8, 16, 2048, 2048), (-2,)),
            },
        ),
        (
            "split-rows",
            {
                ((512, 1048576), (-1,)),
                ((64, 3000001), (-1,)),
                ((64, 16777216), (-1,)),
                ((4, 268435456), (-1,)),
            },
        ),
        (
            "views",
            {((16384, 4097), (-1,)), ((16384, 8192), (0,)), ((16384, 8192), (1,)), ((8192, 50257), (-1,))},
        ),
    ],
)
def test_suites_over_any_dimension(suite, wanted):
    assert {(case.shape, case.dim) for case in SUITES[suite].cases} == wanted


def test_the_backward_takes_every_shape_of_the_forward():
    both = [case.shape for name in ("columns-forward", "columns-tall") for case in SUITES[name].cases]
    assert [case.shape for case in SUITES["columns-backward"].cases] == both


def test_other_shapes_keep_dims_and_views():
    suite = SUITES["views"].with_shapes([(64, 33)])
    assert {(c.dim, c.view) for c in suite.cases} == {(c.dim, c.view) for c in SUITES["views"].cases}
