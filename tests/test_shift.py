"""The funnel through which columns that begin anywhere become vectors, on plain numbers."""

import pytest

from cute_softmax.kernels.panel import shift

WORD = (1 << 32) - 1


@pytest.fixture
def funnel(monkeypatch):
    """`shift.funnel` on ints; the funnel shift as PTX has it."""

    def shifted(low, high, bits, left):
        both = high << 32 | low
        return (both << bits >> 32 if left else both >> bits) & WORD

    monkeypatch.setattr(shift, "funnel_shift", shifted)
    return shift.funnel


def packed(elements: list[int], bits: int) -> list[int]:
    """Elements of so many bits in words of 32, the first lowest."""
    each = 32 // bits
    words = (elements[i : i + each] for i in range(0, len(elements), each))
    return [sum(e << bits * j for j, e in enumerate(word)) for word in words]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("words", "bits"), [(4, 16), (2, 16), (1, 16), (4, 32), (2, 32), (1, 32)])
def test_every_shift_gives_the_elements_between(funnel, words, bits, left):
    vector = words * 32 // bits
    elements = [*range(1, 2 * vector + 1)]
    both = packed(elements, bits)
    for by in range(vector):
        first = vector - by if left else by
        found = funnel(both[:words], both[words:], by, bits, left=left)
        assert found == packed(elements[first : first + vector], bits), by
