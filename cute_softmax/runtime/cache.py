"""The store of compiled kernels on disk: a process with a warm store never imports cutlass.

An entry is one file in one folder, `<name>-<key>.so`: the object that `cute.compile` exports, linked to a
shared library of about 20 KB, and behind it a SHA-256 of name, key and library. The key covers whatever the
machine code depends on (see `fingerprint`), so that an entry is never updated, only added or removed.

- Nothing is loaded from a folder or a file that somebody else owns or may write: its code would run as us.
- The digest is checked before the library is mapped: mapping a damaged one can kill the process.
- Processes that miss the same key at once compile it once. The lock is an `flock`: it dies with its holder.
  An entry appears by `os.replace`: a reader sees all of it or nothing. It is not synced to disk; what a power
  cut leaves half-written fails its digest and is rebuilt.
- Where the store cannot be used it warns once, and kernels are compiled in memory, one to two seconds each.

Without a linker (`LINKERS`) the entry is the object file, `<name>-<key>.o`, which only cutlass can load: that
costs the import of cutlass, about half a second, but still no compilation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .folders import cache_folder, locked

ENVIRONMENT = "CUTE_SOFTMAX_CACHE_DIR"
# About 9,000 kernels; a whole set for one GPU and one version is a few hundred.
MAX_BYTES = 256 << 20
# A kernel compiles in one to two seconds: whoever holds the lock longer hangs, and then two compile the same.
LOCK_TIMEOUT_S = 120
# What a killed process left behind (a build folder, a lock) is removed when it is older than any build takes.
LEFTOVER_S = 3600
# The lightest first: `ld` needs 4 ms, a compiler driver 16 ms.
LINKERS = ("ld", "ld.lld", "cc", "gcc", "clang")
# What shapes a kernel besides the fields of its plan, relative to the folder that holds the package.
SOURCES = (
    "cute_softmax/kernels/**/*.py",
    "cute_softmax/ladder/**/*.py",
    "cute_softmax/plan/**/*.py",
    "cute_softmax/runtime/compile.py",
    "cute_softmax/runtime/frames.py",
    "layouts/__init__.py",
    "layouts/algebra.py",
    "layouts/coordinates.py",
    "layouts/ints.py",
    "layouts/notation.py",
    "layouts/trace.py",
)
# Of the variables that cutlass reads, those that change no machine code beyond what the plan says: the architecture,
# which is one of its fields, and where files are left.
NO_CODE = ("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR")
_ENTRY = re.compile(r"(?P<name>\w+)-[0-9a-f]{32}\.(so|o)")
_LEFTOVER = re.compile(r"\w+-[0-9a-f]{32}\.lock|\.cute_softmax-build-\w+")
_DIGEST_BYTES = hashlib.sha256().digest_size


class Entry(NamedTuple):
    """A stored kernel: its file, the size in bytes and the time of its last use in seconds since 1970."""

    path: Path
    size: int
    used: float


class Store:
    """The compiled kernels in one private folder.

    `root` is `$CUTE_SOFTMAX_CACHE_DIR` or the user's cache folder, unless given; made (0700) on first use.
    When a new kernel takes the store over `max_bytes`, those not used for the longest time are removed.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.root = Path(root or os.environ.get(ENVIRONMENT) or cache_folder())
        self.max_bytes = max_bytes
        self._loaded: set[Path] = set()
        self._warned = False

    def load(self, name: str, fields: Mapping[str, Any], build: Callable[[], Any]) -> Callable[..., Any]:
        """The kernel `name` of the Plan class `fields` as a function, from the store or else from `build`.

        `fields` holds plain values (numbers, strings, None, sequences of them), the GPU architecture among
        them. `build()` returns what `cute.compile(..., options="--enable-tvm-ffi ...")` returned; it is only
        called on a miss. The function takes its arguments by position. Raises `ValueError` for a name that is
        no identifier, `TypeError` for a field that is not plain, and whatever `build` raises.
        """
        if not name.isidentifier():
            raise ValueError(f"name must be an identifier, as it becomes a symbol, got {name!r}")
        try:
            self.check()
            path = self.root / f"{name}-{entry_key(name, fields)}"
        except (OSError, ImportError) as error:
            self._warn(error)
            return _in_memory(build())
        return self._read(path) or self._make(path, build)

    def check(self) -> None:
        """Make the folder if need be; raise `OSError` where it is not ours alone, so that nothing is kept in it."""
        if not self.root.is_absolute():
            raise FileNotFoundError(f"{str(self.root)!r} is not an absolute path; set {ENVIRONMENT} to one")
        try:
            info = os.lstat(self.root)
        except FileNotFoundError:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = os.lstat(self.root)
        if not (stat.S_ISDIR(info.st_mode) and _is_private(info)):
            raise PermissionError(
                f"{self.root} must be a folder, no link, that belongs to user {os.geteuid()} and that nobody"
                f" else may write, but it belongs to user {info.st_uid}, mode {stat.filemode(info.st_mode)}"
            )

    def entries(self) -> list[Entry]:
        """All stored kernels, the one used last at the end."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as files:
            for file in files:
                if _ENTRY.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
                        info = file.stat(follow_symlinks=False)
                        found.append(Entry(Path(file.path), info.st_size, info.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def size_bytes(self) -> int:
        """The bytes that all entries take."""
        return sum(entry.size for entry in self.entries())

    def clear(self) -> int:
        """Remove every entry and return their number. Functions that are loaded stay valid.

        Other files in the folder are left alone. Raises `OSError` where the folder is not ours.
        """
        entries = self.entries()
        if entries:
            self.check()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        self._remove_leftovers(age_s=0)
        return len(entries)

    def prune(self, max_bytes: int | None = None) -> int:
        """Remove the entries not used for the longest time until the rest fits `max_bytes`, and return their
        number. Those that this store has loaded stay. The bound is the store's own, unless given."""
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - (self.max_bytes if max_bytes is None else max_bytes)
        removed = 0
        for entry in entries:
            if excess <= 0:
                break
            if entry.path not in self._loaded:
                entry.path.unlink(missing_ok=True)
                excess -= entry.size
                removed += 1
        self._remove_leftovers(LEFTOVER_S)
        return removed

    def _remove_leftovers(self, age_s: float) -> None:
        # Removing a lock that somebody holds is harmless: at worst a kernel is compiled twice.
        with contextlib.suppress(FileNotFoundError):
            for path in self.root.iterdir():
                with contextlib.suppress(OSError):
                    if _LEFTOVER.fullmatch(path.name) and path.lstat().st_mtime <= time.time() - age_s:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _read(self, path: Path) -> Callable[..., Any] | None:
        """The function of the entry `path` (without suffix), or None where there is no sound one."""
        for file in (path.with_suffix(".so"), path.with_suffix(".o")):
            try:
                with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
                    info = os.fstat(stream.fileno())
                    if not (stat.S_ISREG(info.st_mode) and _is_private(info)):
                        continue
                    content = stream.read()
                payload, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
                if _digest(path, payload) != digest:
                    continue
                function = _load(file)
            except Exception:  # absent, or sound and yet not loadable here
                continue
            self._loaded.add(file)
            with contextlib.suppress(OSError):
                os.utime(file)  # the time of the last use, for `prune`
            return function
        return None

    def _make(self, path: Path, build: Callable[[], Any]) -> Callable[..., Any]:
        with contextlib.ExitStack() as stack:
            # No lock (a read-only folder, a holder that hangs): at worst a kernel is compiled twice.
            with contextlib.suppress(OSError, NotImplementedError):
                stack.enter_context(locked(Path(f"{path}.lock"), LOCK_TIMEOUT_S))
            if function := self._read(path):
                return function
            compiled = build()
            try:
                self._write(path, compiled)
                if function := self._read(path):
                    return function
                raise OSError(f"an entry just written to {self.root} cannot be loaded")
            except OSError as error:
                self._warn(error)
                return _in_memory(compiled)

    def _write(self, path: Path, compiled: Any) -> None:
        name = _symbol(path)
        with tempfile.TemporaryDirectory(prefix=".cute_softmax-build-", dir=self.root) as folder:
            built = Path(folder, f"{name}.o")
            compiled.export_to_c(str(built), function_name=name, export_only_tvm_ffi_symbols=True)
            built = _link(built) or built
            payload = built.read_bytes()
            built.write_bytes(payload + _digest(path, payload))
            built.chmod(0o600)
            os.replace(built, path.with_suffix(built.suffix))
        self.prune()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            message = f"kernels are compiled anew in every process, as the store cannot be used: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


