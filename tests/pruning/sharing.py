"""Sharing on ready-made batches, for tests of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multihead.data.batch import Batch
from multihead.models.site import find_sites
from multihead.pruning.gqa import share_layers
from multihead.pruning.plan import select_sites
from multihead.pruning.shared_heads import SharedHeads, SharingOptions


def share_weights(
    model: Any,
    num_kv_heads: int,
    batches: Sequence[Mapping[str, Any]],
    layers: Any = None,
    **options: Any,
) -> list[SharedHeads]:
    sites = find_sites(model)
    chosen = sites if layers is None else select_sites(sites, layers)
    return share_layers(
        model,
        chosen,
        num_kv_heads,
        [Batch(dict(batch)) for batch in batches],
        SharingOptions(**options),
    )
