"""How calls on rows that ranks share are served: by what all ranks know alike."""

import pytest
import torch

from cute_softmax.dispatch.sharded.states import slice_of
from cute_softmax.dispatch.sharded.ways import Facts, way_of

FACTS = Facts("softmax", 2, 64, 5000, 5000, torch.bfloat16, torch.device("cuda", 0), False, True)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "visit"])
def test_slices_that_are_known_to_be_alike_stay_on_chip(function):
    assert way_of(FACTS._replace(function=function)).on_chip


@pytest.mark.parametrize(
    "other",
    [
        {"function": "numbers"},  # are read once anyway
        {"function": "loss"},
        {"ranks": 1},
        {"shortest": 0},
        {"device": torch.device("cpu")},
        {"invariant": True},
        {"kernels": False},
    ],
    ids=str,
)
def test_others_do_not(other):
    assert not way_of(FACTS._replace(**other)).on_chip


def test_slices_are_alike_where_nobody_says_where_they_begin():
    group = "a name"  # as a DTensor gives it
    assert not slice_of(10, group, 0, 20).alike
    assert slice_of(10, group, 0, 20, True).alike
