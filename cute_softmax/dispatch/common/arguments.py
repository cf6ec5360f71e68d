"""Checks of arguments that every public function shares."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from ...plan.problem import canonical_dims, contiguous
from ...runtime import launch

DTYPES = launch.DTYPE_NAMES  # that kernels take
FLOATS = (*DTYPES, torch.float64)
_OF_PYTHON = {float: torch.float64, int: torch.int64, bool: torch.bool}


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where our kernels run."""
    return tensor.is_cuda


def served(input: torch.Tensor, dtype: torch.dtype, *others: torch.Tensor | None) -> bool:
    """Whether our kernels serve a call with a result of this dtype; all else goes to torch's operations.

    others: operands of floating-point dtypes; each may be None.
    """
    return (
        on_gpu(input)
        and input.dtype in DTYPES
        and dtype in DTYPES
        and all([t is None or t.dtype in DTYPES for t in others])
        and not negated(input, *others)
    )


def negated(*tensors: torch.Tensor | None) -> bool:
    """Whether a bit of torch's negates what lies in memory. Operators, as compiled code calls, are given no such
    tensor."""
    return not is_dynamo_compiling() and any([t is not None and t.is_neg() for t in tensors])


def of_shape(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor without memory. Raises ValueError for a shape that no tensor has."""
    strides = contiguous("fp32", shape).strides
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def check_tensor(name: str, tensor: object, function: str = "softmax") -> None:
    """Raise TypeError for what `function` does not take as its argument `name`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {tensor.layout}: {function} needs a dense (strided) tensor; see Tensor.to_dense"
        )
    if tensor.is_complex():
        raise TypeError(f"{name} has dtype {tensor.dtype}: {function} is not defined for complex numbers")


def column_of(name: str, tensor: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """One number for each row, (..., 1), in float32 (float64 for float64 logits). Raises TypeError or ValueError for
    what has none."""
    rows = tuple(logits.shape[:-1])
    shape = tuple(tensor.shape)
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}: it must be a number for each row")
    if tensor.device != logits.device:
        raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}")
    if shape not in ((), rows, (*rows, 1)):
        raise ValueError(
            f"{name} has shape {shape}, logits {tuple(logits.shape)}: it has one number for each row, {rows}"
        )
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if logits.dtype is not torch.float64:
        wide = torch.float32
    column = tensor.to(wide)
    return column.reshape((*rows, 1)) if shape else column.expand(*rows, 1)


def autocasts(input: torch.Tensor) -> bool:
    """Whether autocast is on and asks for float32, as it does for softmax and what sums."""
    return input.dtype in DTYPES and on_gpu(input) and torch.is_autocast_enabled("cuda")


def torch_dtype(dtype: torch.dtype | type | None) -> torch.dtype | None:
    """A dtype as torch reads it: Python's `float`, `int` and `bool` name dtypes, too. Raises TypeError for a tensor."""
    if isinstance(dtype, torch.Tensor):  # of which no comparison says yes or no
        raise TypeError("dtype must be a torch.dtype, not a tensor")
    return _OF_PYTHON.get(dtype, dtype)


def float_dtype(input: torch.Tensor, dtype: torch.dtype | None, function: str = "softmax") -> torch.dtype:
    """The dtype of a result: as asked, the input's, or what autocast says. Raises TypeError for other than floats."""
    dtype = torch_dtype(dtype)
    if dtype is None and autocasts(input):
        dtype = torch.float32
    if not (input.dtype.is_floating_point or dtype):
        raise TypeError(
            f"input has dtype {input.dtype}: {function} needs a floating-point tensor, or dtype= to convert to"
        )
    result = dtype or input.dtype
    checked = ({"input": input.dtype} if input.dtype.is_floating_point else {}) | {"dtype": result}
    for name, d in checked.items():
        if d not in FLOATS:
            raise TypeError(f"{name} is {d}: {function} takes {', '.join(map(str, FLOATS))}")
    return result


def out_dtype(
    out: torch.Tensor, input: torch.Tensor, dtype: torch.dtype | None, result: torch.dtype
) -> torch.dtype:
    """The dtype of a result that goes to `out`: where nothing says which, it is that of `out`."""
    free = dtype is None and not autocasts(input) and getattr(out, "dtype", None) in FLOATS
    return out.dtype if free else result


