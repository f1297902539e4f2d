"""Plain transformers and sentence-transformers open a pruned checkpoint by the code in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from multihead.models.pruned_code import write_pruned_code
from multihead.models.site import find_sites
from multihead.pruning import checkpoint
from pruning.kept_checkpoints import shrink

SMALL: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=60
)
IDS = {"input_ids": torch.arange(2, 18)[None]}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code that it runs; not to the user's cache."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


def bert(folder: Path, kind: Any = tf.BertModel) -> tuple[Any, Path]:
    """A small BERT without two heads of each layer."""
    torch.manual_seed(0)
    kind(tf.BertConfig(**SMALL)).save_pretrained(folder)
    smaller, _, plain = shrink(folder)
    assert not plain
    smaller.save_pretrained(out := folder.parent / "out")
    return smaller, out


def test_an_automatic_class_opens_it(tmp_path: Path) -> None:
    smaller, out = bert(tmp_path / "bert")
    assert write_pruned_code(smaller, out) == "AutoModel"
    model = tf.AutoModel.from_pretrained(out, trust_remote_code=True)
    assert type(model) is tf.BertModel
    with torch.no_grad():
        expected = smaller(**IDS)[0]
        torch.testing.assert_close(model(**IDS)[0], expected, rtol=0, atol=0)
    heads = [s.head_label(h) for s in find_sites(model) for h in range(s.num_heads)]
    assert heads == ["L0.H0", "L0.H3", "L1.H0", "L1.H3"]
    with pytest.raises((RuntimeError, ValueError)):  # code runs only when it is trusted
        tf.AutoModel.from_pretrained(out)
    for trust in (False, True):  # here nothing needs it, trusted or not
        ours = multihead.load(out, trust_remote_code=trust)
        assert type(ours) is tf.BertModel
    for n, again in enumerate((model, ours)):  # whose own checkpoint has no code to point to
        again.save_pretrained(tmp_path / f"again{n}")
        content = json.loads((tmp_path / f"again{n}" / "config.json").read_text())
        assert "auto_map" not in content
        with torch.no_grad():
            loaded = multihead.load(tmp_path / f"again{n}")
            torch.testing.assert_close(loaded(**IDS)[0], expected, rtol=0, atol=0)


def test_the_model_inside_of_one_with_a_head_on_top(tmp_path: Path) -> None:
    smaller, out = bert(tmp_path / "bert", tf.BertForMaskedLM)
    assert write_pruned_code(smaller, out) == "AutoModelForMaskedLM"
    whole = tf.AutoModelForMaskedLM.from_pretrained(out, trust_remote_code=True)
    inside = tf.AutoModel.from_pretrained(out, trust_remote_code=True)
    assert type(whole) is tf.BertForMaskedLM and type(inside) is tf.BertModel
    with torch.no_grad():
        torch.testing.assert_close(whole(**IDS)[0], smaller(**IDS)[0], rtol=0, atol=0)
        torch.testing.assert_close(inside(**IDS)[0], smaller.bert(**IDS)[0], rtol=0, atol=0)


def test_code_that_is_there_stays(tmp_path: Path) -> None:
    smaller, out = bert(tmp_path / "bert")
    content = json.loads((out / "config.json").read_text()) | {"auto_map": {"AutoModel": "a.B"}}
    (out / "config.json").write_text(json.dumps(content))
    assert write_pruned_code(smaller, out) is None
    assert json.loads((out / "config.json").read_text()) == content


@pytest.mark.slow
def test_sentence_transformers_gives_the_pruned_models_embeddings(
    minilm_dir: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    smaller, tokenizer, plain = shrink(minilm_dir, heads=(0, 3, 7))
    written = checkpoint.save(smaller, tokenizer, tmp_path / "out", plain=plain)
    assert written.has_code and not written.left_out
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=True)
    texts = ["The cat sat on the mat.", "To be, or not to be.", "A short one."]
    got = model.encode(texts, convert_to_tensor=True)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = smaller(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(got, torch.nn.functional.normalize(mean), rtol=0, atol=1e-6)
    whole = SentenceTransformer(str(minilm_dir), device="cpu").encode(texts, convert_to_tensor=True)
    assert (got - whole).abs().max() > 1e-3
