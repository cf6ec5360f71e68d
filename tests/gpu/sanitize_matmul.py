"""The jobs of softmax_matmul for `sanitize.py`: each form of its forward and backward classes on a small call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import classes
import torch
from checking import DTYPES, Guarded, random
from gradients import Call, Gradients, call
from sanitizing import Job, received, sent, timed

from cute_softmax.dispatch.matmul import backward as matmul_backward
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.matmul import MatmulPlan, canonical_matmul, plan_matmul
from cute_softmax.plan.matmul_backward import MatmulBackwardPlan
from cute_softmax.plan.matmul_class import MatmulClass
from cute_softmax.plan.problem import ALIGNMENT
from cute_softmax.runtime import launch

CTAS = 2  # of a persistent grid, so that each takes several tiles


@dataclass(frozen=True)
class Form:
    """A call, and how it is planned.

    pad: elements between rows of scores beyond what 16 bytes ask for; None where rows are `columns` apart.
    alike: whether rows of dS lie as those of the scores do. multiprocessors: of the device that is planned for.
    instruction: see `plan_matmul`; without wgmma rows of values lie as those of the scores do.
    stats: whether the rows' log-sum-exps are given. cluster: CTAs of a cluster whose warpgroups take turns; 0 where
    warpgroups have rows of their own; None for what a plan chooses. mergers: of the second launch of such turns.
    """

    rows: int = 200
    columns: int = 264
    depth: int = 64
    dtype: str = "bf16"
    scores: str = ""
    pad: int | None = 0
    alike: bool = True
    owners: tuple[int, ...] = (2,)
    multiprocessors: int = 132
    clusters: bool = False
    cluster: int | None = 0
    mergers: int = 0
    lse: bool = False
    instruction: str = "wgmma"
    stats: bool = False
    options: dict = field(default_factory=dict)

    def call(self) -> Call:
        full = (2, self.rows, self.columns)
        options = {n: full if n in ("mask", "bias") else v for n, v in self.options.items()}
        if "sink" in options:
            options["sink"] = (*full[:-1], 1)
        if wide := options.pop("wide_bias", False):
            options["bias"] = full
        made = call(
            (2,),
            self.rows,
            self.columns,
            self.depth,
            DTYPES[self.dtype],
            owners=self.owners,
            scores=DTYPES[self.scores or self.dtype],
            device="cpu",
            **options,
        )
        if wide:
            made.bias = made.bias.float()
        return made

    def told(self) -> str:
        told = [f"2 x {self.rows} x {self.columns} x {self.depth}", self.dtype, self.scores, *self.options]
        told += ["stats"] * self.stats
        return " ".join(filter(None, told))


def strides(shape: tuple[int, ...], unit: int, pad: int | None = 0) -> tuple[int, ...]:
    """Of a matrix per batch: rows begin at multiples of `unit` elements, `pad` more of them apart."""
    pitch = shape[-1] if pad is None else math.ceil(shape[-1] / unit) * unit + pad
    return (*(math.prod(shape[d + 1 : -1]) * pitch for d in range(len(shape) - 1)), 1)


def guarded(values: torch.Tensor, pad: int | None = 0) -> Guarded:
    unit = ALIGNMENT // values.element_size()
    return Guarded.of(values, strides=strides(values.shape, unit, pad))


def forward(form: Form, device: Device) -> Job:
    c = form.call()
    batch = c.scores.shape[:-2]
    tma = form.instruction == "wgmma"
    inputs = [guarded(c.scores, form.pad), guarded(c.values, 0 if tma else form.pad)]
    inputs += [Guarded.of(t) if t.dtype != torch.bool else t for t in (c.mask, c.bias) if t is not None]
    inputs = [t.tensor if isinstance(t, Guarded) else t for t in inputs]
    extra = iter(inputs[2:])
    mask, bias = (None if t is None else next(extra) for t in (c.mask, c.bias))
    sink = None if c.sink is None else c.sink.expand(c.scores.shape)
    inputs += [] if sink is None else [sink]
    outputs = [Guarded((*batch, form.rows, form.depth), c.values.dtype, device="cpu")]
    if form.lse:
        outputs.append(Guarded((*batch, form.rows), torch.float32, device="cpu"))
    problem = canonical_matmul(
        c.scores.shape,
        form.depth,
        launch.operand(inputs[0]),
        launch.operand(inputs[1].expand(*batch, *c.values.shape[-2:])),
        form.dtype,
        *(None if t is None else launch.operand(t) for t in (mask, bias, sink)),
        tma=tma,
    )
    limit = device.architecture.cluster_limit if form.clusters else 1
    made = planned_as(
        form,
        problem,
        replace(
            device,
            architecture=replace(device.architecture, cluster_limit=limit),
            multiprocessors=form.multiprocessors,
        ),
        scale=c.scale,
        causal=c.causal,
        zero=c.zero,
        lse=form.lse,
        stats=form.stats,
        instruction=form.instruction,
    )
    k = made.kernel
    what = f"{k.math} {'/'.join(k.dtypes)} {k.name}, {form.told()}"
    return Job((k,), c.scores.numel(), what, partial(check_forward, made, c, inputs, outputs))


def planned_as(form: Form, *arguments, **options) -> MatmulPlan:
    """The plan of the form's kind of kernel."""

    def wanted(c: MatmulClass) -> bool:
        kind = (c.alternate, c.cluster, c.mergers) == (True, form.cluster, form.mergers)
        return form.cluster is None or (kind if form.cluster else not c.alternate)

    with classes.products(wanted):
        return plan_matmul(*arguments, **options)


