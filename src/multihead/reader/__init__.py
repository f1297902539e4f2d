"""Statistics of every head while a model runs: readings, tables of heads, maps and relations.

`read` is the verb, `session` the reading around a user's loop, `statistics/` what is measured,
`tokens` which token is where, `verify` the comparison with the model as it came; `sums` and `table`
hold the numbers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
