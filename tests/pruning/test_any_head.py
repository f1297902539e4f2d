"""Models with any head on top, encoder-decoders, pictures and sound: scored, pruned, shared and
tuned by the loss that fits them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import multihead
from data.test_tokenizing import small_tokenizer
from multihead.data import targets
from multihead.errors import MultiheadError
from multihead.pruning.criteria import GRADIENTS
from multihead.pruning.losses import compare_losses, evaluate
from multihead.pruning.plan import Plan
from multihead.pruning.pruner import Pruner

WORDS = dict(vocab_size=6, pad_token_id=5)
BERT = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4)
T5 = dict(d_model=24, d_kv=6, d_ff=20, num_layers=2, num_heads=4, **WORDS)
BART = dict(
    d_model=24,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=20,
    decoder_ffn_dim=20,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=1,
    **WORDS,
)
PICTURE = dict(image_size=8, patch_size=4, **BERT)
MADE: dict[str, Callable[[], Any]] = {
    "sequences": lambda: tf.BertForSequenceClassification(tf.BertConfig(**BERT, **WORDS)),
    "several labels": lambda: tf.BertForSequenceClassification(
        tf.BertConfig(problem_type="multi_label_classification", num_labels=3, **BERT, **WORDS)
    ),
    "tokens": lambda: tf.BertForTokenClassification(tf.BertConfig(**BERT, **WORDS, num_labels=3)),
    "answers": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT, **WORDS)),
    "choices": lambda: tf.BertForMultipleChoice(tf.BertConfig(**BERT, **WORDS)),
    "two heads": lambda: tf.BertForPreTraining(tf.BertConfig(**BERT, **WORDS)),
    "electra": lambda: tf.ElectraForPreTraining(tf.ElectraConfig(**BERT, **WORDS)),
    "encoder": lambda: tf.BertModel(tf.BertConfig(**BERT, **WORDS)),
    "tuples": lambda: tf.BertModel(tf.BertConfig(**BERT, **WORDS, return_dict=False)),
    "dpr": lambda: tf.DPRContextEncoder(tf.DPRConfig(**BERT, **WORDS)),
    "reward": lambda: tf.LlamaForSequenceClassification(
        tf.LlamaConfig(**BERT, vocab_size=6, num_labels=1)
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=5)),
    "t5 alone": lambda: tf.T5Model(tf.T5Config(**T5, decoder_start_token_id=5)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "bart classes": lambda: tf.BartForSequenceClassification(tf.BartConfig(**BART)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**BART | {"decoder_start_token_id": 5})),
    "siamese": lambda: Siamese(tf.BertModel(tf.BertConfig(**BERT, **WORDS))),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**PICTURE, num_labels=3)),
    "deit": lambda: tf.DeiTModel(tf.DeiTConfig(**PICTURE)),
    "clip vision": lambda: tf.CLIPVisionModelWithProjection(
        tf.CLIPVisionConfig(**PICTURE, projection_dim=10)
    ),
    "wav2vec2": lambda: tf.Wav2Vec2ForCTC(
        tf.Wav2Vec2Config(
            **BERT,
            vocab_size=6,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
        )
    ),
    "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**WHISPER)),
}
WHISPER = BART | dict(
    num_mel_bins=4, max_source_positions=8, max_target_positions=16, begin_suppress_tokens=None
)
OF_TEXT = [
    name for name in MADE if name not in ("vit", "deit", "clip vision", "wav2vec2", "whisper")
]


class Siamese(nn.Module):
    """A user-defined module on top of an encoder, which gives two tensors."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.on_top = encoder, nn.Linear(24, 7)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.encoder(input_ids, attention_mask=attention_mask)[0]
        return self.on_top(hidden[:, 0]), hidden.mean(1)


@pytest.fixture(autouse=True)
def few_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "NEW_TOKENS", 6)


@cache
def model(name: str) -> Any:
    """With weights so large that each head matters."""
    torch.manual_seed(0)
    made = MADE[name]().eval()
    for key, weight in made.named_parameters():
        if weight.ndim == 2 and "embed" not in key and "shared" not in key:
            weight.data = torch.randn_like(weight) * 1.3 * weight.shape[1] ** -0.5
    return made


