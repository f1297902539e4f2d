"""Masses on classes of tokens, and on special tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from small import IDS, llama
from tiny_tokenizers import every_kind
from user_statistics import Letters, statistic


def read(batch: Any = None, **options: Any) -> Any:
    model = options.pop("model", None) or llama()
    return multihead.read(model, [batch or {"input_ids": IDS}], probe=False, **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_class_and_no_row(side: str) -> None:
    mask = torch.ones_like(IDS)
    mask[0, slice(3) if side == "left" else slice(9, 12)] = 0
    padded = {"input_ids": IDS.masked_fill(mask == 0, 3), "attention_mask": mask}
    options: dict[str, Any] = {
        "statistics": statistic("threes", key_values=lambda context: context.key_ids == 3),
        "classes": {"threes": "^D3$"},
        "special_ids": [3],
    }
    whole = read(padded, tokenizer=Letters(), **options)
    apart = sum(
        read({"input_ids": ids[real.bool()][None]}, tokenizer=Letters(), **options)
        for ids, real in zip(IDS, mask, strict=True)
    )
    for column in ("threes", "class:threes", "special"):
        np.testing.assert_array_equal(whole.count(column), apart.count(column))
        np.testing.assert_allclose(whole.value(column), apart.value(column), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(whole.value("class:threes"), whole.value("special"))
    np.testing.assert_array_equal(
        whole.value("contribution:class:threes"), whole.value("contribution:special")
    )


def test_classes_are_of_what_each_token_says() -> None:
    tokenizer = Letters()
    table = read(
        tokenizer=tokenizer, classes={"even": "[02468]$", "a-j": "^[A-J]", "every": "", "none": "~"}
    )
    own = read(statistics=statistic("even", key_values=lambda context: context.key_ids % 2 == 0))
    for kind in ("", "contribution:", "even:"):
        np.testing.assert_allclose(
            table.value(f"{kind}class:even"), own.value(f"{kind}even"), rtol=1e-6
        )
    np.testing.assert_allclose(table.value("class:every"), 1, rtol=1e-6)
    np.testing.assert_allclose(table.value("contribution:class:every"), 1, rtol=1e-6)
    assert np.isnan(table.value("class:none")).all()
    assert table.reasons["class:none"] == "no token of this text matches '~'"
    tokenizer = Letters()
    read(tokenizer=tokenizer, classes={"even": "[02468]$", "every": ""})
    assert len(tokenizer.asked) == 2 * len(set(IDS.flatten().tolist()))  # each token once a class
    assert max(
        table.columns.index(c) for c in table.columns if "class:" not in c
    ) < table.columns.index("class:a-j")


def test_the_tokens_of_a_picture_are_a_class() -> None:
    """Though their ids match no other token: five equal ids are no duplicates."""
    torch.manual_seed(0)
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = dict(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        head_dim=8,
    )
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**text),
        vision_config=tf.CLIPVisionConfig(**vision),
        image_token_id=7,
        image_token_index=7,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    model = tf.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 7, 7, 7, 7, 7, 3, 4, 7 + 1]])
    batch = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}
    with multihead.reading(model) as session, torch.no_grad():
        model(**batch)
    assert np.isnan(session.table().value("duplicate")[2:]).all()
    classes = {"picture": "^H7$", "three": "^D3$", "other": "^[^H]"}
    table = read(batch, model=model, tokenizer=Letters(), classes=classes)
    maps = multihead.read_maps(model, batch, ["L0.H0", "L0.H1", "L0.H2"])
    for n, found in zip(range(2, 5), maps, strict=True):
        weights = found.weights.astype(float)
        assert found.tokens == [str(i) for i in ids[0].tolist()]
        want = weights[1:, ids[0] == 7].sum(-1).mean()
        assert table.value("class:picture")[n] == pytest.approx(want, rel=1e-5)
        assert table.count("class:picture")[n] == 8 and table.count("class:three")[n] == 3
        assert table.value("class:other")[n] == pytest.approx(
            weights[:, ids[0] != 7].sum(-1).mean(), rel=1e-5
        )
    assert np.isnan(table.value("class:picture")[:2]).all()  # of the tower, which has no ids


def test_embeddings_have_no_classes() -> None:
    table = read({"inputs_embeds": torch.randn(1, 6, 24)}, tokenizer=Letters(), classes={"x": "1"})
    assert np.isnan(table.value("class:x")).all()
    assert table.reasons["class:x"] == "no token ids were given"
    assert all(row["class:x"] is None for row in table.rows())


@pytest.mark.parametrize(
    ("classes", "error", "words"),
    [
        ({"x": "("}, ValueError, r"classes: x='\(' isn't a regular expression \(.*backslash"),
        ({"two words": "x"}, ValueError, "classes: 'two words' isn't a name"),
        ({"": "x"}, ValueError, "classes: '' isn't a name"),
        ({"x:y": "x"}, ValueError, "classes: 'x:y' isn't a name"),
        ({"x" * 61: "x"}, ValueError, "up to 60"),
        (["x"], TypeError, r"classes=\['x'\]: expected names"),
        ({"x": 3}, TypeError, "expected names of classes with a regular expression"),
    ],
)
def test_bad_classes(classes: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        read(tokenizer=Letters(), classes=classes)


def test_classes_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer is None: pass the tokenizer"):
        read(classes={"x": "y"})
    assert read(classes={}).columns == read(classes=None).columns


# --- classes of characters that are several tokens


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "bytes"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_bytes_of_a_character_are_in_its_class(kind: str, side: str) -> None:
    tokenizer = every_kind()[kind]
    ids = tokenizer("the 😀 cat 你")["input_ids"]
    size = len(tokenizer)
    config = tf.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).eval()
    pad = [0, 0] if side == "left" else []
    row = torch.tensor([[*pad, *ids]])
    batch = {"input_ids": row, "attention_mask": torch.tensor([[0] * len(pad) + [1] * len(ids)])}
    classes = {"smile": "😀", "han": r"[\u4e00-\u9fff]", "letters": "[a-z]"}
    table = read(batch, model=model, tokenizer=tokenizer, classes=classes)
    found = multihead.read_maps(model, batch, "L0.H1", tokenizer=tokenizer)
    for name, character, size in (("smile", "😀", 4), ("han", "你", 3)):
        keys = [n for n, label in enumerate(found.tokens) if label.startswith(character)]
        assert len(keys) == size
        want = found.weights[keys[0] :, keys].sum(-1).mean()
        assert table.value(f"class:{name}")[1] == pytest.approx(float(want), rel=1e-5)
    assert (table.value("class:letters") > 0).all()


def test_a_class_that_only_several_tokens_match_is_explained() -> None:
    model, tokenizer = multihead.load_builtin()
    table = multihead.read(
        model, ["the dog", "the cat"], tokenizer=tokenizer, probe=False,
        classes={"cat": "cat", "fox": "fox", "c": "^ c$"},
    )  # fmt: skip
    assert table.reasons["class:cat"] == (
        "no token by itself matches 'cat': in this text 'cat' is several tokens, ' c' 'at'; give an"
        " expression that matches one of them"
    )
    assert table.reasons["class:fox"] == "no token of this text matches 'fox'"
    assert "class:c" not in table.reasons  # the advice, followed


def test_by_words_all_tokens_of_a_word_are_in_its_class() -> None:
    model, tokenizer = multihead.load_builtin()
    texts = ["a zebra and a cat", "the zebra"]
    options: Any = dict(tokenizer=tokenizer, probe=False, classes={"z": "^zebra$"})
    table = multihead.read(model, texts, by="word", **options)
    total = rows = 0.0
    for text in texts:
        found = multihead.read_maps(model, text, "L1.H0", tokenizer=tokenizer)
        held = np.zeros(len(found.tokens), bool)
        for start, stop, word in found.words:
            held[start:stop] = word == "zebra"
        may = np.arange(len(held)) >= held.argmax()
        total, rows = total + found.weights[may][:, held].sum(), rows + may.sum()
    n = [head.head for head in table.heads].index("L1.H0")
    assert table.value("class:z")[n] == pytest.approx(total / rows, rel=1e-5)
    assert table.count("class:z")[n] == rows
    assert np.isnan(multihead.read(model, texts, **options).value("class:z")).all()
    with pytest.raises(ValueError, match="class"):
        table + multihead.read(model, texts, **options)
    with pytest.raises(ValueError, match="by='x'"):
        multihead.read(model, texts, by="x", **options)
