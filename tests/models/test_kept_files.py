"""A checkpoint's other files are copied; those that have become another one stay so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multihead.models.kept_files import add_to_readme, copy_companions, copy_other_files
from multihead.models.loading import load_with_tokenizer
from multihead.models.source import find_source


@pytest.fixture
def opened(llama: Path, tmp_path: Path) -> tuple[Any, Any, Path]:
    """A model, its tokenizer, and a folder that both were written to."""
    (llama / "vocab.txt").write_text("the source's\n")
    loaded = load_with_tokenizer(llama)
    (target := tmp_path / "target").mkdir()
    loaded.model.save_pretrained(target)
    assert loaded.tokenizer is not None
    return loaded.model, loaded.tokenizer, target


def test_the_same_tokenizer_keeps_its_files(opened: Any, llama: Path) -> None:
    model, tokenizer, target = opened
    (llama / "modeling_multihead.py").write_text("# of the heads before")
    tokenizer("the head", truncation=True, max_length=1)  # which changes what it would write
    tokenizer.save_pretrained(target)
    assert copy_companions(model, tokenizer, find_source(model), target) == {}
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "generation_config.json"):
        assert (target / name).read_bytes() == (llama / name).read_bytes(), name
    assert not (target / "modeling_multihead.py").exists()


def test_another_tokenizer_and_another_way_to_generate_stay(opened: Any, llama: Path) -> None:
    model, tokenizer, target = opened
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(target)
    model.generation_config.max_length = 7
    model.generation_config.save_pretrained(target)
    left_out = copy_companions(model, tokenizer, find_source(model), target)
    assert left_out == {"vocab.txt": "the tokenizer is another one"}
    assert "more" in (target / "tokenizer.json").read_text() and not (target / "vocab.txt").exists()
    assert json.loads((target / "generation_config.json").read_text())["max_length"] == 7


def test_a_file_that_cant_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "a.txt").write_text("a")
    (source / "modules.json").write_text("no JSON")
    os.mkfifo(source / "pipe")

    def refuse(file: Path, place: Path) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr("shutil.copyfile", refuse)
    found = copy_other_files(source, target, keep=(), replaced=("modules.json",))
    assert found == {"a.txt": "can't be read", "pipe": "not a regular file"}
    assert not list(target.iterdir())


def test_a_readme_is_added_to_where_there_is_one(tmp_path: Path) -> None:
    add_to_readme(tmp_path, "A line.")
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_bytes(b"\xff")
    add_to_readme(tmp_path, "A line.")
    assert (tmp_path / "README.md").read_bytes() == b"\xff\n\nA line.\n"
