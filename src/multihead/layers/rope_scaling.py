"""Scaling of rotary frequencies for sequences longer than those of training, as in a config.json.

Entries are checked here. The formulas are those of transformers (`ROPE_INIT_FUNCTIONS`), except
"dynamic": transformers' depends on the length of a call as a number, which a compiled graph must
not look at. Of "longrope" both sets are computed, between which a call chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "proportional": ((), ("factor",)),
}
COMMON_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
)
# Names in older files: Phi-3's of LongRoPE, and Qwen2-VL's of sections, which any type may have.
OLD_NAMES = {"su": "longrope", "mrope": "default"}
AXES = 3  # of the positions of a `mrope_section`: time, height, width


def scaled_frequencies(
    rotary_dim: int, theta: float, rope_type: str, scaling: Mapping[str, Any], *, long: bool = False
) -> tuple[tuple[float, ...], float]:
    """Radians per position of each pair, `rotary_dim / 2` numbers exact in float32, and the factor
    of cosines and sines; for all types but "default" and "dynamic".

    `long` asks for those of "longrope" beyond the length of training.

    >>> scaled_frequencies(4, 100.0, "linear", {"factor": 2.0})[1]
    1.0
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    trained = scaling.get("original_max_position_embeddings")
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(scaling[key]) != rotary_dim // 2:
                raise MultiheadError(
                    f"scaling[{key!r}] has {len(scaling[key])} numbers: expected one for each pair,"
                    f" rotary_dim/2={rotary_dim // 2}"
                )
    config = SimpleNamespace(
        head_dim=rotary_dim,
        hidden_size=rotary_dim,
        num_attention_heads=1,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **scaling},
        standardize_rope_params=lambda: None,
    )
    with torch.device("cpu"):  # also inside torch.device("meta")
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](
            config, "cpu", seq_len=trained + 1 if long and trained else None
        )
    return tuple(frequencies.tolist()), float(attention_factor)


def axis_of_pairs(rotary_dim: int, scaling: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The axis of positions (0 time, 1 height, 2 width) that rotates each of the `rotary_dim / 2`
    pairs; None without `mrope_section`.

    Raises:
        MultiheadError: sections that don't sum to `rotary_dim / 2`.

    >>> axis_of_pairs(12, {"mrope_section": [2, 2, 2]})
    (0, 0, 1, 1, 2, 2)
    >>> axis_of_pairs(12, {"mrope_section": [2, 2, 2], "mrope_interleaved": True})
    (0, 1, 2, 0, 1, 2)
    """
    sections = scaling.get("mrope_section")
    if sections is None:
        return None
    half = rotary_dim // 2
    if sum(sections) != half:
        raise MultiheadError(
            f"scaling['mrope_section']={sections} sums to {sum(sections)}: expected sections of all"
            f" pairs, rotary_dim/2={half}"
        )
    if not scaling.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    # Height has the pairs 1, 4, 7, ..., width 2, 5, 8, ..., and time all others.
    for axis in range(1, AXES):
        if sections[axis] and axis + AXES * (sections[axis] - 1) >= half:
            raise MultiheadError(
                f"scaling['mrope_section']={sections} with mrope_interleaved=True: every third of"
                f" {half} pairs are fewer than {sections[axis]}; give sections whose last two are"
                " at most a third, or mrope_interleaved=False"
            )
    return tuple(p % AXES if p % AXES and p < AXES * sections[p % AXES] else 0 for p in range(half))


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
    _refuse_mappings(entries)
    older = entries.pop("type", None)  # the name before rope_type; some files have both
    rope_type = entries.setdefault("rope_type", older)
    if "mrope" in (older, rope_type) and "mrope_section" not in entries:
        raise MultiheadError(
            "scaling lacks 'mrope_section', the number of pairs of each axis (time, height, width);"
            " Qwen2-VL has [16, 24, 24]"
        )
    if rope_type is None and "mrope_section" in entries:
        rope_type = "default"
    rope_type, older = (OLD_NAMES.get(str(name), name) for name in (rope_type, older))
    entries["rope_type"] = rope_type
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


def _refuse_mappings(entries: Mapping[str, Any]) -> None:
    """Raise for the parameters of several types of layers (Gemma 3, ModernBERT)."""
    kinds = [key for key, value in entries.items() if isinstance(value, Mapping)]
    if kinds:
        raise MultiheadError(
            f"scaling has a mapping for each type of layer, {', '.join(map(repr, kinds))}: pass the"
            f" one of this layer, such as scaling[{kinds[0]!r}]; config.json has the type of each"
            " layer in layer_types"
        )


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
    if rope_type == "longrope" and not {"factor", "attention_factor"} & set(entries):
        raise MultiheadError(
            "scaling lacks 'factor', from which rope_type='longrope' computes its attention_factor:"
            " give config.json's max_position_embeddings divided by its"
            " original_max_position_embeddings (or attention_factor itself)"
        )
    if entries.get("mrope_interleaved") and "mrope_section" not in entries:
        raise MultiheadError(
            "scaling has mrope_interleaved=True without 'mrope_section', the number of pairs of"
            " each axis; Qwen3-VL has [24, 20, 20]"
        )


def _check_value(key: str, value: Any) -> None:
    name = f"scaling[{key!r}]"
    if key == "original_max_position_embeddings":
        require_positive_int(name, value)
    elif key in ("short_factor", "long_factor"):
        for index, number in enumerate(_require_list(name, value, "numbers, one for each pair")):
            require_number(f"{name}[{index}]", number, "be positive", above=0.0)
    elif key == "mrope_section":
        expected = "three integers, the number of pairs of time, height and width"
        sections = _require_list(name, value, expected)
        if len(sections) != AXES:
            raise MultiheadError(f"{name}={value!r}: expected {expected}")
        for index, count in enumerate(sections):
            if count != 0 or isinstance(count, bool):
                require_positive_int(f"{name}[{index}]", count)
    elif key in ("truncate", "mrope_interleaved"):
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


def _require_list(name: str, value: Any, expected: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{name}={value!r}: expected a list, {expected}")
    return value


def _check_order(entries: Mapping[str, Any]) -> None:
    rope_type = entries["rope_type"]
    if rope_type == "llama3" and entries["low_freq_factor"] >= entries["high_freq_factor"]:
        raise MultiheadError(
            f"scaling['low_freq_factor']={entries['low_freq_factor']}: must be below"
            f" scaling['high_freq_factor']={entries['high_freq_factor']}; Llama 3.1 has 1.0 and 4.0"
        )
    trained = entries.get("original_max_position_embeddings")
    if rope_type == "longrope" and trained == 1 and "attention_factor" not in entries:
        raise MultiheadError(
            f"scaling['original_max_position_embeddings']={trained}: must be at least 2, since"
            " rope_type='longrope' divides by its logarithm"
        )
    slow, fast = entries.get("beta_slow", 1.0), entries.get("beta_fast", 32.0)
    if rope_type == "yarn" and slow > fast:
        raise MultiheadError(
            f"scaling['beta_slow']={slow}: must be at most scaling['beta_fast']={fast}; they are 1"
            " and 32 unless given"
        )
