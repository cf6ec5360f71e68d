"""What a report of a fault must say: the machine, versions, the store, and whether kernels work here.

Each finding is printed as soon as it is there; one with a fault has a hint.
"""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ..plan.describe import plan_shape
from ..plan.hardware import H200, Device
from ..plan.problem import FLOATS
from ..runtime.cache import ENVIRONMENT, LINKERS, Store, runtime_library
from ..version import __version__

DISTRIBUTION = "cute-softmax"
# Beside what is required: what figures, this command and the benchmarks use where it is there.
OPTIONAL = ("drawsvg", "rich", "click")
NAMES = 20  # characters of the column of names
DRIVER = Path("/proc/driver/nvidia/version")
# A row in vectors, one with edges, and columns.
SHAPES = (((64, 1024), -1), ((64, 1001), -1), ((512, 96), 0))


class Finding(NamedTuple):
    """What is printed under a name; with a hint it is a fault."""

    name: str
    text: str
    hint: str = ""


def run(out: Callable[[str], None] = print) -> int:
    """Print all findings; 1 if one is a fault."""
    faults = 0
    for finding in findings():
        faults += bool(finding.hint)
        out(f"{finding.name:<{NAMES}}{finding.text}")
        if finding.hint:
            out(f"{'':<{NAMES}}-> {finding.hint}")
    out(f"\n{faults} fault{'s' if faults > 1 else ''} found." if faults else "\nNo fault found.")
    return int(faults > 0)


def findings() -> Iterator[Finding]:
    """All of them, in order; later ones need what the earlier ones name."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("cute_softmax", f"{__version__} in {Path(__file__).parents[1]}, {system}")
    yield from versions()
    try:
        from ..runtime.neighbours import switched_off
    except ImportError:  # torch: `versions` has said what to do
        return
    if beside := switched_off():
        yield Finding("beside", beside)
    gpu, index = yield from found_gpu()
    yield from stored()
    compiled = yield from compiles(gpu or H200)
    if index is not None and compiled:
        yield from runs(index)


# -- Versions ----------------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """Of the packages that are required, and of the optional ones that are there."""
    needed = required()
    for name, bounds in needed.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "missing", f"pip install '{name}{bounds}'")
            continue
        fits = within(found, bounds)
        yield Finding(name, found, "" if fits else f"it must be {bounds}: pip install '{name}{bounds}'")
    for name in (n for n in OPTIONAL if n not in needed):
        try:
            yield Finding(name, f"{metadata.version(name)} (optional)")
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed (optional)")


def required() -> dict[str, str]:
    """Bounds of versions by package, as the metadata of this distribution has them; empty where there is none."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    plain = (re.match(r"([\w.-]+)(.*)", line) for line in lines if "extra ==" not in line)
    return {match[1]: match[2].strip() for match in plain}


