"""The public reductions, logsumexp, amax and sum: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..dispatch.common.arguments import (
    autocasts,
    check_tensor,
    dim_named,
    dims_or_all,
    given_dims,
    torch_dtype,
)
from ..dispatch.common.spec import of_rows
from ..dispatch.heads.reductions import reduce
from ..dispatch.heads.sinks import log_sum_exp
from ..dispatch.sharded.functions import Shard, is_shared, row_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def logsumexp(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    axis: int | Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """The logarithm of the sum of exponentials over `dim`, `log(sum(exp(x)))` without overflow, as `torch.logsumexp`.

    CUDA tensors of bfloat16, float16 and float32 are read once, by our kernels, with float32 arithmetic inside. CPU
    tensors, float64 ones on any device, integers and empty tensors go to ATen.

    Within `batch_invariant` the bits are those of the row alone, and of the sum that `log_softmax` subtracts.

    A row of nothing but -inf gives -inf, one with +inf gives +inf, one with NaN gives NaN, as in torch. The gradient is
    one more read of the input, and NaN throughout a row of +inf or of nothing but -inf. Differentiable twice as well.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce, which must be given.
        keepdim: Keep them with size 1.
        out: A tensor of the result's dtype to write to, given its shape as for `softmax`. For calls without autograd.
        sink: A floating-point tensor that broadcasts to the input and has size 1 in the reduced dimensions: one more
            element of each row, or of all rows that share it.
        axis: Another name of `dim`, as in torch.
        group: A torch.distributed.ProcessGroup over which rows are sharded: the input is this rank's slice of them
            along `dim`, one dimension; every rank returns the same numbers, and the gradient that flows back into them
            must be the same on every rank. A DTensor that is sharded over `dim` needs none.
        vocab_start: The index in the row of this rank's first element; None: slices are equally long.
        vocab_size: The length of the row, where the last slices have padding behind its end.

    Returns:
        A tensor of the input's dtype (float32 under autocast; of integers, torch's default dtype), or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken, and without a
            dimension.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or none, for an `out` of another dtype or device, and for a sink that does
            not fit the input.
        NotPlanned: Where more than five kept, or five reduced, dimensions do not merge in memory, and for 2^31 elements
            in a row.
    """
    dim = dim_named("logsumexp", dim, axis, None)
    if dim is None:
        raise TypeError("logsumexp() missing 1 required argument: 'dim'")
    check_tensor("input", input, "logsumexp")
    dims, dtype, shard = (
        given_dims(dim, input),
        _autocast(input, input.dtype),
        Shard(group, vocab_start, vocab_size),
    )
    if is_shared(input, dims, shard):
        if out is not None or sink is not None:
            name = "sink" if out is None else "out"
            raise ValueError(
                f"{name} of rows that ranks share: logsumexp returns their own in a new tensor there"
            )
        (found,) = row_numbers(input, None, dims, 1.0, "lse", shard, dtype)
        return found.unsqueeze(dims[0]) if keepdim else found
    if sink is not None:
        return log_sum_exp(input, of_rows("sink", sink, input, dims), dims, keepdim, dtype, out)
    return reduce("logsumexp", input, dims, keepdim, dtype, out)


def amax(
    input: torch.Tensor,
    dim: int | Sequence[int] = (),
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
    axis: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """The largest element over `dim`, as `torch.amax`; NaN if one is NaN.

    CUDA tensors of bfloat16, float16 and float32 run our kernels. CPU tensors, float64 ones on any device, integers and
    empty tensors go to ATen. The bits are always those of the row alone. The gradient is shared evenly by elements that
    are equally large.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if empty.
        keepdim: Keep them with size 1.
        out: A tensor of the result's dtype to write to, given its shape as for `softmax`. For calls without autograd.
        axis: Another name of `dim`, as in torch.

    Returns:
        A tensor of the input's dtype, or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken.
        IndexError: For a dimension out of range and, as from torch, for the maximum of no element.
        ValueError: For a repeated dimension, and for an `out` of another dtype or device.
        NotPlanned: As for `logsumexp`.
    """
    check_tensor("input", input, "amax")
    return reduce(
        "amax", input, dims_or_all(dim_named("amax", dim, axis, ()), input), keepdim, input.dtype, out
    )


def sum(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    axis: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """The sum over `dim`, as `torch.sum`; added in float32, pairwise within a thread and between threads.

    CUDA tensors of bfloat16, float16 and float32 run our kernels. CPU tensors, float64 ones on any device, integers and
    empty tensors go to ATen. Within `batch_invariant` the bits are those of the row alone.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        keepdim: Keep them with size 1.
        dtype: Of the result. None: the input's (float32 under autocast; of integers, int64).
        out: A tensor of the result's dtype to write to, given its shape as for `softmax`. For calls without autograd.
        axis: Another name of `dim`, as in torch.

    Returns:
        A tensor of that dtype, or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension, and for an `out` of another dtype or device.
        NotPlanned: As for `logsumexp`.
    """
    check_tensor("input", input, "sum")
    dims, dtype = dims_or_all(dim_named("sum", dim, axis, None), input), torch_dtype(dtype)
    if dtype is None and input.dtype.is_floating_point:
        dtype = _autocast(input, input.dtype)
    return reduce("sum", input, dims, keepdim, dtype, out)


def _autocast(input: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The result's dtype: float32 where autocast would convert the input to it."""
    return torch.float32 if autocasts(input) else dtype
