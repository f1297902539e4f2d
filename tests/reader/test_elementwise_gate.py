"""A gate or norm between the heads and W_O is detected from values, not by a class's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from small import IDS, llama

H, E = 3, 8  # of small.llama


@contextmanager
def between(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The model with something between its heads `[B, L, H, E]` and each W_O."""
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: (change(args[0].unflatten(-1, (H, E))).flatten(-2),)
        )
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gate(x: Tensor) -> Tensor:
    return x * torch.linspace(-1, 2, H * E).view(H, E)


def norm(x: Tensor) -> Tensor:
    return x / x.square().mean((-1, -2), keepdim=True).sqrt() * torch.linspace(0.5, 2, E)


BY_ITSELF = {
    "gate": gate,
    "norm": norm,
    "head norm": lambda x: x / x.norm(dim=-1, keepdim=True) * torch.linspace(1, 2, E),
}
MIXED = {
    "heads in one another's place": lambda x: x.roll(1, 2) * 1.5,
    "numbers in one another's place": lambda x: x.roll(1, 3),
    "rows in one another's place": lambda x: gate(x.roll(1, 1)),
    "heads mixed": lambda x: x + 0.1 * x.sum(2, keepdim=True),
    "something added": lambda x: gate(x) + 1,
    "a mean taken off": lambda x: x - x.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", BY_ITSELF)
@pytest.mark.parametrize("verify", [True, False])
def test_an_elementwise_gate_or_norm_is_read(name: str, verify: bool) -> None:
    model = llama()
    with (
        between(model, BY_ITSELF[name]),
        torch.no_grad(),
        multihead.reading(model, verify=verify) as reading,
    ):
        model(IDS)
    table = reading.table()
    row = table.rows()[0]
    assert row["self"] is not None and row["norm"] is not None and row["contribution:self"] is None
    assert "elementwise gate or norm" in table.reasons["contribution:self"]
    assert sum(table.value("share")[:H]) == pytest.approx(1, abs=1e-5)
    assert table.count("entropy")[0] == IDS.numel(), "the pass that proves it counts nothing"
    after = multihead.read(
        model, [{"input_ids": IDS}], probe=False
    )  # nothing stands there any more
    assert after.rows()[0]["contribution:self"] is not None


@pytest.mark.parametrize("name", MIXED)
def test_an_operation_that_mixes_channels_is_refused(name: str) -> None:
    model = llama()
    with (
        between(model, MIXED[name]),
        pytest.raises(
            multihead.errors.ReadingError, match=r"o_proj is neither the output of its heads"
        ) as caught,
    ):
        multihead.read(model, [{"input_ids": IDS}], probe=False)
    assert "LlamaAttention" in str(caught.value)


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
def test_the_proof_leaves_a_cache_unchanged() -> None:
    from transformers import DynamicCache

    model = llama()
    with between(model, gate), torch.no_grad():
        want = model(IDS).logits
        with multihead.reading(model) as reading:
            cache = DynamicCache(config=model.config)
            got = [
                model(IDS[:, a:b], past_key_values=cache, use_cache=True).logits
                for a, b in ((0, 5), (5, 6), (6, 12))
            ]
    assert cache.get_seq_length() == 12 and torch.allclose(torch.cat(got, 1), want, atol=1e-4)
    assert reading.table().count("entropy")[0] == IDS.numel()


def test_mean_ablated_heads_and_a_gate() -> None:
    model = llama()
    inputs = {"input_ids": IDS}
    with between(model, gate), multihead.ablate_heads(model, "L0.H1", mode="mean", over=[inputs]):
        table = multihead.read(model, [inputs], probe=False)
    assert table.rows()[0]["norm"] is not None
