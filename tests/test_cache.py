"""The store of compiled kernels: each thing the contract asks of it, on small real kernels."""

import contextlib
import json
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from stored import FIELDS, Build, entry_of, run_python

from cute_softmax.commands import cache as command
from cute_softmax.runtime import cache
from cute_softmax.runtime.cache import Store

pytest_plugins = ("stored",)

NOBODY = 65534


@contextlib.contextmanager
def unprivileged(folder: Path):
    """Run the body as a user who may do no more than file modes say, the owner of `folder`."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def one_warning(match: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1, messages
    assert match in messages[0]
    assert "cannot be used" in messages[0]


# ------------------------------------------------------------------------------------------------------- hit and miss


def test_a_miss_builds_and_a_hit_does_not(store, build):
    first = store.load("add_one", FIELDS, build)
    again = store.load("add_one", FIELDS, build)
    elsewhere = Store(store.root).load("add_one", FIELDS, build)
    assert build.calls == 1
    assert {type(f).__name__ for f in (first, again, elsewhere)} == {"Function"}
    assert all(map(callable, (first, again, elsewhere)))


def test_what_a_miss_leaves_in_the_folder(store, build):
    store.load("add_one", FIELDS, build)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    entry = entry_of(store)
    assert entry.name == f"add_one-{cache.entry_key('add_one', FIELDS)}.so"
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert {path.name for path in store.root.iterdir()} == {entry.name, f"{entry.stem}.lock"}
    assert store.size_bytes() == entry.stat().st_size < 40_000


def test_a_warm_process_loads_without_cutlass(store, build):
    store.load("add_one", FIELDS, build)
    script = f"""
import json, sys, time
import torch
start = time.process_time()
from cute_softmax.runtime.cache import Store
imported = time.process_time()
import tvm_ffi
tvm = time.process_time()
function = Store().load("add_one", {FIELDS!r}, lambda: sys.exit("built"))
end = time.process_time()
def error(*arguments):
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
# No element is no block: an error on a GPU as without one.
errors = [error(0, 0, 0, 0), error("x"), error("x", 0, 0, 0)]
print(json.dumps([errors, "cutlass" in sys.modules, imported - start, tvm - imported, end - tvm]))
"""
    errors, cutlass, *seconds = json.loads(run_python(script, CUTE_SOFTMAX_CACHE_DIR=str(store.root)))
    print(
        "CPU time of import cache, import tvm_ffi, load: " + ", ".join(f"{1e3 * s:.1f} ms" for s in seconds)
    )
    assert not cutlass
    assert errors[0][0] in ("RuntimeError", "ValueError"), errors
    assert errors[1][0] == "TypeError"
    assert "parameters when calling" in errors[1][1]
    assert errors[2][0] == "TypeError"
    assert (
        seconds[0] + seconds[2] < 0.5
    )  # of CPU time: 0.13, nearly all for the modules here; cutlass takes 0.7


def test_the_fallback_function_is_the_bare_one(compiled):
    assert type(cache._in_memory(compiled)).__name__ == "Function"
    assert cache._in_memory(len) is len


def test_wrong_arguments_and_a_failing_build(store, build):
    with pytest.raises(ValueError, match=r"name must be an identifier.*'\.\./x'"):
        store.load("../x", FIELDS, build)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.load("add_one", {"dtype": object()}, build)
    with pytest.raises(ZeroDivisionError):
        store.load("add_one", FIELDS, lambda: 1 / 0)
    assert build.calls == 0
    store.load("add_one", FIELDS, build)  # the failure left no lock behind
    assert build.calls == 1


# ------------------------------------------------------------------------------------------------------------- damage


def rewrite(path: Path, content: bytes) -> None:
    """A new file, as this process may have mapped the old one."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def flip(position: float):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1
        rewrite(path, content)

    return damage


def truncate(part: float):
    return lambda path: rewrite(path, path.read_bytes()[: int(part * path.stat().st_size)])


def not_loadable(path: Path) -> None:
    payload = b"not a library, under a digest that fits"
    rewrite(path, payload + cache._digest(path.with_suffix(""), payload))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def writable(path: Path) -> None:
    path.chmod(0o620)


