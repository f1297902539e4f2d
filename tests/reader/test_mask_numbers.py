"""Readings of masks given as numbers: the table is that of the same mask in any other form, and
queries that may read nothing count nowhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import multihead
from multihead.errors import ReadingError
from multihead.models.transformers import register_attention
from small import llama

IDS = torch.tensor([[1, 5, 9, 7, 5, 9, 3], [3, 5, 9, 7, 5, 9, 8]])
MAY = torch.ones(7, 7, dtype=torch.bool).tril()
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
LEFT = MAY & PADDED[:, None, None].bool() & PADDED[:, None, :, None].bool()  # [2, 1, 7, 7]
LOWEST = torch.finfo(torch.float32).min


def numbers(may: Tensor, low: float) -> Tensor:
    return torch.zeros(may.shape).masked_fill(~may, low)


def read(model: Any, *args: Any, **inputs: Any) -> Any:
    with torch.no_grad(), multihead.reading(model) as reading:
        model(*args, **inputs)
    return reading.table()


def assert_equal(a: Any, b: Any) -> None:
    assert a.sums.keys() == b.sums.keys()
    for column in a.sums:
        assert np.array_equal(a.count(column), b.count(column)), column
        np.testing.assert_allclose(
            a.value(column), b.value(column), atol=1e-4, rtol=1e-4, err_msg=column
        )


@pytest.fixture(params=["eager", "sdpa", "multihead"])
def model(request: Any) -> Any:
    register_attention()
    found = llama()
    found.set_attn_implementation(request.param)
    return found


@pytest.mark.parametrize("low", [-1e4, -1e5, -1e9, LOWEST, LOWEST / 2, -torch.inf])
def test_the_axes_of_a_mask_change_nothing(model: Any, low: float) -> None:
    want = read(model, IDS)
    mask = numbers(MAY, low)
    for given in (mask[None, None], mask.expand(1, 3, 7, 7), mask.expand(2, 3, 7, 7).clone()):
        assert_equal(read(model, IDS, attention_mask=given), want)
    assert not want.count("next").any()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("low", [-1e4, -1e9, LOWEST, LOWEST / 2])
def test_left_padding_in_a_mask_is_left_padding(model: Any, low: float, heads: int) -> None:
    given = numbers(LEFT, low).expand(2, heads, 7, 7)
    assert_equal(read(model, IDS, attention_mask=given), read(model, IDS, attention_mask=PADDED))


@pytest.mark.parametrize("low", [-1e9, LOWEST])
def test_queries_that_may_read_nothing_but_are_read(model: Any, low: float) -> None:
    """They count nowhere, and what they add to the model's stream is what the model itself adds."""
    may = MAY.expand(2, 1, 7, 7).clone()
    may[0, :, :2] = False
    table = read(model, IDS, attention_mask=numbers(may, low))
    assert set(table.count("entropy")) == {12}
    by_head = may.expand(2, 3, 7, 7).clone()
    by_head[1, 1, :4] = False
    table = read(model, IDS, attention_mask=numbers(by_head, low))
    assert list(table.count("entropy")) == [12, 8, 12] * 2


def test_a_mask_of_booleans(model: Any) -> None:
    """Eager attention adds it as 0 and 1, so nothing is masked: that isn't taken for a mask."""
    if model.config._attn_implementation == "eager":
        with pytest.raises(ReadingError, match="adds a boolean mask to the scores as 0 and 1"):
            read(model, IDS, attention_mask=LEFT)
    else:
        want = read(model, IDS, attention_mask=PADDED)
        assert_equal(read(model, IDS, attention_mask=LEFT), want)


def test_whole_numbers_are_added_as_eager_attention_adds_them() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    given = numbers(LEFT, -10000).long()
    assert_equal(read(model, IDS, attention_mask=given), read(model, IDS, attention_mask=PADDED))
    read(model, IDS, attention_mask=MAY[None, None].long())  # 0 and 1: a bias


def test_masks_of_a_model_in_training() -> None:
    model = llama(attention_dropout=0.5).train()
    given = numbers(LEFT, LOWEST)
    table, want = read(model, IDS, attention_mask=given), read(model, IDS, attention_mask=PADDED)
    assert np.array_equal(table.count("self"), want.count("self"))


