"""Open what a cost is asked of: a model, or a config (in a file, a folder or the hub), from which a
model is built on the meta device. No weights are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import MultiheadError
from ..io import parse_json, read_regular_file, require_regular_file
from ..models.checkpoint_files import locate_model, named_class
from ..models.gguf import check_gguf, read_gguf_once
from ..models.guard import blame_checkpoint
from ..models.introspect import config_of, text_config, unwrap
from ..models.names import find_number
from ..models.pruned import pruned_class
from ..models.quiet import quiet
from ..models.weigh import build_on_meta
from .configs import OpenedConfig, open_config
from .shape import DTYPES, Shape, num_bytes
from .totals import Weights


@dataclass(frozen=True)
class Asked:
    """The source of a cost."""

    name: str
    module: nn.Module
    config: Any  # None for a user-defined module
    twin: nn.Module | None  # the module on the meta device, whose cache can be counted
    opened: OpenedConfig


def open_source(model: Any) -> Asked:
    """Open a model, or build that of a config on the meta device."""
    if isinstance(model, nn.Module):
        model = unwrap(model)
        opened = OpenedConfig(config_of(model))
        return Asked(type(model).__name__, model, opened.config, _build_twin(model), opened)
    if isinstance(model, (str, Path)) or model is None:
        name, opened = _find_config(model)
    elif isinstance(model, Mapping):
        name, opened = str(model.get("model_type", "config")), open_config("the config", model)
    elif hasattr(model, "model_type") and hasattr(model, "to_dict"):
        name, opened = model.model_type, OpenedConfig(model)
    else:
        raise TypeError(
            f"model={type(model).__name__}: expected a folder, a config.json, a GGUF file, a hub"
            " name, a config or a model"
        )
    built = _build(name, opened.config)
    return Asked(name, built, opened.config, built, opened)


def _build_twin(model: nn.Module) -> nn.Module | None:
    """A model of transformers once more, from its config."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        twin = _build(type(model).__name__, model.config, type(model))
    except MultiheadError:  # a class that its config doesn't describe alone
        return None
    names = [name for name, _ in model.named_modules()]
    return twin if names == [name for name, _ in twin.named_modules()] else None


def max_lengths(config: Any) -> tuple[int | None, int | None]:
    """The largest number of tokens that a config allows for a sequence, and for an encoder's
    source.
    """
    names = ("max_position_embeddings", "max_target_positions", "n_positions")
    source = getattr(config, "max_source_positions", None)
    return find_number(text_config(config), names), source if isinstance(source, int) else None


def count_weights(model: Any, source: Asked, shapes: Iterable[Shape], dtype: str | None) -> Weights:
    """Count the parameters of a whole model and their bytes: in `dtype`, or as its files or its
    tensors store them.
    """
    module, config, differs = source.module, source.config, source.opened.differs
    attention = {shape.name for shape in shapes}
    vectors = sum(
        p.numel()
        for name, p in module.named_parameters()
        if p.ndim < 2 and not any(name.startswith(f"{part}.") for part in attention)
    )
    parameters = sum(p.numel() for p in module.parameters())
    quantised = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantised, Mapping):
        quantised = quantised.to_dict()
    size: int | None
    unknown = f"of {differs} the weights outside of attention aren't known" if differs else ""
    if dtype is not None and not differs:
        size = num_bytes(dtype, parameters)
    elif isinstance(model, nn.Module):
        size = sum(p.numel() * p.element_size() for p in module.parameters())
    else:
        if quantised and not unknown:
            method = quantised.get("quant_method", "")
            unknown = f"the config's {parameters:,} weights are quantised ({method})"
        size = _size_of_files(model)
        if size is None and not unknown:
            stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
            size = num_bytes(stored if stored in DTYPES else "bfloat16", parameters)
    return Weights(
        parameters=parameters,
        attention=sum(sum(shape.parameters.values()) for shape in shapes),
        vectors=vectors,
        bytes=size,
        unknown=unknown,
    )


def _size_of_files(model: Any) -> int | None:
    """Bytes of the weight files of a checkpoint, where they are next to its config."""
    if not isinstance(model, (str, Path)) and model is not None:
        return None
    _, path = locate_model(model)
    if path is None:
        return None
    if path.suffix == ".gguf":
        return path.stat().st_size
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        content = parse_json(read_regular_file(index, str(index)), str(index))
        names = {str(name) for name in dict(content).get("weight_map", {}).values()}
    files = [folder / Path(name).name for name in names]
    return sum(file.stat().st_size for file in files) if all(map(Path.is_file, files)) else None


def _find_config(model: str | Path | None) -> tuple[str, OpenedConfig]:
    """The name and config of a file, folder or hub name."""
    from transformers import AutoConfig, PreTrainedConfig

    name, path = locate_model(model)
    if path is None:  # the hub, or its local cache
        with (
            quiet(),
            blame_checkpoint(
                f"model={name!r}: there is no such file or folder here, and its config isn't in the"
                " local cache nor on the hub. Expected a folder with config.json, that file"
                " itself, or a GGUF file"
            ),
        ):
            content, _ = PreTrainedConfig.get_config_dict(name)
        return name, open_config(f"model={name!r}", content)
    if path.suffix == ".gguf":
        require_regular_file(path, f"model={str(path)!r}")
        check_gguf(name, path)
        what = f"model={str(path)!r}: transformers could not read the GGUF file's settings"
        hint = "; it may need: pip install 'multihead[gguf]'"
        with quiet(), read_gguf_once(), blame_checkpoint(what, hint):
            config = AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        return name, OpenedConfig(config)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"model={str(path)!r}: the folder has no config.json; give the folder of a transformers"
            " checkpoint, a config.json, or a GGUF file"
        )
    if file.suffix != ".json":
        raise MultiheadError(
            f"model={str(path)!r}: expected a folder with config.json, that file itself, or a GGUF"
            " file; a cost needs no weights"
        )
    shown = f"model={str(file)!r}:"
    content = parse_json(read_regular_file(file, shown), shown)
    in_folder = path.is_file() and path.name == "config.json"
    return path.resolve().parent.name if in_folder else name, open_config(str(file), content)


def _build(name: str, config: Any, kind: Any = None) -> nn.Module:
    """The model on the meta device, where parameters have shapes and no memory."""
    import torch
    import transformers

    kind = kind or named_class({"architectures": getattr(config, "architectures", None)})
    kind = pruned_class(kind, vars(config)) or kind or transformers.AutoModel
    what = (
        f"model={name!r}: transformers {transformers.__version__} can't build a model from its"
        " config"
    )
    advice = ". Check its sizes: heads must divide the width, key/value heads the heads"
    with quiet():
        # as servers run it; and experts in a form that depends on no values, for it has none
        options = {"dtype": torch.bfloat16, "experts_implementation": "batched_mm"}
        return build_on_meta(kind, copy.deepcopy(config), what, advice, **options).eval()
