"""Models of any library: their attention sites, how they are instrumented, resized and loaded.

`names` and `site` describe attention modules, `instrument` is the seam to a running model,
`transformers` and `foreign` connect attention to it, `loading` opens checkpoints.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
