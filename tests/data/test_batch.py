"""Padding, targets and the loss of a batch, against a plain loop over log probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from data.test_tokenizing import small_tokenizer
from families import FAMILIES, batches_of, model_of
from multihead.data.batch import IGNORED, Batch, collate, concatenate, decoder_inputs
from multihead.data.windows import Window
from multihead.models.site import find_sites
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])


def whole(*texts: str, **options: Any) -> Batch:
    tokenizer = small_tokenizer(pad_token="c", padding_side="left")
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return collate([Window(row, 0, len(row)) for row in ids], tokenizer, **options)


# --- padding ---


def test_batches_are_padded_on_the_right_and_real_tokens_marked() -> None:
    batch = whole("a", "a b c")
    assert batch.inputs["input_ids"].tolist() == [[0, 2, 1, 4, 4], [0, 2, 3, 4, 1]]
    # the "c" of the second text is real
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert {x.dtype for x in batch.inputs.values()} == {torch.int64}
    assert batch.valid is not None and batch.valid.equal(batch.inputs["attention_mask"].bool())
    assert batch.partial is None and batch.tokens == 8 and batch.document is None


def test_padding_on_the_left_and_documents() -> None:
    batch = whole("a b", "b", left=True, document=[1, 0])
    assert batch.inputs["input_ids"].tolist() == [[0, 2, 3, 1], [4, 0, 3, 1]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert batch.document is not None and batch.document.tolist() == [1, 0]


def test_tokenizer_without_padding_token() -> None:
    batch = collate([Window([2, 3], 0, 2), Window([2], 0, 1)], small_tokenizer(special=False))
    assert batch.inputs["input_ids"].tolist() == [[2, 3], [2, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_repeated_tokens_of_a_window_are_not_valid() -> None:
    batch = collate([Window([0, 2, 3, 1], 0, 3), Window([0, 3, 1], 2, 3)], small_tokenizer())
    assert batch.partial is not None and batch.valid is batch.partial
    assert batch.partial.tolist() == [[True, True, True, False], [False, False, True, False]]
    assert batch.tokens == 4


def test_joined_batches_are_padded() -> None:
    a = whole("a b").with_targets(llama(), causal=True)
    b = whole("a b c").with_targets(llama(), causal=True)
    both = concatenate([a, b])
    assert both.inputs["input_ids"].tolist() == [[0, 2, 3, 1, 0], [0, 2, 3, 4, 1]]
    assert both.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert both.tokens == a.tokens + b.tokens
    assert both.targets is not None
    assert both.targets.tolist() == [[2, 3, 1, -100, -100], [2, 3, 4, 1, -100]]
    assert concatenate([Batch({"x": torch.ones(1, 2)}), Batch({"x": torch.ones(2, 1)})]).inputs[
        "x"
    ].tolist() == [[1, 1], [1, 0], [1, 0]]


def test_rows_that_are_no_padding() -> None:
    model = model_of(BY_NAME["t5"])
    sites = {site.name: site for site in find_sites(model)}
    encoder = next(site for name, site in sites.items() if name.startswith("encoder"))
    decoder = next(site for name, site in sites.items() if name.startswith("decoder"))
    x = torch.randn(2, 8, 3)
    batch = Batch(
        {"input_ids": IDS, "attention_mask": MASK, "decoder_attention_mask": MASK.flip(0)}
    )
    assert batch.select(x, encoder).equal(x[MASK.bool()])
    assert batch.select(x, decoder).equal(x[MASK.flip(0).bool()])
    assert batch.select(x[:, :5], encoder).equal(x[:, :5].reshape(-1, 3))
    assert Batch({"input_ids": IDS}).select(x).equal(x.reshape(-1, 3))


def test_for_model_gives_an_encoder_decoder_both_sides() -> None:
    model = model_of(BY_NAME["t5"])
    batch = whole("a b", "a").for_model(model)
    start = model.config.decoder_start_token_id
    assert batch.inputs["decoder_input_ids"].tolist() == [[start, 0, 2, 3], [start, 0, 2, 1]]
    assert batch.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]


# --- targets and loss ---


def by_hand(logits: Tensor, targets: Tensor) -> list[float]:
    losses = [0.0] * len(targets)
    for n, row in enumerate(targets.tolist()):
        for place, token in enumerate(row):
            if token != IGNORED:
                losses[n] -= float(logits[n, place].double().log_softmax(-1)[token])
    return losses


def next_by_hand(inputs: dict[str, Any], valid: Tensor | None) -> Tensor:
    """Position i is scored against token i + 1 where both are text and the token counts."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    targets = torch.full_like(ids, IGNORED)
    for n, row in enumerate(ids.tolist()):
        for i in range(len(row) - 1):
            real = mask is None or bool(mask[n, i] and mask[n, i + 1])
            if real and (valid is None or bool(valid[n, i + 1])):
                targets[n, i] = row[i + 1]
    return targets


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_causal_loss_is_the_log_probability_of_the_next_tokens(
    name: str, masked: bool, partial: bool
) -> None:
    model = model_of(BY_NAME[name])
    inputs = {"input_ids": IDS} | ({"attention_mask": MASK} if masked else {})
    valid = torch.arange(8).expand(2, 8) >= 4 if partial else None
    batch = Batch(inputs, valid).with_targets(model, causal=True)
    expected = next_by_hand(inputs, valid)
    assert batch.targets is not None and batch.targets.tolist() == expected.tolist()
    with torch.no_grad():
        losses = by_hand(model(**inputs)["logits"], expected)
        total, count = batch.losses(model)
        torch.testing.assert_close(
            total, torch.tensor(losses, dtype=total.dtype), rtol=1e-5, atol=0
        )
        assert count.tolist() == (expected != IGNORED).sum(1).tolist()
        few, _ = batch.losses(model, most_logits=100)
        torch.testing.assert_close(few, total, rtol=1e-6, atol=0)
        whole_sum, tokens = batch.loss(model, output=model(**inputs))
        assert float(whole_sum) == pytest.approx(sum(losses), rel=1e-5)
        assert tokens == int(count.sum())
        assert len(batch.token_losses(model)) == tokens


