"""The store of compiled kernels: where it is, what is in it, and how to empty it."""

from __future__ import annotations

import sys
import time

from ..runtime.cache import Store


def run(action: str) -> int:
    """Do `path`, `list` or `clear`; 2 where the folder is not ours."""
    store = Store()
    try:
        if action == "path":
            print(store.root)
        elif action == "clear":
            print(f"{store.clear()} kernels removed from {store.root}")
        else:
            entries = store.entries()
            for path, size, used in entries:
                print(f"{size:>12,}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(used))}  {path.name}")
            print(f"{store.size_bytes():>12,} bytes in {len(entries)} kernels in {store.root}")
    except OSError as error:
        print(f"cannot {action}: {error}", file=sys.stderr)
        return 2
    return 0
