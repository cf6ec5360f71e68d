"""Forms of eager calls on scores: what is launched is what the long way launches, and which calls share a form."""

import gc
import weakref

import pytest
import torch
from remembered import forget_forms, fresh_forms

from cute_softmax import log_softmax, softmax
from cute_softmax.api import softmax as api
from cute_softmax.dispatch.common import arguments, forms
from cute_softmax.dispatch.common.spec import scores_of
from cute_softmax.dispatch.softmax import kernels
from cute_softmax.plan.hardware import H200
from cute_softmax.runtime import launch, private

X = torch.randn(32, 64).bfloat16()
MASK, BIAS, ROWS = torch.rand(64) < 0.5, torch.randn(64).bfloat16(), torch.rand(32, 1)
CALLS = [
    {"scale": 0.5},
    {"scale": ROWS},
    {"scale": ROWS.bfloat16(), "mask": MASK},
    {"mask": MASK, "empty_rows": "zero"},
    {"bias": BIAS, "mask": None, "scale": 2},
    {"mask": MASK.expand(32, 64).clone(), "bias": torch.randn(32, 64)},
    {"causal": True},
    {"causal": 1000, "scale": 0.25},
    {"scale": 1.0, "alpha": 3},
    {"scale": 1.0, "mask": None, "causal": False},
    {"sink": ROWS},
    {"sink": ROWS.bfloat16(), "scale": 0.5, "mask": MASK},
]


@pytest.fixture
def launched(monkeypatch):
    """The classes and arguments of launches, without a GPU."""
    found = []
    monkeypatch.setattr(launch, "device_facts", lambda index, shipped_only=False: H200)
    monkeypatch.setattr(launch, "function_of", lambda kernel: lambda *given: found.append((kernel, given)))
    monkeypatch.setattr(launch, "_call", launch._call.__wrapped__)
    monkeypatch.setattr(arguments, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(forms, "empty_strided", lambda *form: torch.empty_strided(*form[:2], dtype=form[2]))
    monkeypatch.setattr(private, "current_stream", lambda device: 7)
    monkeypatch.setattr(private, "current_device", lambda: -1)
    fresh_forms(monkeypatch)
    return found


def count() -> int:
    return sum(len(same) for found in api._of_scores.values() for same in found.values())


def made(*tensor, function=softmax, **given) -> bool:
    """Whether a call makes a form."""
    before = count()
    function(*(tensor or (X,)), **given)
    return count() > before


@pytest.mark.parametrize("given", CALLS, ids=lambda given: "_".join(given))
@pytest.mark.parametrize("log", [False, True])
def test_a_call_is_that_of_the_long_way(given, log, launched):
    if log and "alpha" in given:
        given = {"scale": 3}
    for _ in range(3):
        made(function=log_softmax if log else softmax, **given)
    assert count() == 1
    (*scored, sink), spec = scores_of(X, (1,), X.dtype, log, **given)
    if sink is None:
        results = (kernels.forward(X, *scored, spec),)
    else:
        results = kernels.forward_with_sink(X, *scored, sink, spec)
    *ours, (kernel, expected) = launched
    assert len(ours) == 3
    own = {expected.index(result.data_ptr()) for result in results}
    if isinstance(given.get("scale"), torch.Tensor) and given["scale"].dtype != torch.float32:
        own.add(len(expected) - 2)  # a float32 copy of each call
    for k, got in ours:
        assert k == kernel and len(got) == len(expected)
        assert all(a == b for i, (a, b) in enumerate(zip(got, expected, strict=True)) if i not in own)


def test_numbers_are_those_of_the_call(launched):
    for scale in (0.5, 0.7, 3, -0.0, 1e300):
        softmax(X, scale=scale)
        assert launched[-1][1][5] == launch.float_bits(scale)
    for causal, offset in ((2, 2), (-7, -7), (1000, 64), (-1000, -32)):
        softmax(X, causal=causal)
        assert launched[-1][1][5] == offset
    softmax(X, causal=True)
    assert launched[-1][1][5] == 0 and count() == 3


def test_which_calls_share_a_form(launched):
    assert made(scale=0.5) and not made(scale=0.7) and not made(scale=3)
    assert made(scale=1) and not made(scale=1.0) and made(scale=1, alpha=2.0) and made(scale=0.5, alpha=2.0)
    assert made(mask=MASK) and not made(mask=~MASK) and made(mask=MASK.expand(32, 64).clone())
    assert made(causal=True) and made(causal=2) and not made(causal=-7)
    forget_forms()
    assert made(mask=MASK, empty_rows="zero") and not made(mask=MASK, empty_rows="".join(["ze", "ro"]))
    assert made(scale=0.5) and made(scale=0.5, dtype=torch.float32) and made(scale=0.5, online=False)
    assert made(X, 1, scale=0.5) and made(X, (0, 1), scale=0.5) and made(function=log_softmax, scale=0.5)
    forget_forms()
    assert made(bias=BIAS) and made(bias=BIAS.float()) and made(bias=BIAS.clone().requires_grad_())
    assert made(scale=ROWS) and made(scale=ROWS.half())
    assert not made(bias=-BIAS) and not made(scale=-ROWS)
    assert made(X.float(), scale=0.5) and made(X.repeat(1, 2)[:, :64], scale=0.5) and made(X[:8], scale=0.5)
    forget_forms()
    assert made(sink=ROWS) and not made(sink=-ROWS) and made(sink=ROWS.half()) and made(sink=ROWS[:1])


def test_what_torch_is_told_beside_the_call_is_part_of_a_form(launched):
    leaf = X.clone().requires_grad_()
    assert made(scale=0.5) and made(leaf, scale=0.5) and not made(leaf, scale=0.5)
    with torch.inference_mode():
        assert made(scale=0.5)
    with torch.autocast("cpu"):
        assert made(scale=0.5)
    assert not made(scale=0.5) and not made(leaf, scale=0.25)


def test_a_tensor_that_changed_is_looked_at_anew(launched):
    x, mask = X.clone(), MASK.clone()
    softmax(x, mask=mask)
    mask.resize_(32, 64)
    x.t_()
    with pytest.raises(ValueError, match="mask has shape"):
        softmax(x, mask=mask)
    assert made(x.t_(), mask=mask)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"mask": MASK, "empty_rows": "none"}, ValueError, "empty_rows is 'none'"),
        ({"mask": MASK[:5]}, ValueError, "mask has shape"),
        ({"mask": MASK.byte()}, TypeError, "mask is torch.uint8"),
        ({"scale": True}, TypeError, "scale must be a number"),
        ({"scale": ROWS.mT}, ValueError, "scale has shape"),
        ({"causal": 1.0}, TypeError, "causal must be"),
        ({"sacle": 0.5}, TypeError, "unexpected keyword argument 'sacle'"),
    ],
)
def test_wrong_calls_are_refused_beside_right_ones(given, error, told, launched):
    right = [
        {"mask": MASK},
        {"mask": MASK, "empty_rows": "nan"},
        {"scale": 0.5},
        {"scale": ROWS},
        {"causal": 1},
    ]
    for call in right:
        softmax(X, **call)
    with pytest.raises(error, match=told):
        softmax(X, **given)


