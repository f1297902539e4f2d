"""The attention operator, its masks and its backends.

`functional` is the operator, `masks` and `convert` its masks, `call` what they are lowered to,
`backends/` the ways to compute it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
