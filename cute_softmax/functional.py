"""The public functions: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.autograd import forward_ad

from . import launch, ops
from .hardware import H200, Device
from .plan import PanelPlan, Plan, plan
from .problem import Operand, canonical, canonical_dims

FLOATS = (*launch.DTYPE_NAMES, torch.float64)
_TORCH_DTYPES = {name: dtype for dtype, name in launch.DTYPE_NAMES.items()}
# By shape: forms of eager calls, each made at its first call. Few per shape: they differ in strides, dtypes,
# arguments, and in what of torch's state the dispatcher looks at (autograd, autocast).
_forms: dict[torch.Size, deque[ops.Form]] = {}
MOST_FORMS = 4096  # shapes; a program with ever new ones starts over, at some 50 us each
MOST_FORMS_OF_A_SHAPE = 8
_latest: list[ops.Form | None] = [None]


def softmax(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    online: bool = True,
) -> torch.Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over `dim`, as `torch.softmax`.

    input: a tensor of any shape, bfloat16, float16 or float32, on a CUDA device. Arithmetic is float32 inside.
    dim: the dimension or dimensions to reduce.
    dtype: of the result; the input's if None. Integer inputs need it.
    out: a tensor of the input's shape to write to; may be the input itself.
    online: one exchange of (max, sum) pairs between the threads of a row; False takes the maximum first, then the
        sum.

    A NaN or +inf makes its row NaN, and so does a row of nothing but -inf, as in torch. The same call gives the same
    bits every time. Forward saves only its result for the backward. CPU and float64 tensors go to ATen, and so do
    calls inside functorch transforms (vmap, grad, jvp) and forward-mode AD.

    Raises TypeError for what is not a real, dense tensor; IndexError for a dimension out of range; ValueError for a
    repeated dimension or an `out` that does not fit; `plan.NotPlanned` (a NotImplementedError and a ValueError) for
    more than five dimensions that do not merge, and for 2^31 elements in a group.
    """
    if torch.compiler.is_compiling():
        return _softmax(input, dim, dtype, out, online)
    if out is None and type(input) is torch.Tensor:
        # The common eager call decides nothing: it finds its form, allocates and launches. A model tends to repeat
        # the last one.
        form = _latest[0]
        if form is None or not (
            form.dim is dim and form.dtype is dtype and form.online is online and form.matches(input)
        ):
            form = _find(input, dim, dtype, online)
        if form is not None and forward_ad._current_level < 0:
            if form.requires_grad and torch.is_grad_enabled():
                return ops.apply_softmax(input, form)
            return form.run(input)
    return _softmax(input, dim, dtype, out, online)


def _find(input: torch.Tensor, dim: object, dtype: torch.dtype | None, online: bool) -> ops.Form | None:
    """The form of a call, if it has been made before. `is`, because 1, 1.0 and True are equal."""
    for form in _forms.get(input.shape, ()):
        if form.dim is dim and form.dtype is dtype and form.online is online and form.matches(input):
            _latest[0] = form
            return form
    return None


def _softmax(
    input: torch.Tensor,
    dim: int | Sequence[int],
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    online: bool,
) -> torch.Tensor:
    """The whole of `softmax`: every check, any device."""
    check_tensor("input", input)
    dims = given_dims(dim, input)
    asked = dtype
    if dtype is None and autocasts(input):
        dtype = torch.float32
    if not (input.dtype.is_floating_point or dtype):
        raise TypeError(
            f"input has dtype {input.dtype}: softmax needs a floating-point tensor, or dtype= to convert to"
        )
    result_dtype = dtype or input.dtype
    checked = ({"input": input.dtype} if input.dtype.is_floating_point else {}) | {"dtype": result_dtype}
    for name, d in checked.items():
        if d not in FLOATS:
            raise TypeError(f"{name} is {d}: softmax takes {', '.join(map(str, FLOATS))}")
    source = input
    if not input.dtype.is_floating_point:
        input = input.to(dtype)
    if out is not None:
        return _softmax_out(input, dims, result_dtype if dtype else None, out, online)
    if not ops.on_kernel(input, result_dtype):
        return ops.aten_softmax(input, dims, result_dtype)
    if torch.compiler.is_compiling():
        return ops.softmax(input, list(dims), result_dtype, online)
    if transformed():
        return ops.aten_softmax(input, dims, result_dtype)
    if type(input) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0:
        return ops.softmax(input, list(dims), result_dtype, online)
    form = ops.Form(input, dims, result_dtype, online)
    if type(dim) in (int, tuple) and source is input:
        form.dim, form.dtype = dim, asked
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms.setdefault(input.shape, deque(maxlen=MOST_FORMS_OF_A_SHAPE)).append(form)
    if input.requires_grad and torch.is_grad_enabled():
        return ops.apply_softmax(input, form)
    return form.run(input)


