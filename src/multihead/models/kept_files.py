"""Copy what lies in a checkpoint's folder next to its config and weights: the tokenizer, modules of
sentence-transformers, processors, code, the README.

Weights in other formats are those of the model before, so they are left out; so is what isn't
inside the folder, since a checkpoint is made to be given away.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from ..errors import MultiheadError
from ..io import parse_json, read_regular_file
from .checkpoint_files import PICKLES
from .pruned import MODULE
from .quiet import quiet
from .source import Source

__all__ = ["CODE", "add_to_readme", "copy_companions", "copy_other_files"]

CODE = "transformers_modules."  # the package of code that lies in checkpoints

# endings of files with weights, in any format
WEIGHTS = (
    *(*PICKLES, ".safetensors", ".index.json", ".gguf", ".ggml", ".h5", ".msgpack", ".npz"),
    *(".onnx", ".onnx_data", ".tflite", ".mlmodel", ".ot", ".pb", ".engine", ".llamafile"),
)
TOKENIZER = ("tokenizer", "vocab.", "merges.", "special_tokens_map.", "added_tokens.", "spiece.")
SKIPPED = (".git", ".cache", "__pycache__")  # folders of tools


def copy_companions(model: Any, tokenizer: Any, source: Source, partial: Path) -> dict[str, str]:
    """Copy the source's other files. Where the tokenizer or the generation config in memory is
    another one, it stays; else the source's files do, as they are.

    Returns:
        What was left out, with the reason.
    """
    if source.is_gguf:
        return {}
    written = {file.name for file in partial.iterdir()}
    keep = set()
    if "generation_config.json" in written and not _same_generation(model, source.path):
        keep.add("generation_config.json")
    of_tokenizer = {name for name in written if _is_tokenizer_file(name)}
    is_same = tokenizer is None or _same_tokenizer(tokenizer, source.path, partial)
    if not is_same:
        keep |= {file.name for file in source.path.iterdir() if _is_tokenizer_file(file.name)}
    replaced = {"config.json", "model.safetensors.index.json", f"{MODULE}.py", *source.metadata}
    left_out = copy_other_files(source.path, partial, keep=keep, replaced=replaced)
    if is_same and not any(map(_is_tokenizer_file, left_out)):
        for name in of_tokenizer:  # the same in other files
            if not (source.path / name).exists():
                (partial / name).unlink()
    return left_out | dict.fromkeys(keep - written, "the tokenizer is another one")


def _same_generation(model: Any, folder: Path) -> bool:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return False
    kept = GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
    return bool(kept == model.generation_config.to_dict())


def _same_tokenizer(tokenizer: Any, folder: Path, partial: Path) -> bool:
    """Whether a tokenizer is the one in a folder: that one, written again, gives the same files."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as again, quiet():
        try:
            is_trusted = type(tokenizer).__module__.startswith(CODE)
            AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=is_trusted
            ).save_pretrained(again)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        names = [file.name for file in Path(again).iterdir()]
        return all((partial / name).is_file() for name in names) and all(
            _content(Path(again) / name) == _content(partial / name) for name in names
        )


def _content(file: Path) -> Any:
    if file.suffix != ".json":
        return file.read_bytes()
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("truncation", "padding"):  # which each call of a tokenizer sets
        content.pop(name, None) if isinstance(content, dict) else None
    return content


def _is_tokenizer_file(name: str) -> bool:
    """Whether a file of a checkpoint belongs to its tokenizer."""
    return name.startswith(TOKENIZER) or name.endswith(".model") or name == "chat_template.jinja"


def copy_other_files(
    source: Path, target: Path, *, keep: Container[str], replaced: Container[str]
) -> dict[str, str]:
    """Copy all files of a checkpoint's folder but its config and weights to `target`.

    Args:
        keep: names of files that stay as they are in `target`.
        replaced: names of the config and weight files, of which `target` has the new ones.

    Returns:
        What was left out, with the reason.
    """
    left_out: dict[str, str] = {}
    modules = _module_folders(source)
    for file, why in _files_of(source, target, modules):
        name = file.relative_to(source).as_posix()
        if name in replaced or name in keep:
            continue
        if why:
            is_folder = file.is_dir() and not file.is_symlink()
            left_out[f"{name}/" if is_folder else name] = why
            continue
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.unlink(missing_ok=True)
            shutil.copyfile(file, place)
        except PermissionError:
            left_out[name] = "can't be read"
    return left_out


def add_to_readme(folder: Path, line: str) -> None:
    """Append a paragraph to the README.md of a folder that has one."""
    readme = folder / "README.md"
    if readme.is_file():
        with readme.open("ab") as file:
            file.write(f"\n\n{line}\n".encode())


def _module_folders(source: Path) -> set[str]:
    """The folders that sentence-transformers' modules.json names: their weights stay valid."""
    file = source / "modules.json"
    if not file.is_file():
        return set()
    try:
        modules = parse_json(read_regular_file(file, str(file)), str(file))
        return {str(entry["path"]).split("/")[0] for entry in modules if entry.get("path")}
    except (MultiheadError, OSError, KeyError, TypeError, AttributeError):
        return set()


def _files_of(source: Path, target: Path, modules: set[str]) -> Iterator[tuple[Path, str]]:
    """The files of a folder and why each is left out ("" if it is kept); a folder that is left out
    counts as one.
    """
    for entry in sorted(source.iterdir()):
        if not entry.is_dir() or entry.is_symlink():
            yield entry, _why_left_out(entry, source)
        elif entry.name in SKIPPED or entry.resolve() == target.resolve():
            continue
        else:
            inside = sorted(_walk(entry))
            is_module = entry.name in modules
            if not is_module and any(map(_is_weights, inside)):
                yield entry, "it holds weights of the model before"
                continue
            for file in inside:
                if target.resolve() not in file.resolve().parents:
                    yield file, _why_left_out(file, source, may_be_weights=is_module)


def _walk(folder: Path) -> Iterator[Path]:
    """All files in a folder, and its links to folders, which are not followed."""
    for at, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(at) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(at) / name for name in (*names, *links))


def _is_weights(file: Path) -> bool:
    return file.name.lower().endswith(WEIGHTS)


def _why_left_out(file: Path, source: Path, *, may_be_weights: bool = False) -> str:
    if file.is_symlink() and not _stays_inside(file, source):
        return "a link to a place outside of the folder"
    try:
        kind = file.stat().st_mode
    except OSError:
        return "a link to nothing"
    if not stat.S_ISREG(kind):
        return "a link to a folder" if stat.S_ISDIR(kind) else "not a regular file"
    return "weights of the model before" if _is_weights(file) and not may_be_weights else ""


def _stays_inside(link: Path, source: Path) -> bool:
    """Whether a link leads to a place in the folder, or in the hub's cache to the content that the
    cache keeps for the file.
    """
    root, end = source.resolve(), link.resolve()
    if root in (end, *end.parents):
        return True
    return root.parent.name == "snapshots" and root.parents[1] / "blobs" in end.parents
