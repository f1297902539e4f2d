"""Attention under the name "multihead" in transformers: the same outputs, and masks that hold two
numbers a row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.models import instrument
from small import IDS, llama


@pytest.mark.parametrize(
    ("family", "padding"),
    [pytest.param(f, p, id=f"{f.name}-{p}") for f in FAMILIES for p in f.paddings()],
)
def test_equal_outputs_without_a_reading(family: Any, padding: str) -> None:
    model, batch = model_of(family), batches_of(family, padding)[0]
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    with torch.no_grad():
        want = model(**batch)[0]
        with instrument(model, sites=[], attention=True):
            got = model(**batch)[0]
    if mask is not None and want.shape[:2] == mask.shape:
        want, got = want[mask.bool()], got[mask.bool()]
    assert torch.allclose(want, got, atol=1e-4 * float(want.abs().max()))


def test_generation_and_training_through_the_public_switch() -> None:
    multihead.models.register_attention()
    model = llama()
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    model(IDS, labels=IDS).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation("multihead")
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), want)
    model(IDS, labels=IDS).loss.backward()
    for a, p in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-5 * float(a.abs().max()))


@pytest.mark.parametrize(
    "kind", ["bool", "float", "float with a bias", "holes", "positions of packed texts"]
)
def test_masks_of_ones_own(kind: str) -> None:
    """4-D masks, padding with holes and packed positions: read as the model itself reads them."""
    model = llama(attn_implementation="eager")
    may = torch.ones(12, 12, dtype=torch.bool).tril()
    may[:, 2] = False
    may |= torch.eye(12, dtype=torch.bool)
    low = torch.finfo(torch.float32).min
    inputs: dict[str, Any] = {
        "bool": {"attention_mask": may[None, None].expand(2, 1, 12, 12)},
        "float": {"attention_mask": torch.where(may, 0.0, low)[None, None].expand(2, 1, 12, 12)},
        "float with a bias": {
            "attention_mask": (
                torch.where(may, torch.randn(12, 12), low)[None, None].expand(2, 1, 12, 12)
            )
        },
        "holes": {"attention_mask": (torch.arange(12) != 3).long().expand(2, 12)},
        "positions of packed texts": {
            "position_ids": torch.tensor([*range(5), *range(7)]).expand(2, 12)
        },
    }[kind]
    if kind == "bool":
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = model(IDS, **inputs).logits
        with multihead.reading(model) as reading:
            got = model(IDS, **inputs).logits
    keep = torch.arange(12) != 3 if kind == "holes" else slice(None)
    assert torch.allclose(want[:, keep], got[:, keep], atol=1e-4 * float(want.abs().max()))
    assert reading.table().count("entropy")[0] == (22 if kind == "holes" else 24)
    causal = torch.allclose(want, model(IDS).logits, atol=1e-3)
    assert not causal


def test_keys_that_an_indexer_chose_are_the_only_ones_read() -> None:
    """DeepSeek's sparse attention hands over `indices=` where eager would find them in its mask."""
    from multihead.models.transformers import forward

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=g) for _ in range(3))
    indices = torch.stack([torch.randperm(7, generator=g)[:4] for _ in range(14)]).view(2, 7, 4)
    chosen = torch.zeros(2, 1, 7, 7, dtype=torch.bool).scatter(-1, indices[:, None], True)
    may = torch.ones(7, 7, dtype=torch.bool).tril()
    masks = {
        "none": None,
        "bool": may[None, None].expand(2, 1, 7, 7),
        "float": torch.where(may, 0.0, -1e38)[None, None],
    }
    for name, mask in masks.items():
        module = torch.nn.Module()
        module.is_causal = False
        got = forward(module, q, k, v, mask, indices=indices)[0]
        both = chosen if name == "none" else chosen & may
        scores = (q @ k.mT * 5**-0.5).masked_fill(~both, -torch.inf)
        want = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
        if name == "float":  # a query that may read nothing attends by such numbers
            got, want = (x * both.any(-1)[:, 0, :, None, None] for x in (got, want))
        assert torch.allclose(got, want, atol=1e-5), name


def test_block_masks_of_flex_attention() -> None:
    """Under reading, too: one head, all heads, and another mask than the causal one."""
    model = llama()
    model.set_attn_implementation("flex_attention")
    for heads, reach in ((None, 9), (3, 9), (None, 2)):
        mask = create_block_mask(
            lambda b, h, q, k, reach=reach: (q >= k) & (q - k < reach),
            *(1, heads, IDS.shape[1], IDS.shape[1]),
            device="cpu",
        )
        with torch.no_grad(), multihead.reading(model) as reading:
            model(IDS, attention_mask=mask)
        place = torch.arange(IDS.shape[1])
        may = (place[:, None] >= place) & (place[:, None] - place < reach)
        plain = llama()
        with torch.no_grad(), multihead.reading(plain) as other:
            plain(IDS, attention_mask=may[None, None])
        got, want = reading.table(), other.table()
        for column in ("entropy", "even:self", "contribution:first"):
            assert torch.allclose(*(torch.as_tensor(t.value(column)) for t in (got, want)))
