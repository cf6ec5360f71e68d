"""Layouts of CuTe kernels as values: read, evaluated, checked and drawn, without a GPU, torch or
cutlass."""

from .algebra import AnyLayout, ComposedLayout, Layout, Swizzle
from .notation import LayoutSyntaxError, parse

__all__ = ["AnyLayout", "ComposedLayout", "Layout", "LayoutSyntaxError", "Swizzle", "parse"]


def _repr_svg_(layout: AnyLayout) -> str | None:
    """The layout's grid as SVG, which a notebook shows; None, and so its text, where nothing draws."""
    try:
        from .figures import layout_grid
    except ModuleNotFoundError:  # drawsvg, or all of it (on the kernel hub)
        return None
    return layout_grid(layout).svg()


Layout._repr_svg_ = ComposedLayout._repr_svg_ = _repr_svg_
