"""A user's own folders, and a lock between processes, with the standard library alone: on the hub there is no other."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "cute_softmax"
_AGAIN_S = 0.05  # between two tries of a lock


def cache_folder() -> Path:
    """Where a user's cached files are."""
    return _folder("XDG_CACHE_HOME", "~/.cache")


def settings_folder() -> Path:
    """Where a user's settings are."""
    return _folder("XDG_CONFIG_HOME", "~/.config")


def _folder(variable: str, default: str) -> Path:
    return Path(os.path.expanduser(os.environ.get(variable) or default)) / NAME


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Held by one process at a time, until it leaves or dies. Entering raises TimeoutError, an OSError, after so long,
    and OSError where there can be no lock."""
    end = time.monotonic() + timeout_s
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path} is locked for more than {timeout_s} s") from None
                time.sleep(_AGAIN_S)
        yield
    finally:
        os.close(file)  # which unlocks it
