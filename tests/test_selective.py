"""selective_log_softmax and entropy on the CPU: results, gradients, memory, launches, errors."""

import gc
import weakref

import pytest
import torch
from checking import DTYPES, FLOATS, example

from cute_softmax import entropy, selective_log_softmax
from cute_softmax.dispatch.heads import kernels
from cute_softmax.dispatch.heads.calls import ENTROPY, HEADS, SELECTED
from cute_softmax.plan.catalogue import used_dtypes

INF = float("inf")


def tokens(*shape, high=9, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def exact(logits, index, scale=1.0):
    """(log-probabilities, entropies) in float64, differentiable."""
    found = torch.log_softmax(logits.double() * scale, -1)
    p = found.exp()
    entropies = -torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, found)).sum(-1)
    if index.dim() < logits.dim():
        return found.gather(-1, index.unsqueeze(-1)).squeeze(-1), entropies
    return found.gather(-1, index), entropies


SHAPES = [
    ((4, 9), (4,)),
    ((4, 9), (4, 1)),
    ((4, 9), (4, 5)),
    ((2, 3, 9), (2, 3)),
    ((2, 3, 9), (2, 3, 20)),
    ((9,), ()),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_results(shapes, dtype, launched):
    logits, index = example(shapes[0], dtype), tokens(*shapes[1])
    for scale in (1.0, 0.5, -2):
        right, entropies = exact(logits, index, scale)
        found = selective_log_softmax(logits, index, scale=scale)
        both = selective_log_softmax(logits, index.int(), scale=scale, return_entropy=True)
        assert found.dtype == dtype and found.shape == index.shape
        assert torch.equal(both[0], found) and both[1].shape == logits.shape[:-1] and both[1].dtype == dtype
        for got, expected in ((found, right), (both[1], entropies)):
            assert torch.allclose(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    if launched is not None and dtype != torch.float64:
        assert [n.math for n in launched] == ["selective", "selective_entropy"] * 3
        assert [n.numbers for n in launched] == [(), (), (0.5,), (0.5,), (-2.0,), (-2.0,)]
        assert all(n.dtypes[1] == torch.int64 and n.strides[1][-1] == 0 for n in launched)
        # Of several, the rest is gathered beside what the kernel finds.
        one = shapes[1] == shapes[0][:-1] or shapes[1][-1] == 1
        assert all(set(n.dtypes[3:]) == {torch.float32} for n in launched)
        assert [n.dtypes[2] for n in launched] == [dtype if one else torch.float32, torch.float32] * 3
        # What is compiled ahead has these dtypes.
        names = {torch.int64: "int64", **{of_name: name for name, of_name in DTYPES.items()}}
        assert all(tuple(names[d] for d in n.dtypes) in used_dtypes(n.math, names[dtype]) for n in launched)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("wanted", ["found", "entropy", "both"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients(shapes, wanted, dtype, launched, monkeypatch):
    """By one kernel each; those of several elements are written beside it."""
    logits, index = example(shapes[0], dtype), tokens(*shapes[1])
    upstream = [example(shapes[1], dtype, seed=1), example(shapes[0][:-1], dtype, seed=2)]
    if index.dim() == 1:
        logits[0, 3:] = -INF
        index[0] = 1
    gradients = []
    ours = lambda x, i, scale: selective_log_softmax(x, i, scale=scale, return_entropy=True)  # noqa: E731
    for function in (ours, exact):
        leaf = logits.clone().double().to(dtype).requires_grad_()
        chosen = {"found": slice(0, 1), "entropy": slice(1, 2), "both": slice(0, 2)}[wanted]
        y, dy = function(leaf, index, 0.5)[chosen], upstream[chosen]
        gradients += torch.autograd.grad(y, leaf, [g.to(t.dtype) for g, t in zip(dy, y, strict=True)])
    assert gradients[0].dtype == dtype and gradients[0].shape == logits.shape
    error = (gradients[0].double() - gradients[1].double()).abs().max()
    bound = 16 * torch.finfo(dtype).eps * gradients[1].abs().max()
    assert error <= bound
    for mutant in (torch.zeros_like(gradients[0]), gradients[0].roll(1, -1), -gradients[0]):
        assert (mutant.double() - gradients[1].double()).abs().max() > bound
    if launched is not None and dtype != torch.float64:
        assert [n.math for n in launched] == ["selective_entropy", "softmax"]
        one = index.numel() == logits[..., 0].numel()
        assert bool(launched[1].prologue.target) == (wanted != "entropy" and one)
        assert launched[1].prologue.entropy == (wanted != "found")


def test_one_kernel_and_one_matrix_backward(launches):
    """A bfloat16 gradient near p = 1 is as fine as its value: not the difference of two rounded ones."""
    logits = torch.zeros(2, 6, dtype=torch.bfloat16)
    logits[0, 2] = 8.0
    logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = selective_log_softmax(logits, torch.tensor([2, 1]))
    assert sum(t.numel() * t.element_size() for t in saved if t.data_ptr() != logits.data_ptr()) <= 64
    (dx,) = torch.autograd.grad(y, logits, torch.ones_like(y))
    right = 1 - torch.softmax(logits.detach().double(), -1)[0, 2]
    assert abs(dx[0, 2].double() - right) <= 2**-8 * right
    assert [n.math for n in launches] == ["selective", "softmax"]
    assert launches[1].prologue.target and launches[1].dtypes[0] == launches[1].dtypes[-1]


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_softcap(refuse, several, launches):
    """Of scores before all else: of one element of each row a kernel each way, with the entropy."""
    launches.refuse = refuse
    logits, index = example((4, 9)), tokens(4, 3) if several else tokens(4)
    gradients = []
    for seed in range(2):
        launches.clear()
        leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
        found = selective_log_softmax(leaf, index, scale=-0.7, softcap=1.5, return_entropy=True)
        right = exact(1.5 * torch.tanh(wide * -0.7 / 1.5), index)
        upstream = example(index.shape, seed=seed), example((4,), seed=3)
        gradients = [
            torch.autograd.grad(y, x, [g.to(t.dtype) for g, t in zip(upstream, y, strict=True)])[0]
            for y, x in ((found, leaf), (right, wide))
        ]
        for ours, expected in (*zip(found, right, strict=True), gradients):
            assert torch.allclose(ours.double(), expected, atol=1e-6)
        if not (refuse or several):
            assert [n.math for n in launches] == ["selective_entropy", "softmax"]
            assert all(n.prologue.softcap for n in launches)
    with pytest.raises(ValueError, match="softcap is 0"):
        selective_log_softmax(logits, index, softcap=0)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_ignored_tokens_and_results_of_a_dtype(several, launched):
    """0 where they are, without a gradient; float32 is what the kernel has."""
    logits = example((4, 9), torch.bfloat16).requires_grad_()
    index = torch.tensor([[2, -100], [-100, -100], [0, 8], [3, 3]])[:, slice(2) if several else 0]
    keep = index != -100
    for wanted in (None, torch.float32):
        for _ in range(2):  # a call that repeats
            logp, entropies = selective_log_softmax(
                logits, index.int(), ignore_index=-100, return_entropy=True, dtype=wanted
            )
            assert logp.dtype is entropies.dtype is (wanted or torch.bfloat16)
        leaf = logits.detach().double().requires_grad_()
        every, at = torch.log_softmax(leaf, -1), torch.where(keep, index, 0).view(4, -1)
        right = torch.where(keep, every.gather(-1, at).view(index.shape), 0.0)
        alone = selective_log_softmax(logits, index, ignore_index=-100, dtype=wanted)
        assert torch.equal(alone, logp) and (logp[~keep] == 0).all()
        eps = torch.finfo(logp.dtype).eps
        assert torch.allclose(logp.double(), right, rtol=eps, atol=4e-6)
        (found,) = torch.autograd.grad(logp.float().sum(), logits)
        (exact,) = torch.autograd.grad(right.sum(), leaf)
        assert torch.allclose(found.double(), exact, rtol=2.0**-7, atol=2.0**-7)
        assert (found[1] == 0).all()
    byte = torch.tensor([3, 156, 0, 7], dtype=torch.uint8)  # of which -100 is none
    wide = example((4, 200), torch.float32)
    found = selective_log_softmax(wide, byte, ignore_index=-100)
    assert torch.equal(found, selective_log_softmax(wide, byte))
    with pytest.raises(TypeError, match="ignore_index must be an int"):
        selective_log_softmax(logits, index, ignore_index=-100.0)
    with pytest.raises(TypeError, match="integer dtype"):
        selective_log_softmax(logits, index.float(), ignore_index=-100)


def test_repeated_tokens(launches):
    """Each of them counts, wherever they stand."""
    logits, index = example((3, 7)), torch.tensor([[1, 1, 1], [4, 2, 4], [0, 6, 0]])
    dy = example((3, 3), seed=1)
    gradients = []
    for function in (selective_log_softmax, lambda x, i: exact(x, i)[0]):
        leaf = logits.clone().requires_grad_()
        y = function(leaf, index)
        gradients += torch.autograd.grad(y, leaf, dy.to(y.dtype))
    assert torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 4), (5,)])
def test_formulas_differentiate(shape):
    logits = example(shape, torch.float64).requires_grad_()
    index = tokens(*shape[:-1], 3, high=shape[-1])
    for function in (
        lambda x: selective_log_softmax(x, index, scale=0.7, return_entropy=True),
        lambda x: selective_log_softmax(x, index[..., 0]),
        entropy,
        lambda x: entropy(x, tuple(range(x.dim()))),
    ):
        torch.autograd.gradcheck(function, logits)
        torch.autograd.gradgradcheck(function, logits)


@pytest.mark.parametrize("dtype", FLOATS)
def test_entropy(dtype, launched, monkeypatch):
    """By one kernel each; where none has its gradient, by torch's operations on pieces."""
    monkeypatch.setattr(kernels, "PIECE", 20)
    logits = example((2, 3, 8), dtype)
    logits[0, 0, 2:] = -INF
    logits[1, 1] = -INF
    logits[1, 1, 3] = 2
    for dim in (-1, 0, (1, 2), 1, (0, 1, 2)):
        leaf = logits.clone().requires_grad_()
        y = entropy(leaf, dim)
        wide = logits.double().requires_grad_()
        dims = (dim,) if isinstance(dim, int) else dim
        moved = wide.movedim(dims, [-i - 1 for i in range(len(dims))][::-1]).flatten(-len(dims))
        right = exact(moved, torch.zeros(moved.shape[:-1], dtype=torch.int64))[1]
        assert y.dtype == dtype and y.shape == right.shape
        assert torch.allclose(y.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)
        found = torch.autograd.grad(y.sum(), leaf)[0].double()
        (expected,) = torch.autograd.grad(right.sum(), wide)
        assert (found - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()
    assert entropy(torch.tensor(1.0)) == 0
    uniform = entropy(torch.zeros(4, 1000))
    assert torch.allclose(uniform, torch.tensor(1000.0).log())


def test_rows_of_nothing(launches):
    logits = torch.full((2, 5), -INF)
    logits[1] = 0
    found, entropies = selective_log_softmax(logits, torch.tensor([1, 1]), return_entropy=True)
    assert found.isnan().tolist() == [True, False] and entropies.isnan().tolist() == [True, False]
    assert selective_log_softmax(logits[:0], torch.tensor([], dtype=torch.int64)).shape == (0,)
    assert entropy(logits[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, i: (x, [1, 2]), TypeError, "index must be a torch.Tensor, not list"),
        (lambda x, i: (x, i.float()), TypeError, "index is torch.float32: it must have an integer dtype"),
        (lambda x, i: (x, i.bool()), TypeError, "index is torch.bool: it must have an integer dtype"),
        (lambda x, i: (x, i.to("meta")), ValueError, "index is on meta, logits on cpu"),
        (lambda x, i: (x, i[:2]), ValueError, r"index has shape \(2,\), logits \(4, 9\): index must have the shape"),
        (lambda x, i: (x, i[None]), ValueError, r"index has shape \(1, 4\), logits \(4, 9\)"),
        (lambda x, i: (x, i[:, None, None]), ValueError, r"index has shape \(4, 1, 1\), logits \(4, 9\)"),
        (lambda x, i: (x[0, 0], i[0]), ValueError, r"index has shape \(\), logits \(\)"),
        (lambda x, i: (x, i + 9), IndexError, "index has elements from 9 to .*: they must lie in 0 to 8"),
        (lambda x, i: (x, i - 10), IndexError, "index has elements from -10 to .*: they must lie in 0 to 8"),
        (lambda x, i: (x.int(), i), TypeError, "input has dtype torch.int32: selective_log_softmax needs"),
        (lambda x, i: (x.cfloat(), i), TypeError, "logits has dtype torch.complex64: selective_log_softmax is"),
        (lambda x, i: ([1.0], i), TypeError, "logits must be a torch.Tensor, not list"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message):
    logits, index = example((4, 9)), torch.tensor([0, 3, 5, 8])
    with pytest.raises(error, match=message):
        selective_log_softmax(*call(logits, index))


def test_wrong_arguments_of_one_kind():
    logits, index = example((4, 9)), torch.tensor([0, 3, 5, 8])
    for scale in ("1", None, True):
        with pytest.raises(TypeError, match=r"scale must be a number or a torch\.Tensor, not"):
            selective_log_softmax(logits, index, scale=scale)
    with pytest.raises(IndexError, match="dim=2 is out of range"):
        entropy(logits, 2)
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, not float"):
        entropy(1.0)
    with pytest.raises(TypeError, match=r"input has dtype torch\.int64: entropy needs"):
        entropy(index)


def test_probabilities_near_one(launched):
    """Their logarithm is as fine as itself, not as the scores that it is the difference of."""
    logits = torch.zeros(3, 50)
    logits[:, 7] = torch.tensor([20.0, 30.0, 25.0]) + 0.1
    for scale in (1.0, 0.7):
        found = selective_log_softmax(logits, torch.full((3,), 7), scale=scale).double()
        right = exact(logits, torch.full((3,), 7), scale)[0]
        assert (found - right).abs().max() <= (1e-6 if scale != 1 else 1.2e-7)


def test_a_call_that_repeats_finds_its_form(launches):
    logits, index = example((5, 16)), tokens(5, high=16)

    def count():
        return sum(len(forms) for head in HEADS for forms in head.known.values())

    def check(logits, index, **given):
        found = selective_log_softmax(logits, index, **given)
        assert torch.allclose(found.double(), exact(logits, index, given.get("scale", 1.0))[0], atol=1e-6)

    for seed in range(3):
        check(example((5, 16), seed=seed), tokens(5, high=16, seed=seed))
    assert count() == 1
    for scale in (0.5, -2, 3.0):
        check(logits, index, scale=scale)
    assert count() == 2
    check(logits, index.int()), check(logits, index.int())
    selective_log_softmax(logits, index.unsqueeze(-1))
    assert count() == 4
    selective_log_softmax(logits, torch.stack((index, index), -1))
    check(logits.t().contiguous().t(), index)
    assert count() == 4, "several elements of a row, and rows that are not contiguous, take another way"
    place = torch.empty(81)[1:].view(5, 16).copy_(logits)  # not where 16 bytes begin
    before = len(launches)
    check(place, index)
    assert count() == 4 and len(launches) == before + 1


@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_an_entropy_that_repeats_finds_its_form(dtype, launches):
    for shape, dim in (((5, 16), -1), ((5, 16), 0), ((4, 5, 16), 1), ((5, 16), (0, 1)), ((), -1)):
        for seed in range(3):
            for offset in (0, 1):  # not where 16 bytes begin
                place = torch.empty(321, dtype=dtype)[offset:]
                x = place[: torch.Size(shape).numel()].view(shape).copy_(example(shape, dtype, seed))
                leaf, right = x.requires_grad_(), x.detach().double().requires_grad_()
                dims, log = (dim if type(dim) is tuple else (dim,)), right - torch.logsumexp(right, dim, True)
                found, expected = entropy(leaf, dim), -(log.exp() * log).sum(dims)
                bound = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
                assert found.dtype == dtype and found.shape == expected.shape
                assert torch.allclose(found.double(), expected, **bound)
                ours, torchs = (
                    torch.autograd.grad(y.sum(), t)[0].double() for y, t in ((found, leaf), (expected, right))
                )
                assert (ours - torchs).abs().max() <= 16 * torch.finfo(dtype).eps * max(1, torchs.abs().max())
    assert sorted(len(forms) for forms in ENTROPY.known.values()) == [1, 2]
    assert {n.math for n in launches} == {"entropy", "softmax"}


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_a_call_that_repeats(offset, launches):
    index = tokens(5, high=16)
    for seed in range(3):
        logits = torch.empty(81)[offset:][:80].view(5, 16).copy_(example((5, 16), seed=seed)).requires_grad_()
        right = exact(logits, index, 0.5)[0]
        for upstream in (example((5,), seed=seed), torch.tensor(2.0).expand(5)):
            found = selective_log_softmax(logits, index, scale=0.5)
            (d,) = torch.autograd.grad(found, logits, upstream)
            (want,) = torch.autograd.grad(right, logits, upstream.double(), retain_graph=True)
            assert torch.allclose(d, want, atol=1e-6)
    assert [n.math for n in launches[-2:]] == ["selective", "softmax"] and launches[-1].prologue.target


def test_a_form_keeps_no_tensor(launches):
    logits, index = example((5, 16)).requires_grad_(), tokens(5, high=16)
    for _ in range(2):
        torch.autograd.grad(selective_log_softmax(logits, index, scale=0.5).sum(), logits)
    known = [weakref.ref(t) for t in (logits, index)]
    assert SELECTED.known
    del logits, index
    gc.collect()
    assert [ref() for ref in known] == [None] * 2
