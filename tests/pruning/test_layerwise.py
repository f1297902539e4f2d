"""Layers run one by one give what the model gives, and see what earlier layers became."""

from __future__ import annotations

import torch

from multihead.data.batch import Batch
from multihead.models.site import find_sites
from multihead.pruning.layerwise import LayerwiseRunner, run_layerwise
from multihead.pruning.shared_heads import write_shared_heads
from pruning.sharing import share_weights
from pruning.small_models import BATCHES, make


def test_blocks_run_one_by_one_are_the_model() -> None:
    model = make("llama")
    sites = find_sites(model)
    with run_layerwise(model, [Batch(b) for b in BATCHES], sites) as runner:
        assert len(runner.blocks) == 2
        stepped = [runner.capture(site) for site in sites]
        plain = LayerwiseRunner(model, [Batch(b) for b in BATCHES], sites[1:])
        assert not plain.blocks
        whole = plain.capture(sites[1])
    for x, y in zip(stepped[1].entered, whole.entered, strict=True):
        torch.testing.assert_close(x, y)


def test_later_layers_are_calibrated_on_what_earlier_ones_give() -> None:
    model = make("llama")
    first, second = share_weights(model, 1, BATCHES)
    alone = share_weights(model, 1, BATCHES, layers=[1])[0]
    assert not torch.allclose(alone.v, second.v)
    write_shared_heads(find_sites(model)[0], first)
    torch.testing.assert_close(
        share_weights(model, 1, BATCHES, layers=[1])[0].v, second.v, rtol=1e-3, atol=1e-4
    )