def check_forward(made: MatmulPlan, c: Call, inputs: list[torch.Tensor], outputs: list[Guarded]) -> float:
    """Launch and compare. Raises AssertionError on a wrong result."""
    tensors = [sent(t) for t in (*inputs, *(o.tensor for o in outputs))]
    copies = tensors[len(inputs) :]
    if made.kernel.split:
        tensors.append(torch.empty(made.parts_bytes, dtype=torch.uint8, device="cuda"))
    if made.kernel.stats:
        tensors.append(
            c._exponentials(torch.float64)[1].expand(c.scores.shape[:-1]).float().contiguous().to("cuda")
        )
    if made.kernel.instruction == "wgmma" and made.kernel.cluster == 1:
        made = replace(made, ctas=min(made.ctas, CTAS))
    call = launch.Call(made, launch.function_of(made.kernel))
    stream = torch.cuda.current_stream().cuda_stream
    seconds = timed(lambda: call(stream, *(t.data_ptr() for t in tensors)))
    c.check_result(*(received(o, copy) for o, copy in zip(outputs, copies, strict=True)))
    return seconds


def backward(form: Form, device: Device) -> Job:
    c = form.call()
    if form.lse:
        c.lse_grad = random(c.scores.shape[:-1], torch.float32, 6, device="cpu")
    _, result, lse = c.torch(torch.float64)
    guards = {
        "scores": guarded(c.scores, form.pad),
        "grad": guarded(c.grad),
        "values": guarded(c.values),
        "dscores": Guarded(c.scores.shape, c.scores.dtype, offset=1, device="cpu"),
        "dvalues": Guarded(c.values.shape, c.values.dtype, device="cpu"),
        "output": guarded(result.to(c.values.dtype)),
        "lse": Guarded.of(lse.float()),
    }
    if form.alike:
        guards["dscores"] = Guarded(
            c.scores.shape, c.scores.dtype, strides=guards["scores"].tensor.stride(), device="cpu"
        )
    if c.sink is not None:
        guards["sink_grad"] = Guarded(c.scores.shape[:-1], torch.float32, device="cpu")
    sink = None if c.sink is None else c.sink.float().squeeze(-1)
    extras = {"mask": c.mask, "bias": c.bias, "lse_grad": c.lse_grad, "sink": sink}
    tensors = {name: g.tensor for name, g in guards.items()}
    tensors |= {name: t for name, t in extras.items() if t is not None}
    shared = [n == 1 < size for n, size in zip(c.values.shape, c.scores.shape[:-2], strict=False)]
    numbers = c.causal, c.scale, c.scale, c.zero
    _, *lies = matmul_backward.form_of(c.scores.shape, shared, form.depth, tensors, *numbers)
    made = matmul_backward.planned(0, *lies)
    k, d = made.kernel, made.delta
    what = f"{k.math} {'/'.join(k.dtypes)} {k.name}, delta {d.depth} by {d.vector}, {form.told()}"
    outputs = {name: guards[name] for name in ("dscores", "dvalues", "sink_grad") if name in guards}
    return Job((k, d), c.scores.numel(), what, partial(check_backward, made, c, tensors, outputs))


