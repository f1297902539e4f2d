"""Statistics of a head: the protocol, the built-in ones by topic, and the columns of a table.

`base.py` has the protocol `Statistic`; `masses.py`, `weights.py`, `updates.py` and `on_request.py`
declare the built-in statistics, and `columns.py` lists them and names a table's columns. Nothing
of that loads torch.

`A_ij` are the attention weights of one head, `c_ij = A_ij * ||v_j W_O^(h)||` is the norm of what
key j adds to the update of query i (Kobayashi et al. 2020), and `u_i = O_i W_O^(h)` is the head's
update. v includes the value bias, u excludes the output bias, and both are measured before any
later norm or layer scale. docs/reading.md is the specification.
"""

from .base import Defined as Defined
from .base import HeadUpdates as HeadUpdates
from .base import Statistic as Statistic
from .base import Totals as Totals
from .columns import columns as columns
from .columns import describe as describe
from .columns import is_relation as is_relation
from .columns import list_statistics as list_statistics
from .columns import resolve_statistics as resolve_statistics
from .columns import statistics_table as statistics_table
