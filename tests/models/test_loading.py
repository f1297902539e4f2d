"""Opening a model: the class that the checkpoint names, with all its weights, in the dtype asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, LlamaConfig, T5Config

from models.checkpoints import SIZES, ask, edit, refusal
from multihead.models.loading import load_with_tokenizer

# --- what opens ---


def test_folder_gives_the_model_and_its_tokenizer(llama: Path) -> None:
    loaded = load_with_tokenizer(llama)
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("the head").input_ids == [1, 2]
    assert (loaded.name, loaded.path, loaded.notes) == ("llama", llama, ())
    stored = load_file(llama / "model.safetensors")
    for name, weight in stored.items():
        torch.testing.assert_close(loaded.model.state_dict()[name], weight, rtol=0, atol=0)


def test_name_is_that_of_the_folder_however_it_is_given(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama)
    assert load_with_tokenizer(".").name == "llama"
    monkeypatch.chdir(llama.parent)
    assert (
        load_with_tokenizer("llama").name == "llama"
    )  # a folder that is there comes before the hub


def test_model_without_tokenizer_files_has_none(llama: Path) -> None:
    for file in llama.glob("tokenizer*"):
        file.unlink()
    assert load_with_tokenizer(llama).tokenizer is None


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("BertForMaskedLM", BertConfig(**SIZES, intermediate_size=24)),
        ("BertModel", BertConfig(**SIZES, intermediate_size=24)),
        (
            "T5ForConditionalGeneration",
            T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2),
        ),
        (
            "ViTForImageClassification",
            transformers.ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4}),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_class_is_the_one_that_the_checkpoint_names(kind: str, config: Any, tmp_path: Path) -> None:
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "model")
    assert type(load_with_tokenizer(tmp_path / "model").model).__name__ == kind


@pytest.mark.parametrize(
    ("saved", "opened"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("BertModel", "BertModel"),
        ("T5ForConditionalGeneration",) * 2,
    ],
)
def test_class_where_the_config_names_none(saved: str, opened: str, tmp_path: Path) -> None:
    configs = {
        "LlamaForCausalLM": LlamaConfig(**SIZES, intermediate_size=24),
        "BertModel": BertConfig(**SIZES, intermediate_size=24),
        "T5ForConditionalGeneration": T5Config(
            vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
        ),
    }
    getattr(transformers, saved)(configs[saved]).save_pretrained(tmp_path / "model")
    edit(tmp_path / "model" / "config.json", architectures=None)
    assert type(load_with_tokenizer(tmp_path / "model").model).__name__ == opened


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.float32),
        ("float64", torch.float64),
        (torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16),
    ],
)
def test_dtype(dtype: Any, expected: torch.dtype, llama: Path) -> None:
    transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float16).save_pretrained(llama)
    assert {
        weight.dtype for weight in load_with_tokenizer(llama, dtype=dtype).model.parameters()
    } == {expected}


def test_weights_in_several_files(llama: Path) -> None:
    whole = load_with_tokenizer(llama).model
    whole.save_pretrained(llama, max_shard_size="4KB")
    (llama / "model.safetensors").unlink(missing_ok=True)
    assert len(list(llama.glob("model-*.safetensors"))) > 1
    for name, weight in load_with_tokenizer(llama).model.state_dict().items():
        torch.testing.assert_close(weight, whole.state_dict()[name], rtol=0, atol=0)


def test_transformers_settings_are_as_before(
    llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    capfd.readouterr()
    try:
        load_with_tokenizer(llama)
        (llama / "model.safetensors").unlink()
        refusal(FileNotFoundError, llama)
        assert "".join(capfd.readouterr()) == ""
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)


def test_a_missing_pooler_is_harmless_and_a_missing_layer_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    transformers.BertModel(BertConfig(**SIZES, intermediate_size=24)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "pooler" not in k},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    load_with_tokenizer(folder)
    save_file(
        {k: v for k, v in weights.items() if "layer.1.attention.self.query" not in k},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    said = refusal(ValueError, folder)
    assert "model='bert': the checkpoint lacks 2 of the weights of BertModel" in said
    assert (
        "encoder.layer.1.attention.self.query.bias, encoder.layer.1.attention.self.query.weight"
        in said
    )
    assert "would be random" in said
    assert "architectures" in said


def test_weights_that_have_no_place_are_noted(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    (note,) = load_with_tokenizer(llama).notes
    assert (
        note == "1 weights of the checkpoint have no place in LlamaForCausalLM and were left out: "
        "model.layers.0.self_attn.q_proj.bias"
    )


# --- what is refused ---


def test_config_of_an_unknown_model(llama: Path) -> None:
    edit(llama / "config.json", model_type="somethingnew", architectures=["SomethingNew"])
    said = refusal(ValueError, llama)
    assert f"transformers {transformers.__version__} could not open {llama}" in said
    assert "`somethingnew`" in said


def test_weights_of_another_size_than_the_config(llama: Path) -> None:
    edit(llama / "config.json", intermediate_size=32)
    said = refusal(ValueError, llama)
    assert "6 weights of the checkpoint have another size than its config makes them" in said
    assert "the first model.layers.0.mlp.down_proj.weight: (16, 24), expected (16, 32)" in said


def test_foreign_code_runs_only_when_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    (llama / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaForCausalLM\n"
        "class OwnForCausalLM(LlamaForCausalLM): pass\n"
    )
    edit(llama / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    # transformers has a class of its own for what this checkpoint names, so nothing foreign is
    # needed.
    assert type(load_with_tokenizer(llama).model) is transformers.LlamaForCausalLM
    assert not (tmp_path / "ran").exists()
    assert (
        type(load_with_tokenizer(llama, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    )
    (tmp_path / "ran").unlink()
    edit(llama / "config.json", architectures=["OwnForCausalLM"])
    said = refusal(ValueError, llama)
    assert (
        f"{llama / 'config.json'} asks to run Python code that lies in the checkpoint"
        " (own.OwnForCausalLM)" in said
    )
    assert "trust_remote_code=True" in said
    assert "--trust-remote-code" in said
    assert not (tmp_path / "ran").exists()
    assert (
        type(load_with_tokenizer(llama, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    )


def test_unknown_dtype_and_device(llama: Path) -> None:
    said = refusal(ValueError, llama, dtype="float23")
    assert (
        said == "dtype='float23' is not a dtype that models are read in; "
        "choose one of float32, bfloat16, float16, float64, auto"
    )
    assert "dtype='int8'" in refusal(ValueError, llama, dtype=torch.int8)
    for device in ("gpu", "cuda:99", "meta"):
        said = refusal(ValueError, llama, device=device)
        assert (
            f"device={device!r} is not a device that torch {torch.__version__} finds on this"
            " machine" in said
        )
        assert "choose one of cpu" in said


# --- real models ---


def test_minilm(minilm_dir: Path) -> None:
    loaded = load_with_tokenizer(minilm_dir)
    assert type(loaded.model) is transformers.BertModel
    assert (loaded.name, loaded.notes) == ("all-MiniLM-L6-v2", ())
    assert loaded.tokenizer is not None
    with torch.no_grad():
        texts = [
            "a cat sat on the mat",
            "a kitten rested on the rug",
            "interest rates rose sharply",
        ]
        inputs = loaded.tokenizer(texts, padding=True, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors = (loaded.model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        near, far = torch.cosine_similarity(vectors[:1], vectors[1:])
    assert near > 0.5 > 0.2 > far  # weights that were loaded wrong give no such meaning


# --- weight of the import ---


def test_import_is_light() -> None:
    script = (
        "import sys, multihead.models.loading; print({'torch', 'transformers', 'numpy'} &"
        " {*sys.modules})"
    )
    assert ask(script) == "set()\n"
