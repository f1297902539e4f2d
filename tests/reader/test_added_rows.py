"""Rows and keys that are no tokens: soft prompts, prefixes, expanded pictures, caches filled before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from data.test_tokenizing import small_tokenizer
from small import IDS, llama

VIRTUAL = 5
TEXT = torch.tensor([[5, 9, 7, 5, 9, 8, 7, 5, 9, 6, 7, 5]])


def eager(model: Any, **inputs: Any) -> np.ndarray:
    """Weights of layer 0 `[H, L, S]`, from the model's own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[0][0]
    model.set_attn_implementation(before)
    return weights.numpy()


def duplicate_mass(weights: np.ndarray, ids: list[int], first: int) -> tuple[int, np.ndarray]:
    """Queries with an earlier copy, and the mean mass on the copies; `ids` -1: no token."""
    rows, sums = 0, np.zeros(len(weights))
    for row in range(weights.shape[1]):
        at = row + len(ids) - weights.shape[1]
        copies = [j for j in range(at) if ids[j] == ids[at] >= 0]
        if copies and row >= first:
            rows, sums = rows + 1, sums + weights[:, row, copies].sum(-1)
    return rows, sums / max(rows, 1)


# ---- rows that are added


class SoftPrompt(nn.Module):
    """Rows of its own around the text."""

    def __init__(self, inner: Any, before: int = 0, after: int = 0) -> None:
        super().__init__()
        self.inner = inner
        self.before, self.after = (
            nn.Parameter(torch.randn(1, n, 24, generator=torch.Generator().manual_seed(n)))
            for n in (before, after)
        )

    def rows(self, ids: Any) -> Any:
        embeds = self.inner.get_input_embeddings()(ids)
        ends = (x.expand(len(ids), -1, -1) for x in (self.before, self.after))
        return torch.cat([next(ends), embeds, next(ends)], 1)

    def forward(self, ids: Any, attention_mask: Any = None) -> Any:
        if attention_mask is not None:
            ones = attention_mask.new_ones(len(ids), 1)
            ends = (ones.expand(-1, n.shape[1]) for n in (self.before, self.after))
            attention_mask = torch.cat([next(ends), attention_mask, next(ends)], 1)
        return self.inner(inputs_embeds=self.rows(ids), attention_mask=attention_mask)


def prompt_tuned(**options: Any) -> Any:
    import peft

    torch.manual_seed(3)
    kind = options.pop("kind", peft.PromptTuningConfig)
    model = peft.get_peft_model(
        llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, **options)
    )
    return model.eval()


def p_tuned() -> Any:
    import peft

    return prompt_tuned(kind=peft.PromptEncoderConfig, encoder_hidden_size=8)


def prefix_tuned() -> Any:
    import peft

    torch.manual_seed(3)
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=64, vocab_size=50)
    )
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    return peft.get_peft_model(model.eval(), config).eval()


ADDING: dict[str, tuple[Callable[[], Any], int, int]] = {
    "before": (lambda: SoftPrompt(llama(), 4, 0), 4, 0),
    "after": (lambda: SoftPrompt(llama(), 0, 3), 0, 3),
    "around": (lambda: SoftPrompt(llama(), 1, 2), 1, 2),
    "prompt tuning": (prompt_tuned, VIRTUAL, 0),
    "p-tuning": (p_tuned, VIRTUAL, 0),
}


@pytest.mark.parametrize("name", ADDING)
def test_rows_that_are_added_are_keys_without_a_token(name: str) -> None:
    make, before, after = ADDING[name]
    model, seen = make(), []
    inner = model.inner if name in ("before", "after", "around") else model.get_base_model()
    handle = inner.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(TEXT)
    handle.remove()
    weights = eager(inner, inputs_embeds=seen[0])
    ids = [-1] * before + TEXT[0].tolist() + [-1] * after
    with multihead.reading(model) as reading, torch.no_grad():
        model(TEXT)
    table = reading.table()
    assert table.meta["tokens"] == 12 and table.meta["documents"] == 1
    assert table.count("entropy").tolist() == [12] * 6
    count, mass = duplicate_mass(weights, ids, before)
    assert table.count("duplicate").tolist() == [count] * 6
    np.testing.assert_allclose(table.value("duplicate")[:3], mass, rtol=1e-4, atol=1e-6)
    rows = weights[:, before : before + 12]
    far = np.abs(np.arange(len(ids))[None] - np.arange(before, before + 12)[:, None])
    np.testing.assert_allclose(
        table.value("distance")[:3], (rows * far).sum(-1).mean(-1), rtol=1e-4
    )
    np.testing.assert_allclose(table.value("first")[:3], rows[..., 0].mean(-1), atol=1e-5)


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.parametrize("options", [{}, {"context": 5}, {"context": 6, "stride": 2}], ids=str)
def test_texts_count_their_tokens_alone(name: str, options: dict[str, Any]) -> None:
    texts, tokenizer = ["a b c a b", "c", "b b a a b c b a"], small_tokenizer(pad_token="c")
    model = ADDING[name][0]()
    got = multihead.read(model, texts, tokenizer=tokenizer, **options)
    want = multihead.read(llama(), texts, tokenizer=tokenizer, **options)
    for meta in ("tokens", "documents"):
        assert got.meta[meta] == want.meta[meta]
    for column in ("entropy", "duplicate", "special", "induction", "probe:induction", "logit"):
        assert got.count(column).tolist() == want.count(column).tolist(), column