def transformed() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) or forward-mode AD is under way.

    A torch.library operator has no derivative there; a kernel launched behind their back would even give a wrong
    one (zero) without a word.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _softmax_out(
    input: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype | None, out: torch.Tensor, online: bool
) -> torch.Tensor:
    check_tensor("out", out)
    if torch.is_grad_enabled() and (input.requires_grad or out.requires_grad):
        raise ValueError("out= does not support autograd: neither input nor out may require a gradient")
    if out.shape != input.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {tuple(input.shape)}")
    if out.device != input.device:
        raise ValueError(f"out is on {out.device}, input on {input.device}")
    if out.dtype != (dtype or out.dtype) or out.dtype not in FLOATS:
        raise ValueError(f"out has dtype {out.dtype}, the result has {dtype or input.dtype}")
    if torch.compiler.is_compiling():
        return out.copy_(ops.softmax(input, list(dims), out.dtype, online))
    if not ops.on_kernel(input, out.dtype):
        return out.copy_(ops.aten_softmax(input, dims, out.dtype))
    same = out.data_ptr() == input.data_ptr() and out.stride() == input.stride() and out.dtype == input.dtype
    if not same and _overlap(input, out):
        raise ValueError(
            "out overlaps input in memory without being the same tensor: the result would be undefined"
        )
    if _overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()}: several of its elements share one place in memory")
    if input.numel():
        launch.run("softmax", (input, out), dims, online)
    return out


