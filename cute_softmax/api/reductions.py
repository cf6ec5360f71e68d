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
from ..dispatch.common.shards import Shard, is_shared
from ..dispatch.common.spec import of_rows
from ..dispatch.heads.reductions import reduce
from ..dispatch.heads.sinks import log_sum_exp
from ..dispatch.sharded.functions import row_numbers

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
    """The logarithm of the sum of exponentials over `dim`, `log(sum(exp(x)))` without overflow, like `torch.logsumexp`.

    Our kernels read CUDA tensors of bfloat16, float16 and float32 once, and compute in float32. CPU tensors, float64
    tensors on any device, integers and empty tensors go to ATen.

    Within `batch_invariant` the bits depend on the row alone, and are those of the sum that `log_softmax` subtracts.

    A row of only -inf gives -inf, a row with +inf gives +inf, and a row with NaN gives NaN, as in torch. The gradient
    reads the input once more; it is NaN for all of a row with +inf or of only -inf. Twice differentiable.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce, which must be given.
        keepdim: Whether to keep them with size 1.
        out: A tensor of the result's dtype to write to, resized if needed as in `softmax`. For calls without autograd.
        sink: A floating-point tensor that broadcasts to the input and has size 1 in the reduced dimensions: an extra
            element for each row, or for all rows that share it.
        axis: Another name for `dim`, as in torch.
        group: A torch.distributed.ProcessGroup over which rows are sharded: the input is this rank's slice of them
            along `dim`, a single dimension. Every rank returns the same numbers, and their upstream gradient must be
            the same on every rank. A DTensor that is sharded over `dim` needs no group.
        vocab_start: The index in the row of this rank's first element; None: slices have equal lengths.
        vocab_size: The length of the row, if the last slices have padding after its end.

    Returns:
        A tensor of the input's dtype (float32 under autocast; torch's default dtype for integers), or `out`.

    Raises:
        TypeError: For anything but a dense real tensor, and for an unsupported floating-point dtype, and without a
            dimension.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, for an `out` of another dtype or device, and for a sink
            that does not fit the input.
        NotPlanned: If more than five kept, or five reduced, dimensions do not merge in memory, and for 2^31 elements in
            a row.
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
    """The largest element over `dim`, like `torch.amax`; NaN if any element is NaN.

    CUDA tensors of bfloat16, float16 and float32 use our kernels. CPU tensors, float64 tensors on any device, integers
    and empty tensors go to ATen. The bits always depend on the row alone. The gradient is shared evenly among elements
    that are equally large.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if empty.
        keepdim: Whether to keep them with size 1.
        out: A tensor of the result's dtype to write to, resized if needed as in `softmax`. For calls without autograd.
        axis: Another name for `dim`, as in torch.

    Returns:
        A tensor of the input's dtype, or `out`.

    Raises:
        TypeError: For anything but a dense real tensor, and for an unsupported floating-point dtype.
        IndexError: For a dimension out of range and, as in torch, for the maximum of no element.
        ValueError: For a repeated dimension, and for an `out` of another dtype or device.
        NotPlanned: As in `logsumexp`.
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
    """The sum over `dim`, like `torch.sum`; added in float32, pairwise within a thread and between threads.

    CUDA tensors of bfloat16, float16 and float32 use our kernels. CPU tensors, float64 tensors on any device, integers
    and empty tensors go to ATen. Within `batch_invariant` the bits depend on the row alone.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        keepdim: Whether to keep them with size 1.
        dtype: The dtype of the result. None: the input's (float32 under autocast; int64 for integers).
        out: A tensor of the result's dtype to write to, resized if needed as in `softmax`. For calls without autograd.
        axis: Another name for `dim`, as in torch.

    Returns:
        A tensor of that dtype, or `out`.

    Raises:
        TypeError: For anything but a dense real tensor, and for an unsupported floating-point dtype.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension, and for an `out` of another dtype or device.
        NotPlanned: As in `logsumexp`.
    """
    check_tensor("input", input, "sum")
    dims, dtype = dims_or_all(dim_named("sum", dim, axis, None), input), torch_dtype(dtype)
    if dtype is None and input.dtype.is_floating_point:
        dtype = _autocast(input, input.dtype)
    return reduce("sum", input, dims, keepdim, dtype, out)


def _autocast(input: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The result's dtype: float32 where autocast would convert the input to it."""
    return torch.float32 if autocasts(input) else dtype