DAMAGES = {
    **{f"flip at {position}": flip(position) for position in (0, 0.001, 0.3, 0.9, 1)},
    **{f"truncated to {part}": truncate(part) for part in (0, 0.0005, 0.5, 0.999)},
    "garbage": lambda path: rewrite(path, os.urandom(20_000)),
    "not loadable": not_loadable,
    "removed": Path.unlink,
    "symlink": linked,
    "writable by others": writable,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_rebuilt(damage, store, build):
    store.load("add_one", FIELDS, build)
    # Under another path, as `dlopen` knows a library that is in the process by its path.
    moved = Store(store.root.rename(store.root.with_name("moved")))
    damage(entry_of(moved))
    assert callable(moved.load("add_one", FIELDS, build))
    assert build.calls == 2
    assert callable(Store(moved.root).load("add_one", FIELDS, build))
    assert build.calls == 2
    assert not entry_of(moved).is_symlink()


def test_an_entry_under_anothers_name_is_rebuilt(store, build):
    store.load("add_one", FIELDS, build)
    other = FIELDS | {"threads": 256}
    shutil.copy(entry_of(store), store.root / f"add_one-{cache.entry_key('add_one', other)}.so")
    store.load("add_one", other, build)
    assert build.calls == 2


def test_an_entry_of_another_user_is_not_loaded(store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    fstat = os.fstat

    def foreign(fd: int) -> os.stat_result:
        fields = list(fstat(fd))
        fields[stat.ST_UID] += 1
        return os.stat_result(fields)

    monkeypatch.setattr(cache.os, "fstat", foreign)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("a foreign file was loaded"))
    assert cache.Store(store.root)._read(entry_of(store).with_suffix("")) is None


def test_an_entry_that_never_loads_is_compiled_in_memory(store, build, monkeypatch):
    def refuse(file: Path):
        raise RuntimeError("noexec")

    monkeypatch.setattr(cache, "_load", refuse)
    with one_warning("cannot be loaded"):
        assert callable(store.load("add_one", FIELDS, build))


# ----------------------------------------------------------------------------------------------------- private folder


def group_writable(root: Path) -> None:
    root.chmod(0o770)


def world_writable(root: Path) -> None:
    root.chmod(0o707)


def link(root: Path) -> None:
    root.rename(root.with_name("real"))
    root.symlink_to(root.with_name("real"))


def regular_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("")


@pytest.mark.parametrize("spoil", [group_writable, world_writable, link, regular_file])
def test_a_folder_that_is_not_private_is_refused(spoil, store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    spoil(store.root)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("loaded from a folder that is not private"))
    other = Store(store.root)
    with one_warning(f"{store.root} must be a folder, no link"):
        assert callable(other.load("add_one", FIELDS, build))
        assert callable(other.load("add_two", FIELDS, build))  # no second warning
    assert build.calls == 3


def test_the_folder_of_another_user_is_refused(store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    owner = os.geteuid()
    monkeypatch.setattr(cache.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("loaded from a foreign folder"))
    with one_warning(f"belongs to user {owner + 1}"):
        assert callable(Store(store.root).load("add_one", FIELDS, build))
    with pytest.raises(PermissionError):
        store.clear()
    assert build.calls == 2


def test_the_mask_of_the_user_does_not_matter(store, build):
    old = os.umask(0o002)
    try:
        store.load("add_one", FIELDS, build)
    finally:
        os.umask(old)
    Store(store.root).load("add_one", FIELDS, build)
    assert build.calls == 1
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


# ----------------------------------------------------------------------------------------------------------- fallback


def test_a_read_only_folder_is_read_and_else_bypassed(compiled):
    build = Build(compiled)
    root = Path(tempfile.mkdtemp())
    try:
        with unprivileged(root):
            Store(root).load("add_one", FIELDS, build)
            root.chmod(0o500)
            store = Store(root)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert callable(store.load("add_one", FIELDS, build))
            assert build.calls == 1
            with one_warning("Permission denied"):
                assert callable(store.load("add_two", FIELDS, build))
                assert callable(store.load("add_three", FIELDS, build))
            assert build.calls == 3
            root.chmod(0o700)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("home", ["/proc/nowhere", None])
def test_no_home(home, build, monkeypatch, tmp_path):
    for variable in ("HOME", "XDG_CACHE_HOME", cache.ENVIRONMENT):
        monkeypatch.delenv(variable, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)

    def nobody(user: int):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    with one_warning(home or "not an absolute path"):
        assert callable(Store().load("add_one", FIELDS, build))
    assert not list(tmp_path.iterdir())


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store().root == tmp_path / "cute_softmax"
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "mine"))
    assert Store().root == tmp_path / "mine"
    assert not list(tmp_path.iterdir())


def test_no_cutlass(store, build, monkeypatch, fresh_fingerprint):
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: None)
    with one_warning("nvidia-cutlass-dsl is not installed"):
        assert callable(store.load("add_one", FIELDS, build))


