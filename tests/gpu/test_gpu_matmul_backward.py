"""The backward of softmax_matmul on the device: shapes, shared values, masks, strides, dtypes, bits."""

import math

import pytest
import torch
from checking import FACTOR, Guarded, equal_bits, random
from gradients import Call, Gradients, call

from cute_softmax import softmax_matmul
from cute_softmax.dispatch.matmul import backward
from cute_softmax.dispatch.matmul.request import Upstream, request_of
from cute_softmax.plan import NotPlanned

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def computed(c: Call, scores=None, values=None, grad=None, result=None, lse=None) -> Gradients:
    """By our kernel; from other tensors of the same values where they are given."""
    if result is None:
        _, result, lse = c.torch(torch.float64)
    request = request_of(
        c.scores if scores is None else scores,
        c.values if values is None else values,
        c.mask,
        c.bias,
        c.scale,
        c.causal,
        c.zero,
        sink=c.sink,
    )
    upstream = Upstream(result.to(c.values.dtype), lse.float(), c.grad if grad is None else grad, c.lse_grad)
    return Gradients(*backward.backward(request, upstream, c.bias is not None))


def same(a: Gradients, b: Gradients) -> bool:
    return all(x is y is None or equal_bits(x, y) for x, y in zip(a, b, strict=True))


def checked(c: Call, factor: float = FACTOR, **tensors) -> Gradients:
    found = computed(c, **tensors)
    c.check(found, factor)
    assert same(found, computed(c, **tensors)), "a second call gave other bits"
    return found


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("depth", [8, 40, 64, 120, 128])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (64, 128), (65, 136), (100, 1000), (1000, 264), (2048, 64)]
)
def test_shapes(rows, columns, depth, dtype):
    checked(call((2,), rows, columns, depth, dtype, scale=0.3))


