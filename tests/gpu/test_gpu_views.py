"""Softmax, forward and backward, of views whose kept dimensions do not merge; guard bands intact."""

import pytest
import torch
from checking import DTYPES, Guarded, check_backward, check_softmax, equal_bits, random

from cute_softmax import softmax, softmax_backward
from cute_softmax.plan import NotPlanned
from cute_softmax.runtime import launch

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def views(dtype: str, columns: int):
    """(view, kept modes of its class)."""
    x = random((4, 5, 6, columns + 9), DTYPES[dtype], seed=columns, scale=2.0)
    return [
        (x[0, :, :4, :columns], 2),
        (x[0, :, 1:, 3 : columns + 3], 2),
        (x[:, 1:4, :5, :columns], 5),
        (x[1:, 2, :4, 1 : columns + 1], 2),
        (x[::2, ::3, ::4, :columns], 5),
        (x.as_strided((3, 4, 5, columns), (0, 7, 3, 1)), 5),  # rows that overlap
    ]


@dtypes
@pytest.mark.parametrize("columns", [1, 2, 7, 33, 64, 127, 1000, 1023, 4096, 20000, 50257])
def test_forward_and_backward(columns, dtype):
    for x, modes in views(dtype, columns):
        y = softmax(x)
        check_softmax(y, x)
        for _ in range(2):
            assert equal_bits(softmax(x), y), "a second call gave other bits"
        plan = launch.call_of("softmax", (x, y), (x.dim() - 1,)).plan
        assert getattr(plan.kernel, "kept_modes", 1) == modes or 1 in x.shape
        dy = random(x.shape, x.dtype, seed=1)
        strided = torch.empty_like(dy.flatten().repeat(2)).as_strided(
            x.shape, [2 * s for s in dy.stride()[:-1]] + [1]
        )
        strided.copy_(dy)
        dx = softmax_backward(strided, y)
        check_backward(dx.flatten(0, -2), dy.flatten(0, -2), y.flatten(0, -2))


@dtypes
@pytest.mark.parametrize("columns", [1, 9, 64, 1000, 1023, 20000])
def test_guarded(columns, dtype):
    """Inputs and results of other strides each, at odd places."""
    shape = (3, 4, 5, columns)
    places = [
        {"strides": (4 * 6 * (columns + 2), 6 * (columns + 2), columns + 2, 1), "offset": 3},
        {"strides": (columns, 3 * columns, 12 * columns, 1)},
        {"strides": (20 * columns + 8, 5 * columns, columns, 1), "offset": 1},
        {},
    ]
    x = random(shape, DTYPES[dtype], seed=columns)
    for place in places:
        for other in places:
            source, out = Guarded.of(x, **place), Guarded(shape, x.dtype, **other)
            softmax(source.tensor, out=out.tensor)
            out.check()
            source.check(written=False)
            check_softmax(out.tensor, x)
            both = Guarded.of(x, **place)
            softmax(both.tensor, out=both.tensor)
            both.check()
            check_softmax(both.tensor, x)
    y = softmax(x)
    dy = Guarded.of(random(shape, x.dtype, seed=2), **places[0])
    result = Guarded(shape, x.dtype, **places[2])
    launch.run("softmax_backward", (dy.tensor, Guarded.of(y, **places[1]).tensor, result.tensor), (3,))
    result.check()
    check_backward(result.tensor, dy.tensor, y)


@dtypes
def test_gradients_through_autograd(dtype):
    x = random((4, 5, 300), DTYPES[dtype], seed=3).requires_grad_()
    for _ in range(2):  # the second call takes the short way
        y = softmax(x[:, :3])
        dy = random(y.shape, y.dtype, seed=4)
        (dx,) = torch.autograd.grad(y, x, dy)
        check_backward(dx[:, :3], dy, y.detach())
        assert (dx[:, 3:] == 0).all()


def test_few_and_many_rows():
    x = random((70_000, 3, 40), torch.bfloat16)
    check_softmax(softmax(x[:, :2]), x[:, :2])
    check_softmax(softmax(x[:1, :2]), x[:1, :2])
    empty = x[:0, :2]
    assert softmax(empty).shape == empty.shape
    seven = x.flatten()[: 3**7].view((3,) * 7)[:2, :2, :2, :2, :2, :2]
    with pytest.raises(NotPlanned, match="6 dimensions that do not merge"):
        softmax(seven)
