"""GPUs as plans see them: what `plan_softmax` takes as its device."""

from .plan.hardware import ARCHITECTURES, H200, Architecture, Device

__all__ = ["ARCHITECTURES", "H200", "Architecture", "Device"]
