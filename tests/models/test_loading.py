"""Opening models: what comes back, and the words of every refusal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast, T5Config

from multihead.models import checkpoint_files, gguf
from multihead.models.loading import load_with_tokenizer

SIZES: dict[str, Any] = dict(
    vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small random Llama with a tokenizer of a few words."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "the": 1, "head": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def edit(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text())
    content.update(entries)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def ask(script: str, **environment: str) -> str:
    """All that a fresh interpreter prints: the hub's library, for one, reads its settings once."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, **both)
    assert not done.returncode, done.stdout
    return str(done.stdout)


def refusal(kind: type[Exception], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(kind) as caught:
        load_with_tokenizer(*arguments, **keywords)
    return str(caught.value)


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


def test_missing_built_in_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    monkeypatch.setattr(checkpoint_files, "BUILTIN", tmp_path / "builtin")
    said = refusal(FileNotFoundError)
    assert str(tmp_path / "builtin") in said
    assert "reinstall" in said
    llama.rename(tmp_path / "builtin")
    assert load_with_tokenizer().name == "built-in"


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


def test_path_that_does_not_exist(llama: Path) -> None:
    said = refusal(FileNotFoundError, str(llama)[:-1])
    assert f"model={str(llama)[:-1]!r}: there is no such file or folder" in said
    assert f"Did you mean {str(llama)!r}?" in said
    assert "config.json, model.safetensors" in said
    assert "GGUF" in said
    assert "there is no such file" in refusal(
        FileNotFoundError, Path("llama")
    )  # a Path is never a hub name
    assert "there is no such file" in refusal(FileNotFoundError, "model.gguf")
    assert "there is no such file" in refusal(FileNotFoundError, "")


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
            "(no network)",
        ),  # nothing listens there
        ({"HF_HUB_OFFLINE": "1"}, "(HF_HUB_OFFLINE is set)"),
    ],
    ids=["no network", "offline"],
)
def test_hub_name_without_network(setting: dict[str, str], cause: str, tmp_path: Path) -> None:
    script = (
        "from multihead.models.loading import load_with_tokenizer\ntry: load_with_tokenizer('owner/m')\nexcept FileNotFoundError"
        " as e: print(e)"
    )
    said = ask(script, HF_HOME=str(tmp_path), **setting)
    assert said.startswith("model='owner/m': there is no such file or folder here")
    assert f"the hub can't be asked {cause}" in said
    assert f"local cache {tmp_path}" in said
    assert "What works without network: a folder with config.json" in said


def test_hub_name_that_the_cache_holds(llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    save_file(weights | {"spare": torch.ones(1)}, llama / "model.safetensors", {"format": "pt"})
    repo = tmp_path / "hub" / "models--owner--m"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(llama, repo / "snapshots" / ("0" * 40))
    script = (
        "from multihead.models.loading import load_with_tokenizer; m = load_with_tokenizer('owner/m'); print(m.name,"
        " type(m.model).__name__)"
    )
    # Nothing else: neither progress nor transformers' report on the spare weight, which is in
    # `notes`.
    assert ask(script, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") == "owner/m LlamaForCausalLM\n"


def test_folder_without_config(llama: Path) -> None:
    (llama / "config.json").rename(llama / "adapter_config.json")
    said = refusal(FileNotFoundError, llama)
    assert f"model={str(llama)!r}: the folder has no config.json." in said
    assert "adapter: merge it" in said
    (llama / "adapter_config.json").rename(llama / "small.gguf")
    assert f"It holds a GGUF file: give {str(llama / 'small.gguf')!r}" in refusal(
        FileNotFoundError, llama
    )


def test_config_that_is_not_json(llama: Path) -> None:
    (llama / "config.json").write_text('{"model_type": "llama",')
    said = refusal(ValueError, llama)
    assert f"{llama / 'config.json'} is not valid JSON (Expecting property name" in said
    (llama / "config.json").write_text("[]")
    assert "holds a list, expected named entries {...}" in refusal(ValueError, llama)


def test_config_of_an_unknown_model(llama: Path) -> None:
    edit(llama / "config.json", model_type="somethingnew", architectures=["SomethingNew"])
    said = refusal(ValueError, llama)
    assert f"transformers {transformers.__version__} could not open {llama}" in said
    assert "`somethingnew`" in said


def test_folder_without_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "consolidated.safetensors")
    said = refusal(FileNotFoundError, llama)
    assert f"{llama} has a config.json but no weights: no model.safetensors" in said
    assert "there is consolidated.safetensors, which transformers does not look for" in said


def test_weight_file_that_the_index_lists_is_missing(llama: Path) -> None:
    load_with_tokenizer(llama).model.save_pretrained(llama, max_shard_size="4KB")
    (llama / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(llama.glob("model-*.safetensors"))
    shards[1].unlink()
    said = refusal(FileNotFoundError, llama)
    index = llama / "model.safetensors.index.json"
    assert f"1 of the {len(shards)} weight files that {index} lists are missing" in said
    assert shards[1].name in said


@pytest.mark.parametrize(
    "keep", [0, 5, 300, -1], ids=["empty", "in the length", "in the header", "in the weights"]
)
def test_truncated_safetensors(keep: int, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    built = []
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lambda *a, **k: built.append(a))
    said = refusal(ValueError, llama)
    assert f"{file} ({file.stat().st_size:,} bytes) is truncated or damaged" in said
    assert "download or copy it again" in said
    assert not built


def test_weights_of_another_size_than_the_config(llama: Path) -> None:
    edit(llama / "config.json", intermediate_size=32)
    said = refusal(ValueError, llama)
    assert "6 weights of the checkpoint have another size than its config makes them" in said
    assert "the first model.layers.0.mlp.down_proj.weight: (16, 24), expected (16, 32)" in said


def test_pickle_is_refused_and_never_opened(llama: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "the trap went off"),)

    (llama / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap()}, llama / "pytorch_model.bin")
    said = refusal(ValueError, llama)
    assert f"{llama} has its weights only as a pickle (pytorch_model.bin)" in said
    assert "can run any code" in said
    assert "in safetensors" in said
    said = refusal(ValueError, llama / "pytorch_model.bin")
    assert f"model={str(llama / 'pytorch_model.bin')!r} is a pickle" in said
    assert not (tmp_path / "the trap went off").exists()


def test_the_conversion_that_the_refusal_of_a_pickle_names_works(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    torch.save(weights, llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    call = re.search(r"transformers\.Llama.*\)(?=, and copy)", refusal(ValueError, llama))
    assert call
    eval(call.group(), {"transformers": transformers})
    converted = load_with_tokenizer(f"{llama}-safetensors").model
    torch.testing.assert_close(
        converted.state_dict()["lm_head.weight"], weights["lm_head.weight"], rtol=0, atol=0
    )


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


# --- weight of the import ---


def test_import_is_light() -> None:
    script = (
        "import sys, multihead.models.loading; print({'torch', 'transformers', 'numpy'} &"
        " {*sys.modules})"
    )
    assert ask(script) == "set()\n"
