"""Kernels that another package has registered for torch's operators: seen, reported, and replaced only if asked."""

import sys
import warnings

import pytest
import torch
from checking import example
from test_accelerate import kernels, reachable, restored, same, tables

from cute_softmax import accelerate, accelerated
from cute_softmax.acceleration.overrides import override_of, tells_places

routing = sys.modules["cute_softmax.acceleration.switch"]
_ = kernels, restored  # fixtures


@pytest.fixture
def theirs():
    """The dtypes of the calls that another package's kernel gets, which stands in the place of ATen's."""
    library, seen = torch.library.Library("aten", "IMPL"), []

    def theirs(input, dim, half_to_float):
        seen.append(input.dtype)
        return torch.full_like(input, 7.0)

    library.impl("_softmax", theirs, "CPU")
    yield seen
    library._destroy()


@reachable
def test_a_kernel_registered_before_ours_is_what_calls_go_on_to(kernels, theirs):
    before = tables()
    with accelerate(override=True) as acceleration:
        torch.softmax(example((2, 3), torch.float64), -1)
        torch.softmax(example((2, 3)), -1)
        assert not acceleration.report().overridden
    assert theirs == [torch.float64]
    assert tables() == before


@reachable
def test_another_packages_kernel_is_left_in_its_place(kernels, theirs):
    before, x = tables(), example((2, 3))
    with pytest.warns(
        UserWarning, match=r"overridden aten::_softmax \(.*test_accelerate_overrides.py:\d+\): left to it"
    ):
        acceleration = accelerate()
    with acceleration:
        assert (torch.softmax(x, -1) == 7).all() and theirs == [torch.float32]
        same(torch.log_softmax(x, -1), torch.log_softmax(x.double(), -1).float())
        report = acceleration.report()
        assert report.served == {"aten::_log_softmax": 1}
        assert list(report.overridden) == ["aten::_softmax"]
        assert "aten::_softmax: overridden by another package: " in str(report)
        assert __file__ in report.overridden["aten::_softmax"]
        # A block within may ask for more, and leaves it again.
        with accelerate(override=True) as inner:
            assert (torch.softmax(x, -1) != 7).all()
            assert inner.report().served == {"aten::_softmax": 1} and not inner.report().overridden
        assert (torch.softmax(x, -1) == 7).all()
    assert tables() == before


@reachable
def test_a_kernel_registered_after_ours_is_reported(kernels):
    x = example((2, 3))
    with accelerate() as acceleration:
        assert not acceleration.report().overridden
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("_softmax", lambda input, dim, half_to_float: torch.full_like(input, 7.0), "CPU")
            assert (torch.softmax(x, -1) == 7).all()
            assert list(acceleration.report().overridden) == ["aten::_softmax"]
        finally:
            library._destroy()
        assert (torch.softmax(x, -1) != 7).all() and not acceleration.report().overridden


def test_overrides_without_torchs_private_names(theirs, monkeypatch):
    where = __file__ if tells_places() else "an unknown place"  # torch 2.8
    assert where in override_of("_softmax", "CPU") and override_of("_log_softmax", "CPU") is None
    monkeypatch.delattr(torch._C, "_dispatch_dump")
    assert override_of("_softmax", "CPU") and override_of("_log_softmax", "CPU") is None
    monkeypatch.delattr(torch.library, "_impls")
    assert override_of("_softmax", "CPU") is None


@reachable
def test_a_warning_that_is_an_error_leaves_torch_as_it_was(kernels, theirs):
    before = tables()
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="overridden"):
        warnings.simplefilter("error")
        accelerate()
    assert tables() == before and not accelerated().active
    with accelerate(override=True):
        assert accelerated().active
    assert tables() == before
