"""Attention layers, transformer blocks, caches and position encodings, on `multihead.ops`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
