"""Find bugs in an attention implementation: `check`, its report, and what it tests.

`discover` finds out how to call the target (`Callee`), `properties` has the table of properties,
`bugs` that of known bugs, each a change of the `definition`; `recompute` reproduces the output.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
