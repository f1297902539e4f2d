"""Write a model of Llama's kin as a GGUF file, as llama.cpp's convert_hf_to_gguf.py lays it out.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. For Llama and Mistral
llama.cpp rotates neighbouring dimensions of queries and keys where transformers rotates halves, so
the rows of W_Q and W_K are interleaved within each head.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from .gguf_rope import TABLE, rope_divisors
from .gguf_tokenizer import TEXTS, tokenizer_fields
from .quiet import quiet
from .resize import head_layout
from .site import find_sites
from .source import Source

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["require_gguf_output", "require_gguf_plan", "write_gguf"]

# by class of transformers
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
BY_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F32"}
# types that the gguf package can write; others become Q8_0, the nearest that takes no search
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def require_gguf_output(model: Any, tokenizer: Any, source: Source | None) -> None:
    """Raise where a model can't be written as a GGUF file, as far as its config and tokenizer show.

    Raises:
        MultiheadError: another architecture, rotary positions that the format's loaders don't read,
            a tokenizer that can't be described, or the gguf package is missing.
    """
    kind, config = type(model).__name__, model.config
    if kind not in ARCHITECTURES:
        raise MultiheadError(
            f"{kind} can't be written as a GGUF file; {', '.join(ARCHITECTURES)} can. Give a new"
            " folder instead"
        )
    if missing := [n for n in ("gguf", "accelerate") if importlib.util.find_spec(n) is None]:
        raise MultiheadError(
            f"writing GGUF needs {' and '.join(missing)}; run: pip install 'multihead[gguf]'"
        )
    if getattr(config, "mlp_bias", False) or getattr(config, "hidden_act", "silu") != "silu":
        raise MultiheadError(f"{kind} with mlp_bias or another activation than silu has no GGUF")
    if source is not None and source.is_gguf:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    rotates = rope.get("rope_type", "default")
    if rotates not in (("default", "llama3") if kind == "LlamaForCausalLM" else ("default",)):
        raise MultiheadError(
            f"rope_type={rotates!r}: rotary positions scaled so aren't read from GGUF files; give a"
            " new folder, and convert that by llama.cpp's convert_hf_to_gguf.py"
        )
    if getattr(config, "use_sliding_window", False):
        raise MultiheadError(f"{kind} with use_sliding_window has no GGUF; give a new folder")
    if tokenizer is None:
        raise MultiheadError("a GGUF file holds the tokenizer, and there is none; give tokenizer=")
    tokenizer_fields(tokenizer, config.vocab_size)


def require_gguf_plan(
    model: Any, kind: str, compensate: str | None, share: float | None = None
) -> None:
    """Raise where a file can't hold what a plan of this kind leaves, before any work.

    Args:
        share: of the heads, that stays.

    Raises:
        MultiheadError: layers would have other numbers of heads, or a bias without a place.
    """
    if kind != "uniform":
        raise MultiheadError(
            f"--kind {kind}: a GGUF file of this architecture has one number of heads for all"
            " layers; give --kind uniform, or a new folder for --save"
        )
    is_llama = ARCHITECTURES[type(model).__name__] == "llama"
    if is_llama and share is not None:
        _require_divisor(model, share)
    if compensate != "none" and not is_llama:
        raise MultiheadError(_no_place_for_bias(model))


def _require_divisor(model: Any, share: float) -> None:
    """transformers refuses Llamas whose width is no multiple of their number of heads."""
    site, width = find_sites(model)[0], model.config.hidden_size
    count, groups = site.num_heads, site.slices().num_kv_heads
    left = round(share * count, 6)
    if left == int(left) and width % int(left):
        whole = [n for n in range(count - 1, 0, -1) if not n % groups or not n % (count // groups)]
        fits = ", ".join(f"{1 - n / count:.0%}" for n in whole if width % n == 0)
        raise MultiheadError(
            f"{int(left)} heads would stay in each layer, and transformers opens a GGUF file of a"
            f" Llama only if they divide its width of {width:,}; give --remove {fits}"
        )


def _no_place_for_bias(model: Any) -> str:
    return (
        f"a GGUF file of {type(model).__name__} has no place for the bias that compensates removed"
        " heads; give --compensate none (compensate='none'), or a new folder"
    )


def write_gguf(
    model: Any, tokenizer: Any, source: Source | None, file: Path, texts: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Write a model, all of whose layers have the same numbers of heads, to `file`.

    Fields and tokenizer are those of the GGUF file that the model came from; else they are made
    from its config and tokenizer. Each tensor is of the type that it had there, if the gguf package
    can write it, and Q8_0 if not; of a model from elsewhere, of the type that it was stored in.
    Vectors are float32, as llama.cpp has them.

    Args:
        texts: further fields, by name.

    Returns:
        The parameters of the model as the file holds them, by name.
    """
    import gguf
    import torch

    architecture = ARCHITECTURES[type(model).__name__]
    if architecture != "llama" and any(".o_proj.bias" in n for n, _ in model.named_parameters()):
        raise MultiheadError(_no_place_for_bias(model))
    writer = gguf.GGUFWriter(file, architecture)
    before = None if source is None or not source.is_gguf else gguf.GGUFReader(source.path)
    types: dict[str, str] = {}
    given = _shape_fields(model, architecture)
    if before is not None:
        types = {tensor.name: tensor.tensor_type.name for tensor in before.tensors}
        _copy_fields(before, writer, {*given, *texts})
    else:
        given |= _config_fields(model, architecture)
        writer.add_name(Path(str(model.name_or_path or type(model).__name__)).name)
        given |= tokenizer_fields(tokenizer, model.config.vocab_size)
    for name, value in {**given, **texts}.items():
        _add(writer, name, value)
    held, used = {}, Counter[str]()
    names = gguf.get_tensor_name_map(_arch_number(architecture), len(_layers(model)))
    for name, x in model.named_parameters():  # a tied one once
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise MultiheadError(f"{name} has no place in a GGUF file of {type(model).__name__}")
        values = _permute(x, name, model) if architecture == "llama" else x
        kind = _kind(name, x, types.get(place), source)
        data = values.detach().float().cpu().contiguous().numpy()
        packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(place, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        used[kind] += x.numel()
        held[name] = torch.from_numpy(_unpack(packed, kind)).reshape(x.shape)
        if architecture == "llama":
            held[name] = _permute(held[name], name, model, back=True)
        held[name] = held[name].to(x)
    if architecture == "llama":
        _add_biases(writer, names, held)
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor(TABLE, rope_divisors(rope, find_sites(model)[0].head_dim))
    most = used.most_common(1)[0][0]
    file_type = "ALL_F32" if most == "F32" else f"MOSTLY_{most}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if before is None:
        _compare_tokenizers(tokenizer, file)
    return held


def _layers(model: Any) -> Any:
    return model.model.layers


def _add_biases(writer: Any, names: Any, held: Mapping[str, torch.Tensor]) -> None:
    """Where attention has a bias in W_O alone, add those of zeros in W_Q, W_K and W_V that the
    architecture of transformers has with it.
    """
    import numpy as np

    for name in [name for name in held if name.endswith("o_proj.bias")]:
        for other in ("q", "k", "v"):
            twin = name.replace("o_proj", f"{other}_proj")
            rows = held[twin.replace("bias", "weight")].shape[0]
            if twin not in held:
                place = names.get_name(twin, try_suffixes=(".bias",))
                writer.add_tensor(place, np.zeros(rows, dtype=np.float32))


def _arch_number(architecture: str) -> Any:
    import gguf

    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _kind(name: str, x: torch.Tensor, before: str | None, source: Source | None) -> str:
    """The type to write a tensor in."""
    if x.ndim == 1:
        return "F32"
    if before is None:
        dtype = (None if source is None else source.dtype(name)) or x.dtype
        before = BY_DTYPE[str(dtype).removeprefix("torch.")]
    kind = before if before in WRITTEN else "Q8_0"
    return kind if not kind.startswith("Q") or x.shape[-1] % 32 == 0 else "F16"


def _unpack(packed: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    values: np.ndarray = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    return values.astype("float32")


def _permute(x: torch.Tensor, name: str, model: Any, *, back: bool = False) -> torch.Tensor:
    """Interleave the two halves of the rows of each query or key head, or undo that."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return x
    site = find_sites(model)[0]
    heads = site.num_heads if ".q_proj." in name else site.slices().num_kv_heads
    halves = (-1, 2) if back else (2, -1)
    return x.reshape(heads, *halves, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _shape_fields(model: Any, architecture: str) -> dict[str, Any]:
    """Fields that removing heads changes."""
    sites = find_sites(model)
    counts = {(site.num_heads, site.slices().num_kv_heads, site.head_dim) for site in sites}
    if len(counts) != 1 or not all(head_layout(site).is_even for site in sites):
        raise MultiheadError(
            "a GGUF file of this architecture has one number of heads for all layers; give"
            " kind='uniform' (--kind uniform), or a new folder instead of a file"
        )
    num_heads, num_kv_heads, width = counts.pop()
    fields = {
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
    }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _config_fields(model: Any, architecture: str) -> dict[str, Any]:
    config = model.config
    window = getattr(config, "sliding_window", None)
    length = config.max_position_embeddings
    fields = {
        # llama.cpp computes no windows for these: up to one window there is no difference
        "context_length": min(length, window) if window else length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _copy_fields(before: Any, writer: Any, given: set[str]) -> None:
    """The fields of another file, but those that are given anew."""
    for name, field in before.fields.items():
        if name.startswith("GGUF.") or name in {
            "general.architecture",
            "general.file_type",
            *given,
        }:
            continue
        if name.startswith("multihead."):  # of an earlier removal
            continue
        value = field.contents()
        if isinstance(value, list) and not value:
            continue
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _add(writer: Any, name: str, value: Any) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    by_type = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        inner = {int: kinds.INT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value[0])]
        writer.add_key_value(name, value, kinds.ARRAY, inner)
    else:
        writer.add_key_value(name, value, by_type[type(value)])


def _compare_tokenizers(tokenizer: Any, file: Path) -> None:
    """Raise where the tokenizer that transformers reads in the file splits texts another way."""
    from transformers import AutoTokenizer

    with quiet():
        read = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
    for text in TEXTS:
        expected, found = (t(text)["input_ids"] for t in (tokenizer, read))
        if expected != found:
            raise MultiheadError(
                f"the tokenizer in the GGUF file splits {json.dumps(text)} into {found}, the"
                f" model's into {expected}, so the file wasn't kept; give a new folder"
            )