class Writing(SoftPrompt):
    def generate(self, input_ids: Any, attention_mask: Any, **options: Any) -> Any:
        mask = nn.functional.pad(attention_mask, (self.before.shape[1], 0), value=1)
        return self.inner.generate(
            inputs_embeds=self.rows(input_ids), attention_mask=mask, **options
        )


@pytest.mark.parametrize("make", [lambda: Writing(llama(), 4), prefix_tuned])
def test_added_rows_before_generated_text(make: Callable[[], Any]) -> None:
    texts, tokenizer = ["a b c a b", "b b a"], small_tokenizer(pad_token="c")
    new = {"max_new_tokens": 4, "eos_token_id": None}
    got = multihead.read(make(), texts, tokenizer=tokenizer, generate=new, probe=False)
    lengths = [len(tokenizer(text)["input_ids"]) + 3 for text in texts]
    assert got.meta["tokens"] == sum(lengths) and got.meta["documents"] == 2
    assert got.count("entropy").tolist() == [sum(lengths)] * len(got.heads)
    assert got.count("duplicate").all()


def test_a_prompt_that_is_added_at_every_step_is_refused() -> None:
    """As peft does with caches that it doesn't know."""

    class Again(Writing):
        def generate(self, input_ids: Any, attention_mask: Any, **options: Any) -> Any:
            for _ in range(2):
                self.inner(inputs_embeds=self.rows(input_ids))

    with pytest.raises(ValueError, match=r"Again isn't given .*so its steps can't be read"):
        multihead.read(
            Again(llama(), 4), "a b", tokenizer=small_tokenizer(pad_token="c"), generate=2
        )


def test_long_texts_leave_room_for_virtual_tokens() -> None:
    for make in (prompt_tuned, prefix_tuned):
        table = multihead.read(
            make(), "a b c " * 40, tokenizer=small_tokenizer(model_max_length=10**9)
        )
        assert table.meta["tokens"] == 64 - VIRTUAL


def test_losses_are_of_tokens_alone() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    options: dict[str, Any] = dict(tokenizer=tokenizer, statistics=["importance", "effect"])
    got = multihead.read(prompt_tuned(), ["a b c a b", "c"], **options)
    want = multihead.read(llama(), ["a b c a b", "c"], **options)
    for column in ("importance", "effect"):
        assert got.count(column).tolist() == want.count(column).tolist()


def test_a_prefix_has_no_tokens() -> None:
    model = prefix_tuned()
    with multihead.reading(model) as reading, torch.no_grad():
        model(TEXT)
        model(TEXT, attention_mask=torch.ones_like(TEXT))
    table = reading.table()
    assert table.meta["tokens"] == 24 and table.meta["documents"] == 2
    assert table.count("entropy").tolist() == [24] * 6
    assert table.count("duplicate").tolist() == [2 * 7] * 6


class Expanding(nn.Module):
    """The token 9 becomes three rows of a picture."""

    def __init__(self, inner: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, ids: Any) -> Any:
        embeds = self.inner.get_input_embeddings()(ids) * self.scale
        at = int((ids[0] == 9).nonzero()[0])
        picture = torch.ones(1, 3, 24)
        return self.inner(
            inputs_embeds=torch.cat([embeds[:, :at], picture, embeds[:, at + 1 :]], 1)
        )


def test_a_picture_that_is_expanded_inside() -> None:
    ids = torch.tensor([[5, 6, 9, 5, 6, 7, 5]])
    model = Expanding(llama())
    with multihead.reading(model) as reading, torch.no_grad():
        model(ids)
    table = reading.table()
    assert table.count("entropy").tolist() == [6] * 6 and table.meta["tokens"] == 6
    assert table.count("duplicate").tolist() == [3] * 6  # 5, 6 and 5 after the picture


