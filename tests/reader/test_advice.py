"""What a message advises is done once, and works."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from small import llama
from tiny_tokenizers import byte_level, fast

IDS = torch.tensor([[1, 5, 9, 7, 5, 9]])
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
)


def refused(words: str, run: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        run()


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return multihead.load_builtin()


def test_nan_in_half_precision_is_read_in_float32() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 1e6
        layer.mlp.up_proj.weight.data *= 1e3
    refused(
        "load it in float32",
        lambda: multihead.read(copy.deepcopy(model).half(), {"input_ids": IDS}),
    )
    assert multihead.read(model, {"input_ids": IDS}).count("self").all()


def test_a_site_that_runs_several_times_is_read_as_a_table() -> None:
    sizes = SIZES | {"num_hidden_layers": 2, "embedding_size": 16}
    model = tf.AlbertModel(tf.AlbertConfig(**sizes)).eval()
    refused(
        "read the table instead", lambda: multihead.read_maps(model, {"input_ids": IDS}, "L0.H0")
    )
    assert multihead.read(model, {"input_ids": IDS}).count("self").all()


def test_a_compiled_model_is_read_as_it_was_before() -> None:
    model = torch.compile(llama())
    refused(r"pass model\._orig_mod", lambda: multihead.read(model, {"input_ids": IDS}))
    assert multihead.read(model._orig_mod, {"input_ids": IDS}).count("self").all()


def test_texts_and_classes_need_the_tokenizer(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    refused("pass tokenizer=", lambda: multihead.read(model, "the cat"))
    refused(
        "pass the tokenizer", lambda: multihead.read(model, {"input_ids": IDS}, classes={"a": "a"})
    )
    refused("AutoTokenizer", lambda: multihead.read(model, "the cat", tokenizer="gpt2"))
    given = {"input_ids": tokenizer("the cat")["input_ids"]}  # or ready-made model inputs
    for texts in ("the cat", given):
        table = multihead.read(model, texts, tokenizer=tokenizer, classes={"a": "a"}, probe=False)
        assert table.meta["tokens"] == 4 and table.count("class:a").all()


def test_generation_needs_the_head_of_the_model(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    refused(
        "load the model with its head",
        lambda: multihead.read(model.model, "the cat", tokenizer=tokenizer, generate=2),
    )
    assert (
        multihead.read(model, "the cat", tokenizer=tokenizer, generate=2, probe=False)
        .count("self")
        .all()
    )


@pytest.mark.parametrize("odd", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_decoding_that_is_not_followed_is_read_in_a_loop(
    odd: Any, builtin: tuple[Any, Any]
) -> None:
    model, tokenizer = builtin
    options = {"max_new_tokens": 3, "pad_token_id": 0, **odd}
    refused(
        "read the finished text instead",
        lambda: multihead.read(model, "the cat", tokenizer=tokenizer, generate=options),
    )
    encoded = tokenizer("the cat", return_tensors="pt")
    torch.manual_seed(0)
    with multihead.reading(model) as session, torch.no_grad():
        written = model.generate(**encoded, **options)
    assert session.table().count("self").all()
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    assert multihead.read(model, text, tokenizer=tokenizer, probe=False).count("self").all()


def test_a_loss_needs_a_head_or_labels(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    refused(
        "language-modelling head",
        lambda: multihead.read(
            model.model, "the cat sat", tokenizer=tokenizer, statistics="effect", probe=False
        ),
    )
    refused(
        "language-modelling head",
        lambda: multihead.pruning.evaluate(model.model, "the cat sat", tokenizer=tokenizer),
    )
    bert = tf.BertForMaskedLM(tf.BertConfig(**SIZES)).eval()
    refused(
        r"ready-made batches with labels \[B, L\]",
        lambda: multihead.read(bert, {"input_ids": IDS}, statistics="effect"),
    )
    table = multihead.read(bert, {"input_ids": IDS, "labels": IDS}, statistics="effect")
    assert table.count("effect").all()


def test_windows_and_limits_that_are_named_fit(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    text = "the cat and the dog " * 150

    def read(**options: Any) -> Any:
        return multihead.read(model, text, tokenizer=tokenizer, probe=False, **options)

    refused("the model has 512 positions; give at most that many", lambda: read(context=513))
    assert read(context=512).count("self").all()
    refused("give context too", lambda: read(stride=8))
    assert read(context=256, stride=128).count("self").all()
    refused("give at least 2", lambda: read(context=1))
    assert (
        multihead.read(model, "the cat", tokenizer=tokenizer, context=2, probe=False)
        .count("self")
        .all()
    )
    note = read().meta["notes"]
    assert "given a context (--context) long texts are read whole" in " ".join(note)
    assert read(context=256).meta["tokens"] > 512


def test_model_inputs_are_not_resumed_but_texts_are(
    builtin: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = builtin
    file = tmp_path / "progress"
    refused("give strings", lambda: multihead.read(model, {"input_ids": IDS}, resume=file))
    assert (
        multihead.read(model, "the cat", tokenizer=tokenizer, resume=file, probe=False)
        .count("self")
        .all()
    )


def test_inputs_of_another_kind_are_named_by_their_argument() -> None:
    vit = tf.ViTModel(
        tf.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
        )
    ).eval()
    tokenizer = fast(byte_level())
    refused(
        r"multihead\.read\(model, \[\{'pixel_values'",
        lambda: multihead.read(vit, "a cat", tokenizer=tokenizer),
    )
    assert multihead.read(vit, [{"pixel_values": torch.randn(1, 3, 8, 8)}]).count("self").all()


class Block(nn.Module):
    """Attention as a user writes it, whose number of heads and projection have names of its own."""

    def __init__(self, heads: str, out: str) -> None:
        super().__init__()
        setattr(self, heads, 2)
        self.heads, self.last = heads, out
        self.qkv = nn.Linear(8, 24)
        setattr(self, out, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return getattr(self, self.last)(y.transpose(1, 2).flatten(2))


def test_names_that_are_not_known_are_registered() -> None:
    class StrangeHeadsAttention(Block):
        pass

    class StrangeOutAttention(Block):
        pass

    x = {"x": torch.randn(1, 5, 8)}
    heads, out = (
        StrangeHeadsAttention("how_many", "out_proj"),
        StrangeOutAttention("num_heads", "mixer"),
    )
    refused(
        r"register_family\('StrangeHeadsAttention', num_heads='its name'\)",
        lambda: multihead.read(heads, [x]),
    )
    multihead.models.register_family("StrangeHeadsAttention", num_heads="how_many")
    assert multihead.read(heads, [x]).count("self").all()
    refused(
        r"register_family\('StrangeOutAttention', out='its name'\)",
        lambda: multihead.read(out, [x]),
    )
    multihead.models.register_family("StrangeOutAttention", out="mixer")
    assert multihead.read(out, [x]).count("self").all()


def test_nested_tensors_are_given_padded() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(rows)
    refused(
        "give padded ones, and a key_padding_mask",
        lambda: multihead.read(layer, [{"query": nested, "key": nested, "value": nested}]),
    )
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    table = multihead.read(
        layer, [{"query": padded, "key": padded, "value": padded, "key_padding_mask": mask}]
    )
    assert table.count("self").tolist() == [8, 8]


def test_gates_of_sites_that_differ_are_given_by_label() -> None:
    model = llama()
    refused(
        "give a dict from site label",
        lambda: multihead.ablate_heads(model, gates=torch.ones(2, 5)).__enter__(),
    )
    with multihead.ablate_heads(model, gates={"L0": torch.zeros(3)}):
        model(IDS)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_part_with_another_implementation_than_the_model_is_named(layer: int) -> None:
    """The model makes no mask for SDPA, and eager attention without one isn't causal."""
    model = llama(attn_implementation="sdpa")
    part = model.model.layers[layer].self_attn
    part.config = copy.deepcopy(part.config)
    part.config._attn_implementation_internal = "eager"
    refused(
        f"the config of model.layers.{layer}.self_attn names 'eager' attention, and the model around it makes masks for 'sdpa'.* set _attn_implementation of that config to 'sdpa'",
        lambda: multihead.read(model, {"input_ids": IDS}),
    )
    part.config._attn_implementation = "sdpa"
    table, want = (multihead.read(m, {"input_ids": IDS}) for m in (model, llama()))
    for column in want.columns:
        assert table.value(column) == pytest.approx(
            want.value(column), rel=1e-3, abs=1e-6, nan_ok=True
        )


def test_parts_that_make_their_own_masks_may_differ() -> None:
    """A tower with eager attention in a model with SDPA, as set_attn_implementation allows."""
    vision = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    config = tf.CLIPConfig(
        text_config=SIZES | {"max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=vision,
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = tf.CLIPModel(config).eval()
    inputs = {"input_ids": IDS, "pixel_values": torch.randn(1, 3, 8, 8)}
    want = multihead.read(model, [inputs])
    model.set_attn_implementation({"vision_config": "eager"})
    table = multihead.read(model, [inputs])
    assert table.value("entropy") == pytest.approx(want.value("entropy"), rel=1e-4)