@pytest.mark.parametrize("low", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_encoders_and_decoders(implementation: str, low: float) -> None:
    """T5's bias of positions, here as low as -60, forbids nothing."""
    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, pad_token_id=0
    )
    model = tf.T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation(implementation)
    for stack in (model.encoder, model.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_(std=20)
    full = PADDED[:, None, None].bool() & PADDED[:, None, :, None].bool()
    want = read(model.encoder, IDS, attention_mask=PADDED)
    for heads in (1, 4):
        given = numbers(full, low).expand(2, heads, 7, 7)
        assert_equal(read(model.encoder, IDS, attention_mask=given), want)
    inputs = dict(input_ids=IDS, attention_mask=PADDED, decoder_input_ids=IDS.flip(1))
    want = read(model, **inputs, decoder_attention_mask=PADDED)
    given = numbers(LEFT, low)
    assert_equal(read(model, **inputs, decoder_attention_mask=given), want)


def test_the_padding_of_a_decoder_counts_in_cross_attention_neither() -> None:
    torch.manual_seed(0)
    config = tf.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=20,
    )
    model = tf.BartModel(config).eval()
    inputs = dict(input_ids=IDS, decoder_input_ids=IDS.flip(1))
    given = read(model, **inputs, decoder_attention_mask=numbers(LEFT, LOWEST))
    assert_equal(given, read(model, **inputs, decoder_attention_mask=PADDED))


class Written(nn.Module):
    """Attention by hand, twice."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv, self.proj = 4, nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.proj(y.transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Attention(), self.Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.first(x, mask)
        return x + self.second(x, mask)


class Torch(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.weights = weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = mask if mask is None or mask.ndim < 4 else mask.expand(2, 4, 7, 7).flatten(0, 1)
        for attention in (self.first, self.second):
            x = x + attention(x, x, x, attn_mask=mask, need_weights=self.weights)[0]
        return x


@pytest.mark.parametrize("kind", ["written", "torch", "torch, with weights"])
def test_modules_of_other_libraries(kind: str) -> None:
    torch.manual_seed(0)
    model = (Written() if kind == "written" else Torch(kind != "torch")).eval()
    x = torch.randn(2, 7, 32)
    want = read(model, x, MAY if kind == "written" else ~MAY)
    for low in (-1e4, -1e9, LOWEST, -torch.inf):
        mask = numbers(MAY, low)
        for given in (mask, mask.expand(2, 4, 7, 7), mask.expand(2, 4, 7, 7).clone()):
            assert_equal(read(model, x, given), want)
    empty = MAY.expand(2, 1, 7, 7).clone()
    empty[0, :, :2] = False
    for low in (-1e4, -1e9, LOWEST):  # read or not by others
        assert set(read(model, x, numbers(empty, low)).count("entropy")) == {12}
        assert set(read(model, x, numbers(LEFT, low)).count("entropy")) == {12}
    assert set(read(model, x, numbers(LEFT, -1e9).expand(2, 4, 7, 7)).count("entropy")) == {12}


def test_one_layer_whose_attention_gives_nan_for_such_queries() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    del model.model.layers[1:]
    given = read(model, IDS, attention_mask=numbers(LEFT, -torch.inf))
    assert_equal(given, read(model, IDS, attention_mask=PADDED))


def test_this_library_s_layer() -> None:
    torch.manual_seed(0)
    layer = multihead.MultiHeadAttention(32, 4).eval()
    x = torch.randn(2, 7, 32)
    want = read(layer, x, mask=MAY)
    for low in (-1e4, -1e9, LOWEST, -torch.inf):
        assert_equal(read(layer, x, attn_bias=numbers(MAY, low)), want)
        assert_equal(read(layer, x, attn_bias=numbers(MAY, low).expand(2, 4, 7, 7)), want)
    assert set(read(layer, x, attn_bias=numbers(LEFT, -1e9)).count("entropy")) == {12}


def test_losses_of_padding_in_a_mask_are_left_out() -> None:
    tables = [
        multihead.read(
            llama(),
            [{"input_ids": IDS, "attention_mask": mask}],
            statistics=["effect", "importance"],
        )
        for mask in (PADDED, numbers(LEFT, LOWEST))
    ]
    assert_equal(*tables)
