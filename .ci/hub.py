"""Builds the package for Hugging Face's kernel hub, which loads it without installing it::

    python .ci/hub.py OUT        writes OUT/build/torch-cuda, OUT/README.md and OUT/LICENSE

There a package may import the standard library, torch, cutlass, tvm_ffi and itself, by relative imports alone, and
shares a process with other versions of itself. So `layouts` goes into the package, its operators get a namespace of
their own, and what draws, teaches and has commands stays behind. Everything else is the source as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "cute-softmax"
VARIANT = "build/torch-cuda"
LEFT_OUT = (
    "cute_softmax/commands/",
    "cute_softmax/draw/",
    "cute_softmax/ladder/",
    "cute_softmax/__main__.py",
)
LAYOUTS = ("__init__", "algebra", "coordinates", "ints", "notation", "trace")
CARD = """---
license: mit
tags: [kernels]
---

# {name} {version}

Softmax kernels for NVIDIA GPUs in the CuTe DSL, as a kernel of the hub::

    from kernels import get_kernel

    cute_softmax = get_kernel(...)
    y = cute_softmax.softmax(x)

It needs `nvidia-cutlass-dsl` and `apache-tvm-ffi` beside torch.
"""


def sources() -> Iterator[tuple[Path, str]]:
    """(file, its place in the package) of all that goes there."""
    for file in sorted((ROOT / "cute_softmax").rglob("*")):
        place = file.relative_to(ROOT).as_posix()
        if file.suffix in (".py", ".json", ".typed") and not place.startswith(LEFT_OUT):
            yield file, place.removeprefix("cute_softmax/")
    for name in LAYOUTS:
        yield ROOT / "layouts" / f"{name}.py", f"layouts/{name}.py"


def adapted(text: str, place: str, namespace: str) -> str:
    """A source file as the package has it."""
    up = "." * (place.count("/") + 1)
    text = re.sub(r"^( *from )layouts\b", rf"\1{up}layouts", text, flags=re.M)
    text = text.replace('"cute_softmax::', f'"{namespace}::')
    if place == "runtime/cache.py":  # paths of sources, from the package's folder instead of its parent's
        text = text.replace('"cute_softmax/', '"').replace(
            "Path(__file__).parents[2]", "Path(__file__).parents[1]"
        )
    return text


def build(out: Path) -> Path:
    """Write the package and return its folder, which is new."""
    files = {place: file.read_bytes() for file, place in sources()}
    files["runtime/folders.py"] = (ROOT / ".ci" / "hub_folders.py").read_bytes()
    digest = hashlib.sha256(
        b"".join(place.encode() + content for place, content in files.items())
    ).hexdigest()[:12]
    namespace, folder = f"cute_softmax_{digest}", out / VARIANT
    shutil.rmtree(folder, ignore_errors=True)
    for place, content in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if place.endswith(".py"):
            content = adapted(content.decode(), place, namespace).encode()
        (folder / place).write_bytes(content)
    version = re.search(r'"(.+)"', files["version.py"].decode().splitlines()[-1])[1]
    metadata = {
        "id": namespace,
        "name": NAME,
        "version": int(version.split(".")[1]),
        "license": "MIT",
        "python-depends": ["nvidia-cutlass-dsl", "tvm-ffi"],
        "backend": {"type": "cuda"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "README.md").write_text(CARD.format(name=NAME, version=version))
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(build(Path(sys.argv[1])))