@pytest.mark.parametrize("sink", [(1,), (3, 1, 1), (2, 3, 130, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": -10, "zero": True}, {"mask": (130, 264), "bias": (130, 264)}]
)
@pytest.mark.parametrize("depth", [33, 64, 256])
def test_sinks(sink, options, depth):
    """Their gradients from the launch that makes delta; of the log-sum-exps, too."""
    c = call((2, 3), 130, 264, depth, scale=0.3, sink=sink, owners=(2, 1), **options)
    c.lse_grad = random((2, 3, 130), fp32, 9).abs()  # what one sink of all rows sums does not cancel
    found = checked(c)
    right = c.torch(torch.float64)[0]
    for wrong in (torch.zeros_like(found.sink), -found.sink):
        with pytest.raises(AssertionError, match="dsink"):
            c.check(Gradients(right.scores, right.values, right.bias, wrong.double()))
    none = torch.full_like(c.sink, -torch.inf)
    c.sink = none
    assert not computed(c).sink.any()


def test_sinks_of_a_model():
    """A number a head in the values' dtype, by autograd: as a column more of the scores that is dropped."""
    scores, values = random((2, 4, 200, 256), bf16, 1), random((2, 4, 256, 64), bf16, 2)
    sink = random((4,), bf16, 3).requires_grad_()
    scores, values = scores.requires_grad_(), values.requires_grad_()
    grad = random((2, 4, 200, 64), bf16, 4)
    ours = softmax_matmul(scores, values, scale=0.125, causal=56, sink=sink[:, None, None])
    found = torch.autograd.grad(ours, (scores, values, sink), grad)
    leaves = [t.detach().double().requires_grad_() for t in (scores, values, sink)]
    c = Call(leaves[0], leaves[1], grad, scale=0.125, causal=56)
    whole = c.whole(c.shown(leaves[0], None), leaves[2][:, None, None])
    exact = torch.softmax(whole, -1)[..., :256] @ leaves[1]
    right = torch.autograd.grad(exact, leaves, grad.double())
    for got, expected in zip((ours, *found), (exact, *right), strict=True):
        assert (got.double() - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("depth", [136, 192, 256, 320, 512])
def test_deep_values(depth):
    checked(call((2,), 300, 264, depth, scale=0.3))


@pytest.mark.parametrize("depth", [64, 512])
def test_split_dv_is_as_near_as_torchs(depth):
    """Few heads are walked through in several parts, whose float32 sums are rounded once."""
    c = call((1,), 2048, 2048, depth)
    exact, theirs, ours = c.torch(torch.float64)[0], c.torch(bf16)[0], computed(c)
    off, allowed = ((x.values.double() - exact.values).square().mean().sqrt() for x in (ours, theirs))
    assert off <= 1.1 * allowed
    checked(call((1, 2), 200, 255, depth, causal=0, owners=(1, 1)))


@pytest.mark.parametrize(
    ("batch", "owners"),
    [
        ((2, 3), (2, 1)),
        ((2, 3), (1, 3)),
        ((2, 3, 4), (2, 3, 1)),
        ((2, 3, 4), (1, 3, 1)),
        ((2, 3), (3,)),
        ((2, 3), ()),
        ((), ()),
    ],
)
def test_values_shared_by_heads(batch, owners):
    checked(call(batch, 200, 264, 64, owners=owners))


def test_few_columns_are_split():
    """Parts of dV are added up in one order."""
    checked(call((1,), 8192, 128, 64, scale=0.2))
    checked(call((1, 4), 2048, 128, 128, owners=(1, 1), causal=-500, zero=True))


@pytest.mark.parametrize("causal", [0, 1, 63, 64, 200, -1, -100, 10**9, -(10**9)])
@pytest.mark.parametrize("columns", [256, 257])
def test_causal(causal, columns):
    checked(call((2,), 300, columns, 64, causal=causal, zero=True))


def test_rows_in_which_nothing_counts():
    c = call((2,), 130, 264, 64, causal=-10, zero=True)
    found = checked(c)
    assert not found.scores[:, :10].any()
    c.zero = False
    found = computed(c)
    assert not found.scores[:, :10].any() and not found.scores.isnan().any()
    assert found.values[:, :64].isnan().all()
    c = call((2,), 130, 264, 64)
    c.mask = torch.ones(130, 264, dtype=torch.bool, device="cuda")
    c.mask[5], c.mask[7, 100:] = False, False
    checked(c)


@pytest.mark.parametrize("columns", [264, 263])
@pytest.mark.parametrize("shape", ["full", "heads", "rows", "columns", "one"])
def test_mask_and_bias(shape, columns):
    shape = {
        "full": (2, 3, 130, columns),
        "heads": (1, 3, 130, columns),
        "rows": (130, 1),
        "columns": (2, 1, 1, columns),
        "one": (1,),
    }[shape]
    checked(call((2, 3), 130, columns, 64, mask=shape, zero=True))
    checked(call((2, 3), 130, columns, 64, bias=shape, scale=0.25))
    checked(call((2, 3), 130, columns, 64, owners=(2, 1), bias=shape, mask=shape, causal=3, zero=True))


@pytest.mark.parametrize("columns", [1, 7, 127, 255, 1023])
def test_odd_rows(columns):
    checked(call((3,), 70, columns, 64, scale=0.5))


@pytest.mark.parametrize(("scores", "dtype"), [(fp32, bf16), (fp32, fp16), (fp16, bf16), (bf16, fp16)])
def test_scores_of_another_dtype(scores, dtype):
    # float32 gradients are not rounded themselves: that delta is summed from a rounded result then shows.
    factor = 2 * FACTOR if scores == fp32 else FACTOR
    checked(call((2,), 100, 255, 128, dtype, scores=scores), factor)
    checked(call((2,), 129, 384, 64, dtype, scores=scores, causal=0, scale=0.1), factor)


@pytest.mark.parametrize("depth", [1, 7, 33, 100])
def test_odd_depths(depth):
    checked(call((2,), 100, 256, depth))


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with rows (dimension -2) slower than the batch."""
    return tensor.movedim(-2, 0).contiguous().movedim(0, -2)


def test_strides():
    c = call((2, 4), 128, 264, 64)
    plain = checked(c)
    assert same(plain, checked(c, values=turned(c.values), grad=turned(c.grad)))
    swapped = c.scores.transpose(0, 1).contiguous().transpose(0, 1)
    assert same(plain, checked(c, scores=swapped))
    wide = torch.cat([c.scores, c.scores], -1)[..., :264]
    assert same(plain, checked(c, scores=wide))
    odd = torch.cat([c.scores[..., :1], c.scores], -1)[..., 1:]
    assert torch.allclose(checked(c, scores=odd).scores.float(), plain.scores.float(), atol=1e-2)
    c.grad = c.grad[..., :1, :1].expand_as(c.grad)
    checked(c)


def test_gradient_of_the_log_sum_exps():
    c = call((2, 3), 130, 264, 64, owners=(2, 1), scale=0.5)
    c.lse_grad = torch.randn(2, 3, 130, device="cuda", generator=torch.Generator("cuda").manual_seed(6)) * 5
    checked(c)
    c.lse_grad = c.lse_grad[:1, :1].expand(2, 3, 130)
    checked(c)


def test_scores_shared_by_values():
    c = call((3,), 128, 256, 64)
    c.scores = c.scores[:1]
    checked(c)


@pytest.mark.parametrize("scale", [20.0, 500.0, -3.0])
def test_large_scores(scale):
    """Rows in which one element is all."""
    checked(call((2,), 130, 264, 64, scale=scale))
    checked(call((2,), 130, 263, 64, fp16, scale=min(scale, 50.0), scores=fp32), 2 * FACTOR)


def test_nan_and_infinity_stay_in_their_rows():
    c = call((2,), 130, 264, 64)
    c.scores[0, 3, 5] = math.nan
    c.scores[1, 7, 9] = math.inf
    found = computed(c)
    assert found.scores[0, 3].isnan().all() and found.scores[1, 7].isnan().all()
    assert found.scores.isnan().sum() == 2 * 264
    assert found.values.isnan().all()


@pytest.mark.parametrize(("rows", "columns"), [(65, 136), (64, 128), (65, 135), (1, 1)])
def test_nothing_else_is_written(rows, columns):
    c = call((2,), rows, columns, 64, causal=-3, zero=True)
    _, result, lse = c.torch(torch.float64)
    tensors = {
        "scores": Guarded.of(c.scores),
        "grad": Guarded.of(c.grad),
        "values": Guarded.of(c.values),
        "dscores": Guarded(c.scores.shape, bf16),
        "dvalues": Guarded(c.values.shape, bf16),
        "output": Guarded.of(result.to(bf16)),
        "lse": Guarded.of(lse.float()),
    }
    given = {name: guarded.tensor for name, guarded in tensors.items()}
    form = backward.form_of(c.scores.shape, [False], 64, given, c.causal, 1.0, 1.0, True)
    made = backward.planned(*form)
    backward.run(backward.bound(made), given)
    for name, guarded in tensors.items():
        guarded.check(written=name in ("dscores", "dvalues"))
    c.check(Gradients(given["dscores"], given["dvalues"]))


@pytest.mark.parametrize("options", [{}, {"causal": 0}, {"owners": (1,)}], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(2048, 2048), (2047, 2045)])
def test_many_steps_give_the_same_bits_again(rows, columns, options):
    """Rings that go round and round, on all SMs."""
    c = call((16,), rows, columns, 128, scale=0.3, **options)
    _, result, lse = c.torch(torch.float64)
    found = computed(c, result=result, lse=lse)
    c.check(found)
    for _ in range(10):
        assert same(found, computed(c, result=result, lse=lse))


def test_nothing_to_do():
    for rows, columns, depth in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        c = call((2,), rows, columns, depth)
        upstream = Upstream(c.grad, torch.zeros(2, rows, device="cuda"), c.grad)
        found = backward.backward(request_of(c.scores, c.values), upstream)
        assert found[0].shape == c.scores.shape and not found[1].any()


def test_memory():
    c = call((8,), 2048, 2048, 128)
    _, result, lse = c.torch()
    result, lse = result.to(bf16), lse.float()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    computed(c, result=result, lse=lse)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    # dV is a result, too.
    assert extra <= 1.05 * 2 * c.scores.numel() + 2 * c.values.numel()


def test_too_deep():
    c = call((1,), 64, 64, 520)
    with pytest.raises(NotPlanned, match="D up to 512"):
        computed(c)


def test_operator():
    c = call((2, 3), 130, 264, 64, owners=(2, 1), bias=(3, 130, 264), scale=0.5)
    _, result, lse = c.torch(torch.float64)
    arguments = (c.scores, c.values, result.to(bf16), lse.float(), c.grad, 0.5, None, False, None, c.bias)
    torch.library.opcheck(backward.operator, (*arguments, True, None))
    torch.library.opcheck(backward.operator, (*arguments, False, lse.float()))
    *found, of_no_sink = torch.compile(backward.operator, fullgraph=True)(*arguments, True, None)
    assert same(Gradients(*found), computed(c)) and not of_no_sink.numel()


def test_graph_and_stream():
    c = call((2,), 130, 264, 64)
    _, result, lse = c.torch(torch.float64)
    expected = computed(c, result=result, lse=lse)
    arguments = request_of(c.scores, c.values), Upstream(result.to(bf16), lse.float(), c.grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward.backward(*arguments)
    found[0].fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert same(Gradients(*found), expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = backward.backward(*arguments)
    stream.synchronize()
    assert same(Gradients(*found), expected)


@pytest.mark.parametrize(("depth", "compiled"), [(64, False), (64, True), (520, False)])
def test_through_the_public_function(depth, compiled):
    """What no kernel is planned for goes through torch's operations."""
    c = call((2, 3), 130, 264, depth, owners=(2, 1), bias=(3, 1, 264), mask=(130, 264), scale=0.5, causal=20)
    c.zero = True
    c.lse_grad = torch.randn(2, 3, 130, device="cuda") / 8
    leaves = [t.clone().requires_grad_() for t in (c.scores, c.values, c.bias)]

    def both(scores, values, bias):
        options = {"scale": 0.5, "mask": c.mask, "bias": bias, "causal": 20, "empty_rows": "zero"}
        return softmax_matmul(scores, values, **options, return_lse=True)

    outputs = (torch.compile(both, fullgraph=True) if compiled else both)(*leaves)
    torch.autograd.backward(outputs, (c.grad, c.lse_grad))
    c.check(Gradients(*(t.grad for t in leaves)), 2 * FACTOR)


def test_gradients_of_gradients():
    s, v = (torch.randn(2, 8, 8, device="cuda", dtype=bf16, requires_grad=True) for _ in range(2))
    (ds,) = torch.autograd.grad(softmax_matmul(s, v).float().square().sum(), s, create_graph=True)
    ds.float().square().sum().backward()
    assert s.grad.isfinite().all() and v.grad.any()
