"""timm, where torchvision can't be had: PyPI's doesn't load beside the CPU build of torch, and then
breaks transformers too.

timm needs it for its picture transforms, which no test uses, and for one class that it tests
modules for.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from enum import Enum
from typing import Any
from unittest.mock import MagicMock

from torch import nn

PARTS = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")


def import_timm() -> Any:
    """The module timm; while it is imported something stands in for a torchvision that isn't
    there.
    """
    if "timm" in sys.modules or importlib.util.find_spec("torchvision"):
        import timm

        return timm
    for part in PARTS:
        stand_in: Any = types.ModuleType(f"torchvision{part}")
        stand_in.__getattr__ = lambda name: MagicMock if name[:1].isupper() else MagicMock()
        stand_in.FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
        stand_in.InterpolationMode = Enum(
            "InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"
        )
        sys.modules[stand_in.__name__] = stand_in
    for part in PARTS[1:]:
        above, _, name = f"torchvision{part}".rpartition(".")
        setattr(sys.modules[above], name, sys.modules[f"torchvision{part}"])
    try:
        import timm
    finally:
        for part in PARTS:
            del sys.modules[f"torchvision{part}"]
    return timm
