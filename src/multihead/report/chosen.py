"""`chosen_maps`: the attention maps that a page shows, of every head for a short text and of the
most informative heads for a longer one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from ..data.batching import first_batch
from ..data.token_range import count_tokens, cut_tokens
from ..models.introspect import text_config
from ..reader.digest import Digest
from ..reader.maps import HeadMap, read_maps
from ..reader.probe import takes_probe
from ..reader.table import Table

EVERY_HEAD = 64  # tokens up to which a page has the maps of all heads
CHOSEN = 48  # heads with a map, for longer texts
WINDOW = 128  # tokens of a map, for longer texts: the first ones


def chosen_maps(
    model: nn.Module, text: Any, table: Table, tokenizer: Any = None
) -> tuple[list[HeadMap], list[str]]:
    """The maps for the page of one text, and notes on what is not among them."""
    first, _ = first_batch(model, text, tokenizer)
    notes = (
        ["the maps are of the first text; all numbers are of all texts"]
        if table.meta.get("documents", 1) > 1
        else []
    )
    length = max(v.shape[1] for v in first.values() if hasattr(v, "ndim") and v.ndim >= 2)
    reached = [n for n, count in enumerate(table.count("norm")) if count]
    labels = [table.heads[n].head for n in reached]
    if length <= EVERY_HEAD:
        return read_maps(model, first, labels, tokenizer=tokenizer), notes
    order = [table.heads[n].head for n in Digest(table).order() if n in set(reached)][:CHOSEN]
    window = min(length, WINDOW)
    found = _first_maps(model, first, order, window, tokenizer)
    if window < length:
        notes.append(
            f"the maps show the first {window} of {length:,} tokens; all numbers are of the whole"
            " text"
        )
    if len(order) < len(labels):
        notes.append(
            f"there are maps of the {len(order)} most informative of {len(labels)} heads; a text"
            f" of up to {EVERY_HEAD} tokens has those of all"
        )
    return found, notes


def _first_maps(
    model: nn.Module, inputs: dict[str, Any], heads: list[str], window: int, tokenizer: Any
) -> list[HeadMap]:
    """The maps of the first tokens. Where no query reads a later key, they are those of these
    tokens alone, so no more of the text has to run.
    """
    if count_tokens(inputs) is not None and takes_probe(model) and not _angles_vary(model):
        part = cut_tokens(inputs, 0, window)
        found = read_maps(model, part, heads, tokenizer=tokenizer)
        if not any(np.triu(one.weights, 1).any() for one in found):
            return found
    return read_maps(model, inputs, heads, rows=range(window), keys=window, tokenizer=tokenizer)


def _angles_vary(model: nn.Module) -> bool:
    """Whether rotary angles depend on the length of the text."""
    given = getattr(text_config(model), "rope_parameters", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)
