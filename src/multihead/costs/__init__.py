"""Parameters, operations, memory and KV cache of a model's attention, computed from its config."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
