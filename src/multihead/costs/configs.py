"""From the JSON of a config to a config of transformers: of its model type, or where that isn't
known to transformers, of a type whose attention has the same sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import MultiheadError
from ..models.checkpoint_files import check_config, code_names, list_some, named_class
from ..models.guard import blame_checkpoint
from ..models.introspect import text_config
from ..models.names import STATES_HEADS, STATES_WIDTH
from ..models.quiet import quiet
from ..models.weigh import weigh_counts
from .shape import Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Entries = dict[str, Any]

# Entries that decide on costs: a note lists those that a config leaves to its type's defaults.
DECISIVE = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "global_head_dim",
    "num_global_key_value_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_d_state",
    "mamba_n_heads",
    "mamba_d_head",
    "ssm_state_size",
    "state_size",
    "mamba_num_heads",
    "mamba_head_dim",
    "d_kv",
    "max_position_embeddings",
)
# Entries from which model types compute layer_types.
SAY_LAYER_TYPES = {
    "attn_layer_indices",
    "attn_layer_period",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "no_rope_layers",
    "sliding_window_pattern",
}
# Parts of a config with another model inside, whose text model is counted.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class OpenedConfig:
    """A config of transformers, notes on how it was found, and what is still to be done with the
    shapes of its model.

    `differs` names the model of which the parameters outside of attention aren't known, for
    messages.
    """

    config: Any
    notes: list[str] = field(default_factory=list)
    revise: Callable[[list[Shape]], list[Shape]] = list
    differs: str = ""


class Known(NamedTuple):
    """Entries under a model type that transformers knows; the rest is as in `OpenedConfig`."""

    entries: Entries
    notes: list[str]
    revise: Callable[[list[Shape]], list[Shape]] = list
    differs: str = ""


def open_config(where: str, content: Any) -> OpenedConfig:
    """transformers' config of a JSON object.

    Args:
        where: the file or its kind, for messages.
        content: what it holds.

    Raises:
        MultiheadError: it has no type or architecture that is known, or lacks a size that matters.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not isinstance(content, Mapping):
        raise MultiheadError(
            f"{where}: holds a {type(content).__name__}, expected named entries {{...}}"
        )
    check_config(where, Path("config.json"), content)
    content, notes, revise, differs = _known(where, dict(content))
    kind = content["model_type"]
    for pattern, what in (
        (STATES_WIDTH, "width (hidden_size, d_model, n_embd, ...)"),
        (STATES_HEADS, "number of heads (num_attention_heads, n_head, ...)"),
    ):
        if not any(pattern.search(str(key)) for key in _keys(content)) and any(
            pattern.search(key) for key in CONFIG_MAPPING[kind]().to_dict()
        ):
            raise MultiheadError(
                f"{where}: has no entry for the model's {what}, and the default of {kind} may not"
                " be meant; add the entry, or give embed_dim, num_heads and so on instead of a"
                " config"
            )
    weigh_counts(where, "config.json", content, None)
    with quiet(), blame_checkpoint(f"{where}: transformers can't build a config from it"):
        config = AutoConfig.for_model(**content)
    missing = _list_defaults(config, content)
    if missing:
        notes.append(f"the config leaves out, so these are {kind}'s defaults: {missing}")
    return OpenedConfig(config, notes, revise, differs)


def _known(where: str, content: Entries) -> Known:
    """The entries under a model type that transformers knows, and notes on how it was chosen."""
    from transformers import CONFIG_MAPPING

    kind, names = content.get("model_type"), content.get("architectures") or []
    if kind is not None and not re.fullmatch(r"[\w.+-]+", str(kind)):
        raise MultiheadError(
            f"{where}: model_type={kind!r}: expected the name of a model type, such as 'llama'"
        )
    called = f"model_type {kind!r}" if kind else "a config without model_type"
    code = " (its own code isn't run)" if code_names(content) else ""
    if kind in CONFIG_MAPPING:
        return Known(content, [f"counted as transformers' {kind}{code}"] if code else [])
    if (same := named_class(content)) is not None:
        known = same.config_class.model_type
        note = f"{called}, unknown to transformers, is counted as {known} by its architecture"
        return Known(content | {"model_type": known}, [f"{note} {same.__name__}{code}"])
    for name in names:
        if name in KIN:
            entries, revise = KIN[name](content)
            known = entries["model_type"]
            note = (
                f"{called}, unknown to transformers: attention is counted as {known}'s, which has"
                f" that of its architecture {name}{code}"
            )
            other = name in OTHER_OUTSIDE or _adds_experts(content, known)
            note += "; parameters outside of it are others" if other else ""
            return Known(entries, [note], revise, name if other else "")
    for part in PARTS:
        if isinstance(inner := content.get(part), Mapping):
            found = _known(f"{where}, {part}", dict(inner))
            only = f"{called}, unknown to transformers: only its {part} is counted{code}"
            return found._replace(notes=[only, *found.notes], differs=str(kind or "this model"))
    shown = f" with architecture {list_some(names)}" if names else ""
    has = f"model_type={kind!r}, unknown to transformers" if kind else "no model_type"
    raise MultiheadError(
        f"{where}: has {has}{shown}, so its attention can't be built; give its sizes instead:"
        " embed_dim, num_heads, num_kv_heads, head_dim, num_layers"
    )