def test_what_a_form_does_not_launch_itself(launched, monkeypatch):
    """Addresses that are no multiples of 16 bytes, and tensors of another device than the current one."""
    seen = []
    monkeypatch.setattr(kernels, "forward", lambda *given: seen.append(given) or X)
    assert made(scale=0.5) and len(launched) == 1
    odd = torch.zeros(32 * 64 + 1, dtype=X.dtype)[1:].view(32, 64)
    softmax(odd, scale=0.25)
    assert seen[-1][0] is odd and seen[-1][-1].factor == 0.25
    wide = torch.zeros(32 * 64 + 1, dtype=torch.bool)[1:].view(32, 64)
    softmax(X, mask=wide, causal=-3)
    assert seen[-1][2] is wide and seen[-1][-1].causal == -3
    monkeypatch.setattr(private, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    softmax(X, bias=BIAS, alpha=2)
    assert seen[-1][1] is BIAS and seen[-1][-1].alpha == 2
    assert len(seen) == 3 and len(launched) == 1


def test_forms_keep_no_tensor(launched):
    tensors = [X.clone(), BIAS.clone(), MASK.clone(), ROWS.clone()]
    x, bias, mask, scale = tensors
    softmax(x, bias=bias, mask=mask, scale=scale)
    assert count() == 1
    known = [weakref.ref(t) for t in tensors]
    launched.clear()
    del tensors, x, bias, mask, scale
    gc.collect()
    assert [ref() for ref in known] == [None] * 4


def test_forms_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(forms, "MOST_SHAPES", 3)
    for n in range(1, 20):
        softmax(X[:n], scale=0.5)
        assert len(api._of_scores["softmax"]) <= 3
    for _ in range(2 * forms.MOST_OF_A_SHAPE):
        softmax(X, [1], scale=0.5)  # a list is never the same twice: no form
        softmax(X, (1, *()), scale=0.5, dtype=torch.float32)
    assert count() <= 3 * forms.MOST_OF_A_SHAPE
