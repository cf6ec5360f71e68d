"""Our kernels under torch's own operators."""

from .switch import Acceleration, Report, accelerate, accelerated, restore

__all__ = ["Acceleration", "Report", "accelerate", "accelerated", "restore"]
