"""Multi-head attention: attend, read, prune, cost and check.

The public names are listed once, in `__init__.pyi`, and imported when they are first used.
"""

import lazy_loader

from .version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
