"""Statistics that a user adds, and classes of tokens that a user names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from multihead.reader.statistics import ADDED
from multihead.reader.table import load_table
from multihead.report.page import render
from small import IDS, llama

TEXT = {"formula": "f", "meaning": "m"}


@pytest.fixture(autouse=True)
def _none_stays() -> Iterator[None]:
    yield
    for name in list(ADDED):
        multihead.reader.remove_statistic(name)


def read(batch: Any = None, **options: Any) -> Any:
    return multihead.read(
        options.pop("model", None) or llama(), [batch or {"input_ids": IDS}], probe=False, **options
    )


class Letters:
    """Token n says the n-th sign, and its number behind it."""

    all_special_ids: tuple[int, ...] = ()
    pad_token_id = unk_token_id = bos_token_id = eos_token_id = cls_token_id = sep_token_id = None

    def __init__(self) -> None:
        self.asked: list[int] = []

    def decode(self, ids: list[int], **options: Any) -> str:
        self.asked += ids
        return f"{chr(ord('A') + ids[0])}{ids[0]}"


def third(block: Any) -> torch.Tensor:
    members = block.text.key_ids[:, block.keys] % 3 == 0
    return (block.weights * members[:, None, None]).sum(-1)


def test_a_class_of_keys_by_number_and_a_number_of_keys_agree() -> None:
    """A mass by weight is the mean of ones and zeros, over the rows that may read such a key."""
    multihead.reader.add_statistic("mass", keys=lambda text: text.key_ids % 3 == 0, **TEXT)
    multihead.reader.add_statistic(
        "mean", keys=lambda text: (text.key_ids % 3 == 0).double(), **TEXT
    )
    multihead.reader.add_statistic(
        "whole", keys=lambda text: (text.key_ids % 3 == 0).long(), **TEXT
    )
    multihead.reader.add_statistic("row", row=third, **TEXT)
    table = read()
    total = table.value("mass") * table.count("mass")
    for name in ("mean", "whole", "row"):
        np.testing.assert_allclose(table.value(name) * table.count(name), total, rtol=1e-5)
        assert set(table.count(name).tolist()) == {24}
    assert table.count("mass").max() < 24
    assert {"contribution:mass", "even:mass"} <= set(table.columns)
    assert not {"contribution:mean", "contribution:row"} & set(table.columns)


def test_a_head_may_pull_against_its_site_so_its_share_has_no_least() -> None:
    (share,) = [s for s in multihead.reader.list_statistics() if s.name == "share"]
    assert share.range == "any number"
    attention, x = torch.nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 5, 4)
    with torch.no_grad():  # the second head does what the first does, turned round and halved
        rows = attention.in_proj_weight.view(3, 2, 2, 4)
        rows[:, 1] = rows[:, 0]
        attention.out_proj.weight[:, 2:] = attention.out_proj.weight[:, :2] / -2
    table = multihead.read(attention, [{"query": x, "key": x, "value": x}])
    np.testing.assert_allclose(table.value("share"), [2, -1], rtol=1e-3)


def test_the_list_says_what_was_added_and_removed() -> None:
    before = multihead.reader.list_statistics()
    multihead.reader.add_statistic(
        "mine",
        formula="sum_j A_ij",
        meaning="all of it",
        row=lambda block: block.weights.sum(-1),
        unit="parts",
        rows="each",
        source="me",
        low=0,
        top=1,
    )
    (found,) = [s for s in multihead.reader.list_statistics() if s.name == "mine"]
    assert (found.formula, found.meaning, found.unit, found.rows) == (
        "sum_j A_ij",
        "all of it",
        "parts",
        "each",
    )
    assert found.source == "me"
    assert found.range == "0..1"
    assert np.allclose(read().value("mine"), 1)
    multihead.reader.remove_statistic("mine")
    assert multihead.reader.list_statistics() == before
    with pytest.raises(KeyError, match="mine"):
        read().value("mine")
    with pytest.raises(ValueError, match="name='mine' wasn't added: none was"):
        multihead.reader.remove_statistic("mine")
    with pytest.raises(ValueError, match="name='entropy' wasn't added"):
        multihead.reader.remove_statistic("entropy")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("entropy", "taken; choose another$"),
        ("probe:x", "a word"),
        ("", "a word"),
        ("two words", "a word"),
        ("3x", "a word"),
        ("x" * 61, "up to 60"),
        ("head", "taken"),
        ("roles", "taken"),
        ("mine", r"remove_statistic\('mine'\) first"),
    ],
)
def test_names(name: str, words: str) -> None:
    multihead.reader.add_statistic("mine", row=lambda block: block.weights.sum(-1), **TEXT)
    with pytest.raises(ValueError, match=words):
        multihead.reader.add_statistic(name, row=lambda block: block.weights.sum(-1), **TEXT)


@pytest.mark.parametrize("given", [{}, {"keys": len, "row": len}])
def test_exactly_one_of_keys_and_row(given: Any) -> None:
    with pytest.raises(ValueError, match="give exactly one of them"):
        multihead.reader.add_statistic("mine", **given, **TEXT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"keys": lambda text: text.real[:, :-1]},
            r"'mine': its keys= gave \[2, 11\], expected a tensor \[2, 12\] \[B, S\]",
        ),
        ({"keys": lambda text: 1.0}, "'mine': its keys= gave float, expected a tensor"),
        (
            {"keys": lambda text: text.key_ids.double().log() * torch.nan},
            "'mine': its keys= gave numbers that aren't finite",
        ),
        (
            {"row": lambda block: block.weights},
            r"'mine': its row= gave \[2, 3, 12, 12\], expected a tensor \[2, 3, 12\]",
        ),
        ({"row": lambda block: None}, "'mine': its row= gave NoneType"),
        (
            {"row": lambda block: block.weights.sum(-1) / 0},
            "'mine': it gave an infinite number.*NaN",
        ),
    ],
)
def test_what_it_gives_is_checked_and_the_model_is_as_it_was(given: Any, words: str) -> None:
    model = llama()
    want = model(IDS).logits
    multihead.reader.add_statistic("mine", **given, **TEXT)
    with pytest.raises(ValueError, match=words):
        read(model=model)
    assert torch.equal(model(IDS).logits, want)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    multihead.reader.remove_statistic("mine")
    read(model=model)


def test_an_error_in_it_says_whose_it_is() -> None:
    multihead.reader.add_statistic("mine", row=lambda block: 1 / 0, **TEXT)
    with pytest.raises(ZeroDivisionError) as caught:
        read()
    assert caught.value.__notes__ == ["in row= of the statistic 'mine', for rows 0 to 11"]


def test_rows_and_keys_where_it_does_not_exist() -> None:
    multihead.reader.add_statistic("never", keys=lambda text: None, **TEXT)
    multihead.reader.add_statistic(
        "nowhere", row=lambda block: torch.full_like(block.weights[..., 0], torch.nan), **TEXT
    )
    multihead.reader.add_statistic(
        "nobody", keys=lambda text: torch.zeros_like(text.key_real), **TEXT
    )
    multihead.reader.add_statistic(
        "spoilt", row=lambda block: block.weights.zero_().sum(-1), **TEXT
    )  # the block is its own
    table = read()
    for name in ("never", "nowhere", "nobody"):
        assert np.isnan(table.value(name)).all()
        assert not table.count(name).any()
        assert table.reasons[name]
    assert not table.value("spoilt").any()
    for name in list(ADDED):
        multihead.reader.remove_statistic(name)
    plain = read()
    for column in plain.columns:
        np.testing.assert_allclose(table.value(column), plain.value(column), rtol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_class_and_no_row(side: str) -> None:
    mask = torch.ones_like(IDS)
    mask[0, slice(3) if side == "left" else slice(9, 12)] = 0
    padded = {"input_ids": IDS.masked_fill(mask == 0, 3), "attention_mask": mask}
    multihead.reader.add_statistic("threes", keys=lambda text: text.key_ids == 3, **TEXT)
    whole = read(padded, tokenizer=Letters(), classes={"threes": "^D3$"}, special_ids=[3])
    apart = sum(
        read(
            {"input_ids": ids[real.bool()][None]},
            tokenizer=Letters(),
            classes={"threes": "^D3$"},
            special_ids=[3],
        )
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
    multihead.reader.add_statistic("even", keys=lambda text: text.key_ids % 2 == 0, **TEXT)
    own = read()
    for kind in ("", "contribution:", "even:"):
        np.testing.assert_allclose(
            table.value(f"{kind}class:even"), own.value(f"{kind}even"), rtol=1e-6
        )
    np.testing.assert_allclose(table.value("class:every"), 1, rtol=1e-6)
    np.testing.assert_allclose(table.value("contribution:class:every"), 1, rtol=1e-6)
    assert np.isnan(table.value("class:none")).all()
    assert "no such row" in table.reasons["class:none"]
    assert len(tokenizer.asked) == 4 * len(set(IDS.flatten().tolist()))  # each token once a class
    assert max(
        table.columns.index(c) for c in table.columns if "class:" not in c
    ) < table.columns.index("class:a-j")


def test_a_picture_s_place_is_in_no_class() -> None:
    """Its token stands for no text, whatever it decodes to."""
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
    tokenizer = Letters()
    table = read(
        batch, model=model, tokenizer=tokenizer, classes={"picture": "^H7$", "three": "^D3$"}
    )
    assert 7 not in tokenizer.asked and -1 not in tokenizer.asked
    assert np.isnan(table.value("class:picture")).all()
    heads = [n for n, head in enumerate(table.heads) if "language" in head.site]
    assert table.count("class:three")[heads].tolist() == [3, 3, 3]


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


ELSEWHERE = """
import sys, multihead
from multihead.report.page import render
table = multihead.load_table(sys.argv[1])
assert not [s for s in multihead.reader.list_statistics() if s.name in ("mass", "squares")]
assert {"mass", "contribution:mass", "even:mass", "squares", "class:one.half"} <= set(table.columns), table.columns
assert "squares" in table.rows()[0] and "added by a user" in render(table)
print(table)
both = table + table
both.save(sys.argv[2])
"""


def test_a_table_is_read_where_its_statistics_are_not_known(tmp_path: Path) -> None:
    multihead.reader.add_statistic("mass", keys=lambda text: text.key_ids % 3 == 0, **TEXT)
    multihead.reader.add_statistic(
        "squares", row=lambda block: block.weights.square().sum(-1), **TEXT
    )
    table = read(tokenizer=Letters(), classes={"one.half": "[02468]$"})
    table.save(tmp_path / "one.json")
    table.save(tmp_path / "one.csv")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "one.json", tmp_path / "two.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "L0.H0" in done.stdout
    both = load_table(tmp_path / "two.json")
    for column in ("mass", "contribution:mass", "squares", "class:one.half"):
        np.testing.assert_array_equal(both.value(column), table.value(column))
        np.testing.assert_array_equal(both.count(column), 2 * table.count(column))
    assert "squares" in (tmp_path / "one.csv").read_text().splitlines()[0]
    page = render(table)
    assert '"squares"' in page and json.dumps("class:one.half") in page
    multihead.reader.remove_statistic("mass")
    plain = read()
    added = table + plain  # one that has the column and one that lacks it
    np.testing.assert_array_equal(added.value("mass"), table.value("mass"))


def test_the_longest_names_save_and_load(tmp_path: Path) -> None:
    name = "x" * 60
    multihead.reader.add_statistic(name, keys=lambda text: text.key_ids % 3 == 0, **TEXT)
    table = read(tokenizer=Letters(), classes={name: "1"})
    table.save(tmp_path / "t.json")
    assert load_table(tmp_path / "t.json").columns == table.columns


def test_blocks_come_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the block, rows and keys say which part of the whole it is."""
    seen = []

    def row(block: Any) -> torch.Tensor:
        seen.append((block.rows, block.keys))
        assert block.weights.shape[-2:] == (
            block.rows.stop - block.rows.start,
            block.keys.stop - block.keys.start,
        )
        at = torch.arange(block.keys.start, block.keys.stop)
        return (block.weights * at.float()).sum(-1)

    ids = torch.randint(3, 50, (1, 60), generator=torch.Generator().manual_seed(0))
    multihead.reader.add_statistic("place", row=row, **TEXT)
    multihead.reader.add_statistic(
        "place_", keys=lambda text: torch.arange(text.key_ids.shape[1]).float()[None], **TEXT
    )
    monkeypatch.setattr("multihead.ops.backends.blocks.rows_per_block", lambda *_: 7)
    table = read({"input_ids": ids})
    assert len(seen) > 10
    np.testing.assert_allclose(table.value("place"), table.value("place_"), rtol=1e-5)


def test_maps_do_without() -> None:
    multihead.reader.add_statistic("broken", row=lambda block: 1 / 0, **TEXT)
    assert multihead.read_maps(llama(), {"input_ids": IDS[:1]}, "L0.H0").weights.shape == (12, 12)


@pytest.mark.parametrize("argument", ["keys", "row"])
def test_what_is_no_function_is_refused_at_once(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}=5: expected a function"):
        multihead.reader.add_statistic("odd", formula="f", meaning="m", **{argument: 5})
    assert "odd" not in {s.name for s in multihead.reader.list_statistics()}
