"""Files that are missing, damaged, pickled or elsewhere are refused with what to do."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.checkpoints import ask, refusal
from multihead.models import checkpoint_files
from multihead.models.loading import load_with_tokenizer


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


def test_missing_built_in_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path
) -> None:
    monkeypatch.setattr(checkpoint_files, "BUILTIN", tmp_path / "builtin")
    said = refusal(FileNotFoundError)
    assert str(tmp_path / "builtin") in said
    assert "reinstall" in said
    llama.rename(tmp_path / "builtin")
    assert load_with_tokenizer().name == "built-in"


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


def test_the_base_of_all_models_is_no_class_of_a_checkpoint() -> None:
    """transformers keeps what it finds out about a class for all that inherit from it."""
    assert checkpoint_files.named_class({"architectures": ["PreTrainedModel"]}) is None
    named = {"architectures": ["PreTrainedModel", "ViTModel"]}
    assert checkpoint_files.named_class(named) is transformers.ViTModel
