"""Rows that ranks share: processes with gloo on the CPU, against the whole rows in float64."""

import on_ranks
import on_ranks_torch
import pytest
import ranks
import torch

kernels = pytest.mark.parametrize("kernels", [False, True], ids=["formulas", "kernels"])


@pytest.mark.parametrize(
    ("world", "cut", "kernels"),
    [
        (1, "equal", True),
        (2, "equal", True),
        (2, "unequal", False),
        (3, "unequal", True),
        (3, "empty", True),
        (3, "empty", False),
        (4, "equal", True),
        (8, "unequal", True),
    ],
)
def test_functions(world, cut, kernels):
    ranks.run(world, on_ranks.functions, cut=cut, kernels=kernels)


def test_functions_of_bfloat16():
    ranks.run(2, on_ranks.functions, cut="unequal", kernels=True, dtype=torch.bfloat16)


def test_functions_of_rows_that_fit_on_no_chip():
    ranks.run(2, on_ranks.functions, cut="equal", kernels=True, refuse=True)


@pytest.mark.parametrize(
    ("world", "cut", "kernels"),
    [
        (1, "equal", True),
        (2, "turned", True),
        (2, "turned", False),
        (3, "unequal", True),
        (3, "empty", True),
        (4, "equal", False),
        (8, "equal", True),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(world, cut, kernels):
    ranks.run(world, on_ranks.invariant, cut=cut, kernels=kernels)


def test_cuts_that_are_not_batch_invariant():
    ranks.run(2, on_ranks.invariant_cuts)


@pytest.mark.parametrize(("world", "kernels"), [(1, True), (2, False), (4, True)])
def test_padding(world, kernels):
    ranks.run(world, on_ranks.padded, kernels=kernels)


@kernels
@pytest.mark.parametrize(
    "name", ["shapes", "several_consumers", "bad_numbers", "without_a_size", "collectives"]
)
def test_on_two_ranks(name, kernels):
    ranks.run(2, getattr(on_ranks, name), kernels=kernels)


def test_pieces_of_rows():
    ranks.run(2, on_ranks.in_pieces)


@pytest.mark.parametrize(
    "name",
    [
        "exported",
        "states_of_torch",
        "wrong_arguments",
        "a_rank_that_raises",
        "gone",
        "dtensors_that_are_not_taken",
    ],
)
def test_torch(name):
    ranks.run(2, getattr(on_ranks_torch, name))


@kernels
@pytest.mark.long
def test_compiled(kernels):
    ranks.run(2, on_ranks_torch.compiled, kernels=kernels)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_dtensors(world):
    ranks.run(world, on_ranks_torch.dtensors)


@pytest.mark.long
def test_compiled_dtensors():
    ranks.run(2, on_ranks_torch.dtensors, compile=True)


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (2, {}),
        (4, {}),
        (4, {"alone": True}),
        pytest.param(2, {"compile": True}, marks=pytest.mark.long),
    ],
)
def test_dtensors_that_are_sharded_elsewhere(world, how):
    ranks.run(world, on_ranks_torch.everywhere, **how)


def test_two_groups_at_once():
    ranks.run(4, on_ranks_torch.two_groups)
