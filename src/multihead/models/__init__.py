"""Models of any library: their attention sites, how they are instrumented, resized and loaded."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
