"""The benchmarks' operations, with their checks against float64, and their providers as far as a CPU has them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import operations, providers
from benchmarks.cases import PROVIDERS, Case

CPU = torch.device("cpu")


# ---- checks against float64

SMALL = [
    Case("softmax", (8, 256)),
    Case("softmax", (8, 1023), "fp16"),
    Case("softmax", (6, 4096), "fp32"),
    Case("softmax", (64, 9), dim=(0,)),
    Case("softmax", (2, 3, 4), dim=(0, 2)),
    Case("softmax_backward", (8, 256)),
    Case("softmax_backward", (8, 1023), "fp16"),
    Case("softmax_backward", (6, 4096), "fp32"),
    Case("softmax_backward", (64, 9), dim=(0,)),
]


def exact(case: Case, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result in float64, rounded once."""
    wide = [t.double() for t in inputs]
    if case.op == "softmax":
        e = (wide[0] - wide[0].amax(case.dim, True)).exp()
        y = e / e.sum(case.dim, True)
    else:
        y = wide[1] * (wide[0] - (wide[0] * wide[1]).sum(case.dim, True))
    return y.to(inputs[0].dtype)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_right_results_pass_and_mutants_fail(case):
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    right = exact(case, inputs)
    assert operation.check(case, inputs, right) <= operations.TOLERANCE[case.dtype]
    one_nan = right.clone()
    one_nan.view(-1)[3] = float("nan")
    last = case.dim[-1]
    half = right.shape[last] // 2
    dropped = right.clone()
    dropped.narrow(last, half, right.shape[last] - half).zero_()
    mutants = {
        "zeros": torch.zeros_like(right),
        "uniform": torch.full_like(right, 1 / right.shape[last]),
        "shifted": right.roll(1, last),
        "dropped": dropped,
        "denominator": (right * 1.03).to(right.dtype),
        "nan": one_nan,
        "dtype": right.double(),
        "shape": right.flatten(),
    }
    for mutant in mutants.values():
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant)


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_checking_in_pieces_sees_every_row(op, monkeypatch):
    monkeypatch.setattr(operations, "_PIECE", 100)
    case = Case(op, (37, 33), "fp32")
    inputs = operations.OPERATIONS[op].inputs(case, CPU)
    right = exact(case, inputs)
    operations.OPERATIONS[op].check(case, inputs, right)
    for row in (0, 20, 36):
        wrong = right.clone()
        wrong[row, 32] *= 1.5
        with pytest.raises(operations.WrongResult):
            operations.OPERATIONS[op].check(case, inputs, wrong)


def test_inputs_are_the_same_every_time_and_not_constant():
    case = Case("softmax_backward", (16, 64))
    one, two = (operations.OPERATIONS[case.op].inputs(case, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(t.float().std() > 0 for t in one)
    assert not torch.equal(one[0], one[1])


# ---- providers


@pytest.mark.parametrize("case", [c for c in SMALL if len(c.dim) == 1], ids=str)
def test_torch_as_provider_is_right(case):
    inputs = operations.OPERATIONS[case.op].inputs(case, CPU)
    output = providers.build("torch", case.op, case)(*inputs)
    operations.OPERATIONS[case.op].check(case, inputs, output)


def test_copy_reads_and_writes_what_an_operation_does():
    x = torch.randn(4, 5)
    out = providers.build("copy", "softmax", Case("softmax", (4, 5)))(x)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    both = providers.build("copy", "softmax_backward", Case("softmax_backward", (4, 5)))(x, x)
    assert torch.equal(both, x + x)


def test_every_provider_is_registered_and_refuses_what_it_has_not():
    assert tuple(providers.REGISTRY) == PROVIDERS
    with pytest.raises(providers.Refusal, match="has no entry"):
        providers.build("copy", "entry", Case("softmax", (4, 5)))
    with pytest.raises(providers.Refusal, match="one dimension"):
        providers.build("torch", "softmax", Case("softmax", (2, 3, 4), dim=(0, 2)))


def test_the_fastest_way_is_kept(monkeypatch):
    tried = []

    def slow(x):
        return x + 1

    def fails(x):
        raise RuntimeError("no")

    def clock(call, tensors):
        call(*tensors)
        tried.append(call)
        return 9.0 if call is slow else 1.0

    def fast(x):
        return x + 2

    monkeypatch.setattr(providers, "_event_us", clock)
    chosen = providers.Fastest({"slow": slow, "fails": fails, "fast": fast})
    assert chosen(1) == 3 and chosen.note == "fast"
    count = len(tried)
    assert chosen(2) == 4 and len(tried) == count
    with pytest.raises(RuntimeError, match="no"):
        providers.Fastest({"fails": fails})(1)