def check_out(
    out: object,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    sources: Sequence[torch.Tensor],
) -> None:
    """Raise TypeError or ValueError for an `out` that no result of this dtype and device fits in; give it the shape, as
    torch does: with its warning, unless it is empty.

    sources: what the result is computed from; none of it, nor `out`, may require a gradient.
    """
    check_tensor("out", out)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (out, *sources)):
        raise ValueError("out= does not support autograd: neither input nor out may require a gradient")
    if out.device != device:
        raise ValueError(f"out is on {out.device}, input on {device}")
    if out.dtype != dtype:
        raise ValueError(f"out has dtype {out.dtype}, the result has {dtype}")
    if tuple(out.shape) != tuple(shape):
        if out.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
                f"match the required output shape {list(shape)}. This behavior is deprecated.",
                stacklevel=5,  # the call of a public function
            )
        out.resize_(tuple(shape))


def check_memory(out: torch.Tensor, input: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Raise ValueError where a kernel that writes `out` would overwrite what it reads; `out` may be the input."""
    same = out.data_ptr() == input.data_ptr() and out.stride() == input.stride() and out.dtype == input.dtype
    if not same and overlap(input, out):
        raise ValueError(
            "out overlaps input in memory without being the same tensor: the result would be undefined"
        )
    if any(t is not None and overlap(t, out) for t in others):
        raise ValueError("out overlaps bias, mask, scale or sink in memory: the result would be undefined")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()}: several of its elements share one place in memory")


def given_dims(dim: int | Sequence[int], tensor: torch.Tensor) -> tuple[int, ...]:
    """`canonical_dims` of what a caller gave; TypeError for what is no dimension."""
    if type(dim) is int:
        return canonical_dims((dim,), tensor.dim())
    dims = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"dim must be an int or a sequence of ints, not {dim!r}")
    return canonical_dims(tuple(dims), tensor.dim())


def dim_named(function: str, dim: object, axis: object, default: object) -> object:
    """What is given as `dim` or, under its other name in torch, as `axis`. Raises TypeError for both."""
    if axis is None:
        return dim
    if dim is not default and dim != default:
        raise TypeError(f"{function}() got dim={dim!r} and axis={axis!r}, which are one argument")
    return axis


def implicit_dim(function: str, input: torch.Tensor, stacklevel: int) -> int:
    """The dimension that torch takes where None is given, with its warning, which no trace takes."""
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"Implicit dimension choice for {function} has been deprecated. "
            "Change the call to include dim=X as an argument.",
            stacklevel=stacklevel,
        )
    return 0 if input.dim() in (0, 1, 3) else 1


def dims_or_all(dim: object, input: torch.Tensor) -> tuple[int, ...]:
    """`given_dims`, and all of them for None or an empty sequence."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(max(input.dim(), 1)))
    return given_dims(dim, input)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of memory of two tensors overlap."""
    (a_first, a_end), (b_first, b_end) = (
        (
            t.data_ptr(),
            t.data_ptr()
            + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size(),
        )
        for t in (a, b)
    )
    return a.numel() > 0 and b.numel() > 0 and a_first < b_end and b_first < a_end


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share a place: some stride does not step over all that the smaller ones reach."""
    reach = 0
    modes = ((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in sorted(modes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def checked_backward(
    function: str, grad: object, output: object, dim: object, input_dtype: torch.dtype | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """(dims, dtype of the gradient) of a public backward; its arguments checked."""
    check_tensor("grad", grad)
    check_tensor("output", output)
    dims = given_dims(dim, output)
    if grad.shape != output.shape:
        raise ValueError(f"grad has shape {tuple(grad.shape)}, output has {tuple(output.shape)}")
    if grad.device != output.device:
        raise ValueError(f"grad is on {grad.device}, output on {output.device}")
    input_dtype = torch_dtype(input_dtype) or output.dtype
    for name, d in (("grad", grad.dtype), ("output", output.dtype), ("input_dtype", input_dtype)):
        if d not in FLOATS:
            raise TypeError(f"{name} is {d}: {function} takes {', '.join(map(str, FLOATS))}")
    return dims, input_dtype