def check_backward(
    made: MatmulBackwardPlan, c: Call, tensors: dict[str, torch.Tensor], outputs: dict[str, Guarded]
) -> float:
    """As `check_forward`, of both launches of the backward."""
    copies = {name: sent(t) for name, t in tensors.items()}
    made = replace(made, ctas=1)  # of two CTAs each might use no stage of a long ring twice
    both = matmul_backward.bound(made)
    seconds = timed(lambda: matmul_backward.run(both, copies))
    scores, values, *sink = (received(outputs[name], copies[name]) for name in outputs)
    # With a scale of 1 the gradient of a bias is that of the scores.
    sink = sink[0].unsqueeze(-1).to(c.sink.dtype) if sink else None
    c.check(Gradients(scores, values, None if c.bias is None else scores.to(c.bias.dtype), sink))
    return seconds


PLAIN = {"rows": 330, "multiprocessors": 1}  # a block of rows a warpgroup
PAIRED = {"rows": 250, "multiprocessors": 1}  # two of them
TURNS = {"rows": 40, "cluster": 1}  # few rows, the steps in turns
TURNS_PARTS = {"rows": 40, "columns": 500, "cluster": 1, "mergers": 16}
SHARED = {"rows": 40, "columns": 700, "clusters": True, "cluster": 4}  # in parts, of the CTAs of a cluster
SHARED_BY_8 = {"rows": 40, "columns": 1000, "clusters": True, "cluster": 8}
ALL_TURNS = TURNS, TURNS_PARTS, SHARED, SHARED_BY_8
PARTS = {"rows": 100, "columns": 1100}  # columns in parts
MET = {"rows": 100, "columns": 500, "clusters": True}  # in halves, of a pair of CTAs
EMPTY = {"causal": -10, "zero": True}  # the first rows have nothing
EVERY = {"scale": 2.0, "mask": True, "bias": True, **EMPTY}
# Rows off 16-byte boundaries: batches that begin on them, and such that do not.
LINES, SHIFTED = {"columns": 260, "pad": None}, {"columns": 263, "pad": None}


def lying(config: dict, odd: dict) -> dict:
    """A configuration's form with rows off 16-byte boundaries."""
    return (
        config
        | odd
        | ({"columns": config["columns"] + odd.get("columns", 260) - 260} if "columns" in config else {})
    )


def forward_forms() -> Iterator[Form]:
    for depth, config in product((64, 128, 192, 256, 320), (PLAIN, PAIRED, *ALL_TURNS, PARTS, MET)):
        if depth <= 128 or config is not PAIRED:
            yield Form(depth=depth, owners=(1,), **config)
    for config in (PLAIN, PAIRED, *ALL_TURNS, PARTS, MET):
        # The diagonal leaves parts enough, or the first rows nothing.
        empty = EMPTY | ({"causal": config["columns"] - 120} if "columns" in config else {})
        yield Form(options={"causal": empty["causal"] + 15}, **config)
        yield Form(options={"scale": -0.5}, **config)
        yield Form(options=empty, lse=True, **config)
        yield Form(dtype="fp16", depth=33, options={"scale": 0.3, **empty}, lse=True, **config)
    for config in (PLAIN, *ALL_TURNS, PARTS, MET):
        every = EVERY | ({"causal": config["columns"] - 120} if "columns" in config else {})
        yield Form(options={"mask": True, "zero": True}, **config)
        yield Form(options={"bias": True}, **config)
        yield Form(options=every, depth=128, lse=True, **config)
        yield Form(scores="fp32", **config)
        yield Form(scores="fp32", options=every, depth=62, lse=True, **config)
        for odd in (LINES, SHIFTED):
            yield Form(**lying(config, odd))
            yield Form(options=every, depth=33, lse=True, **lying(config, odd))
    for config, depth in ((PLAIN, 64), (PAIRED, 128), (TURNS, 128), (PARTS, 256), (MET, 256)):
        yield Form(dtype="fp16", depth=depth, lse=True, **config)
    for config in (PLAIN, TURNS):
        yield Form(dtype="fp16", options=EVERY, **config)
        yield Form(dtype="fp16", options={"mask": True, "causal": 5}, **config | SHIFTED)
        yield Form(dtype="fp16", scores="fp32", options={"causal": 5}, **config)
    yield Form(depth=128, rows=250, columns=2600, multiprocessors=4, clusters=True)  # two blocks in pairs
    yield Form(options={"wide_bias": True}, **PLAIN)
    yield Form(depth=62, **PLAIN)
    for config in (PLAIN, PAIRED, *ALL_TURNS, PARTS, MET):
        yield Form(stats=True, **config)
        yield Form(dtype="fp16", depth=128, stats=True, options={"scale": -0.5, "zero": True}, **config)
    yield Form(scores="fp32", stats=True, options=EVERY, **PLAIN)
    for config in (PLAIN, PAIRED, *ALL_TURNS, PARTS, MET):
        yield Form(lse=True, options={"sink": True, "scale": -0.5}, **config)
    yield Form(options=EVERY | {"sink": True}, scores="fp32", **PLAIN)


