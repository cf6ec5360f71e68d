"""A parser of command lines that says in one line what is wrong with one."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's, without the usage before an error; its subparsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read on; the status is 2."""
        self.exit(2, f"error: {message}. See '{self.prog} --help'.\n")
