"""Removing, sharing and retraining heads, with the loss measured.

`prune` and `gqa` (sharing) are the verbs, `pruner` tries `criteria`, `surgery` makes the smaller
model and proves it, `checkpoint` writes it, `losses` measures it, `tune` distils it; `job` is what
the commands do.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
