"""Texts and batches: files and strings to tokens, windows and padded batches, and the token loss."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
