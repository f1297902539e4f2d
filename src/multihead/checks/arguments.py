"""Roles of arguments, from their names; and `MaskForm`, how a callable takes a mask."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The first pattern that matches the whole lower-case name decides. A name without a role and
# without a default has to be given by the user.
ROLES = {
    role: re.compile(pattern)
    for role, pattern in {
        "padding": (
            r"(src_|tgt_|memory_|encoder_)?(key_)?pad(ding)?_?mask|valid(_mask)?|valid_lens?|"
            r"lengths?|seq_?len(gth)?s?"
        ),
        "causal": r"(is_)?causal|use_causal_mask",
        "mask": (
            r"(attn|attention|src|tgt|causal|self|self_attn)?_?mask|(attn|attention|mask)_bias|"
            r"(?!encoder|cross|memory|context)\w+_(attn|attention|causal)_mask"
        ),
        "weights": r"(need|return|output|get|with)_?\w*(weight|attention|attn|score|prob|map)\w*",
        "num_kv_heads": r"(num|n)_?(kv|key_value)_?heads?|n_?kv|(num_)?(kv_)?groups",
        "num_heads": r"(num|n)_?(attention_|query_|q_)?heads?|heads?|nhead|h",
        "head_dim": r"head_(dim|size)|d_?(k|head)",
        "embed_dim": r"d_?model|embed_dim|dim|hidden_size",
        "use_cache": r"use_(kv_?)?cache",
        "cache": r"((kv|key_value|layer)_?)?cache|(layer_)?past(_(key_values?|kv))?",
        "start": r"start(_pos(ition)?)?|(pos(ition)?_)?offset|cache_position|input_pos",
        "cos_sin": r"position_embeddings|cos_sin|rotary_pos_emb",
        "cos": r"(rope_|freqs_)?cos",
        "sin": r"(rope_|freqs_)?sin",
        "freqs_cis": r"freqs(_cis|_complex)?",
        "positions": r"position_ids|positions|pos(_ids)?",
        "training": r"train(ing)?",
        "q weight": r"(w|weight)_?q(uery)?|(q|query)_?(w|weight|proj)",
        "k weight": r"(w|weight)_?k(ey)?|(k|key)_?(w|weight|proj)",
        "v weight": r"(w|weight)_?v(alue)?|(v|value)_?(w|weight|proj)",
        "o weight": r"(w|weight)_?o(ut|utput)?|(o|out|output)_?(w|weight|proj)",
        "qkv weight": r"(w|weight)_?qkv|qkv_?(w|weight|proj)?",
        "q bias": r"b(ias)?_?q(uery)?|q_?b(ias)?",
        "k bias": r"b(ias)?_?k(ey)?|k_?b(ias)?",
        "v bias": r"b(ias)?_?v(alue)?|v_?b(ias)?",
        "o bias": r"b(ias)?_?o(ut)?|(o|out)_?b(ias)?",
        "memory": (
            r"context|memory|(kv|key_value)(_(in|input|states|seq|x))?|y|source|cond|enc(_\w+)?|x_?kv|"
            r"(encoder|cross|key_value)_(hidden_)?(states|output)\w*"
        ),
        "query": r"x?_?q(ueries|uery)?(_(in|input|states|seq|x))?|tgt|target",
        "key": r"x?_?k(eys?)?(_in)?|key_states",
        "value": r"x?_?v(alues?)?(_in)?|value_states",
        "x": (
            r"x_?(in)?|inputs?|hidden(_states)?|h|src|tokens?|seq(uence)?|embeddings?|tensor|"
            r"states?"
        ),
    }.items()
}
INPUTS = ("x", "query", "key", "value", "memory")
TABLES = ("cos_sin", "cos", "sin", "freqs_cis")  # rotary tables


def role_of(name: str) -> str | None:
    """The role of an argument of this name; None where the name doesn't tell.

    >>> role_of("key_padding_mask"), role_of("hidden_states"), role_of("alpha")
    ('padding', 'x', None)
    """
    return next((role for role, pattern in ROLES.items() if pattern.fullmatch(name.lower())), None)


ENCODINGS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "True may read": lambda allowed, dtype: allowed,
    "True is hidden": lambda allowed, dtype: ~allowed,
    "1 may read": lambda allowed, dtype: allowed.to(dtype),
    "1 is hidden": lambda allowed, dtype: (~allowed).to(dtype),
    # After those above: (1 - mask) * -1e9 hides where -inf is given too, by chance.
    "-inf added": lambda allowed, dtype: torch.zeros(allowed.shape, dtype=dtype).masked_fill(
        ~allowed, -torch.inf
    ),
    "lengths": lambda allowed, dtype: allowed.sum(-1),
}
SHAPES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "[B, 1, L, S]": lambda mask, heads: mask[:, None],
    "[B, L, S]": lambda mask, heads: mask,
    "[L, S]": lambda mask, heads: mask[0],
    "[B, H, L, S]": lambda mask, heads: mask[:, None].expand(-1, heads, -1, -1),
    "[B * H, L, S]": lambda mask, heads: mask.repeat_interleave(heads, 0),
    "[B, S]": lambda mask, heads: mask,
    "[S]": lambda mask, heads: mask[0],
    "[B, 1, 1, S]": lambda mask, heads: mask[:, None, None],
    "[B]": lambda mask, heads: mask,
}
# Shapes that can hide any key from any query, and shapes that hide a key from all queries.
QUERY_KEY_SHAPES = ("[B, 1, L, S]", "[B, L, S]", "[L, S]", "[B, H, L, S]", "[B * H, L, S]")
KEY_SHAPES = ("[B, S]", "[B, 1, 1, S]", "[S]")


@dataclass(frozen=True)
class MaskForm:
    """Form of a mask argument: its name, its shape, and the meaning of its values.

    `leak` is the influence of a hidden key on the output, relative to that of a key that is read.

    >>> form = MaskForm("mask", "[L, S]", "True is hidden")
    >>> form.encode(torch.ones(1, 2, 2).tril().bool(), 4, torch.float64)
    tensor([[False,  True],
            [False, False]])
    """

    name: str
    shape: str
    encoding: str
    leak: float = 0.0

    def encode(self, allowed: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """The argument for `allowed`, bool `[B, L, S]` or, for padding, `[B, S]` (True = read)."""
        return SHAPES[self.shape](ENCODINGS[self.encoding](allowed, dtype), num_heads)

    @property
    def description(self) -> str:
        return f"{self.name}{self.shape}, {self.encoding}"

    @property
    def contradicts(self) -> str:
        """The meaning that libraries agree on for this name, if True means the opposite here."""
        agreed = conventional_encoding(self.name)
        meaning = self.encoding.partition(" ")
        if agreed is None or meaning[0] not in ("True", "1"):
            return ""
        return agreed if meaning[2] != agreed.partition(" ")[2] else ""


def candidate_forms(name: str, shapes: tuple[str, ...]) -> list[MaskForm]:
    """Every way to pass a mask as this argument, the most common first."""
    encodings = [encoding for encoding in ENCODINGS if encoding != "lengths"]
    forms = [MaskForm(name, shape, encoding) for shape in shapes for encoding in encodings]
    return [*forms, MaskForm(name, "[B]", "lengths")] if "[B, S]" in shapes else forms


def conventional_encoding(name: str) -> str | None:
    """The meaning of True for names on which libraries agree; for others both are in use.

    >>> conventional_encoding("key_padding_mask")
    'True is hidden'
    """
    name = name.lower()
    if name in ("attention_mask", "valid", "valid_mask"):
        return "True may read"
    return "True is hidden" if name.endswith("key_padding_mask") else None
