"""The modules on the CPU: torch's arguments, warnings and state, and the options of our functions."""

import copy
import pickle
import warnings

import pytest
import torch
from checking import example

from cute_softmax import log_softmax, nn, softmax

PAIRS = [(nn.Softmax, torch.nn.Softmax), (nn.LogSoftmax, torch.nn.LogSoftmax)]
pairs = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=lambda c: c.__name__)


@pairs
@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_as_torchs(ours, torchs, shape):
    x = example(shape)
    for dim in {-1, 0, len(shape) - 1} & {*range(-max(len(shape), 1), max(len(shape), 1))}:
        assert torch.equal(ours(dim)(x), torchs(dim)(x))
        assert repr(ours(dim)) == repr(torchs(dim))
    assert isinstance(ours(), torchs)
    assert repr(ours()) == repr(torchs())


@pairs
@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_an_implicit_dimension_is_torchs_with_its_warning(ours, torchs, shape):
    x = example(shape)
    with pytest.warns(UserWarning) as found:
        y = ours()(x)
    with pytest.warns(UserWarning) as expected:
        assert torch.equal(y, torchs()(x))
    for a, b in zip(found, expected, strict=True):
        assert str(a.message) == str(b.message) and a.category is b.category
        assert a.filename == __file__, "it names the line that calls the module"


@pairs
def test_state(ours, torchs):
    """Modules of torch's that were pickled before, copies, and state_dicts."""
    x = example((4, 5))
    module = ours(1, scale=0.5, causal=True, empty_rows="zero", dtype=torch.float64)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(again) == repr(module) and torch.equal(again(x), module(x))
    assert not module.state_dict() and not ours().load_state_dict({}).missing_keys
    for state in (torchs(1).__dict__, {k: v for k, v in torchs().__dict__.items() if k != "dim"}):
        loaded = ours.__new__(ours)
        loaded.__setstate__(dict(state))
        assert loaded.dim == state.get("dim")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(loaded(x), torchs(1)(x))
    assert list(torch.nn.Sequential(torch.nn.Linear(5, 5), ours(1)).state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(("ours", "function"), [(nn.Softmax, softmax), (nn.LogSoftmax, log_softmax)])
def test_options(ours, function):
    x, bias = example((2, 4, 6)), example((4, 6), seed=1)
    mask = example((2, 1, 6), seed=2) > 0
    options = [
        {"scale": 0.25},
        {"causal": True},
        {"causal": 0},
        {"causal": 2},
        {"empty_rows": "zero"},
        {"dtype": torch.float64},
        {"scale": 3.0, "causal": 1, "empty_rows": "zero"},
    ]
    for given in options + ([{"alpha": 2.0}] if ours is nn.Softmax else []):
        module = ours(-1, **given)
        assert torch.equal(module(x), function(x, -1, **given))
        both = module(x, mask=mask, bias=bias)
        assert torch.equal(both.nan_to_num(7), function(x, -1, mask=mask, bias=bias, **given).nan_to_num(7))
        assert all(f"{name}={value!r}" in repr(module) for name, value in given.items())
    assert torch.equal(ours((0, 2))(x), function(x, (0, 2)))
    assert repr(ours((0, 2), scale=2.0)) == f"{ours.__name__}(dim=(0, 2), scale=2.0)"


def test_wrong_options():
    x = example((4, 5))
    with pytest.raises(ValueError, match="empty_rows"):
        nn.Softmax(1, empty_rows="one")(x)
    with pytest.raises(IndexError, match=r"dim=2 is out of range"):
        nn.LogSoftmax(2)(x)
    with pytest.raises(TypeError, match="mask"):
        nn.Softmax(1)(x, mask=x)
    with pytest.raises(TypeError, match="alpha"):
        nn.LogSoftmax(1, alpha=2.0)


def test_softmax2d():
    for shape in ((3, 4, 5), (2, 3, 4, 5)):
        x = example(shape)
        assert torch.equal(nn.Softmax2d()(x), torch.nn.Softmax2d()(x))
    assert repr(nn.Softmax2d()) == repr(torch.nn.Softmax2d()) and isinstance(
        nn.Softmax2d(), torch.nn.Softmax2d
    )
    for rank in (2, 5):
        with pytest.raises(
            ValueError, match=rf"Softmax2d: expected input to be 3D or 4D, got {rank}D instead"
        ):
            nn.Softmax2d()(example((2,) * rank))


def test_gradients_and_compile():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.Softmax(-1, scale=0.5), nn.LogSoftmax(0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = example((4, 8)).requires_grad_()
    results = []
    for m in (model, compiled):
        y = m(x)
        results.append((y, torch.autograd.grad(y[0].sum(), x)[0]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