def test_rows_of_unknown_tokens_say_so() -> None:
    model = Expanding(llama(), scale=2.0)
    with multihead.reading(model) as reading, torch.no_grad():
        model(torch.tensor([[5, 6, 9, 5, 6, 7, 5]]))
    table = reading.table()
    assert table.count("entropy").tolist() == [9] * 6
    assert "9 rows, which aren't the 7 tokens" in table.reasons["duplicate"]
    with (
        multihead.reading(model) as reading,
        torch.no_grad(),
        reading.passes(select=torch.ones(1, 7, dtype=torch.bool)),
        pytest.raises(ValueError, match="9 rows of 7 tokens"),
    ):
        model(torch.tensor([[5, 6, 9, 5, 6, 7, 5]]))


class WithClass(nn.Module):
    """A row for the whole before the tokens, and padding that only its layers are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first = nn.Embedding(50, 24), nn.Parameter(torch.randn(1, 1, 24))
        layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Any, attention_mask: Any) -> Any:
        x = torch.cat([self.first.expand(len(ids), -1, -1), self.embed(ids)], 1)
        padding = nn.functional.pad(attention_mask == 0, (1, 0), value=False)
        return self.layers(x, src_key_padding_mask=padding)


def test_a_class_token_and_padding() -> None:
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    table = multihead.read(WithClass(), [{"ids": IDS, "attention_mask": mask}])
    assert table.count("entropy").tolist() == [13 + 8] * 6
    assert "13 rows, which aren't the 12 tokens" in table.reasons["duplicate"]


def test_sound_that_is_downsampled() -> None:
    """The padding mask is of samples, and rows are frames."""
    torch.manual_seed(0)
    config = tf.Wav2Vec2Config(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    model = tf.Wav2Vec2Model(config).eval()
    sound, mask = torch.randn(2, 400), torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    lengths = model._get_feat_extract_output_lengths(mask.sum(-1)).tolist()
    table = multihead.read(model, [{"input_values": sound, "attention_mask": mask}])
    assert lengths[0] > lengths[1]
    assert table.count("entropy").tolist() == [sum(lengths)] * 6
    assert table.meta["tokens"] == sum(lengths) and table.meta["documents"] == 2


# ---- caches


def filled(model: Any, ids: Any, kind: str) -> Any:
    cache: Any = tf.DynamicCache(config=model.config)
    if kind == "static":
        cache = tf.StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_was_filled_before(kind: str) -> None:
    model = llama()
    weights = eager(model, input_ids=TEXT)[:, 8:]
    cache = filled(model, TEXT[:, :8], kind)
    with multihead.reading(model) as reading, torch.no_grad():
        model(TEXT[:, 8:10], past_key_values=cache)
        model(TEXT[:, 10:], past_key_values=cache)
    table = reading.table()
    assert table.meta["documents"] == 1 and table.meta["tokens"] == 4
    far = np.abs(np.arange(12)[None] - np.arange(8, 12)[:, None])
    np.testing.assert_allclose(
        table.value("distance")[:3], (weights * far).sum(-1).mean(-1), rtol=1e-4
    )
    assert "filled or changed outside this reading" in table.reasons["duplicate"]


def test_caches_with_gradients() -> None:
    model = llama()
    with multihead.reading(model) as whole, torch.no_grad():
        model(TEXT)
    with multihead.reading(model) as reading:
        cache = model(TEXT[:, :5]).past_key_values
        out = model(TEXT[:, 5:], past_key_values=cache)
        out.logits.sum().backward()
    got, want = reading.table(), whole.table()
    assert got.meta == want.meta
    for column in ("entropy", "duplicate", "induction", "norm", "logit"):
        assert got.value(column) == pytest.approx(want.value(column), rel=1e-4), column
    assert all(p.grad is not None for n, p in model.named_parameters() if "k_proj" in n)


def test_trained_keys_in_a_cache_keep_their_gradient() -> None:
    """A prefix that is trained: the leaf is in the cache that a user gives."""
    model = llama().requires_grad_(False)
    keys = torch.randn(2, 1, 1, 3, 8, requires_grad=True)
    cache = tf.DynamicCache(config=model.config)
    for layer in range(2):
        cache.update(keys[layer], keys[layer] * 0.5, layer)
    with multihead.reading(model) as reading:
        model(TEXT, past_key_values=cache).logits.sum().backward()
    assert keys.grad is not None and bool(keys.grad.any())
    assert reading.table().meta["tokens"] == 12
