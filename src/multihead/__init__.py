"""Multi-head attention: attend, read, prune, cost and check. Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attention": "attention.functional",
    "causal": "attention.masks", "window": "attention.masks", "padding": "attention.masks",
    "intervals": "attention.masks", "IntervalMask": "attention.masks",
    "split_heads": "attention.heads", "merge_heads": "attention.heads",
    "MultiHeadAttention": "layers.multi_head", "TransformerBlock": "layers.block",
    "read": "reading.read", "reading": "reading.reader", "ReadingError": "reading.check", "maps": "reading.maps",
    "Table": "reading.table", "load_table": "reading.table",
    "heads": "models.switch", "register": "models.interface", "builtin": "models.loading",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .attention.functional import attention as attention
    from .attention.heads import merge_heads as merge_heads
    from .attention.heads import split_heads as split_heads
    from .attention.masks import IntervalMask as IntervalMask
    from .attention.masks import causal as causal
    from .attention.masks import intervals as intervals
    from .attention.masks import padding as padding
    from .attention.masks import window as window
    from .layers.block import TransformerBlock as TransformerBlock
    from .layers.multi_head import MultiHeadAttention as MultiHeadAttention
    from .models.interface import register as register
    from .models.loading import builtin as builtin
    from .models.switch import heads as heads
    from .reading.check import ReadingError as ReadingError
    from .reading.maps import maps as maps
    from .reading.read import read as read
    from .reading.reader import reading as reading
    from .reading.table import Table as Table
    from .reading.table import load_table as load_table


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'multihead' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _Front(type(import_module("sys"))):  # type: ignore[misc]
    """The front door: `multihead.reading` is the function, though a folder of that name is imported too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, type(self).__mro__[1]):
            return
        super().__setattr__(name, value)


import_module("sys").modules[__name__].__class__ = _Front
