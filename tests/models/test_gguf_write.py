"""A GGUF file holds the model: our loader and llama.cpp's layout of its rows say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from multihead.models.gguf_tokenizer import tokenizer_fields
from multihead.models.gguf_write import require_gguf_output, require_gguf_plan, write_gguf
from multihead.models.loading import load_with_tokenizer
from multihead.models.site import find_sites
from multihead.models.source import find_source
from multihead.pruning.surgery import remove_heads
from pruning.kept_checkpoints import shrink, write_llama
from tiny_tokenizers import byte_fallback, byte_level

gguf = pytest.importorskip("gguf")

SMALL: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, vocab_size=340
)
SMALL |= dict(num_key_value_heads=3, head_dim=32, max_position_embeddings=64)
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MAKE = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama with biases": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, attention_bias=True)),
    "llama with scaled positions": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SMALL, rope_parameters=dict(SCALED))
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SMALL, sliding_window=16)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SMALL)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, tie_word_embeddings=True)),
}
IDS = {"input_ids": torch.arange(3, 15)[None]}


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = MAKE[name]().eval()
    for name, x in model.named_parameters():
        x.data = torch.randn_like(x) * (0.3 if x.ndim > 1 else 0.1) + ("norm" in name)
    return model.to(dtype)


def tokenizer_of(backend: Any = None) -> Any:
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend or byte_level(), bos_token="<s>", eos_token="</s>"
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**IDS).logits
    return found


@pytest.mark.parametrize("name", MAKE)
def test_our_loader_opens_it(name: str, tmp_path: Path) -> None:
    """Also with fewer heads, where queries are narrower than the residual stream."""
    model = make(name)
    sites = find_sites(model)
    for n, smaller in enumerate((model, remove_heads(model, {s.name: [0, 1] for s in sites}, IDS))):
        held = write_gguf(smaller, tokenizer_of(), None, tmp_path / f"{n}.gguf", {})
        loaded = load_with_tokenizer(tmp_path / f"{n}.gguf")
        assert not loaded.notes and loaded.tokenizer is not None
        torch.testing.assert_close(logits(loaded.model), logits(smaller), rtol=1e-4, atol=1e-5)
        weights = dict(smaller.named_parameters())
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], x) for name, x in weights.items())
        assert [s.num_heads for s in find_sites(loaded.model)] == [[6, 6], [4, 4]][n]
        if name == "llama with scaled positions":
            assert loaded.model.config.rope_parameters == SCALED
        if name == "mistral":  # llama.cpp knows no windows here
            assert loaded.model.config.max_position_embeddings == 16


def test_rows_are_as_llama_cpp_rotates_them(tmp_path: Path) -> None:
    """Neighbours are a pair there, and halves of a head in transformers."""
    model = make("llama")
    write_gguf(model, tokenizer_of(), None, tmp_path / "x.gguf", {})
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    for place, name, heads in (("attn_q", "q_proj", 6), ("attn_k", "k_proj", 3)):
        weight = getattr(model.model.layers[1].self_attn, name).weight.detach().numpy()
        written = tensors[f"blk.1.{place}.weight"].reshape(heads, 32, 96)
        for h, head in enumerate(weight.reshape(heads, 32, 96)):
            np.testing.assert_array_equal(written[h, 0::2], head[:16])
            np.testing.assert_array_equal(written[h, 1::2], head[16:])
    value = model.model.layers[1].self_attn.v_proj.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["blk.1.attn_v.weight"], value)
    assert "output.weight" not in tensors  # tied


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_bias_that_compensates_comes_with_the_others(name: str, tmp_path: Path) -> None:
    model = make(name)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = torch.nn.Parameter(torch.randn(96))
    write_gguf(model, tokenizer_of(), None, tmp_path / "x.gguf", {})
    loaded = load_with_tokenizer(tmp_path / "x.gguf").model
    assert loaded.config.attention_bias
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_are_those_in_memory_and_vectors_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make("llama", dtype)
    held = write_gguf(model, tokenizer_of(), None, tmp_path / "x.gguf", {})
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[str(dtype).split(".")[1]]
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {kind}
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 1} == {"F32"}
    number = {"BF16": 32, "F16": 1, "F32": 0}[kind]
    assert reader.fields["general.file_type"].contents() == number
    assert all(torch.equal(held[name], x) for name, x in model.named_parameters())


def test_a_folder_in_bfloat16_becomes_bfloat16(tmp_path: Path) -> None:
    smaller, tokenizer, _ = shrink(write_llama(tmp_path / "llama"))
    assert smaller.dtype == torch.float32
    held = write_gguf(smaller, tokenizer, find_source(smaller), tmp_path / "x.gguf", {})
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "BF16" and kinds["blk.0.attn_norm.weight"] == "F32"
    weight = smaller.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(
        held["model.layers.0.self_attn.q_proj.weight"], weight.to(torch.bfloat16).float()
    )


def test_another_file_gives_types_fields_and_tokenizer(tmp_path: Path) -> None:
    """Of the types that need a search to be written, the nearest is taken."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    model = make("llama")
    write_gguf(model, tokenizer_of(), None, first, {"multihead.plan": "an earlier one"})
    kinds = {"attn_q": "Q8_0", "attn_v": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "F16"}
    again(first, second, kinds)
    loaded = load_with_tokenizer(second)
    sites = find_sites(loaded.model)
    smaller = remove_heads(loaded.model, {s.name: [2, 3] for s in sites}, IDS)
    source = find_source(smaller)
    assert source is not None and source.path == second
    held = write_gguf(smaller, None, source, tmp_path / "third.gguf", {"general.description": "b"})
    reader = gguf.GGUFReader(tmp_path / "third.gguf")
    found = {t.name: t.tensor_type.name for t in reader.tensors}
    before = {t.name: t.tensor_type.name for t in gguf.GGUFReader(second).tensors}
    assert found | {"rope_freqs.weight": "F32"} == before  # of ones: no scaling
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["mine.list"] == ["a", "b"] and fields["general.description"] == "b"
    assert fields["llama.attention.head_count"] == 4 and fields["llama.context_length"] == 64
    assert "multihead.plan" not in fields
    opened = load_with_tokenizer(tmp_path / "third.gguf").model
    with torch.no_grad():
        expected = torch.func.functional_call(smaller, held, kwargs=IDS).logits
    torch.testing.assert_close(logits(opened), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(expected, logits(smaller), rtol=0.2, atol=0.2)


def again(file: Path, other: Path, kinds: dict[str, str]) -> None:
    """The same file with some tensors in other types, a list and a table for positions."""
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(other, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    writer.add_array("mine.list", ["a", "b"])
    for tensor in reader.tensors:
        name = next((k for part, k in kinds.items() if f".{part}.w" in tensor.name), "F32")
        kind = gguf.GGMLQuantizationType[name]
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.data), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.ones(16, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- what is refused


def refused(words: str, model: Any, tokenizer: Any = None) -> None:
    with pytest.raises(ValueError, match=words):
        require_gguf_output(model, tokenizer, None)


def test_what_a_file_cant_hold_is_said_before_any_work() -> None:
    refused("GPT2LMHeadModel can't be written as a GGUF file; LlamaForCausalLM, Mistral", gpt2())
    refused("a GGUF file holds the tokenizer, and there is none", make("llama"))
    scaled = make("llama")
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    refused("rope_type='linear': rotary positions scaled so aren't read from GGUF", scaled)
    refused("is of the kind WordPiece, expected BPE", make("llama"), word_piece())
    require_gguf_output(make("llama"), tokenizer_of(), None)
    with pytest.raises(ValueError, match=r"--kind any: a GGUF file .* --kind uniform"):
        require_gguf_plan(make("llama"), "any", None)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has no place for the bias .* none"):
        require_gguf_plan(make("qwen2"), "uniform", None)
    require_gguf_plan(make("qwen2"), "uniform", "none")
    require_gguf_plan(make("llama"), "uniform", "refit", 2 / 3)
    wide = make("llama")
    wide.config.hidden_size = 64
    with pytest.raises(ValueError, match=r"3 heads would stay .* width of 64; give --remove 33%, "):
        require_gguf_plan(wide, "uniform", "refit", 0.5)


def gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))


