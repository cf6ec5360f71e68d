"""Kernels that tests compile ahead: by one process of a run."""

import building
import pytest


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(building, "precompile", lambda wanted, load: found.append(wanted) or iter(wanted))
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "one")
    return found


def test_the_same_kernels_are_built_once_in_a_run(compiled, monkeypatch):
    assert building.build(["a", "b", "a"]) and not building.build(["a", "b"]) and building.build(["b"])
    assert compiled == [["a", "b"], ["b"]]
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "two")
    assert building.build(["a", "b"])
    monkeypatch.setenv("CUTE_SOFTMAX_CACHE_DIR", "/elsewhere")
    assert building.build(["a", "b"]), "another store has nothing of it"


def test_what_failed_is_built_again(compiled, monkeypatch):
    def failing(wanted, load):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(building, "precompile", failing)
        with pytest.raises(OSError, match="no room"):
            building.build(["a"])
    assert building.build(["a"])