def _adds_experts(content: Entries, known: str) -> bool:
    """Whether a config has experts, and the model type that it is counted as none."""
    from transformers import CONFIG_MAPPING

    def has(entries: Mapping[str, Any]) -> bool:
        counts = [n for key, n in entries.items() if "experts" in key and "num" in key]
        counts.append(entries.get("n_routed_experts"))
        return any(isinstance(n, int) and n > 1 for n in counts)

    return has(content) and not has(CONFIG_MAPPING[known]().to_dict())


def _keys(content: Mapping[Any, Any]) -> list[Any]:
    """All keys with a value, those of nested objects too."""
    keys = []
    for key, value in content.items():
        keys += _keys(value) if isinstance(value, Mapping) else [key] if value is not None else []
    return keys


def _list_defaults(config: PretrainedConfig, content: Mapping[str, Any]) -> str:
    """The decisive entries that the config of the text model takes from its type's defaults, with
    their values.
    """
    text = text_config(config)
    inner = next((k for k, v in vars(config).items() if v is text), None)
    given = content.get(inner) if inner else content
    given = given if isinstance(given, Mapping) else {}
    other_names = {theirs: name for name, theirs in (text.attribute_map or {}).items()}
    latent = bool(vars(text).get("kv_lora_rank"))
    found = []
    for name in DECISIVE:
        own = (text.attribute_map or {}).get(name, name)
        value = vars(text).get(own)
        said = {name, own, other_names.get(own, own)}
        if name == "layer_types":
            said |= SAY_LAYER_TYPES
        if not given.keys().isdisjoint(said) or (latent and name == "head_dim"):
            continue
        if name == "head_dim" and value == _even_width(text):
            continue
        if isinstance(value, int) and value:
            found.append(f"{own}={value}")
        elif isinstance(value, list) and len(kinds := Counter(map(str, value))) > 1:
            found.append(f"{own} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})")
    return ", ".join(found)


def _even_width(config: Any) -> int | None:
    """The width of heads that divide the model's, which follows from entries that are given."""
    width, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


# ---- architectures whose attention has the sizes of another's

Kin = tuple[Entries, Callable[[list[Shape]], list[Shape]]]


def _as_llama(content: Entries, **renamed: str) -> Kin:
    """Llama's entries, some of which have other names there."""
    entries = {name: value for name, value in content.items() if value is not None}
    for name, theirs in renamed.items():
        if theirs in content:
            entries[name] = content[theirs]
    return entries | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, list


def _as_minimax(content: Entries) -> Kin:
    kinds = content.get("attn_type_list")
    if isinstance(kinds, list):
        names = {0: "linear_attention", 1: "full_attention"}
        content = content | {"layer_types": [names.get(kind, str(kind)) for kind in kinds]}
    return content | {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, list


def _as_glm(content: Entries) -> Kin:
    """ChatGLM2 and its successors."""
    entries, revise = _as_llama(content, num_hidden_layers="num_layers", head_dim="kv_channels")
    if content.get("multi_query_attention"):
        entries["num_key_value_heads"] = content.get("multi_query_group_num")
    for name, theirs in (
        ("intermediate_size", "ffn_hidden_size"),
        ("vocab_size", "padded_vocab_size"),
        ("max_position_embeddings", "seq_length"),
    ):
        entries[name] = content.get(theirs)
    if content.get("add_qkv_bias"):
        entries |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return {name: value for name, value in entries.items() if value is not None}, revise


def _as_deci(content: Entries) -> Kin:
    """Nemotron-NAS: each layer has its own number of key/value heads, or no attention."""
    blocks = [dict(block.get("attention") or {}) for block in content.get("block_configs") or []]

    def revise(shapes: list[Shape]) -> list[Shape]:
        found = []
        for shape, block in zip(shapes, blocks, strict=True):
            size = block.get("n_heads_in_group")
            if isinstance(size, int) and size > 0:
                heads = shape.num_heads // size
                found.append(replace(shape, num_kv_heads=heads, stored=None))
        return found

    entries, _ = _as_llama(content)
    return entries | {"num_key_value_heads": entries.get("num_attention_heads")}, revise


KIN: dict[str, Callable[[Entries], Kin]] = {
    "BaichuanForCausalLM": _as_llama,
    "ChatGLMForConditionalGeneration": _as_glm,
    "ChatGLMModel": _as_glm,
    "DeciLMForCausalLM": _as_deci,
    "DeepseekForCausalLM": _as_llama,
    "InternLM2ForCausalLM": _as_llama,
    "InternLM3ForCausalLM": _as_llama,
    "MiniCPMForCausalLM": _as_llama,
    "MiniMaxM1ForCausalLM": _as_minimax,
    "MiniMaxText01ForCausalLM": _as_minimax,
    "YiForCausalLM": _as_llama,
}
# Those of KIN whose feed-forward networks aren't those of the type that they are counted as.
OTHER_OUTSIDE = {"DeciLMForCausalLM", "DeepseekForCausalLM"}
