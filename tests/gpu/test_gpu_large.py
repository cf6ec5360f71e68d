"""More than 2^31 elements, forward and backward. Data are made and checked on the device, in parts."""

import pytest
import torch
from checking import DEVICE, Guarded, check_backward, check_softmax, random

from cute_softmax import softmax, softmax_backward
from cute_softmax.runtime import launch

pytestmark = pytest.mark.large
SHAPES = [(65537, 32800), (2_200_000, 1000), (280_000_001, 8), (2200, 1_000_000)]


def fill(tensor: torch.Tensor, seed: int):
    """Normal numbers, without a float32 copy of the whole."""
    rows = max(1, (1 << 27) // tensor.shape[1])
    for i in range(0, tensor.shape[0], rows):
        part = tensor[i : i + rows]
        part.copy_(random(part.shape, torch.float32, seed=seed + i))


def needs(bytes_: int):
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < bytes_:
        pytest.skip(f"needs {bytes_ >> 30} GiB of device memory, {free >> 30} are free")


def sample(rows: int) -> torch.Tensor:
    """Rows to check: the ends, around each multiple of 2^31 elements, and some thousand at random."""
    at = torch.randint(rows, (3000,), device=DEVICE)
    at[:64] = torch.arange(64, device=DEVICE) % rows
    at[64:128] = rows - 1 - torch.arange(64, device=DEVICE) % rows
    return at


def rows_to_check(shape: tuple[int, int]) -> torch.Tensor:
    rows, columns = shape
    at = sample(rows)
    border = (1 << 31) // columns
    near = torch.arange(border - 32, border + 32, device=DEVICE).clamp(0, rows - 1)
    count = min(len(at), (1 << 28) // columns)
    return torch.cat([near, at[:count]]).unique()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(shape, offset):
    needs(3 * 2 * shape[0] * shape[1] + (12 << 30))
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    fill(x, 1)
    out = Guarded(shape, torch.bfloat16, offset=offset)
    softmax(x, out=out.tensor)
    checked_surroundings(out)
    at = rows_to_check(shape)
    check_softmax(out.tensor[at], x[at])
    sums = out.tensor.sum(-1, dtype=torch.float32)
    assert (sums - 1).abs().max() < 0.02, "a row was not written"
    softmax(x, out=x)
    assert torch.equal(x[at], out.tensor[at]) or offset


def checked_surroundings(guarded: Guarded):
    """`Guarded.check` needs several masks of the whole buffer; here the bands alone."""
    shape, _, first = guarded.placement
    end = first + shape[0] * shape[1]
    assert (guarded.bits[:first] == guarded.poison).all() and (guarded.bits[end:] == guarded.poison).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape):
    needs(4 * 2 * shape[0] * shape[1] + (12 << 30))
    dy = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    fill(dy, 2)
    y = softmax(dy)
    fill(dy, 3)
    out = Guarded(shape, torch.bfloat16)
    launch.run("softmax_backward", (dy, y, out.tensor), (1,))
    checked_surroundings(out)
    at = rows_to_check(shape)
    check_backward(out.tensor[at], dy[at], y[at])
    assert not any(part.isnan().any() for part in out.tensor.split(max(1, (1 << 27) // shape[1])))


def test_strides_past_2_to_the_31():
    """Few rows, far apart: row index times stride needs 64 bits."""
    needs(20 << 30)
    x = torch.empty(3 * (1 << 31) + 4096, dtype=torch.bfloat16, device=DEVICE)
    view = x.as_strided((4, 1000), ((1 << 31) + 8, 1))
    view.copy_(random((4, 1000), torch.bfloat16))
    y = softmax(view)
    check_softmax(y, view)
    dx = softmax_backward(view, y)
    check_backward(dx, view, y)
    expected = y.clone()
    softmax(view, out=view)
    assert torch.equal(view, expected)