def softmax_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of `softmax` with respect to its input: ``output * (grad - sum(grad * output))``.

    grad: the gradient of the result, `output`: the result; of one shape and device.
    input_dtype: the dtype of the returned gradient; output's if None.

    Raises as `softmax`, and ValueError where grad and output do not fit each other.
    """
    check_tensor("grad", grad)
    check_tensor("output", output)
    dims = given_dims(dim, output)
    if grad.shape != output.shape:
        raise ValueError(f"grad has shape {tuple(grad.shape)}, output has {tuple(output.shape)}")
    if grad.device != output.device:
        raise ValueError(f"grad is on {grad.device}, output on {output.device}")
    input_dtype = input_dtype or output.dtype
    for name, d in (("grad", grad.dtype), ("output", output.dtype), ("input_dtype", input_dtype)):
        if d not in FLOATS:
            raise TypeError(f"{name} is {d}: softmax_backward takes {', '.join(map(str, FLOATS))}")
    if not torch.compiler.is_compiling() and transformed():
        return ops.aten_backward(grad, output, dims, input_dtype)
    return ops.differentiable_backward(grad, output, dims, input_dtype)


def plan_softmax(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    backward: bool = False,
    online: bool = True,
    device: Device = H200,
) -> Plan:
    """The Plan of `softmax` for a CUDA tensor, or for a contiguous tensor of a shape on a described device.

    dtype: of the result; for a shape also of the input (default bfloat16).
    backward: the plan of the backward pass instead.
    device: for a shape, the GPU to plan for.
    Raises as `softmax`.
    """
    shape, first, dtype, device = operand_of(input, dtype, device)
    dims = canonical_dims(dim, len(shape))
    result = Operand(dtype, launch.result_strides(shape, first.strides))
    operands = [result, result, replace(first, address=0)] if backward else [first, result]
    return plan(
        "softmax_backward" if backward else "softmax", canonical(shape, dims, operands), device, online=online
    )


def operand_of(
    input: torch.Tensor | Sequence[int], dtype: torch.dtype | str | None, device: Device
) -> tuple[tuple[int, ...], Operand, str, Device]:
    """(shape, operand of the input, dtype of the result, device) of a call on a tensor, or on a contiguous tensor of
    a shape. Raises TypeError for dtypes without kernels."""
    name = launch.DTYPE_NAMES.get(dtype, dtype)
    if isinstance(input, torch.Tensor):
        shape, strides, source = tuple(input.shape), input.stride(), launch.DTYPE_NAMES.get(input.dtype)
        address = input.data_ptr() % 16 if input.is_cuda else 0
        device = launch.device_facts(input.get_device()) if input.is_cuda else device
    else:
        shape, source, address = tuple(input), name or "bf16", 0
        strides = torch.empty(shape, device="meta").stride()
    if source not in launch.DTYPE_NAMES.values() or (name or source) not in launch.DTYPE_NAMES.values():
        raise TypeError(f"no kernels for {source} -> {name or source}: these go to ATen")
    return shape, Operand(source, strides, address), name or source, device


class Prepared:
    """`softmax` of tensors of one form, with every decision made; see `prepare`.

    plan: its Plan. Calling it with a tensor of this form launches into a new tensor and returns that.
    """

    __slots__ = ("_run", "plan")

    def __init__(self, plan: Plan | PanelPlan, run: Callable[[torch.Tensor], torch.Tensor]):
        self.plan, self._run = plan, run

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._run(input)


def prepare(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    online: bool = True,
) -> Prepared:
    """`softmax` for tensors like `input`, planned, compiled and loaded now: a loop then only allocates and launches.

    input: a non-empty CUDA tensor, bfloat16, float16 or float32; its shape, strides, dtype and device are what the
    returned function takes, without a check. Other arguments as `softmax`. No gradient is recorded.

    >>> step = prepare(x)
    >>> y = step(x)

    Raises as `softmax`, and ValueError for tensors that go to ATen.
    """
    check_tensor("input", input)
    dims, result_dtype = given_dims(dim, input), dtype or input.dtype
    if not ops.on_kernel(input, result_dtype) or not input.numel():
        raise ValueError(
            f"input is a {input.dtype} tensor on {input.device} with {input.numel()} elements, the result "
            f"{result_dtype}: only non-empty CUDA tensors of {', '.join(map(str, launch.DTYPE_NAMES))} are prepared"
        )
    form = ops.Form(input, dims, result_dtype, online)
    result = torch.empty_like(input, dtype=result_dtype)
    return Prepared(launch.call_of("softmax", (input, result), dims, online, aligned=True).plan, form.run)


def explain(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    **options,
) -> str:
    """How `softmax` would run on this tensor or shape, in words. Arguments as `plan_softmax`.

    >>> print(explain((4096, 8192), dtype="bf16"))
    """
    if isinstance(input, torch.Tensor) and not ops.on_kernel(
        input, _TORCH_DTYPES.get(dtype, dtype) or input.dtype
    ):
        return (
            f"softmax of a {input.dtype} tensor on {input.device} goes to torch.softmax (ATen): "
            "the kernels here take bfloat16, float16 and float32 on CUDA"
        )
    return plan_softmax(input, dim, dtype, **options).explain()


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


def autocasts(input: torch.Tensor) -> bool:
    """Whether autocast is on and asks for float32, as it does for softmax and what sums."""
    return input.dtype in launch.DTYPE_NAMES and input.is_cuda and torch.is_autocast_enabled("cuda")


def given_dims(dim: int | Sequence[int], tensor: torch.Tensor) -> tuple[int, ...]:
    """`canonical_dims` of what a caller gave; TypeError for what is no dimension."""
    dims = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"dim must be an int or a sequence of ints, not {dim!r}")
    return canonical_dims(tuple(dims), tensor.dim())


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
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


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share a place: some stride does not step over all that the smaller ones reach."""
    reach = 0
    modes = ((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in sorted(modes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
