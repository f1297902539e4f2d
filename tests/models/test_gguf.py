"""GGUF files are opened, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from models.checkpoints import refusal
from multihead.models import gguf
from multihead.models.loading import load_with_tokenizer


def test_file_that_is_not_gguf(llama: Path) -> None:
    assert "give its folder" in refusal(ValueError, llama / "model.safetensors")
    (llama / "notes.gguf").write_bytes(b"once upon a time")
    said = refusal(ValueError, llama / "notes.gguf")
    assert (
        f"model={str(llama / 'notes.gguf')!r} is not a GGUF file (those begin with the letters"
        " GGUF)" in said
    )


def test_gguf_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'multihead[gguf]'" in refusal(ValueError, tmp_path / "small.gguf")


def small_gguf(file: Path, architecture: str = "llama") -> None:
    """A GGUF file of a Llama of one layer, each of its weights filled with its own number."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("small")
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {
        "attn_q": (16, 16),
        "attn_k": (8, 16),
        "attn_v": (8, 16),
        "attn_output": (16, 16),
        "attn_norm": (16,),
    }
    shapes |= {"ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24), "ffn_norm": (16,)}
    names = {"token_embd.weight": (3, 16), "output_norm.weight": (16,), "output.weight": (3, 16)}
    names |= {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for number, (name, shape) in enumerate(names.items(), 1):
        writer.add_tensor(name, np.full(shape, number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.gguf"
    small_gguf(file)
    loaded = load_with_tokenizer(file)
    assert "".join(capfd.readouterr()) == ""
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert loaded.name == "small.gguf"
    assert loaded.model.lm_head.weight.unique().tolist() == [3]
    assert loaded.model.model.layers[0].self_attn.q_proj.weight.unique().tolist() == [4]
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_tokens_to_ids(["a", "b", "ab"]) == [0, 1, 2]


@pytest.mark.parametrize(
    "keep", [5, 100, 600, -40], ids=["in the start", "in a field", "in a token", "in the weights"]
)
def test_truncated_gguf(keep: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.gguf"
    small_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    said = refusal(ValueError, file)
    assert (
        f"{file} ({file.stat().st_size:,} bytes) is truncated or damaged; download or copy it again"
        in said
    )
    assert "".join(capfd.readouterr()) == ""


def test_gguf_of_an_unknown_model(tmp_path: Path) -> None:
    small_gguf(tmp_path / "small.gguf", "somethingnew")
    said = refusal(ValueError, tmp_path / "small.gguf")
    assert (
        f"transformers {transformers.__version__} could not open {tmp_path / 'small.gguf'}" in said
    )
    assert "somethingnew" in said
    assert "truncated" not in said


def test_smollm2(smollm2_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_with_tokenizer(smollm2_gguf)
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert loaded.tokenizer is not None
    inputs = loaded.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        following = loaded.model(**inputs).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(following) == " Paris"
    assert "".join(capfd.readouterr()) == ""
