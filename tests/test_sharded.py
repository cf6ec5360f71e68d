"""Rows that ranks share: processes with gloo on the CPU, against the whole rows in float64."""

import pytest
import ranks


@pytest.mark.parametrize("kernels", [False, True], ids=["formulas", "kernels"])
@pytest.mark.parametrize(
    ("world", "cut"),
    [(1, "equal"), (2, "equal"), (2, "unequal"), (3, "unequal"), (3, "empty"), (4, "equal"), (8, "unequal")],
)
def test_functions(world, cut, kernels):
    ranks.run(world, "functions", cut=cut, kernels=kernels)


@pytest.mark.parametrize("kernels", [False, True], ids=["formulas", "kernels"])
@pytest.mark.parametrize(
    ("world", "cut"),
    [(1, "equal"), (2, "equal"), (2, "turned"), (3, "unequal"), (3, "empty"), (4, "equal"), (8, "equal")],
)
def test_any_number_of_ranks_gives_the_same_bits(world, cut, kernels):
    ranks.run(world, "invariant", cut=cut, kernels=kernels)


def test_cuts_that_are_not_batch_invariant():
    ranks.run(2, "invariant_cuts")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_padding(world):
    ranks.run(world, "padded")


@pytest.mark.parametrize("name", ["several_consumers", "bad_numbers", "wrong_arguments"])
def test_on_two_ranks(name):
    ranks.run(2, name)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_dtensors(world):
    ranks.run(world, "dtensors")


def test_two_groups_at_once():
    ranks.run(4, "two_groups")
