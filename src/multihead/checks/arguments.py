"""What an argument is for, told from its name; and what stands for a mask, told by trying."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The first that matches a whole name in small letters. What matches none, and has no default, is
# asked for in words.
ROLES = [
    (role, re.compile(pattern))
    for role, pattern in (
        (
            "padding",
            r"(src_|tgt_|memory_|encoder_)?(key_)?pad(ding)?_?mask|valid(_mask)?|valid_lens?|lengths?|seq_?len(gth)?s?",
        ),
        ("causal", r"(is_)?causal|use_causal_mask"),
        ("mask", r"(attn|attention|src|tgt|causal|self|self_attn)?_?mask|attn_bias|attention_bias"),
        ("weights", r"(need|return|output|get|with)_?\w*(weight|attention|attn|score|prob|map)\w*"),
        ("kv_heads", r"(num|n)_?(kv|key_value)_?heads?|n_?kv|(num_)?(kv_)?groups"),
        ("heads", r"(num|n)_?(attention_|query_|q_)?heads?|heads?|nhead|h"),
        ("head_dim", r"head_(dim|size)|d_?(k|head)"),
        ("width", r"d_?model|embed_dim|dim|hidden_size"),
        ("use_cache", r"use_(kv_?)?cache"),
        ("cache", r"((kv|key_value|layer)_?)?cache|(layer_)?past(_(key_values?|kv))?"),
        ("start", r"start(_pos(ition)?)?|(pos(ition)?_)?offset|cache_position|input_pos"),
        ("tables", r"position_embeddings|cos_sin|rotary_pos_emb"),
        ("cos", r"(rope_|freqs_)?cos"),
        ("sin", r"(rope_|freqs_)?sin"),
        ("turns", r"freqs(_cis|_complex)?"),
        ("positions", r"position_ids|positions|pos(_ids)?"),
        ("training", r"train(ing)?"),
        ("q weight", r"(w|weight)_?q(uery)?|(q|query)_?(w|weight|proj)"),
        ("k weight", r"(w|weight)_?k(ey)?|(k|key)_?(w|weight|proj)"),
        ("v weight", r"(w|weight)_?v(alue)?|(v|value)_?(w|weight|proj)"),
        ("o weight", r"(w|weight)_?o(ut|utput)?|(o|out|output)_?(w|weight|proj)"),
        ("qkv weight", r"(w|weight)_?qkv|qkv_?(w|weight|proj)?"),
        ("q bias", r"b(ias)?_?q(uery)?|q_?b(ias)?"),
        ("k bias", r"b(ias)?_?k(ey)?|k_?b(ias)?"),
        ("v bias", r"b(ias)?_?v(alue)?|v_?b(ias)?"),
        ("o bias", r"b(ias)?_?o(ut)?|(o|out)_?b(ias)?"),
        (
            "memory",
            r"context|memory|kv|y|source|cond|(encoder|cross|key_value)_(hidden_)?(states|output)\w*|enc(_\w+)?|x_?kv|"
            r"key_value",
        ),
        ("query", r"x?_?q(ueries|uery)?(_(in|input|states|seq|x))?|tgt|target"),
        ("key", r"x?_?k(eys?)?(_in)?|key_states"),
        ("value", r"x?_?v(alues?)?(_in)?|value_states"),
        (
            "x",
            r"x_?(in)?|inputs?|hidden(_states)?|h|src|tokens?|seq(uence)?|embeddings?|tensor|states?",
        ),
    )
]


def role_of(name: str) -> str | None:
    return next((role for role, pattern in ROLES if pattern.fullmatch(name.lower())), None)


@dataclass(frozen=True)
class MaskForm:
    """How a callee wants to be told which keys a row reads."""

    name: str  # of its argument
    shape: str
    encoding: str
    leak: float = (
        0.0  # what a hidden key still does to the output, beside what a key that is read does
    )

    def of(self, may: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """`may` is bool [B, L, S], True where a row reads; or [B, S] for padding."""
        return SHAPES[self.shape](ENCODINGS[self.encoding](may, dtype), heads)

    @property
    def words(self) -> str:
        return f"{self.name}{self.shape}, {self.encoding}"


ENCODINGS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "True reads": lambda m, dtype: m,
    "True hides": lambda m, dtype: ~m,
    "-inf added": lambda m, dtype: torch.zeros(m.shape, dtype=dtype).masked_fill(~m, -torch.inf),
    "1 reads": lambda m, dtype: m.to(dtype),
    "1 hides": lambda m, dtype: (~m).to(dtype),
    "how many are real": lambda m, dtype: m.sum(-1),
}
SHAPES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "[B, 1, L, S]": lambda m, heads: m[:, None],
    "[B, L, S]": lambda m, heads: m,
    "[L, S]": lambda m, heads: m[0],
    "[B, H, L, S]": lambda m, heads: m[:, None].expand(-1, heads, -1, -1),
    "[B * H, L, S]": lambda m, heads: m.repeat_interleave(heads, 0),
    "[B, S]": lambda m, heads: m,
    "[S]": lambda m, heads: m[0],
    "[B, 1, 1, S]": lambda m, heads: m[:, None, None],
    "[B]": lambda m, heads: m,
}
FULL = (
    "[B, 1, L, S]",
    "[B, L, S]",
    "[L, S]",
    "[B, H, L, S]",
    "[B * H, L, S]",
)  # shapes that can hide any key from any row
PADDED = ("[B, S]", "[B, 1, 1, S]", "[S]")  # shapes that hide a key from all rows


def forms(name: str, shapes: tuple[str, ...]) -> list[MaskForm]:
    found = [
        MaskForm(name, shape, encoding) for shape in shapes for encoding in list(ENCODINGS)[:5]
    ]
    return [*found, MaskForm(name, "[B]", "how many are real")] if "[B, S]" in shapes else found


def convention(name: str) -> str | None:
    """What True means under names on which libraries agree; under others both are in use."""
    name = name.lower()
    if name in ("attention_mask", "valid", "valid_mask"):
        return "True reads"
    return "True hides" if name.endswith("key_padding_mask") else None
