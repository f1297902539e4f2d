"""`Text` and `Weights`: the positions and the blocks of weights that statistics are computed from.

Only types are declared here, so that statistics can be listed without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Text:
    """Positions of one attention call. Query i is key number `offset + i`."""

    real: Tensor  # bool [B, L]: queries that are not padding and count
    key_real: Tensor  # bool [B, S]: keys that are not padding
    # [B]: the first key that isn't padding; negative once a sliding cache has dropped it
    first: Tensor
    ids: Tensor | None  # [B, L]: token ids of the queries
    key_ids: Tensor | None  # [B, S]: token ids of the keys, -1 where there is no token
    before_ids: Tensor | None  # [B, S]: id of the token before each key, -1 where there is none
    special: Tensor | None  # bool [B, S]: keys that are special tokens
    offset: int | None  # None: queries and keys belong to two sequences (cross-attention)
    reason: str = ""  # why token ids are missing
    continues: bool = False  # the queries continue the sequences of the last pass, from its cache
    found: dict[tuple[object, ...], Tensor] = field(
        default_factory=dict
    )  # key positions sorted by token id, computed once a pass


class Weights(NamedTuple):
    """The attention weights of a block of consecutive queries."""

    weights: Tensor  # [B, H, rows, keys]: A_ij
    rows: slice  # queries of the block
    keys: slice  # keys of the block: all that any of these queries may read
    # bool [B or 1, 1 or H, rows, keys]; None where every query may read all these keys
    allowed: Tensor | None
    text: Text


Watch = Callable[[Weights], None]  # called with each block of queries, in order