def texts(number: int = 24) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(list("abc"), 10 + n % 3)) for n in range(number)]


def inputs(name: str, number: int = 12) -> list[dict[str, Any]]:
    """Ready-made inputs of pictures and sound."""
    draw = torch.Generator().manual_seed(0)
    if name == "wav2vec2":
        return [{"input_values": torch.randn(2, 200, generator=draw)} for _ in range(number // 2)]
    if name == "whisper":
        return [{"input_features": torch.randn(number, 4, 16, generator=draw)}]
    return [{"pixel_values": torch.randn(number, 3, 8, 8, generator=draw)}]


def given(name: str) -> dict[str, Any]:
    if name in OF_TEXT:
        return {"texts": texts(), "tokenizer": small_tokenizer(pad_token="?")}
    return {"texts": inputs(name)}


@pytest.mark.parametrize("name", list(MADE))
def test_heads_are_scored_and_removed_with_proof(name: str) -> None:
    pruner = Pruner(model(name), **given(name))
    by_outputs = pruner.loss_name == "distance from the original's outputs"
    generated = pruner.loss_name == "token loss on what the original generates"
    assert generated if name in ("t5", "bart", "marian", "whisper") else by_outputs
    assert pruner.base_loss == 0 if by_outputs else pruner.base_loss > 0
    scores = pruner.score(["ablation", *GRADIENTS])
    for criterion in GRADIENTS:
        every = torch.cat(list(scores.by_site(criterion).values()))
        assert bool(every.isfinite().all()) and float(every.max()) > 0, criterion
    plan = Plan((pruner.sites[0].head_label(0), pruner.sites[-1].head_label(2)))
    removed = plan.by_site(pruner.sites)
    smaller, _ = pruner.remove(plan, "refit")
    expected = pruner.loss(pruner.compensation(removed, "refit"))
    with torch.no_grad():
        pairs = [batch.loss(smaller) for batch in pruner.held_out]
    found = sum(float(a) for a, _ in pairs) / sum(b for _, b in pairs)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert expected > 1e-5 if by_outputs else expected != pruner.base_loss


@pytest.mark.parametrize("name", ["sequences", "tokens"])
def test_fisher_finds_the_heads_that_matter(name: str) -> None:
    """At the original the distance has no first order, so its own gradients would be zero; to
    second order half of `fisher` is what it costs if a head gives its mean.
    """
    whole = copy.deepcopy(model(name))
    for site in multihead.models.find_sites(whole):
        site.out.weight.data *= 0.3  # so small that the second order is most of it
    pruner = Pruner(whole, **given(name))
    scores = pruner.score(["fisher"]).by_site("fisher")
    cost = {
        site.name: torch.tensor(
            [
                pruner.loss(pruner.compensation({site.name: [head]}, "mean"))
                for head in range(site.num_heads)
            ]
        )
        for site in pruner.sites
    }
    a, b = (torch.cat(list(x.values())).argsort().argsort().double() for x in (scores, cost))
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.7


def test_evaluation_against_the_original() -> None:
    whole, options = model("sequences"), given("sequences")
    pruned = multihead.prune(whole, remove=2, criterion="fisher", **options)
    assert pruned.loss_name == pruned.to_json()["loss"] == "distance from the original's outputs"
    same = evaluate(whole, original=whole, **options)
    changed = evaluate(pruned.model, original=whole, **options)
    assert same.mean == 0 < changed.mean and changed.perplexity is None
    change = compare_losses(same, changed)
    assert 0 < change.low < change.mean and change.documents == 24
    with torch.no_grad():
        a, b = (
            one(**options["tokenizer"](texts()[0], return_tensors="pt")).logits.double()
            for one in (whole, pruned.model)
        )
    p, q = a.log_softmax(-1)[0], b.log_softmax(-1)[0]
    assert changed.total[0] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)


def test_labels_are_the_loss_where_there_are_some() -> None:
    whole, tokenizer = model("sequences"), small_tokenizer(pad_token="?")
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(texts())]
    pruned = multihead.prune(whole, rows, tokenizer=tokenizer, remove=2, criterion="taylor")
    assert pruned.loss_name == "loss on labels" and pruned.base_loss > 0
    found = evaluate(whole, rows, tokenizer=tokenizer)
    with torch.no_grad():
        for n, row in enumerate(rows[:3]):
            logits = whole(**tokenizer(row["text"], return_tensors="pt")).logits
            loss = -float(logits.log_softmax(-1)[0, row["label"]])
            assert found.total[n] == pytest.approx(loss, rel=1e-4)
    with pytest.raises(
        ValueError, match=r"some texts have a label and others have none; give one with each"
    ):
        multihead.prune(whole, [rows[0], "a b"], tokenizer=tokenizer, remove=2)


