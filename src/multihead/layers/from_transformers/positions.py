"""Position encodings of an attention module: those that it may have, to be tried in turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MultiheadError
from ..position_bias import ALiBi, T5Bias
from ..rotary import Rotary
from .twin import definition_of, refuse, signature_of

IDS = (0, 1, 2, 5, 17, 63, 300)  # positions at which cosines and sines are compared
ROTARY = ("RotaryEmbedding", "RopeEmbedding", "RotaryPositionEmbedding")
ROTARY_ARGUMENTS = ("position_embeddings", "rotary_pos_emb", "freqs_cis", "sinusoidal_pos")


def setting(module: nn.Module, name: str) -> Any:
    """An entry of the module's config, that of its layer where layers differ; None without one."""
    config = getattr(module, "config", None)
    layers, index = getattr(config, "per_layer_config", None), getattr(module, "layer_idx", None)
    if isinstance(layers, list | tuple) and isinstance(index, int) and index < len(layers):
        config = layers[index]
    try:
        return getattr(config, name, None)
    except Exception:  # one of a config that refuses
        return None


def layer_type(module: nn.Module) -> str | None:
    """The kind of attention of the module's layer, for models whose layers differ."""
    found = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    if isinstance(found, str):
        return found
    types = setting(module, "layer_types")
    index = getattr(module, "layer_idx", None)
    if types is None or not isinstance(index, int) or index >= len(types):
        return None
    return str(types[index])


# ---- Rotary


def rotary_tables(module: nn.Module, ids: Tensor, dtype: torch.dtype) -> Any:
    """The rotation that the model's rotary module makes of positions `[B, L]`: cosines and sines,
    as its layers pass them to attention; None without such a module.
    """
    rotary = _rotary_module(module)
    if rotary is None:
        return None
    tables = _call_rotary(rotary, module, ids, dtype)
    if tables is None:  # three positions a token
        tables = _call_rotary(rotary, module, ids.expand(3, *ids.shape), dtype)
    return tables


def _call_rotary(rotary: nn.Module, module: nn.Module, ids: Tensor, dtype: torch.dtype) -> Any:
    kind = layer_type(module)
    more: dict[str, Any] = {"layer_type": kind} if "layer_type" in signature_of(rotary) else {}
    with torch.no_grad():
        try:
            return rotary(torch.zeros(*ids.shape[-2:], 1, dtype=dtype), ids, **more)
        except Exception:  # of other arguments, or of layers without it
            return None


def _tables_of_axes(module: nn.Module) -> tuple[Tensor, list[Tensor], list[int] | None] | None:
    """Three different positions a token, `[3, L]`, cosines and sines that the model's rotary module
    computes from them, and its sections; None for a module of one position a token.
    """
    rotary = _rotary_module(module)
    if rotary is None:
        return None
    ids = torch.tensor([IDS, IDS[::-1], (7, *IDS[:-1])])
    tables = _call_rotary(rotary, module, ids[:, None], torch.float32)
    if not (isinstance(tables, tuple) and len(tables) == 2):
        return None
    if not all(x.ndim == 3 and x.shape[:2] == (1, len(IDS)) for x in tables):
        return None
    return ids, [_once(x[0]) for x in tables], getattr(rotary, "mrope_section", None)


def _rotary_module(module: nn.Module) -> nn.Module | None:
    """A new instance of the rotary class in the file of the module's class; if there are several,
    that whose name begins as the module's.
    """
    name, config = type(module).__name__, getattr(module, "config", None)
    for base in type(module).__mro__:
        file = sys.modules.get(base.__module__)
        found = {} if file is None else vars(file)
        classes = [
            x
            for key, x in found.items()
            if key.endswith(ROTARY) and isinstance(x, type) and issubclass(x, nn.Module)
        ]
        classes.sort(key=lambda x: -_shared(x.__name__, name))
        for cls in classes:
            for arguments in ((config,), (config, "cpu")):
                try:
                    return cls(*arguments).eval()
                except Exception:  # of another file's config, or with other arguments
                    continue
        if classes:
            return None
    return None


def _shared(a: str, b: str) -> int:
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def rotaries(module: nn.Module, head_dim: int, tables: Any) -> list[Rotary]:
    """The rotary encodings that the module may have, for heads (or parts of heads) of this width.

    Raises:
        MultiheadError: scaling that `Rotary` doesn't know.
    """
    made = []
    for interleaved in (False, True):
        if tables is not None:
            made.append(_of_tables(module, head_dim, interleaved))
        else:
            made += _of_attributes(module, head_dim, interleaved)
    return made


