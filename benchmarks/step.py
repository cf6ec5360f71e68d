"""``python -m benchmarks.step``: a decoder's training step under torch, `accelerate()` and `patch_transformers(model)`.

The model is that of `eager_model`: eager attention with float32 probabilities, and a cross entropy of float32 logits,
all in torch's own words; `patch_transformers` also gives it the loss on 16-bit logits. A step is forward and backward;
the ways alternate. Needs an NVIDIA GPU with 24 GB of free memory.

    python -m benchmarks.step --save       writes results/<gpu>/checks/decoder-step.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from layouts.arguments import Parser

from . import results
from .eager_model import Config, Model, made, step

NAME = "decoder-step"
COMMAND = "python -m benchmarks.step --save"
CONFIGS = (
    Config(layers=4, length=2048, batch=4),
    Config(layers=4, length=4096, batch=1),
    Config(layers=4, length=2048, batch=1, vocabulary=151936),
    Config(layers=2, length=8192, batch=1),
)
WAYS = ("torch", "accelerated", "patched")
WARM, TIMED = 3, 11
# Of the loss: all ways round scores and probabilities alike, but add in another order.
TOLERANCE = 1e-4


def label(config: Config) -> str:
    """What a table calls it."""
    return (
        f"{config.batch} x {config.length:,} tokens, {config.layers} layers, hidden {config.hidden:,}, "
        f"{config.heads} heads, vocabulary {config.vocabulary:,}"
    )


def shown(row: dict[str, Any], name: str) -> str:
    """What a table shows of a way."""
    way, plain = row[name], row["torch"]["ms"]
    times = "" if name == "torch" else f" ({plain / way['ms']:.2f} times as fast)"
    return f"{way['ms']:.1f} ms{times}, {way['peak_bytes'] / 1e9:.2f} GB"


def ways_of(model: Model) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """By name, the blocks in which steps are measured."""
    from cute_softmax import accelerate
    from cute_softmax.integrations import patch_transformers

    return dict(zip(WAYS, (nullcontext, accelerate, partial(patch_transformers, model)), strict=True))


def measure(config: Config) -> dict[str, Any]:
    """Milliseconds of a step (the median) and the most memory allocated in it, of all ways.

    Raises RuntimeError where their losses differ, or where one of the operators went on to ATen.
    """
    import torch

    from cute_softmax import accelerated

    given = made(config, "cuda", torch.bfloat16)
    ways = ways_of(given[0])
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses, peaks = {}, {}
    for i in range(WARM + TIMED):
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats()
            with way():
                start.record()
                losses[name] = step(*given)[0]
                end.record()
                gone = accelerated().handed_on
            end.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
            if i >= WARM:
                times[name].append(start.elapsed_time(end))
            if gone:
                raise RuntimeError(f"went on to ATen: {gone}")
    if any(abs(loss - losses["torch"]) > TOLERANCE * losses["torch"] for loss in losses.values()):
        raise RuntimeError(f"losses differ: {losses}")
    return {"label": label(config)} | {
        name: {"ms": statistics.median(times[name]), "peak_bytes": peaks[name], "loss": losses[name]}
        for name in ways
    }


def main(argv: list[str]) -> int:
    """The exit status of the command line `argv`."""
    parser = Parser(prog="python -m benchmarks.step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--save", action="store_true", help=f"write results/<gpu>/checks/{NAME}.json")
    given = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("a step is timed on an NVIDIA GPU, and there is none here", file=sys.stderr)
        return 2
    rows = []
    for config in CONFIGS:
        rows.append(row := measure(config))
        torch.cuda.empty_cache()
        print(f"{row['label']}: " + "; ".join(f"{name} {shown(row, name)}" for name in WAYS), flush=True)
    if given.save:
        header = results.make_header([]) | {"command": COMMAND}
        path = results.FOLDER / results.gpu_folder(header["gpu"]) / "checks" / f"{NAME}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"saved {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