def mma_forms() -> Iterator[Form]:
    """Those without wgmma: a block of rows a CTA, two, four, and parts."""
    for depth, config in product((64, 128, 192, 256), ({"rows": 40}, {"rows": 100}, PLAIN, PAIRED)):
        yield Form(depth=depth, owners=(1,), instruction="mma", **config)
        yield Form(depth=depth, stats=True, instruction="mma", **config)
    for config in (PLAIN, PAIRED):
        yield Form(options={"causal": 5, "scale": 2.0, "zero": True}, instruction="mma", **config)
        yield Form(lse=True, instruction="mma", **config | SHIFTED)
    for config in (PLAIN, PARTS):
        yield Form(
            lse=True,
            options={"sink": True, "causal": 995 if config is PARTS else 5},
            instruction="mma",
            **config,
        )
    for config in ({"rows": 40}, {"rows": 330}, PARTS):
        every = EVERY | ({"causal": config["columns"] - 120} if config is PARTS else {})
        for depth in (64, 128):
            yield Form(depth=depth, options={"causal": 5}, lse=True, instruction="mma", **config)
        for odd in ({}, LINES, SHIFTED):
            yield Form(lse=True, instruction="mma", **lying(config, odd))
            yield Form(depth=62, options={"scale": -0.5}, instruction="mma", **lying(config, odd))
            yield Form(options=every, depth=33, stats=True, instruction="mma", **lying(config, odd))
            yield Form(dtype="fp16", options={"mask": True}, instruction="mma", **lying(config, odd))
            yield Form(scores="fp32", options=every, depth=250, instruction="mma", **lying(config, odd))


def backward_forms() -> Iterator[Form]:
    for depth in (64, 128, 192, 256, 384, 512):
        yield Form(depth=depth, owners=(1,))
    for depth in (64, 128, 256, 512):
        yield Form(depth=depth, options={"causal": 5}, lse=True)
        yield Form(depth=depth, **SHIFTED)
    for depth in (64, 256, 512):
        yield Form(depth=depth, rows=1100, columns=128)
        yield Form(depth=depth, options={"mask": True, **EMPTY})
        yield Form(depth=depth, options={"bias": True})
        yield Form(depth=depth, scores="fp32", **SHIFTED)
        yield Form(depth=depth, options={"mask": True, "bias": True, **EMPTY}, **SHIFTED)
        yield Form(depth=depth, options={"causal": 5}, alike=False)
        yield Form(depth=depth, scores="fp32", options={"causal": 5}, alike=False)
    for depth in (128, 512):
        yield Form(dtype="fp16", depth=depth, options={"causal": 5})
        yield Form(dtype="fp16", depth=depth, options={"mask": True, "bias": True})
        yield Form(dtype="fp16", depth=depth, rows=1100, columns=128)
        yield Form(dtype="fp16", depth=depth, options={"causal": 5}, **SHIFTED)
        yield Form(dtype="fp16", depth=depth, scores="fp32", alike=False)
    yield Form(options={"wide_bias": True})
    for depth in (62, 4):
        yield Form(depth=depth, lse=True)
    for depth in (64, 62):
        yield Form(depth=depth, lse=depth == 64, options={"sink": True, **EMPTY})


def jobs(device: Device, names: list[str]) -> Iterator[Job]:
    """Each form of the classes, forward and backward; names: of the dtypes of values."""
    kinds: tuple[tuple[Callable, Callable], ...] = (
        (forward_forms, forward),
        (mma_forms, forward),
        (backward_forms, backward),
    )
    for forms, make in kinds:
        yield from (make(form, device) for form in forms() if form.dtype in names)