# ------------------------------------------------------------------------------------------------------------ linkers


@pytest.mark.parametrize("linkers", ["absent", "failing"])
def test_without_a_linker_the_object_file_is_stored(linkers, store, build, monkeypatch, tmp_path):
    if linkers == "failing":
        for name in cache.LINKERS:
            (tmp_path / name).symlink_to(shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert callable(store.load("add_one", FIELDS, build))
    assert entry_of(store).suffix == ".o"
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 1
    flip(0.5)(entry_of(store))
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 2


@pytest.mark.parametrize("linker", [name for name in cache.LINKERS if shutil.which(name)])
def test_each_linker_makes_a_library(linker, store, build, monkeypatch):
    monkeypatch.setattr(cache, "LINKERS", (linker,))
    store.load("add_one", FIELDS, build)
    assert entry_of(store).suffix == ".so"
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 1


# ------------------------------------------------------------------------------------------------------- size and CLI


@pytest.fixture
def three(store, build) -> list[Path]:
    """Three entries, the first one used the longest ago."""
    paths = []
    for age, name in enumerate(("three", "two", "one")):
        store.load(name, FIELDS, build)
        (path,) = (entry.path for entry in store.entries() if entry.path.name.startswith(name))
        os.utime(path, (time.time() - 1000 * (age + 1),) * 2)
        paths.append(path)
    return paths[::-1]


def test_prune_removes_the_least_recently_used(store, three, build):
    other = Store(store.root)
    assert [entry.path for entry in other.entries()] == three
    size = other.size_bytes()
    assert other.prune(size) == 0
    assert other.prune(size - 1) == 1
    assert [entry.path for entry in other.entries()] == three[1:]
    other.load("two", FIELDS, build)  # now it is in use, and used last
    assert [entry.path for entry in other.entries()] == [three[2], three[1]]
    assert other.prune(0) == 1
    assert [entry.path for entry in other.entries()] == [three[1]]
    assert store.prune(0) == 0  # all loaded by that one


def test_a_new_kernel_prunes(store, three, build):
    bounded = Store(store.root, max_bytes=store.size_bytes())
    bounded.load("four", FIELDS, build)
    names = [entry.path.name.partition("-")[0] for entry in bounded.entries()]
    assert names == ["two", "three", "four"]
    assert bounded.size_bytes() <= bounded.max_bytes


def test_leftovers_go_and_other_files_stay(store, three):
    old = time.time() - 2 * cache.LEFTOVER_S
    leftover = store.root / ".cute_softmax-build-abc"
    leftover.mkdir()
    (leftover / "x.o").write_text("")
    fresh = store.root / ".cute_softmax-build-def"
    fresh.mkdir()
    mine = store.root / "notes.lock"
    mine.write_text("not the store's")
    for path in (leftover, mine, three[0].with_suffix(".lock")):
        os.utime(path, (old, old))
    store.prune()
    assert not leftover.exists()
    assert not three[0].with_suffix(".lock").exists()
    assert three[1].with_suffix(".lock").exists()
    assert fresh.exists()
    assert store.clear() == 3
    assert [path.name for path in store.root.iterdir()] == ["notes.lock"]


def test_clear_leaves_loaded_functions_valid(store, build):
    function = store.load("add_one", FIELDS, build)
    assert store.clear() == 1
    assert store.size_bytes() == 0
    with pytest.raises(TypeError, match="Mismatched type"):
        function("x", 0, 0, 0)
    store.load("add_one", FIELDS, build)
    assert build.calls == 2


def test_an_absent_folder_is_empty(store):
    assert store.entries() == []
    assert store.clear() == store.prune(0) == store.size_bytes() == 0
    assert not store.root.exists()


def test_command_line(store, three, monkeypatch, capsys):
    monkeypatch.setenv(cache.ENVIRONMENT, str(store.root))
    assert command.run("path") == 0
    assert capsys.readouterr().out == f"{store.root}\n"
    assert command.run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in three] == [line.split()[-1] for line in lines[:3]]
    assert "3 kernels" in lines[3]
    store.root.chmod(0o777)
    assert command.run("clear") == 2
    assert "cannot clear" in capsys.readouterr().err
    store.root.chmod(0o700)
    assert command.run("clear") == 0
    assert capsys.readouterr().out == f"3 kernels removed from {store.root}\n"
    assert store.entries() == []
    monkeypatch.setenv(cache.ENVIRONMENT, str(store.root / "notes"))
    assert "0 kernels" in run_python("from cute_softmax.commands.cache import run; run('list')")
