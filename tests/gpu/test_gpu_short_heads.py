"""Short rows of which an index chooses an element: losses with every option, chosen log-probabilities and the gradients
of both, against float64; nothing else written."""

import subprocess
import sys

import classes
import pytest
import short_heads
import torch
from building import build
from checking import DTYPES, equal_bits, random
from families import check_mutants, mutants

import cute_softmax as c
from cute_softmax.plan import table_of

LIMIT = table_of().chosen[-1].capacity
dtypes = pytest.mark.parametrize("dtype", DTYPES)
# So many that threads have rows of their own.
MANY = 64 * 132 + 517


@pytest.fixture(scope="module", autouse=True)
def built_ahead():
    """The classes of all cases, side by side; rows are few here."""
    with classes.however_few():
        if torch.cuda.is_available():
            build(case.kernel() for case in [*losses(), *chosen()])
        yield


def losses() -> list[short_heads.LossCase]:
    return [case for first in range(3) for case in short_heads.every_option(first)]


def chosen() -> list:
    lengths = (1, 2, 5, 8, 12, 33, 49, 64, 77, 100, 128)
    return [
        case
        for i, n in enumerate(lengths)
        for case in short_heads.cases(n, [*DTYPES.values()][i % 3], (i % 3, 0))
    ]


def test_every_option():
    for case in losses():
        assert case.kernel().movement == case.movement
        results = case.launched()
        case.check(results)
        check_mutants(case.check, case.mutants(results), results, case.name)


def test_chosen_elements():
    for case in chosen():
        held = case.math == "softmax"
        assert case.movement == short_heads.movement_of(case.x.shape[-1], case.x.dtype, held)
        case.check(case.launched())


def test_mutants():
    for case in short_heads.cases(33, torch.float32):
        name = f"{case.math} {case.prologue.name}"
        check_mutants(case.check, mutants(case), case.expected(torch.float64), name)


@dtypes
def test_every_length(dtype):
    """Of many rows, the last of them alone in its stretch; and bits that are each row's own."""
    for columns in range(1, LIMIT + 1):
        x, exact = (random((MANY, columns), DTYPES[dtype], columns, 3.0).requires_grad_() for _ in range(2))
        target = torch.arange(MANY, device=x.device) * 7 % columns
        target[5], target[-2] = -100, -100
        found = c.cross_entropy(x, target, dtype=torch.float32, one_visit=False)
        right = torch.nn.functional.cross_entropy(exact.double(), target)
        assert torch.allclose(found.double(), right, rtol=1e-6, atol=1e-6)
        upstream = torch.tensor(2.0 * MANY, device=x.device)
        (d,), (e,) = (
            torch.autograd.grad(found, x, upstream),
            torch.autograd.grad(right, exact, upstream.double()),
        )
        eps = torch.finfo(x.dtype).eps
        assert ((d.double() - e.double()).abs() <= eps * e.double().abs() + 2.0**-18).all(), columns
        rows = c.cross_entropy(x.detach(), target, reduction="none", dtype=torch.float32)
        assert equal_bits(
            c.cross_entropy(x.detach()[16:], target[16:], reduction="none", dtype=torch.float32), rows[16:]
        )
        logs = c.selective_log_softmax(x.detach().float(), target.clamp(min=0))
        exactly = torch.log_softmax(x.detach().double(), -1).gather(-1, target.clamp(min=0)[:, None])[:, 0]
        assert torch.allclose(logs.double(), exactly, rtol=1e-6, atol=1e-6), columns


@pytest.mark.parametrize(("columns", "wrong", "row"), [(10, 10, MANY - 1), (2, -1, 0), (100, 2**40, 5000)])
@pytest.mark.parametrize("function", ["cross_entropy", "selective_log_softmax"])
def test_an_index_out_of_range_is_named(columns, wrong, row, function):
    """By the kernel, which then stops: in a process of its own."""
    program = (
        f"import torch; from cute_softmax import {function}; "
        f"x = torch.zeros({MANY}, {columns}, device='cuda', dtype=torch.bfloat16); "
        f"index = torch.zeros({MANY}, device='cuda', dtype=torch.int64); index[{row}] = {wrong}; "
        f"{function}(x, index); torch.cuda.synchronize()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = found.stdout + found.stderr
    assert found.returncode
    assert f"cute_softmax.{function}: index {wrong} in row {row} is out of range: a row has {columns}" in said
