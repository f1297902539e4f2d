"""Maps: exact weights and contributions of chosen heads, equal to the table and to stored
probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.ops.backends import cpu, jit
from small import IDS, llama
from user_statistics import Letters

TEXT = {"input_ids": IDS[:1]}


def test_weights_are_those_of_the_models_own_eager_attention() -> None:
    model = llama(attn_implementation="eager")
    stored = model(**TEXT, output_attentions=True).attentions
    for label, layer, head in (("L0.H2", 0, 2), ("L1.H0", 1, 0)):
        found = multihead.read_maps(model, TEXT, label)
        assert found.weights == pytest.approx(stored[layer][0, head].detach().numpy(), abs=1e-5)
        value = model.model.layers[layer].self_attn
        assert found.contributions is not None and found.contributions.shape == (12, 12)
        inputs: list[torch.Tensor] = []
        hook = value.v_proj.register_forward_hook(
            lambda _, __, out, inputs=inputs: inputs.append(out)
        )
        model(**TEXT)
        hook.remove()
        norms = (
            (inputs[0][0] @ value.o_proj.weight.T[head * 8 : head * 8 + 8])
            .norm(dim=-1)
            .detach()
            .numpy()
        )
        assert found.contributions == pytest.approx(found.weights * norms, rel=1e-4)


def test_a_map_gives_the_tables_numbers() -> None:
    model = llama()
    table = multihead.read(model, [TEXT], probe=False)
    labels = [head.head for head in table.heads]
    for n, found in enumerate(multihead.read_maps(model, TEXT, labels)):
        assert found.head == labels[n]
        a, c = found.weights.astype(float), found.contributions.astype(float)
        assert np.trace(a) / 12 == pytest.approx(table.value("self")[n], rel=1e-5)
        assert np.trace(c) / c.sum() == pytest.approx(table.value("contribution:self")[n], rel=1e-5)
        assert a[:, 0].mean() == pytest.approx(table.value("first")[n], rel=1e-5)


def test_rows_and_keys_are_cut_out_of_the_whole() -> None:
    model = llama()
    whole = multihead.read_maps(model, TEXT, "L1.H1")
    part = multihead.read_maps(model, TEXT, "L1.H1", rows=[7, 2, 3], keys=5)
    assert part.rows == [2, 3, 7] and part.weights.shape == (3, 5)
    assert np.array_equal(part.weights, whole.weights[[2, 3, 7], :5])
    assert part.tokens == [str(int(i)) for i in IDS[0, :5]] and part.row_tokens == [
        str(int(IDS[0, i])) for i in (2, 3, 7)
    ]


@pytest.mark.skipif(jit.MISSING is not None, reason="without Numba there are no kernels")
@pytest.mark.parametrize(("rows", "keys"), [(None, None), ([7, 2, 3], 5)])
def test_kernels_draw_the_same_maps(
    rows: list[int] | None, keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["L1.H2", "L0.H0", "L0.H1"]
    want = multihead.read_maps(llama(), TEXT, labels, rows=rows, keys=keys)
    monkeypatch.setattr(cpu, "ENOUGH", 0)
    monkeypatch.setattr("multihead.reader.row_stats.sum_by_blocks", None)
    for a, b in zip(
        multihead.read_maps(llama(), TEXT, labels, rows=rows, keys=keys), want, strict=True
    ):
        assert (a.head, a.tokens, a.rows) == (
            b.head,
            b.tokens,
            b.rows,
        ) and a.weights.shape == b.weights.shape
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-5)
        np.testing.assert_allclose(a.contributions, b.contributions, atol=1e-5)


def test_every_kind_of_site() -> None:
    family = next(f for f in FAMILIES if f.name == "t5")
    model, inputs = model_of(family), batches_of(family, "none")[1]
    found = multihead.read_maps(
        model, inputs, ["encoder.L0.H0", "decoder.L1.H1", "decoder.L1.cross.H1"]
    )
    sizes = inputs["input_ids"].shape[1], inputs["decoder_input_ids"].shape[1]
    assert [m.weights.shape for m in found] == [
        (sizes[0], sizes[0]),
        (sizes[1], sizes[1]),
        (sizes[1], sizes[0]),
    ]
    assert all(m.weights.sum(-1) == pytest.approx(1, abs=1e-5) for m in found)


def test_both_sides_of_cross_attention_are_labelled() -> None:
    family = next(f for f in FAMILIES if f.name == "t5")
    model, inputs = model_of(family), dict(batches_of(family, "none")[1])
    source, target = (inputs[n][0].tolist() for n in ("input_ids", "decoder_input_ids"))
    labels = ["decoder.L1.cross.H1", "decoder.L0.H1", "encoder.L0.H1"]
    for found, keys, rows in zip(
        multihead.read_maps(model, inputs, labels, tokenizer=Letters()),
        (source, target, source),
        (target, target, source),
        strict=True,
    ):
        assert found.tokens == [Letters().decode([i]) for i in keys]
        assert found.row_tokens == [Letters().decode([i]) for i in rows]
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -2:] = 0
    padded = multihead.read_maps(model, inputs | {"attention_mask": mask}, labels[0])
    assert padded.tokens == [str(i) for i in source[:-2]] + ["<pad>"] * 2
    assert (padded.weights[:, -2:] == 0).all()


def test_whisper_numbers_its_frames() -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=40, num_mel_bins=4, d_model=16, max_source_positions=5, max_target_positions=8
    )
    layers = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = tf.WhisperConfig(
        **sizes, **layers, **ends, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    model = tf.WhisperForConditionalGeneration(config).eval()
    inputs = {
        "input_features": torch.randn(1, 4, 10),
        "decoder_input_ids": torch.tensor([[1, 8, 9, 5]]),
    }
    found = multihead.read_maps(model, inputs, "decoder.L0.cross.H1")
    assert found.tokens == list("01234") and found.row_tokens == list("1895")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("named", [True, False], ids=["tokenizer", "ids alone"])
def test_a_padded_text_shows_its_padding(side: str, named: bool) -> None:
    model, tokenizer = multihead.load_builtin()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    options = {"tokenizer": tokenizer} if named else {}
    bare = multihead.read_maps(model, tokenizer("the cat", return_tensors="pt"), "L0.H0", **options)
    padded = tokenizer("the cat", padding="max_length", max_length=8, return_tensors="pt")
    found = multihead.read_maps(model, padded, "L0.H0", **options)
    text = slice(8 - len(bare.tokens), 8) if side == "left" else slice(0, len(bare.tokens))
    assert found.tokens[text] == bare.tokens and found.tokens.count("<pad>") == 8 - len(bare.tokens)
    assert found.row_tokens == found.tokens
    np.testing.assert_allclose(found.weights[text, text], bare.weights, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": "L1.H7"}, ["'L1.H7' doesn't exist", "L0.H0 to L1.H2"]),
        ({"heads": "L7.H1"}, ["'L7.H1' doesn't exist", "did you mean"]),
        ({"rows": [3, 12]}, ["12 isn't a query", "0 to 11"]),
        ({"rows": [-1]}, ["-1 isn't a query"]),
        ({"text": {"input_ids": IDS}}, ["2 texts", "expected one"]),
        ({"text": "a text"}, ["tokenizer is None", "AutoTokenizer"]),
        ({"text": [TEXT, TEXT]}, ["2 texts", "expected one"]),
        ({"rows": []}, ["rows=[]", "range(10)"]),
        ({"rows": 5}, ["rows=5", "[5]"]),
        ({"heads": (2, 3)}, ["heads=(2, 3)", "'L2.H3'"]),
    ],
)
def test_words(change: dict[str, Any], words: list[str]) -> None:
    arguments = {"text": TEXT, "heads": "L1.H1", "rows": None} | change
    with pytest.raises((ValueError, TypeError)) as caught:
        multihead.read_maps(llama(), arguments["text"], arguments["heads"], rows=arguments["rows"])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_maps_measure_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "multihead.reader.statistics.updates.UpdateNorm.update", lambda *_: pytest.fail("measured")
    )
    assert multihead.read_maps(llama(), {"input_ids": IDS[:1]}, "L0.H0").weights.shape == (12, 12)


def test_words_are_summed_where_they_are_read_and_averaged_where_they_read() -> None:
    model, tokenizer = multihead.load_builtin()
    found = multihead.read_maps(model, "the cat, a zebra", "L1.H0", tokenizer=tokenizer)
    assert found.tokens[2:4] == [" c", "at"] and found.tokens[6] == " z"
    words = [[0], [1], [2, 3], [4], [5], list(range(6, len(found.tokens)))]
    want = np.array([[found.weights[np.ix_(q, k)].sum(1).mean() for k in words] for q in words])
    merged = found.by_word()
    assert merged.tokens == merged.row_tokens == ["<s>", "the", "cat", ",", "a", "zebra"]
    assert merged.rows == list(range(6))
    np.testing.assert_allclose(merged.weights, want, atol=1e-5)
    np.testing.assert_allclose(merged.weights.sum(-1), 1, atol=1e-5)
    assert found.contributions is not None and merged.contributions is not None
    assert merged.contributions[5, 2] == pytest.approx(
        found.contributions[6:, 2:4].sum(1).mean(), rel=1e-5
    )
    part = multihead.read_maps(
        model, "the cat, a zebra", "L1.H0", tokenizer=tokenizer, by="word", rows=[5, 2], keys=3
    )
    assert part.rows == [2, 5] and part.row_tokens == ["cat", "zebra"]
    assert part.tokens == ["<s>", "the", "cat"]
    np.testing.assert_array_equal(part.weights, merged.weights[[2, 5], :3])
    np.testing.assert_array_equal(merged.by_word().weights, merged.weights)


@pytest.mark.parametrize("side", ["left", "right"])
def test_words_of_a_padded_text(side: str) -> None:
    model, tokenizer = multihead.load_builtin()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    padded = tokenizer("the cat", padding="max_length", max_length=8, return_tensors="pt")
    found = multihead.read_maps(model, padded, "L0.H0", tokenizer=tokenizer, by="word")
    padding = ["<pad>"] * 4
    text = ["<s>", "the", "cat"]
    assert found.tokens == (padding + text if side == "left" else text + padding)


def test_words_of_both_sides() -> None:
    tokenizer = multihead.load_builtin()[1]
    sizes: dict[str, Any] = dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    model = tf.T5Model(tf.T5Config(vocab_size=len(tokenizer), **sizes)).eval()
    inputs = {
        "input_ids": tokenizer("the zebra", return_tensors="pt").input_ids,
        "decoder_input_ids": tokenizer("a cat", return_tensors="pt").input_ids,
    }
    label = "decoder.L0.cross.H0"
    found = multihead.read_maps(model, inputs, label, tokenizer=tokenizer, by="word")
    assert found.tokens == ["<s>", "the", "zebra"] and found.row_tokens == ["<s>", "a", "cat"]


def test_words_need_a_tokenizer_and_a_known_unit() -> None:
    with pytest.raises(multihead.MultiheadError, match=r"by='word'.*tokenizer="):
        multihead.read_maps(llama(), TEXT, "L0.H0", by="word")
    with pytest.raises(multihead.MultiheadError, match="by='line': expected 'token' or 'word'"):
        multihead.read_maps(llama(), TEXT, "L0.H0", by="line")
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(multihead.MultiheadError, match=r"rows: 9 isn't a word.* 0 to 2"):
        multihead.read_maps(model, "the cat", "L0.H0", tokenizer=tokenizer, by="word", rows=[9])
