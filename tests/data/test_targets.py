"""Targets of encoder-decoders, given and generated, and labels of classifiers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from data.test_tokenizing import small_tokenizer
from multihead.data.batch import IGNORED
from multihead.data.documents import Example, each_document
from multihead.data.targets import complete_decoder, generate_targets, labelled_batch, target_batch
from multihead.data.windows import Window, cut_texts

SMALL = dict(vocab_size=17, d_model=24, pad_token_id=0, decoder_start_token_id=0)


@cache
def t5() -> Any:
    torch.manual_seed(0)
    sizes = dict(d_kv=6, d_ff=20, num_layers=2, num_heads=4)
    return tf.T5ForConditionalGeneration(tf.T5Config(**SMALL, **sizes, eos_token_id=1)).eval()


def classifier(**config: Any) -> Any:
    sizes = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    return tf.BertForSequenceClassification(tf.BertConfig(vocab_size=17, **sizes, **config)).eval()


def labelled(*labels: Any) -> list[Window]:
    return [Window([2, 3, 4], 0, 3, None, label) for label in labels]


def test_rows_keep_their_targets_and_labels() -> None:
    rows = [{"source": "a b", "target": "c"}, {"text": "b", "label": 0}, {"text": "c"}]
    pair, one, plain = each_document(rows)
    assert (pair, pair.target, pair.label) == ("a b", "c", None)
    assert (one, one.label) == ("b", 0) and type(plain) is str
    tokenizer = small_tokenizer(pad_token="?")
    (window,) = cut_texts(t5(), [pair], tokenizer, context=3)  # its beginning alone
    assert window == ([0, 2, 1], 0, 3, [0, 4, 1], None)


def test_targets_are_scored_given_the_ones_before_them() -> None:
    windows = [Window([2, 3, 1], 0, 3, [4, 5, 1]), Window([6, 1], 0, 2, [7, 1])]
    batch = target_batch(t5(), small_tokenizer(pad_token="?"), windows)
    assert batch.targets is not None
    assert batch.targets.tolist() == [[4, 5, 1], [7, 1, IGNORED]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 4, 5], [0, 7, 1]]
    with torch.no_grad():
        total, count = batch.loss(t5())
        loss = t5()(
            input_ids=batch.inputs["input_ids"],
            attention_mask=batch.inputs["attention_mask"],
            labels=batch.targets,
        ).loss
    assert count == 5 and float(total) / count == pytest.approx(float(loss), rel=1e-5)


def test_what_a_model_generates_is_its_target() -> None:
    windows = [Window([2, 3, 1], 0, 3), Window([6, 1], 0, 2)]
    tokenizer = small_tokenizer(pad_token="?")
    for window, one in zip(windows, generate_targets(t5(), tokenizer, windows), strict=True):
        assert one.ids == window.ids and one.target
        alone = t5().generate(torch.tensor([window.ids]), max_new_tokens=128, do_sample=False)
        wanted = alone[0, 1:].tolist()
        assert one.target == wanted[: len(one.target)]
        assert len(one.target) == len(wanted) or one.target[-1] == 1
    batch = target_batch(t5(), tokenizer, [windows[0]])
    complete = complete_decoder(t5(), batch)
    assert complete is batch  # it has a decoder's input already


def test_labels_in_each_form() -> None:
    tokenizer = small_tokenizer(pad_token="?")
    names = classifier(num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    batch = labelled_batch(names, tokenizer, labelled("good", 0))
    assert batch.inputs["labels"].tolist() == [2, 0]
    with torch.no_grad():
        total, count = batch.losses(names)
        logits = names(**{k: v for k, v in batch.inputs.items() if k != "labels"}).logits
    assert count.tolist() == [1, 1] and names.config.problem_type is None
    wanted = torch.nn.functional.cross_entropy(logits, batch.inputs["labels"])
    assert total.tolist() == pytest.approx([float(wanted)] * 2, rel=1e-5)
    reward = classifier(num_labels=1)
    assert (
        labelled_batch(reward, tokenizer, labelled(1, 0.5)).inputs["labels"].dtype.is_floating_point
    )
    several = labelled_batch(classifier(num_labels=2), tokenizer, labelled([1, 0], [1, 1]))
    assert several.inputs["labels"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ((3, 0), "label 3: expected one of the model's classes, 0 to 1"),
        ((0.5,), "label 0.5: expected one of the model's classes"),
        (("good",), "label 'good' isn't one of this model's, 'LABEL_0', 'LABEL_1'; give one of"),
        (([1, 0, 1],), "has 3 numbers; the model has 2 labels"),
        (({},), "label {}: expected a finite number, a name or a list of numbers"),
        ((1, [1, 0]), "labels are numbers in some texts and lists in others"),
    ],
)
def test_labels_that_a_model_does_not_have(labels: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        labelled_batch(classifier(), small_tokenizer(pad_token="?"), labelled(*labels))
    assert words in str(caught.value)


def test_models_without_a_label_of_a_whole_text() -> None:
    config = tf.BertConfig(vocab_size=17, hidden_size=24, num_attention_heads=4)
    with torch.device("meta"):
        model = tf.BertForTokenClassification(config)
    with pytest.raises(ValueError, match="BertForTokenClassification has none of a whole text"):
        labelled_batch(model, small_tokenizer(pad_token="?"), labelled(1))


def test_an_example_is_a_text() -> None:
    assert isinstance(Example("a", label=1), str) and Example("a", label=1) == "a"
