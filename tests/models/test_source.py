"""Where a model came from, and the types and files of its weights there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.checkpoints import edit
from multihead.models.kept_files import copy_other_files
from multihead.models.loading import load_with_tokenizer
from multihead.models.source import Source, find_source, to_stored_layout

A, B = "a.safetensors", "b.safetensors"
SOURCE = Source(
    Path("none"),
    12,
    ("bfloat16", "float32"),
    {"bert.q.weight": torch.bfloat16, "bert.norm.weight": torch.float32, "x": torch.bfloat16},
    {"bert.q.weight": A, "bert.norm.weight": B, "x": A, "ids": B},
    {A: {"by": "me"}, B: {}},
    {},
)


@pytest.mark.parametrize(
    ("name", "twin", "dtype"),
    [
        ("bert.norm.weight", "bert.norm.weight", torch.float32),
        ("norm.weight", "bert.norm.weight", torch.float32),
        ("all.bert.norm.weight", "bert.norm.weight", torch.float32),
        ("bert.norm.bias", "bert.norm.weight", torch.float32),
        ("norm.bias", "bert.norm.weight", torch.float32),
        ("weight", None, torch.bfloat16),
        ("new", None, torch.bfloat16),
        ("ids", "ids", torch.bfloat16),
    ],
)
def test_a_tensor_is_stored_as_its_twin_was(
    name: str, twin: str | None, dtype: torch.dtype
) -> None:
    assert SOURCE.twin(name) == twin and SOURCE.dtype(name) == dtype


def test_tied_tensors_stay_one() -> None:
    x = torch.ones(2, 3)
    found = SOURCE.store({"x": x, "y": x, "i": torch.arange(3), "norm.bias": torch.ones(3)})
    assert found["x"] is found["y"] and found["x"].dtype == torch.bfloat16
    assert found["i"].dtype == torch.int64 and found["norm.bias"].dtype == torch.float32


def test_the_folder_that_a_model_came_from(llama: Path, tmp_path: Path) -> None:
    model = load_with_tokenizer(llama).model
    found = find_source(model)
    assert found is not None and found.path == llama and found.types == ("float32",)
    assert found.size == (llama / "model.safetensors").stat().st_size and not found.is_gguf
    assert found.places.keys() == load_file(llama / "model.safetensors").keys()
    edit(llama / "config.json", model_type="mistral")  # another model lies there by now
    assert find_source(model) is None
    shutil.rmtree(llama)
    assert find_source(model) is None
    assert find_source(transformers.LlamaModel(model.config)) is None
    assert find_source(torch.nn.Linear(2, 2)) is None
    model.config._name_or_path = "not a name/of any/model"
    assert find_source(model) is None


def test_a_name_in_the_hubs_cache(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a folder has links to the contents."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo, commit = tmp_path / "hub" / "models--owner--m", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for n, file in enumerate(sorted(llama.iterdir())):
        shutil.copy(file, repo / "blobs" / str(n))
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    model = load_with_tokenizer(snapshot).model
    at_path = find_source(model)
    model.config._name_or_path = "owner/m"  # as transformers has it, given a name
    by_name = find_source(model)
    model.config._commit_hash = commit
    assert at_path == by_name == find_source(model)
    assert at_path is not None and at_path.path == snapshot and len(at_path.places) > 10
    (target := tmp_path / "target").mkdir()
    replaced = ("config.json", "model.safetensors")
    assert copy_other_files(snapshot, target, keep=(), replaced=replaced) == {}
    kept = {file.name for file in target.iterdir() if not file.is_symlink()}
    assert kept == {file.name for file in llama.iterdir()} - {*replaced}


def test_a_gguf_file_has_types_and_no_layout(smollm2_gguf: Path) -> None:
    model = transformers.LlamaModel(
        transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    model.config._name_or_path = str(smollm2_gguf)
    found = find_source(model)
    assert found is not None and found.is_gguf and set(found.types) == {"Q4_1", "F32", "Q8_0"}
    assert found.size == smollm2_gguf.stat().st_size and found.dtype("x") is None


def test_weights_are_distributed_over_their_files(tmp_path: Path) -> None:
    was, now = tmp_path / "was", tmp_path / "now"
    was.mkdir()
    now.mkdir()
    index = {"metadata": {"total_size": 99, "mine": 1, "total_parameters": 7}, "weight_map": {}}
    (was / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = {"bert.q.weight": torch.ones(2, 2), "norm.bias": torch.ones(3), "new": torch.ones(1)}
    save_file(tensors, now / "model.safetensors", {"format": "pt"})
    to_stored_layout(now, replace(SOURCE, path=was))
    assert {file.name for file in now.iterdir()} == {A, B, "model.safetensors.index.json"}
    assert load_file(now / A).keys() == {"bert.q.weight", "new"}
    assert load_file(now / B).keys() == {"norm.bias"}
    with safe_open(now / A, "pt") as weights:
        assert weights.metadata() == {"format": "pt", "by": "me"}
    written = json.loads((now / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == {"bert.q.weight": A, "new": A, "norm.bias": B}
    assert written["metadata"] == {"total_size": 4 * 8, "mine": 1}
