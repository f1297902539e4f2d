"""Masks for `multihead.attention`: True means "may read". They compose with `&`.

>>> from multihead import masks
>>> (masks.causal() & masks.window(1)).dense(3, 3)[0, 0].int()
tensor([[1, 0, 0],
        [1, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
"""

from .ops.convert import from_dense, from_function, from_torch_mask
from .ops.documents import documents
from .ops.masks import IntervalMask, causal, intervals, padding, prefix, window

__all__ = [
    "IntervalMask",
    "causal",
    "documents",
    "from_dense",
    "from_function",
    "from_torch_mask",
    "intervals",
    "padding",
    "prefix",
    "window",
]