def _of_tables(module: nn.Module, head_dim: int, interleaved: bool) -> Rotary:
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    ids = torch.tensor([[x for x in IDS if not isinstance(longest, int) or x < longest]])
    tables = rotary_tables(module, ids, torch.float32)
    if isinstance(tables, Tensor) and tables.is_complex():
        tables = tables.real, tables.imag
    if not (isinstance(tables, tuple) and len(tables) == 2 and tables[0].ndim in (3, 4)):
        raise refuse(module, f"its rotary module gives a {type(tables).__name__} of another form")
    want = [_once(x[0] if x.ndim == 3 else x[0, 0]) for x in tables]
    if not want[0][0].any():  # sines first, as GPT-J has them: that of position 0 is 0
        want.reverse()
    parameters = _parameters(module) or _of_frequencies(_rotary_module(module))
    rotary_dim = 2 * want[0].shape[-1]
    if parameters.get("rope_type") == "proportional":
        rotary_dim = head_dim
    else:
        parameters.pop("partial_rotary_factor", None)
    of_axes = _tables_of_axes(module)
    kinds = [parameters]
    if of_axes is None:
        ids = ids[0]
    else:  # the order of the axes is in the module's code, not in its config
        ids, want, sections = of_axes
        parameters["mrope_section"] = parameters.get("mrope_section") or sections
        kinds = [parameters | {"mrope_interleaved": x} for x in (None, True)]
    given = {key: x for key, x in parameters.items() if x is not None}
    why = ""
    for scaling in kinds:
        try:
            rotary = Rotary(
                head_dim, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling
            )
        except (MultiheadError, TypeError) as error:
            why = why or f" ({error})"
            continue
        got = rotary.cos_sin(ids)
        if all(
            ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=2e-4)
            for ours, theirs in zip(got, want)
        ):
            return rotary
        why = why or f", whose cosines and sines aren't those of {rotary}"
    raise refuse(module, f"rope_parameters={given}{why}")


def _once(x: Tensor) -> Tensor:
    """`[L, R]` cosines in which each pair appears twice -> `[L, R/2]`."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        return x
    if torch.equal(x[:, :half], x[:, half:]):
        return x[:, :half]
    return x[:, 0::2] if torch.equal(x[:, 0::2], x[:, 1::2]) else x


def _parameters(module: nn.Module) -> dict[str, Any]:
    """The mapping of `Rotary(scaling=)` in the module's config."""
    config: Any = getattr(module, "config", None)
    found = getattr(config, "rope_parameters", None)
    kind = layer_type(module)
    if isinstance(found, Mapping) and isinstance(found.get(kind), Mapping):
        found = found[kind]
    parameters = dict(found) if isinstance(found, Mapping) else {}
    length = getattr(config, "max_position_embeddings", None)
    if parameters.get("rope_type") == "dynamic":
        parameters.setdefault("original_max_position_embeddings", length)
        parameters = {k: x for k, x in parameters.items() if k not in ("beta_fast", "beta_slow")}
    if parameters.get("rope_type") == "longrope":
        trained = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        parameters["original_max_position_embeddings"] = trained
        if length and trained and parameters.get("factor") is None:
            parameters["factor"] = length / trained
    return parameters


def _of_frequencies(rotary: nn.Module | None) -> dict[str, Any]:
    """Parameters of a rotary module without a config for it: its base."""
    frequencies = getattr(rotary, "inv_freq", None)
    base = _base(frequencies) if isinstance(frequencies, Tensor) else 10000.0
    return {"rope_type": "default", "rope_theta": base}


def _base(frequencies: Tensor) -> float:
    """The base of frequencies, without their rounding."""
    width, last = 2 * len(frequencies), float(frequencies[-1])
    theta = last ** (-width / (width - 2)) if width > 2 and last > 0 else 10000.0
    return float(round(theta, 4 - math.floor(math.log10(max(theta, 1.0)))))


def _of_attributes(module: nn.Module, head_dim: int, interleaved: bool) -> Iterator[Rotary]:
    """Of a module that computes its angles itself: from frequencies in a buffer, or GPT-J's way."""
    for part in module.modules():
        frequencies = getattr(part, "inv_freq", None)
        if isinstance(frequencies, Tensor) and 2 * len(frequencies) <= head_dim:
            theta, width = _base(frequencies), 2 * len(frequencies)
            yield Rotary(head_dim, theta=theta, rotary_dim=width, interleaved=interleaved)
            return
    if isinstance(getattr(module, "embed_positions", None), Tensor):  # sines, then cosines
        width = getattr(module, "rotary_dim", None) or head_dim
        if isinstance(width, int) and width <= head_dim:
            yield Rotary(head_dim, rotary_dim=width, interleaved=interleaved)


# ---- Biases


def t5_bias(module: nn.Module, num_heads: int) -> T5Bias | None:
    """The position bias of T5 and its relatives, with a copy of the module's table.

    Raises:
        MultiheadError: a table of another form, or one whose buckets differ.
    """
    table = getattr(module, "relative_attention_bias", None)
    if table is None:
        return None
    buckets = getattr(module, "relative_attention_num_buckets", None)
    longest = getattr(module, "relative_attention_max_distance", None)
    if (
        not isinstance(table, nn.Embedding)
        or not isinstance(buckets, int)
        or not isinstance(longest, int)
        or tuple(table.weight.shape) != (buckets, num_heads)
    ):
        raise refuse(module, f"relative_attention_bias={table}, which isn't T5's")
    is_decoder = bool(getattr(module, "is_decoder", False))
    with torch.device("meta"):
        bias = T5Bias(
            num_heads, num_buckets=buckets, max_distance=longest, bidirectional=not is_decoder
        )
    bias.weight = nn.Parameter(table.weight.detach().clone(), table.weight.requires_grad)
    compute: Any = getattr(module, "compute_bias", None)
    if callable(compute) and bias.weight.device.type == "cpu":
        length = longest + 30
        ids = torch.arange(length)
        with torch.no_grad():
            if not torch.allclose(compute(length, length).float(), bias(ids, ids).float()):
                raise refuse(module, f"its buckets of distances aren't those of {bias}")
    return bias


def alibi(module: nn.Module, num_heads: int) -> ALiBi | None:
    """`ALiBi` for a module that takes slopes times distances."""
    is_mpt = definition_of(module, "build_mpt_alibi_tensor") is not None
    return ALiBi(num_heads) if is_mpt or "alibi" in signature_of(module) else None