@functools.cache
def fingerprint(sources: Path = Path(__file__).parents[2]) -> str:
    """A digest of what every kernel's machine code depends on.

    That is: our sources below the folder `sources`, the versions of cutlass-dsl and tvm-ffi, the CUDA version they
    build for, the `CUTE_DSL_*` variables but those of `NO_CODE`, and the CPU, as the host code is compiled for its
    instruction set (AVX-512, where it has that).
    Neither Python nor torch matters: the entries link to neither. Raises `ImportError` or `OSError` where a
    package is missing.
    """
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for name in sorted(glob.glob(pattern, root_dir=sources, recursive=True)):
            with open(os.path.join(sources, name), "rb") as file:
                content = file.read()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    versions = [importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    flags = sorted(i for i in os.environ.items() if i[0].startswith("CUTE_DSL_") and i[0] not in NO_CODE)
    cuda = runtime_library().parts[-3]
    digest.update(json.dumps([versions, cuda, flags, os.uname().machine, _cpu_features()]).encode())
    return digest.hexdigest()


def entry_key(name: str, fields: Mapping[str, Any]) -> str:
    """The key (32 hexadecimal digits) of the kernel `name` with the plain values `fields`, in whatever order.

    Raises `TypeError` for a value that is not plain."""
    text = json.dumps([fingerprint(), name, dict(fields)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def runtime_library() -> Path:
    """The path of the runtime library of cutlass-dsl, found without importing cutlass.

    The packages for CUDA 12 and CUDA 13 can be installed side by side, as `cu12/lib` and `cu13/lib`. As does
    cutlass itself (`_select_and_load_cutlass_ir_toolkit`), take the newest that the driver supports, or the
    newest of all where there is no driver. Raises `ModuleNotFoundError` or `FileNotFoundError` where there is
    none.
    """
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("nvidia-cutlass-dsl is not installed", name="cutlass")
    root = Path(spec.origin).parents[2]  # nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py
    libraries = {int(path.parts[-3][2:]): path for path in root.glob("cu[0-9]*/lib/libcute_dsl_runtime.so")}
    if not libraries:
        raise FileNotFoundError(f"no cu*/lib/libcute_dsl_runtime.so in {root}")
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    supported = [cuda for cuda in libraries if cuda <= version.value // 1000]
    return libraries[max(supported or libraries)]


def _cpu_features() -> str:
    # The first processor's features; all cores of a machine have the same.
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _is_private(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(path: Path, payload: bytes) -> bytes:
    # With the name in it, an entry under another's name is a damaged one.
    return hashlib.sha256(path.name.encode() + payload).digest()


def _symbol(path: Path) -> str:
    return path.name.rpartition("-")[0]


def _link(source: Path) -> Path | None:
    """Link an object file to a shared library beside it; None where no linker does."""
    import tvm_ffi

    target = source.with_suffix(".so")
    # `-z now`: what is missing shows when the library is loaded, not in a call.
    arguments = ["-shared", "-nostdlib", "-z", "now", "-s", "-o", str(target), str(source)]
    arguments += [str(runtime_library()), tvm_ffi.libinfo.find_libtvm_ffi()]
    for linker in filter(None, map(shutil.which, LINKERS)):
        if subprocess.run([linker, *arguments], capture_output=True).returncode == 0:
            return target
    return None


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    # An entry names this library without its folder, so that it must be in the process first.
    return ctypes.CDLL(str(runtime_library()))


def _load(file: Path) -> Callable[..., Any]:
    import tvm_ffi

    if file.suffix == ".o":
        import cutlass.cute as cute

        return cute.runtime.load_module(str(file), enable_tvm_ffi=True)[_symbol(file)]
    _load_runtime()
    # It stays loaded for good: a CUDA graph may hold the kernel when the function is gone.
    return tvm_ffi.load_module(str(file))[_symbol(file)]


def _in_memory(compiled: Any) -> Callable[..., Any]:
    # The bare function, as the store returns it: the wrapper around it costs another 0.3 us a call.
    bare = getattr(compiled, "__tvm_ffi_object__", None)
    return (bare and bare()) or compiled