def word_piece() -> Any:
    from tiny_tokenizers import word_pieces

    return tf.PreTrainedTokenizerFast(tokenizer_object=word_pieces())


@pytest.mark.parametrize("heads", [{0: [0, 1]}, {0: [0], 1: [0]}], ids=["layers", "groups"])
def test_uneven_heads_have_no_place(heads: dict[int, list[int]], tmp_path: Path) -> None:
    model = make("llama")
    sites = find_sites(model)
    smaller = remove_heads(model, {sites[n].name: gone for n, gone in heads.items()}, IDS)
    with pytest.raises(ValueError, match="has one number of heads for all layers; give kind="):
        write_gguf(smaller, tokenizer_of(), None, tmp_path / "x.gguf", {})


def test_a_tokenizer_with_bytes_for_unknown_characters(tmp_path: Path) -> None:
    """As Llama 2's: scores take the place of merges."""
    tokenizer = tokenizer_of(byte_fallback())
    tokenizer.unk_token = "<unk>"
    fields = tokenizer_fields(tokenizer, 340)
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"]
    types = fields["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6] and types[-1] == 5 and len(types) == 340
    write_gguf(make("llama"), tokenizer, None, tmp_path / "x.gguf", {})
    read = load_with_tokenizer(tmp_path / "x.gguf").tokenizer
    assert read is not None
    text = "the cat and the dog"
    assert read(text)["input_ids"][-9:] == tokenizer(text)["input_ids"][-9:]