def test_labels_of_pictures() -> None:
    whole, (batch,) = model("vit"), inputs("vit")
    labels = torch.arange(12) % 3
    pruner = Pruner(whole, [batch | {"labels": labels}])
    assert pruner.loss_name == "loss on labels" and len(pruner.batches) == 5
    found = evaluate(whole, [batch | {"labels": labels}])
    with torch.no_grad():
        logits = whole(**batch).logits
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(found.total, expected.numpy(), rtol=1e-4)
    with pytest.raises(ValueError, match=r"texts\[0\] has the loss on labels, texts\[1\] the"):
        evaluate(whole, [batch | {"labels": labels}, batch], original=whole)


def test_pairs_of_a_source_and_a_target() -> None:
    whole, tokenizer = model("t5"), small_tokenizer(pad_token="?")
    rows = [{"source": text, "target": text[::-1]} for text in texts()]
    pruned = multihead.prune(whole, rows, tokenizer=tokenizer, remove=2, criterion="fisher")
    assert pruned.loss_name == "token loss"
    found = evaluate(whole, rows, tokenizer=tokenizer)
    with torch.no_grad():
        for n, row in enumerate(rows[:3]):
            ids = tokenizer(text_target=row["target"], return_tensors="pt")["input_ids"]
            loss = whole(**tokenizer(row["source"], return_tensors="pt"), labels=ids).loss
            assert found.total[n] / found.count[n] == pytest.approx(float(loss), rel=1e-4)
    assert found.perplexity is not None
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder: plain"):
        evaluate(whole, texts(), tokenizer=tokenizer)


