"""Where a model came from: its folder or GGUF file, and in which types and files its weights lie
there. A smaller copy of the model is stored the same way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from .checkpoint_files import list_weight_files, read_json
from .gguf_header import read_gguf_header

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "find_source", "list_types", "to_stored_layout"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    Attributes:
        path: its folder, or a GGUF file.
        size: bytes of its weight files.
        types: the names of the types that its weights are stored in.
        dtypes: of its floating-point tensors, by name; of a GGUF file none.
        places: the file that each tensor is in, relative to the folder.
        metadata: of each of these files.
        config: the content of its config.json.
    """

    path: Path
    size: int
    types: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return not self.places

    def twin(self, name: str) -> str | None:
        """The name of the stored tensor that a tensor of the smaller model takes the type and the
        file of: itself, itself in a model around or inside, or the weight that a new bias belongs
        to.
        """
        for wanted in (name, f"{name.removesuffix('bias')}weight" if name.endswith("bias") else ""):
            if wanted in self.places:
                return wanted
            near = [
                stored
                for stored in self.places
                if wanted and (stored.endswith(f".{wanted}") or wanted.endswith(f".{stored}"))
            ]
            if len(near) == 1:
                return near[0]
        return None

    def dtype(self, name: str) -> torch.dtype | None:
        """The type to store a floating-point tensor in; None for as it is in memory."""
        if not self.dtypes:
            return None
        return self.dtypes.get(self.twin(name) or "", self.common_dtype)

    @cached_property
    def common_dtype(self) -> torch.dtype:
        """The type of most floating-point tensors."""
        return Counter(self.dtypes.values()).most_common(1)[0][0]

    def store(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in the types that they are stored in; tied ones stay one tensor."""
        stored: dict[str, torch.Tensor] = {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, x in tensors.items():
            dtype = self.dtype(name) if x.is_floating_point() else None
            place = (x.device, x.data_ptr(), x.shape, x.stride())
            if dtype is None or x.dtype == dtype:
                stored[name] = x
            elif x.numel():
                stored[name] = seen.setdefault(place, x.to(dtype))
            else:
                stored[name] = x.to(dtype)
        return stored


def find_source(model: Any) -> Source | None:
    """The checkpoint that a model of transformers was loaded from: a folder, a GGUF file, or a name
    in the hub's local cache. None for a model without one, or whose checkpoint is gone or is
    another model's by now.
    """
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(model, "name_or_path", None)
    if not name:
        return None
    path = Path(str(name))
    if path.is_file():
        return _gguf_source(path)
    if not path.is_dir():
        cached = _in_cache(str(name), getattr(config, "_commit_hash", None))
        if cached is None:
            return None
        path = cached
    try:
        raw = read_json(path.name, path / "config.json")
        if raw.get("model_type") != getattr(config, "model_type", None):
            return None
        return _folder_source(path, raw)
    except (OSError, MultiheadError):
        return None


def _in_cache(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (errors.HFValidationError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _folder_source(folder: Path, raw: Mapping[str, Any]) -> Source:
    import torch
    from safetensors import safe_open

    dtypes, places, metadata = {}, {}, {}
    files = list_weight_files(folder.name, folder, raw)
    for file in files:
        with safe_open(folder / file, framework="pt") as weights:
            metadata[file] = dict(weights.metadata() or {})
            for name in weights.keys():  # noqa: SIM118  (it is no mapping)
                kind = weights.get_slice(name).get_dtype()
                places[name] = file
                if kind in TYPES:
                    dtypes[name] = getattr(torch, TYPES[kind])
    size = sum((folder / file).stat().st_size for file in files)
    named = list_types(folder / file for file in files)
    return Source(folder, size, named, dtypes, places, metadata, raw)


def list_types(files: Iterable[Path]) -> tuple[str, ...]:
    """The names of the types of weights in safetensors files, that of the most tensors first."""
    from safetensors import safe_open

    types: Counter[str] = Counter()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (it is no mapping)
                kind = weights.get_slice(name).get_dtype()
                if kind not in ("I64", "I32", "BOOL"):  # positions and masks
                    types[TYPES.get(kind, kind)] += 1
    return tuple(kind for kind, _ in types.most_common())


def _gguf_source(file: Path) -> Source | None:
    if file.suffix != ".gguf":
        return None
    return Source(file, file.stat().st_size, read_gguf_header(file).types)


def to_stored_layout(folder: Path, source: Source) -> None:
    """Distribute the weights that transformers wrote to `folder`, in one file, over the files that
    those of `source` are in, with their metadata.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    whole = folder / SINGLE
    with safe_open(whole, framework="pt") as weights:
        names = list(weights.keys())
        written = dict(weights.metadata() or {})
        fallback = Counter(source.places.values()).most_common(1)[0][0]
        files: dict[str, list[str]] = {}
        for name in names:
            twin = source.twin(name)
            files.setdefault(fallback if twin is None else source.places[twin], []).append(name)
        kept = {file: {**source.metadata[file], **written} for file in files}
        if list(files) == [SINGLE] and kept[SINGLE] == written:
            return
        total = 0
        for file, inside in files.items():
            tensors = {name: weights.get_tensor(name) for name in inside}
            total += sum(x.numel() * x.element_size() for x in tensors.values())
            part = folder / f"{file}.part"
            part.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata=kept[file])
    whole.unlink()
    for file in files:
        (folder / f"{file}.part").rename(folder / file)
    index = source.config.get("transformers_weights") or (INDEX if _is_sharded(source) else "")
    if str(index).endswith(".json"):
        _write_index(folder, str(index), source.path, total, files)


def _is_sharded(source: Source) -> bool:
    return not (source.path / SINGLE).exists() and len(source.metadata) > 0


def _write_index(
    folder: Path, name: str, source: Path, total: int, files: Mapping[str, Iterable[str]]
) -> None:
    before = read_json(source.name, source / name).get("metadata")
    metadata = (
        {**before, "total_size": total} if isinstance(before, dict) else {"total_size": total}
    )
    metadata.pop("total_parameters", None)
    places = {tensor: file for file, tensors in files.items() for tensor in tensors}
    content = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