def within(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds like ``>=2.8,<3``."""
    have = _numbers(version)
    for bound in bounds.split(","):
        sign, limit = re.match(r"\s*([<>=]*)(.*)", bound).groups()
        if (sign == ">=" and have < _numbers(limit)) or (sign == "<" and have >= _numbers(limit)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


# -- The machine -------------------------------------------------------------------------------------------------------


def found_gpu() -> Iterator[Finding]:
    """The GPU that calls would run on; returns it as plans see it, and its index, or None twice."""
    import torch

    from ..runtime import launch

    driver = driver_version()
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            hint = (
                "this torch is built without CUDA: install one with it (https://pytorch.org)"
                if driver
                else ""
            )
            yield Finding("GPU", f"none that torch sees: torch {torch.__version__} has no CUDA", hint)
        else:
            hint = (
                f"the driver {driver} is there: is it new enough for CUDA {torch.version.cuda}, and does "
                "CUDA_VISIBLE_DEVICES name a GPU?"
                if driver
                else ""
            )
            yield Finding("GPU", "none: calls on CPU tensors go to ATen, kernels can only be compiled", hint)
        return None, None
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    text = (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
        f"{facts.total_memory / 2**30:.0f} GiB, driver {driver or 'unknown'}, CUDA {torch.version.cuda} in torch"
    )
    try:
        gpu = launch.device_facts(index)
    except ValueError as error:
        yield Finding("GPU", text, f"{error}; accelerate() leaves such a GPU to ATen")
        return None, None
    yield Finding("GPU", f"{text}; table of configurations: {gpu.table}")
    return gpu, index


def driver_version() -> str:
    """Of the kernel's NVIDIA driver; empty where there is none."""
    try:
        found = re.search(r"\d+\.\d[\d.]*", DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else "unknown"


def stored() -> Iterator[Finding]:
    """The store of compiled kernels, and what it needs."""
    store = Store()
    try:
        store.check()
        text = f"{len(store.entries())} kernels, {store.size_bytes():,} bytes in {store.root}"
        yield Finding("store", text)
    except OSError as error:
        yield Finding("store", str(error), f"set {ENVIRONMENT} to a folder of your own")
    try:
        library = runtime_library()
        yield Finding("runtime", f"{library.parts[-3]}: {library}")
    except (ImportError, OSError) as error:
        yield Finding(
            "runtime", str(error), "pip install 'cute-softmax' again, or 'cute-softmax[cu13]' for CUDA 13"
        )
    linker = next(filter(None, map(shutil.which, LINKERS)), None)
    missing = f"none of {', '.join(LINKERS)}: each process that loads a kernel imports cutlass, half a second"
    yield Finding("linker", linker or missing)


# -- Whether it works --------------------------------------------------------------------------------------------------


def compiles(gpu: Device) -> Iterator[Finding]:
    """Whether a kernel compiles, is stored and loads; returns that."""
    kernel = plan_shape((64, 1001), "bf16", architecture=gpu.architecture.name).kernel
    hint = "compare the versions above with those that are required; `pip check` names what does not fit"
    try:
        from ..runtime.compile import compile_class

        start = time.perf_counter()
        compiled = compile_class(kernel)
        took = time.perf_counter() - start
    except Exception as error:
        yield Finding("compile", f"failed for {kernel.architecture}: {_brief(error)}", hint)
        return False
    yield Finding("compile", f"works for {kernel.architecture}: {took:.1f} s for {kernel.name}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            Path(folder).chmod(0o700)
            Store(folder).load("info", kernel.fields, lambda: compiled)
            took = time.perf_counter() - start
    except Exception as error:
        yield Finding("load", f"failed: {_brief(error)}", hint)
        return False
    yield Finding("load", f"works: stored and loaded in {took * 1e3:.0f} ms")
    return True


def runs(index: int) -> Iterator[Finding]:
    """Whether kernels run, forward and backward, and agree with float64 as closely as torch does."""
    import torch

    from ..api.softmax import softmax
    from ..runtime import launch
    from .compare import agrees, errors

    for name in FLOATS:
        dtype, worst = launch.TORCH_DTYPES[name], (0.0, 0.0)
        for shape, dim in SHAPES:
            generator = torch.Generator(torch.device("cuda", index)).manual_seed(0)
            x, dy = (
                torch.randn(shape, generator=generator, device=generator.device).to(dtype) for _ in range(2)
            )
            try:
                y = softmax(x.requires_grad_(), dim)
                y.backward(dy)
            except Exception as error:
                where = f"{' x '.join(map(str, shape))}, dim {dim}"
                yield Finding("run", f"{name} of {where} failed: {_brief(error)}", "the first line above that differs "
                              "from a machine where it works; the driver is the usual one")  # fmt: skip
                return
            found = errors(*(t.detach().movedim(dim, -1) for t in (x, dy, y, x.grad)))
            if not agrees(found, dtype):
                yield Finding("agree", f"{name} of {shape}, dim {dim}: errors [ours, torch's] {found}", "please report "
                              "this, with all of this text")  # fmt: skip
                return
            worst = max(worst, *map(tuple, found.values()))
        yield Finding(
            "run", f"{name} agrees with float64: largest error {worst[0]:.1e} (torch {worst[1]:.1e})"
        )


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
