"""Where tensors lie: alignment of base and rows, views, dimensions, in place, `out`; guard bands intact."""

import subprocess
import sys

import classes
import pytest
import torch
from checking import DTYPES, Guarded, check_backward, check_softmax, equal_bits, random

from cute_softmax import softmax, softmax_backward

COLUMNS = (1, 2, 7, 8, 9, 64, 127, 1000, 1023, 4096, 5000, 20000, 50257, 151937)


def call(source: Guarded, out: Guarded, x: torch.Tensor):
    softmax(source.tensor, out=out.tensor)
    out.check()
    source.check(written=False)
    assert equal_bits(source.tensor, x), "the input was changed"
    check_softmax(out.tensor, x)


@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
@pytest.mark.parametrize("columns", COLUMNS)
def test_offsets_and_row_strides(columns, pair):
    """Base offsets of 0 to 8 elements and padded rows, of the input alone, the output alone, and both."""
    source, result = (DTYPES[d] for d in pair)
    rows = 5
    x = random((rows, columns), source, seed=columns, scale=2.0)
    for offset in range(9):
        for pad in (0, 1, 3, 8):
            place = {"offset": offset, "strides": (columns + pad, 1)}
            alone = ((place, {}), ({}, place)) if pair in classes.SAME or offset == pad == 1 else ()
            for ours, theirs in ((place, place), *alone):
                call(Guarded.of(x, **ours), Guarded(x.shape, result, **theirs), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_new_results_of_misaligned_inputs(columns, dtype):
    wide = random((6, columns + 9), DTYPES[dtype], seed=columns)
    for first in range(9):
        x = wide[1:, first : first + columns]
        y = softmax(x)
        check_softmax(y, x)
        assert equal_bits(y, softmax(x))
        check_softmax(
            softmax(wide.flatten()[first : first + columns]), wide.flatten()[first : first + columns]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_view(dtype):
    """Dimension 0 of `x.t()` is contiguous."""
    for shape in ((7, 33), (3, 1000), (100, 1023), (5, 50257)):
        x = random(shape, DTYPES[dtype], seed=1).t()
        out = Guarded(x.shape, x.dtype, strides=x.stride())
        softmax(x, 0, out=out.tensor)
        out.check()
        check_softmax(out.tensor, x, 0)
        y = softmax(x, 0)
        assert y.stride() == x.stride()
        assert equal_bits(y, out.tensor)
        columns = softmax(x, 1)
        assert columns.stride() == x.stride()
        check_softmax(columns, x, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((3, 5, 33), -1),
        ((2, 3, 4, 127), 3),
        ((2, 3, 4, 5), (2, 3)),
        ((2, 3, 4, 5), (-1, -2, 1)),
        ((6, 7), (0, 1)),
        ((3, 1, 1, 40), (1, 3)),
        ((50, 1), 1),
        ((1, 50), 0),
        ((2, 3, 1000), [1, 2]),
    ],
    ids=str,
)
def test_dimensions(shape, dims, dtype):
    x = random(shape, DTYPES[dtype], seed=2, scale=2.0)
    y = softmax(x, dims)
    assert y.shape == x.shape and y.stride() == x.stride()
    check_softmax(y, x, dims)
    check_softmax(softmax(x, dims, dtype=torch.float32), x, dims)


@pytest.mark.parametrize("dtype", DTYPES)
def test_permuted_tensors_keep_their_format(dtype):
    """A permuted dense tensor is rows all the same, whatever its dimensions are called."""
    x = random((4, 6, 130), DTYPES[dtype], seed=4)
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0), (0, 2, 1), (1, 2, 0)):
        view = x.permute(order)
        dim = order.index(2)
        y = softmax(view, dim)
        assert y.stride() == view.stride()
        check_softmax(y, view, dim)
    channels_last = random((2, 64, 5, 7), DTYPES[dtype]).to(memory_format=torch.channels_last)
    y = softmax(channels_last, 1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    check_softmax(y, channels_last, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_rows(dtype):
    for columns in (5, 64, 1000, 20000):
        row = random((1, columns), DTYPES[dtype], seed=columns)
        x = row.expand(37, columns)
        y = softmax(x)
        check_softmax(y, x)
        out = Guarded(x.shape, x.dtype, offset=1)
        softmax(x, out=out.tensor)
        out.check()
        check_softmax(softmax(x.clone()), x)  # another Plan, which may add up in another order
        assert equal_bits(y[:1].expand(37, columns), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 1023, 20000, 50257, 200064, 400000])
def test_in_place(columns, dtype):
    """`out` is the input, in every kind of class: nothing is read after it was written."""
    x = random((11, columns), DTYPES[dtype], seed=columns, scale=3.0)
    for place in ({}, {"offset": 3}, {"strides": (columns + 5, 1), "offset": 1}):
        for online in (True, False):
            both = Guarded.of(x, **place)
            assert softmax(both.tensor, out=both.tensor, online=online) is both.tensor
            both.check()
            check_softmax(both.tensor, x)


@pytest.mark.parametrize(
    "pair", [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp32"), ("fp32", "fp16"), ("bf16", "fp16")]
)
def test_out_of_another_dtype(pair):
    source, result = (DTYPES[d] for d in pair)
    for columns in (3, 64, 1000, 20000):
        x = random((9, columns), source, seed=columns)
        out = Guarded(x.shape, result, offset=1, strides=(columns + 1, 1))
        softmax(x, out=out.tensor)
        out.check()
        check_softmax(out.tensor, x)


def test_out_of_other_strides():
    """Rows in another order, or far apart, or of one column among many."""
    x = random((6, 4, 100), torch.bfloat16)
    out = Guarded((6, 4, 100), torch.bfloat16, strides=(400, 100, 1))
    softmax(x, out=out.tensor)
    out.check()
    far = Guarded((24, 100), torch.bfloat16, strides=(100003, 1), offset=5)
    softmax(x.view(24, 100), out=far.tensor)
    far.check()
    assert equal_bits(far.tensor, out.tensor.view(24, 100))
    swapped = torch.empty(4, 6, 100, dtype=torch.bfloat16, device=x.device).transpose(0, 1)
    assert equal_bits(softmax(x, out=swapped), out.tensor)
    column = torch.empty(100, 24, dtype=torch.bfloat16, device=x.device).t()
    softmax(x.view(24, 100), out=column)
    check_softmax(column, x.view(24, 100))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_out(dtype):
    x = random((4, 64), DTYPES[dtype])
    with pytest.raises(ValueError, match="out overlaps input in memory without being the same tensor"):
        softmax(x[:3], out=x[1:])
    with pytest.raises(ValueError, match="several of its elements share one place in memory"):
        softmax(x, out=torch.empty_like(x[:1]).expand(4, 64))
    with pytest.raises(ValueError, match="several of its elements share one place in memory"):
        softmax(x, out=torch.empty(128, dtype=x.dtype, device=x.device).as_strided((4, 64), (8, 1)))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        other = softmax(x, out=x.new_empty(4, 63))
    assert torch.equal(other, softmax(x)) and torch.equal(softmax(x, out=x.new_empty(0)), other)
    with pytest.raises(ValueError, match="out is on cpu, input on cuda"):
        softmax(x, out=torch.empty(4, 64, dtype=x.dtype))
    with pytest.raises(ValueError, match=r"out has dtype torch.float32, the result has torch.bfloat16"):
        softmax(x, dtype=torch.bfloat16, out=x.new_empty(4, 64, dtype=torch.float32))
    halves = x.new_empty(8, 64)
    assert softmax(halves[:4].copy_(x), out=halves[4:]).data_ptr() == halves[4:].data_ptr()


def test_wrong_devices():
    x = random((4, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="out is on cuda:0, input on cpu"):
        softmax(x.cpu(), out=x)
    with pytest.raises(ValueError, match="grad is on cpu, output on cuda:0"):
        softmax_backward(x.cpu(), x)
    with pytest.raises(TypeError, match="softmax needs a floating-point tensor"):
        softmax(x.int())
    check_softmax(softmax(x.int(), dtype=torch.float32), x.int().float())


def test_arguments_are_checked_on_repeated_calls():
    """The second call of a form takes a shorter way: it refuses what the first refuses."""
    x = random((4, 64), torch.bfloat16)
    for _ in range(2):
        softmax(x)
        softmax(x, 1)
        softmax(x, (1,))
        for dim in (True, 1.0, (1.0,), (True,), "1", {1}):
            with pytest.raises(TypeError, match="dim must be an int or a sequence of ints"):
                softmax(x, dim)
        with pytest.raises(IndexError, match="dim=2 is out of range"):
            softmax(x, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 9, 64, 1000, 1023, 20000, 50257])
def test_misaligned_gradients(columns, dtype):
    """`grad` and `output` at any offset and row stride; the result is new, so their accesses are narrow."""
    y = softmax(random((5, columns), DTYPES[dtype], seed=columns))
    dy = random((5, columns), DTYPES[dtype], seed=columns + 1)
    for offset in range(9):
        for pad in (0, 1, 3, 8):
            place = {"offset": offset, "strides": (columns + pad, 1)}
            for first, second in ((place, {}), (place, place)):
                grad, output = Guarded.of(dy, **first), Guarded.of(y, **second)
                check_backward(softmax_backward(grad.tensor, output.tensor), dy, y)
                grad.check(written=False)
                output.check(written=False)
                assert equal_bits(grad.tensor, dy) and equal_bits(output.tensor, y)


def test_how_many_clusters_run_at_once():
    """Asked for in the first call of a process, before anything else has used the device."""
    code = (
        "from cute_softmax.runtime import launch; d = launch.facts_for(0, False, on_ranks=True);"
        "assert d.architecture.cluster_limit == 1 or 1 <= d.eights <= d.multiprocessors // 8, d"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
