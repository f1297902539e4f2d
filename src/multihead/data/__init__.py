"""Texts and batches: from files and strings to tokens, windows and padded batches, and the token
loss.

`sources` finds texts, `tokenizing` and `windows` cut them, `batching` sorts and pads them into a
`Batch`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