def test_targets_of_sound_are_given_or_generated() -> None:
    whole, (batch,) = model("whisper"), inputs("whisper")
    labels = torch.randint(2, 5, (12, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = whole(**batch, labels=labels).loss
    found = evaluate(whole, [batch | {"labels": labels}])
    assert found.name == "token loss" and found.mean == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize("name", ["sequences", "answers", "encoder", "t5", "bart classes", "vit"])
def test_keys_and_values_are_shared_and_tuned(name: str) -> None:
    whole, options = model(name), given(name)
    layers = [find.label for find in multihead.models.find_sites(whole)][:1]
    choice: Any = dict(method="mean", refit=False, layers=layers)
    shared = multihead.share(whole, num_kv_heads=2, **choice, **options)
    before = evaluate(shared.model, original=whole, **options).mean
    done = multihead.tune(shared.model, whole, steps=24, batch_size=4, **options)
    assert all(loss >= 0 for loss in done.losses)
    if name == "t5":  # whose evaluation is the loss of tokens
        assert sum(done.losses[-3:]) < 0.8 * sum(done.losses[:3])
    else:
        assert evaluate(shared.model, original=whole, **options).mean < 0.9 * before


def test_a_model_of_sentence_transformers_stays_one(minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer  # takes seconds

    whole = SentenceTransformer(str(minilm_dir), device="cpu")
    options: dict[str, Any] = dict(texts=[f"Sentence {n} of some." for n in range(16)])
    options["tokenizer"] = whole.tokenizer
    plan = Plan((multihead.models.find_sites(whole)[0].head_label(3),))
    pruned = multihead.prune(whole, remove=plan, compensate="none", **options)
    assert pruned.loss_name == "distance from the original's outputs"
    assert isinstance(pruned.model, SentenceTransformer)
    texts = ["a cat", "a longer sentence on a cat"]
    with multihead.ablate_heads(whole, plan.remove):
        expected = whole.encode(texts)
    np.testing.assert_allclose(pruned.model.encode(texts), expected, atol=1e-5)
    assert np.abs(expected - whole.encode(texts)).max() > 1e-4
    shared = multihead.share(whole, num_kv_heads=6, layers=[1], **options)
    assert shared.model.encode(texts).shape == expected.shape
    done = multihead.tune(shared.model, whole, steps=1, **options)
    assert 0 < done.losses[0] < 0.1


def test_heads_that_change_places_take_their_position_bias_along() -> None:
    """T5 has one table of position biases for all layers, in the order of the first one's heads."""
    whole = copy.deepcopy(model("t5"))
    for site in multihead.models.find_sites(whole):  # heads 0 and 3 are alike, and 1 and 2
        slices = site.slices()
        for part in (slices.k, slices.v):
            part.put(part.weight()[[0, 1, 1, 0]] + 0.0, None)
    choice: Any = dict(method="mean", refit=False, layers=["encoder.L0", "encoder.L1"])
    shared = multihead.share(whole, num_kv_heads=2, **choice, **given("t5"))
    assert max(shared.errors.values()) < 1e-6
    ids = torch.tensor([[0, 2, 3, 4, 2, 1]])
    with torch.no_grad():
        a, b = (one(ids, decoder_input_ids=ids).logits for one in (whole, shared.model))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("sequences", {"texts": ["a b c"]}, "texts hold 5 tokens in one window: heads are scored"),
        ("sequences", {"texts": ["a b c"], "context": 8}, "give at least 9 tokens, better 4,096"),
        ("vit", {"texts": inputs("vit", 1)}, "texts hold one batch of one sequence (or picture,"),
        ("t5", {"texts": [{"source": "a", "target": "b"}]}, "in one row: heads are scored on"),
        ("sequences", {"texts": [{"source": "a", "target": "b"}] * 9}, "is no encoder-decoder"),
        ("sequences", {"texts": [{"text": "a", "label": 7}] * 9}, "label 7: expected one of the"),
    ],
)
def test_too_little_and_wrong(name: str, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        multihead.prune(model(name), **given(name) | wrong, remove=2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("vit", {"pixels": torch.zeros(2, 3, 8, 8)}, r"fails on the model inputs pixels \[1, 3, 8"),
        ("vit", {"pixel_values": torch.zeros(2, 3, 9, 9)}, r"doesn't match model \(8\*8\)"),
        (
            "vit",
            {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.full((2,), 7)},
            "Target 7 is out of bounds",
        ),
        ("wav2vec2", {"input_values": torch.zeros(2, 12)}, "give inputs that its forward takes"),
    ],
)
def test_inputs_that_a_model_does_not_take(name: str, inputs: Any, words: str) -> None:
    with pytest.raises(MultiheadError, match=words):
        Pruner(model(name), [inputs])


def test_labels_of_numpy_and_of_several_classes() -> None:
    tokenizer = small_tokenizer(pad_token="?")

    def rows(label: Any) -> list[Any]:
        return [{"text": "a b c a", "label": label} for _ in range(4)]

    losses = {
        Pruner(model("sequences"), rows(label), tokenizer=tokenizer).base_loss
        for label in (1, np.int64(1), torch.tensor(1))
    }
    assert len(losses) == 1
    with pytest.raises(
        MultiheadError, match="label 1: the model has several labels a text; give a"
    ):
        Pruner(model("several labels"), rows(1), tokenizer=tokenizer)
    assert Pruner(model("several labels"), rows(np.ones(3)), tokenizer=tokenizer).base_loss > 0


def test_silence_is_a_target_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper's `generate` leaves out the token that ends a text: nothing is left of silence."""
    whole = model("whisper")
    monkeypatch.setattr(whole, "generate", lambda **k: torch.zeros(2, 0, dtype=torch.int64))
    assert targets.generate_ids(whole, {}) == [[1], [1]]
