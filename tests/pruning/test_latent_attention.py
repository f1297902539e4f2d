"""Latent attention, this library's and transformers': heads are removed; sharing has nothing to
share and is refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import multihead
from families import FAMILIES, batches_of, model_of
from models.test_latent_under_reading import IDS, Decoder
from multihead import Cache
from multihead.errors import MultiheadError
from multihead.models import find_sites
from multihead.pruning.gqa import share
from multihead.pruning.surgery import remove_heads
from pruning.sharing import share_weights
from twins import sharpened


@pytest.mark.parametrize(
    "options",
    # a norm of a latent as wide as all queries, or all values, isn't a norm over heads
    [{}, dict(q_latent_dim=72), dict(q_latent_dim=30, bias=True)],
    ids=["", "as wide as queries", "as wide as values"],
)
def test_heads_of_the_layer_are_removed(options: dict[str, Any]) -> None:
    """The smaller layer gives what the whole one does with these heads off, in both forms."""
    model = sharpened(Decoder(**options))
    smaller = remove_heads(model, {"layers.0": [1, 4], "layers.1": [0]}, dict(input_ids=IDS))
    assert [layer.num_heads for layer in smaller.layers] == [4, 5]
    caches = [Cache(), Cache()]
    with torch.no_grad():
        with multihead.ablate_heads(model, ["L0.H1", "L0.H4", "L1.H0"]):
            want = model(IDS)
        steps = torch.cat([smaller(IDS[:, i : i + 1], caches) for i in range(9)], 1)
    for got in (smaller(IDS), steps):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    names = [site.head_label(h) for site in find_sites(smaller) for h in range(site.num_heads)]
    assert names == ["L0.H0", "L0.H2", "L0.H3", "L0.H5", *(f"L1.H{h}" for h in range(1, 6))]
    assert sum(multihead.cost(smaller).parameters.values()) == sum(
        p.numel() for p in smaller.layers.parameters()
    )


def test_heads_of_deepseek_are_removed() -> None:
    family = next(f for f in FAMILIES if f.name == "deepseek_v3")
    model, batch = copy.deepcopy(model_of(family)), batches_of(family, "none")[0]
    smaller = remove_heads(model, {"model.layers.0.self_attn": [2]}, batch)
    with torch.no_grad(), multihead.ablate_heads(model, ["L0.H2"]):
        want = model(**batch).logits
    torch.testing.assert_close(smaller(**batch).logits, want, rtol=0, atol=1e-4)


REASON = r"can't share key/value heads: its keys and values are made of a latent vector that all"


def test_sharing_names_what_it_cannot_make() -> None:
    """Before any text is read."""
    with pytest.raises(MultiheadError, match=rf"layers\.0 \(LatentAttention\) {REASON}"):
        share(Decoder(), "a text", num_kv_heads=2)
    family = next(f for f in FAMILIES if f.name == "deepseek_v3")
    name = r"model\.layers\.0\.self_attn \(DeepseekV3Attention\)"
    with pytest.raises(MultiheadError, match=f"{name} {REASON}"):
        share(model_of(family), "a text", num_kv_heads=2)
    with pytest.raises(MultiheadError, match=f"{name} {REASON}"):
        share_weights(model_of(family), 2, [])
