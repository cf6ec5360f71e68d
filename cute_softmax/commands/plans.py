"""`explain` and `diagrams`: the plan of the call that is asked about, in words and as figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..api.explain import explain as explained
from ..api.explain import plan_call_of
from ..api.topk import plan_topk_log_softmax, plan_topk_softmax
from ..dispatch.common.arguments import of_shape
from ..plan import RowPlan
from ..plan.describe import plan_matmul_shape
from ..plan.hardware import ARCHITECTURES, H200, Device
from ..plan.matmul import MatmulPlan
from ..plan.matmul_backward import MatmulBackwardPlan
from ..plan.topk import TopkPlan
from ..plan.topk_long import LongTopkPlan
from ..runtime import launch
from .asked import Asked

AnyPlan = RowPlan | MatmulPlan | MatmulBackwardPlan | TopkPlan | LongTopkPlan


def device(arch: str | None) -> Device:
    """A GPU of the architecture that is named, or this one, or an H200 where there is none."""
    if arch is not None:
        return replace(H200, architecture=ARCHITECTURES[arch])
    return launch.device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else H200


def explain(asked: Asked) -> int:
    """Print how the call would run."""
    print(in_words(asked))
    return 0


def in_words(asked: Asked) -> str:
    """How the call would run."""
    if asked.matmul is None and asked.topk is None:
        dims = asked.dims or (-1,)
        return explained(asked.shape, dims, asked.dtype, op=asked.op, group=asked.ranks, **_options(asked))
    return plan_of(asked).explain()


def diagrams(asked: Asked, output: Path, *, two_pass: bool, thread: int | None, png: bool) -> int:
    """Write the figures of the plan; print it and their paths."""
    if two_pass and (asked.backward or (asked.matmul, asked.topk, asked.op) != (None, None, "softmax")):
        raise ValueError(
            "--two-pass is a way of the softmax alone: without --backward, --matmul, --topk and --op"
        )
    if 0 in asked.shape:
        raise ValueError(f"{'x'.join(map(str, asked.shape))} is empty: nothing is launched, nothing is drawn")
    from ..draw import MODULES, write

    made = plan_of(asked, online=not two_pass)
    if made.movement not in MODULES:
        raise ValueError(f"the {made.movement} movement has no figures: `explain` says in words what it does")
    try:
        paths = write(made, output, png, thread)
    except RuntimeError as error:  # without cairosvg
        raise ValueError(error) from error
    print(made.explain(), *paths, sep="\n")
    return 0


def plan_of(asked: Asked, online: bool = True) -> AnyPlan:
    """The plan of the call. Raises NotPlanned where no kernel serves it, and else as the function itself."""
    if asked.matmul is not None:
        how = {"causal": asked.scores.causal, "device": device(asked.arch), "backward": asked.backward}
        if asked.scores.scale is not None:
            how["scale"] = asked.scores.scale
        return plan_matmul_shape(asked.shape, asked.matmul, asked.dtype, **how)
    if asked.topk is not None:
        dtype, gpu = launch.TORCH_DTYPES[asked.dtype], device(asked.arch)
        if asked.op == "log_softmax":
            return plan_topk_log_softmax(asked.shape, asked.topk, dtype, device=gpu)
        return plan_topk_softmax(asked.shape, asked.topk, dtype, backward=asked.backward, device=gpu)
    options = _options(asked) | ({} if online else {"online": False})
    return plan_call_of(asked.op, asked.shape, asked.dims or (-1,), asked.dtype, **options)


def _options(asked: Asked) -> dict[str, object]:
    """The other arguments of `plan_call_of`."""
    given = asked.scores.given
    for name in ("scale", "bias", "mask", "sink"):
        if isinstance(given.get(name), tuple):
            dtype = torch.bool if name == "mask" else launch.TORCH_DTYPES[asked.dtype]
            given[name] = of_shape(given[name], dtype)
    return {"backward": asked.backward, "device": device(asked.arch), **given}
