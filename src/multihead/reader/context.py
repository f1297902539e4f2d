"""`TokenContext` and `QueryBlock`: what statistics are computed from.

Only types are declared here, so that statistics can be listed without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TokenContext:
    """The tokens of one attention call. Query i is at key position `offset + i`.

    >>> import multihead
    >>> class Beginning(multihead.Statistic):
    ...     name, formula, meaning = "beginning", "mass on the first 4 keys", "reads the beginning"
    ...
    ...     def key_values(self, context):  # [B, S]
    ...         return context.key_valid & (context.key_valid.cumsum(-1) <= 4)
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "one two", tokenizer=tokenizer, statistics=Beginning())
    >>> bool((table.value("beginning") >= table.value("first")).all())
    True
    """

    query_valid: Tensor  # bool [B, L]: queries that count (no padding)
    key_valid: Tensor  # bool [B, S]: keys that are no padding
    # [B]: the first key that is no padding; negative once a sliding cache has dropped it
    first_key: Tensor
    query_ids: Tensor | None  # [B, L]: token ids; negative where there is no token
    key_ids: Tensor | None  # [B, S]: token ids; -1 where there is no token
    previous_ids: Tensor | None  # [B, S]: id of the token before each key; -1 where there is none
    special: Tensor | None  # bool [B, S]: keys that are special tokens
    offset: int | None  # None: queries and keys belong to two sequences (cross-attention)
    ids_reason: str = ""  # why token ids are missing
    continues: bool = False  # the queries continue the sequences of the last pass, from its cache
    repeats: int = 0  # or without one: so many leading queries are those of the last pass again
    # Ids as the model was given them, those of padding and of placeholders for pictures included,
    # and in cross-attention, too: what maps show, and what token classes match.
    given_query_ids: Tensor | None = None  # [B, L]
    given_key_ids: Tensor | None = None  # [B, S]; -1 where the key is no position of the text
    # key positions sorted by token id, computed once a pass
    sorted_keys: dict[tuple[object, ...], Tensor] = field(default_factory=dict)


class QueryBlock(NamedTuple):
    """The attention weights `[B, H, rows, keys]` of some consecutive queries.

    >>> import multihead
    >>> class Argmax(multihead.Statistic):
    ...     name, formula, meaning = "argmax", "argmax_j A_ij", "mean position of the key read most"
    ...
    ...     def rows(self, block):  # [B, H, rows]
    ...         return block.weights.argmax(-1) + block.keys.start
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "one two", tokenizer=tokenizer, statistics=Argmax())
    >>> bool((table.value("argmax") >= 0).all())
    True
    """

    weights: Tensor  # [B, H, rows, keys]: A_ij
    rows: slice  # queries of the block
    keys: slice  # keys of the block: all that any of these queries may read
    # bool [B or 1, 1 or H, rows, keys]; None where every query may read all these keys
    allowed: Tensor | None
    context: TokenContext


Watch = Callable[[QueryBlock], None]  # called with each block of queries, in order
