"""Scaling of rotary frequencies for sequences longer than those of training, as in a config.json.

Entries are checked here. The formulas are those of transformers (`ROPE_INIT_FUNCTIONS`), except
"dynamic": transformers' depends on the length of a call as a number, which a compiled graph must
not look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import MultiheadError, did_you_mean
from .require import require_number, require_positive_int

# For each type the keys of a config.json that it needs, and those that it may have.
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def scaled_frequencies(
    rotary_dim: int, theta: float, rope_type: str, scaling: Mapping[str, Any]
) -> tuple[tuple[float, ...], float]:
    """Radians per position of each pair, `rotary_dim / 2` numbers exact in float32, and the factor
    of cosines and sines; for "linear", "yarn" and "llama3".

    >>> scaled_frequencies(4, 100.0, "linear", {"factor": 2.0})[1]
    1.0
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        head_dim=rotary_dim,
        hidden_size=rotary_dim,
        num_attention_heads=1,
        max_position_embeddings=scaling.get("original_max_position_embeddings"),
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **scaling},
        standardize_rope_params=lambda: None,
    )
    with torch.device("cpu"):  # also inside torch.device("meta")
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
    return tuple(frequencies.tolist()), float(attention_factor)


def parse_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The checked entries of `scaling` that aren't None, with the type as `rope_type`.

    Raises:
        MultiheadError: an unknown type, missing or unknown keys, values out of range.
        TypeError: not a mapping; values of another type.
    """
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling={scaling!r}: expected a mapping such as {{'rope_type': 'linear', 'factor':"
            " 2.0}"
        )
    entries = {key: value for key, value in scaling.items() if value is not None}
    older = entries.pop("type", None)  # the name before rope_type; some files have both
    rope_type = entries.setdefault("rope_type", older)
    if older not in (None, rope_type):
        raise MultiheadError(
            f"scaling has rope_type={rope_type!r} and type={older!r}; give only one of them"
        )
    if rope_type not in KEYS:
        actual = "has no 'rope_type'" if rope_type is None else f"has rope_type={rope_type!r}"
        hint = did_you_mean(str(rope_type).lower(), KEYS)
        raise MultiheadError(f"scaling {actual}: {hint}expected one of {', '.join(KEYS)}")
    _check_keys(rope_type, entries)
    for key, value in entries.items():
        _check_value(key, value)
    _check_order(entries)
    return entries


def _check_keys(rope_type: str, entries: Mapping[str, Any]) -> None:
    needed, optional = KEYS[rope_type]
    known = (*needed, *optional, *COMMON_KEYS)
    for key, value in entries.items():
        if key not in known:
            raise MultiheadError(
                f"scaling has {key!r}={value!r}, which rope_type={rope_type!r} doesn't use:"
                f" {did_you_mean(key.lower(), known)}It uses {', '.join(known)}; correct the name"
                " or remove it"
            )
    for key in needed:
        if key in entries:
            continue
        hint = ""
        if key == "original_max_position_embeddings":
            hint = ". If config.json has none there, give its max_position_embeddings"
        raise MultiheadError(
            f"scaling lacks {key!r}, which rope_type={rope_type!r} needs; it has"
            f" {', '.join(entries)}{hint}"
        )


def _check_value(key: str, value: Any) -> None:
    name = f"scaling[{key!r}]"
    if key == "original_max_position_embeddings":
        require_positive_int(name, value)
    elif key == "truncate":
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")
    elif key == "factor":
        require_number(name, value, "be at least 1: four times longer is 4.0, not 0.25", least=1.0)
    elif key in ("mscale", "mscale_all_dim"):
        require_number(name, value, "be 0 (as if absent) or above", least=0.0)
    elif key == "partial_rotary_factor":
        must = "be above 0 and at most 1, the share of a head that is rotated"
        require_number(name, value, must, above=0.0)
        if value > 1.0:
            raise MultiheadError(f"{name}={value}: must {must}")
    elif key != "rope_type":
        require_number(name, value, "be positive", above=0.0)


def _check_order(entries: Mapping[str, Any]) -> None:
    rope_type = entries["rope_type"]
    if rope_type == "llama3" and entries["low_freq_factor"] >= entries["high_freq_factor"]:
        raise MultiheadError(
            f"scaling['low_freq_factor']={entries['low_freq_factor']}: must be below"
            f" scaling['high_freq_factor']={entries['high_freq_factor']}; Llama 3.1 has 1.0 and 4.0"
        )
    slow, fast = entries.get("beta_slow", 1.0), entries.get("beta_fast", 32.0)
    if rope_type == "yarn" and slow > fast:
        raise MultiheadError(
            f"scaling['beta_slow']={slow}: must be at most scaling['beta_fast']={fast}; they are 1"
            " and 32 unless given"
        )
