"""The browser of the explorers' tests."""

from browser import browser

__all__ = ["browser"]
