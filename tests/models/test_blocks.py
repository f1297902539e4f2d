"""Passes that begin at a block are those of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import multihead
from families import FAMILIES, WORDS, model_of
from multihead.models import find_sites, instrument
from multihead.models.blocks import BlockInputs, begin_at, find_blocks, record_blocks
from small import IDS, llama
from untouched import assert_untouched, snapshot


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "gpt_neox", "bert", "llama4"])
def test_a_pass_that_begins_at_a_block_gives_the_same(family: str) -> None:
    model = model_of(next(f for f in FAMILIES if f.name == family))
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    blocks = find_blocks(model, find_sites(model))
    recorded = BlockInputs(blocks, stops=False)
    before = snapshot(model)
    with torch.no_grad():
        with instrument(model, recorded, sites=[]):
            want = model(input_ids=ids)[0]
        assert recorded.ran_once()
        for name in blocks:
            hidden = recorded.hidden[name][0]
            with begin_at(name, hidden, recorded):
                torch.testing.assert_close(model(input_ids=ids)[0], want)
            with begin_at(name, hidden.repeat(3, 1, 1), recorded):  # other batch elements too
                again = model(input_ids=ids.repeat(3, 1))[0]
            torch.testing.assert_close(again, want.repeat(3, 1, 1), rtol=1e-4, atol=1e-5)
    assert_untouched(model, before)


def test_blocks_that_do_not_follow_one_another() -> None:
    model = llama()

    class Skips(nn.Module):
        """The second block adds to what the first was given."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            body = self.model.model
            x = body.embed_tokens(input_ids)
            angles = body.rotary_emb(x, torch.arange(x.shape[1])[None])
            first = body.layers[0](x, position_embeddings=angles)
            second: torch.Tensor = body.layers[1](first + x, position_embeddings=angles)
            return second

    skips = Skips().eval()
    recorded = record_blocks(skips, find_blocks(skips, find_sites(skips)), [{"input_ids": IDS}])
    assert not recorded.ran_once()
    assert find_blocks(model, find_sites(model)[:1]) == {}
    assert find_blocks(nn.Linear(2, 2), []) == {}


def test_effects_are_those_of_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.reader.statistics import gradient

    model, wanted = llama(), ["effect", "effect_mean"]
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    lengths: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: lengths.append(len(out))
    )
    fast = multihead.read(model, [batch], probe=False, statistics=wanted)
    runs = len(lengths)
    lengths.clear()
    monkeypatch.setattr(gradient, "count_tokens", lambda _: None)
    slow = multihead.read(model, [batch], probe=False, statistics=wanted)
    hook.remove()
    # the first layer isn't run again without heads of the second: 3 heads, twice
    assert runs < len(lengths) - 2 * 3 and len(fast.heads) == 6
    for column in wanted:
        got, want = (torch.tensor(t.value(column)) for t in (fast, slow))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
