"""Layouts of CuTe kernels as values: read, evaluated, checked and drawn, without a GPU, torch or
cutlass."""

from .algebra import AnyLayout, ComposedLayout, Layout, Swizzle, parse
from .notation import LayoutSyntaxError

__all__ = ["AnyLayout", "ComposedLayout", "Layout", "LayoutSyntaxError", "Swizzle", "parse"]
