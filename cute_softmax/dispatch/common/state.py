"""What torch's state asks of a call: which of kernel, autograd function and operator serves it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import NamedTuple

import torch

from ...runtime.private import forward_ad, look_up

TENSORS = (torch.Tensor, torch.nn.Parameter)  # all other types are subclasses that want to see operators

_interpreters = look_up("_C._functorch.peek_interpreter_stack")
_is_wrapped = look_up("_C._functorch.is_functorch_wrapped_tensor")
_unwrap_if_dead = look_up("_C._functorch.unwrap_if_dead")
_unwrap_for_grad = look_up("_C._functorch._unwrap_for_grad")
_with_forward_mode = look_up("autograd.forward_ad._set_fwd_grad_enabled")
_modes = look_up("_C._len_torch_dispatch_stack")
_is_batched = look_up("_C._functorch.is_legacy_batchedtensor")


class Ways(NamedTuple):
    """The functions that serve a call; all take the same arguments.

    direct: launches. recorded: the same, recorded by autograd. transformed: with the rules of functorch's transforms
    and of forward mode. operator: what torch.compile, export, dispatch modes and subclasses of tensors see.
    """

    direct: Callable
    recorded: Callable
    transformed: Callable
    operator: Callable

    def serve(
        self,
        arguments: tuple,
        tensors: tuple[torch.Tensor | None, ...],
        differentiable: tuple[torch.Tensor | None, ...],
    ) -> object:
        """The result of a call: the one place where torch's state is asked.

        tensors: those among the arguments; differentiable: those of them that gradients flow to.
        """
        if torch.compiler.is_compiling():
            way = self.operator
        elif transformed() and (tells() or not watched(*tensors)):
            way = self.transformed
        elif any([left_over(t) for t in tensors]):
            return self.serve(
                *(tuple(map(unwrapped, given)) for given in (arguments, tensors, differentiable))
            )
        elif watched(*tensors):
            way = self.operator
        elif recorded(*differentiable):
            way = self.recorded
        else:
            way = self.direct
        return way(*arguments)


def recorder(function: type[torch.autograd.Function]) -> Callable:
    """The `apply` of an autograd function, less the test for functorch, which has been made before.

    And less a microsecond in what torch does around it, which works as well without: a node calls `backward` at once,
    not to ask first whether it goes by another name; what torch asks a class for by C strings, which no cache of
    attributes knows, it finds in the class itself, not in the last of its bases.
    """
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    for name in ("setup_context", "clear_saved_tensors_on_access", "boxed_grads_call"):
        if hasattr(function, name):
            setattr(function, name, getattr_static(function, name))
    return super(torch.autograd.Function, function).apply


def transformed() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) or forward-mode AD is under way, or may be.

    Their rules are those of the autograd functions, which hold without them, too; a kernel launched behind their back
    would give a wrong derivative (zero) without a word.
    """
    return not tells() or _interpreters() is not None or forward_ad._current_level >= 0


def tells() -> bool:
    """Whether torch tells of transforms, and of what they have left over."""
    return _interpreters is not None and _is_wrapped is not None and _unwrap_if_dead is not None


def left_over(tensor: object) -> bool:
    """Whether it is what a functorch transform made of a tensor.

    Where none is under way any more, as in a gradient that is called after the transform that kept it, it has no memory
    of its own.
    """
    return _is_wrapped is not None and isinstance(tensor, torch.Tensor) and _is_wrapped(tensor)


def unwrapped(argument: object) -> object:
    """An argument, without what is left over of transforms."""
    return _unwrap_if_dead(argument) if left_over(argument) else argument


def watched(*tensors: torch.Tensor | None) -> bool:
    """Whether a dispatch mode or a subclass of tensors must see an operator, or may have to."""
    # Here and below lists: a generator takes half a microsecond more.
    return _modes is None or _modes() > 0 or any([t is not None and type(t) not in TENSORS for t in tensors])


def unseen(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing of torch but autograd looks at a call on these, so that a kernel may be launched for it."""
    return not (torch.compiler.is_compiling() or transformed() or watched(*tensors))


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records a call on these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def batched(*tensors: torch.Tensor | None) -> bool:
    """Whether one of these stands for several, as upstream gradients with `is_grads_batched` of torch.autograd.grad: an
    older vmap than functorch's, for torch's operations alone."""
    stands = _has_no_storage if _is_batched is None else _is_batched
    return any([t is not None and stands(t) for t in tensors])


def _has_no_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


def jvp_rule(jvp: Callable) -> Callable:
    """``jvp(ctx, saved tensors, *tangents)`` as a rule that outer forward-mode transforms differentiate, too.

    Torch calls rules with forward mode turned off for all levels. Turned on again, this level's own tangents must go.
    Where torch lacks what that takes, a rule would give outer transforms a wrong derivative (zero): it raises.
    """

    @wraps(jvp)
    def rule(ctx, *tangents):
        saved = ctx.saved_tensors
        if _interpreters is not None:
            outside = _interpreters() is None
        else:
            outside = _is_wrapped is not None and not any(map(left_over, saved))
        if outside:
            return jvp(ctx, saved, *tangents)
        if None in (_interpreters, _unwrap_for_grad, _with_forward_mode):
            raise NotImplementedError(
                f"forward mode in transforms of torch.func, with torch {torch.__version__}"
            )
        level = _interpreters().level()
        with _with_forward_mode(True):
            return jvp(ctx, [None if t is None else _unwrap_for_grad(t, level) for t in saved], *tangents)

    return rule