def test_labels_are_shifted_for_a_causal_model_only() -> None:
    labels = IDS.masked_fill(MASK == 0, IGNORED)
    inputs = {"input_ids": IDS, "labels": labels}
    shifted = Batch(inputs).with_targets(llama(), causal=True).targets
    assert shifted is not None and shifted[:, :-1].equal(labels[:, 1:])
    assert (shifted[:, -1] == IGNORED).all()
    plain = Batch(inputs).with_targets(llama(), causal=False).targets
    assert plain is not None and plain.equal(labels)
    with pytest.raises(ValueError, match=r"labels \[2, 5\]: a loss needs .* \[2, 8\]"):
        Batch({"input_ids": IDS, "labels": labels[:, :5]}).with_targets(llama(), causal=True)
    with pytest.raises(ValueError, match="doesn't define which token comes next"):
        Batch({"input_ids": IDS}).with_targets(llama(), causal=False)


def test_texts_packed_in_one_sequence_do_not_predict_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
    inputs = {"input_ids": IDS, "position_ids": positions}
    targets = Batch(inputs).with_targets(llama(), causal=True).targets
    assert targets is not None
    assert (targets[:, 2] == IGNORED).all() and (targets[:, [0, 1, 3, 4, 5, 6]] != IGNORED).all()


def test_a_decoder_is_scored_on_its_own_tokens() -> None:
    family = BY_NAME["bart"]
    model = multihead_bart(model_of(family).config)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    inputs |= decoder_inputs(model, inputs)
    batch = Batch(inputs, valid=MASK.bool()).with_targets(model, causal=False)
    ids = inputs["decoder_input_ids"]
    for n in range(2):
        for i in range(7):
            given = bool(inputs["decoder_attention_mask"][n, i : i + 2].all())
            scored = given and bool(MASK[n, i])
            assert batch.targets is not None
            assert int(batch.targets[n, i]) == (int(ids[n, i + 1]) if scored else IGNORED)
    with torch.no_grad():
        total, _ = batch.losses(model)
        assert batch.targets is not None
        losses = by_hand(model(**inputs)["logits"], batch.targets)
    torch.testing.assert_close(total, torch.tensor(losses, dtype=total.dtype), rtol=1e-5, atol=0)


def test_a_decoder_without_a_mask_is_scored_whatever_the_encoder_s() -> None:
    model = multihead_bart(model_of(BY_NAME["bart"]).config)
    inputs = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}
    targets = Batch(inputs).with_targets(model, causal=False).targets
    assert targets is not None and targets[:, :-1].equal(IDS[:, 1:])


def multihead_bart(config: Any) -> nn.Module:
    import transformers as tf

    return tf.BartForConditionalGeneration(config).eval()


def test_the_loss_has_gradients() -> None:
    model = llama()
    batch = Batch(batches_of(BY_NAME["llama"], "left")[0]).with_targets(model, causal=True)
    total, _ = batch.loss(model)
    total.backward()
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.abs().max() > 0


def test_a_batch_without_a_loss() -> None:
    model = llama()
    with pytest.raises(ValueError, match="this batch has no targets"):
        Batch({"input_ids": IDS}).loss(model)
    bare = Batch({"input_ids": IDS}).with_targets(model.model, causal=True)
    with pytest.raises(ValueError, match="LlamaModel gives no logits for each token"):
        bare.loss(model.model)
    one = Batch({"input_ids": IDS[:, :1]}).with_targets(model, causal=True)
    total, count = one.loss(model)
    assert (float(total.detach()), count) == (0, 0) and total.requires_grad


def test_moving_a_batch() -> None:
    batch = whole("a b", document=[0]).with_targets(llama(), causal=True).to("meta")
    parts = [*batch.inputs.values(), batch.valid, batch.targets, batch.document]
    assert all(x is not None and x.is_meta for x in parts)
    assert multihead.data.Batch is Batch
