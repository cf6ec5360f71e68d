"""A user's own folders, and a lock between processes. Its libraries are loaded where they are needed: 3 ms each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

NAME = "cute_softmax"


def cache_folder() -> Path:
    """Where a user's cached files are."""
    import platformdirs

    try:
        return platformdirs.user_cache_path(NAME, appauthor=False)
    except RuntimeError:  # no home; older versions answer with the following
        return Path("~/.cache") / NAME


def settings_folder() -> Path:
    """Where a user's settings are."""
    import platformdirs

    try:
        return platformdirs.user_config_path(NAME, appauthor=False)
    except RuntimeError:
        return Path("~/.config") / NAME


def locked(path: Path, timeout_s: float) -> AbstractContextManager:
    """Held by one process at a time, until it leaves or dies. Entering raises TimeoutError, an OSError, after so long,
    and OSError or NotImplementedError where there can be no lock."""
    import filelock

    return filelock.FileLock(path, timeout=timeout_s)
