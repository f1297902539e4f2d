"""`chosen_maps`: the attention maps that a page shows, of every head for a short text and of the
most informative heads for a longer one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..data.batching import first_batch
from ..reader.digest import Digest
from ..reader.maps import HeadMap, read_maps
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
    found = read_maps(model, first, order, rows=range(window), keys=window, tokenizer=tokenizer)
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
