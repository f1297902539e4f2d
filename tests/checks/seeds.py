"""The bugs that people make, put into attention as people write it: a file of `wild/`, and what is
replaced in it.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import multihead
from multihead.checks import PROPERTIES, Report

WILD = Path(__file__).parent / "wild"
FUNCTIONS = {"textbook_numpy": "multi_head_attention", "functional": "attention"}
CAUSAL = {"head_loop", "nanogpt", "sdpa", "llama", "mla", "rope_cache", "softcap"}
NAMES = sorted(path.stem for path in WILD.glob("*.py"))


@dataclass(frozen=True)
class Seed:
    bug: str
    where: str
    old: str
    new: str
    certain: bool = True  # named by the definition

    def __str__(self) -> str:
        return f"{self.where}: {self.new.strip()[:50]}"


def load(name: str, old: str = "", new: str = "") -> Any:
    """What a file of `wild/` makes, with a piece of its text replaced."""
    source = (WILD / f"{name}.py").read_text()
    assert old in source, (name, old)
    module = sys.modules[f"wild_{name}"] = types.ModuleType(
        f"wild_{name}"
    )  # where a dataclass looks for its module
    exec(compile(source.replace(old, new) if old else source, f"{name}.py", "exec"), vars(module))
    return getattr(module, FUNCTIONS[name]) if name in FUNCTIONS else module.make()


MIX, SLICE = "tokens and heads mixed", "heads read each other's slices"
SCALE, AXIS = "missing or wrong scale", "softmax over the wrong axis"
AFTER, ZERO, INVERTED = (
    "mask after softmax, not renormalised",
    "masked scores set to 0",
    "inverted mask",
)
NEXT, ITSELF, OFFSET = (
    "attends to the next token",
    "can't attend to itself",
    "top-left instead of offset alignment",
)
NAN, LEAK = "fully masked rows give NaN", "fully masked rows leak"
POLICIES = {NAN, LEAK, INVERTED}  # of which some are notes unless strict
PADDING, OUTPUT = "padding changes real tokens", "W_O missing"
AGAIN, TILE, DROPOUT, BATCH = (
    "a second softmax over heads",
    "grouped heads tiled",
    "dropout active in evaluation",
    "batch elements influence each other",
)
ROTARY, RESTART, CACHE = (
    "rotary positions are wrong",
    "positions restart at the cache",
    "cache differs from the full pass",
)
LATENT, SHARED = "latent isn't normalised", "rotary key isn't shared"
CAP, HALF, OVERFLOW = (
    "soft cap after the mask",
    "half-precision softmax overflow",
    "softmax overflows",
)
GRADIENT, GRADNAN, CHANGED, STRIDES = (
    "gradients don't reach a projection",
    "gradients become NaN",
    "inputs are changed in place",
    "non-contiguous inputs fail",
)
WEIGHTS, VALUES, HIDES = (
    "output depends on requested weights",
    "values projected by W_K",
    "mask doesn't hide keys",
)
SIZES, DIFFERS = "fails with other numbers of tokens", "differs from the definition"
SWAPPED, TWICE = "projections are swapped", "a projection is used twice"

SEEDS = [
    # heads and tokens mixed by a reshape without transpose
    Seed(
        MIX,
        "textbook_numpy",
        "(X @ W_q).reshape(seq_len, num_heads, d_k).transpose(1, 0, 2)",
        "(X @ W_q).reshape(num_heads, seq_len, d_k)",
    ),
    Seed(MIX, "textbook_numpy", "heads.transpose(1, 0, 2).reshape", "heads.reshape"),
    Seed(
        MIX,
        "numpy_class",
        "x.reshape(batch, seq, self.num_heads, self.depth).transpose(0, 2, 1, 3)",
        "x.reshape(batch, self.num_heads, seq, self.depth)",
    ),
    Seed(
        MIX,
        "annotated",
        "lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)",
        "lin(x).view(nbatches, self.h, -1, self.d_k)",
    ),
    Seed(MIX, "annotated", "x.transpose(1, 2).contiguous()", "x.contiguous()"),
    Seed(MIX, "vit_fused", "(attn @ v).transpose(1, 2).reshape", "(attn @ v).reshape"),
    Seed(MIX, "nanogpt", "y.transpose(1, 2).contiguous()", "y.contiguous()"),
    Seed(
        MIX,
        "nanogpt",
        "v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
        "v = v.reshape(B, self.n_head, T, C // self.n_head)",
    ),
    Seed(MIX, "sdpa", "self.out_proj(y.transpose(1, 2).reshape", "self.out_proj(y.reshape"),
    Seed(MIX, "gqa", "context.transpose(1, 2).reshape", "context.reshape"),
    Seed(MIX, "cross", "out.permute(0, 2, 1, 3).reshape", "out.reshape"),
    # heads that read each other's slices
    Seed(SLICE, "slices", "slice(h * self.d, (h + 1) * self.d)", "slice(h, h + self.d)"),
    Seed(SLICE, "slices", "K[..., part], V[..., part]", "K[..., :self.d], V[..., :self.d]"),
    Seed(
        SLICE,
        "numpy_class",
        "k, v = self.split(x @ self.Wq), self.split(x @ self.Wk)",
        "k, v = self.split(x @ self.Wq), (x @ self.Wk).reshape(batch, seq, self.depth,"
        " self.num_heads).transpose(0, 3, 1, 2)",
    ),
    # scale
    Seed(SCALE, "textbook_numpy", " / np.sqrt(d_k)", ""),
    Seed(SCALE, "textbook_numpy", "np.sqrt(d_k)", "np.sqrt(d_model)"),
    Seed(SCALE, "einsum_params", "head_dim**-0.5", "head_dim**-1.0"),
    Seed(SCALE, "vit_fused", "head_dim**-0.5", "dim**-0.5"),
    Seed(SCALE, "head_loop", " * k.shape[-1] ** -0.5", ""),
    Seed(SCALE, "head_loop", "k.shape[-1] ** -0.5", "x.shape[-1] ** -0.5"),
    Seed(SCALE, "sdpa", "y = F.", "q = q / q.shape[-1] ** 0.5\n        y = F."),
    Seed(SCALE, "functional", "/ q.shape[-1] ** 0.5", "/ q.shape[-1]"),
    Seed(SCALE, "rearranged", " * d**-0.5", " * d**-1"),
    Seed(SCALE, "slices", "/ self.d**0.5", "* self.d**0.5"),
    Seed(SCALE, "time_first", "q = q * self.head_dim**-0.5", "pass"),
    Seed(SCALE, "rope_cache", "attn_mask=mask)", "attn_mask=mask, scale=1.0)"),
    # softmax over the wrong axis
    Seed(AXIS, "textbook_numpy", "softmax(scores, axis=-1)", "softmax(scores, axis=-2)"),
    Seed(AXIS, "einsum_params", "softmax(dim=-1)", "softmax(dim=1)"),
    Seed(AXIS, "vit_fused", "attn.softmax(dim=-1)", "attn.softmax(dim=-2)"),
    Seed(AXIS, "head_loop", "F.softmax(wei, dim=-1)", "F.softmax(wei, dim=1)"),
    Seed(AXIS, "slices", "dim=2), v)", "dim=1), v)"),
    Seed(AXIS, "annotated", "softmax(dim=-1)", "softmax(dim=0)"),
    Seed(AXIS, "functional", "scores.softmax(-1)", "scores.softmax(1)"),
    # masks
    Seed(
        AFTER,
        "nanogpt",
        'att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))\n        att ='
        " F.softmax(att, dim=-1)",
        "att = F.softmax(att, dim=-1) * self.bias[:, :, :T, :T]",
    ),
    Seed(AFTER, "functional", "scores = scores.masked_fill(~mask, -torch.inf)", "pass"),
    Seed(AFTER, "annotated", 'scores = scores.masked_fill(mask == 0, float("-inf"))', "pass"),
    Seed(
        ZERO,
        "head_loop",
        'wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))',
        "wei * self.tril[:T, :T]",
    ),
    Seed(ZERO, "numpy_class", "np.where(mask, scores, -np.inf)", "scores * mask"),
    Seed(INVERTED, "nanogpt", "[:, :, :T, :T] == 0", "[:, :, :T, :T] == 1"),
    Seed(INVERTED, "head_loop", "torch.tril(torch.ones", "torch.triu(torch.ones"),
    Seed(INVERTED, "softcap", "triu(1)", "tril(-1)"),
    Seed(INVERTED, "time_first", "~attention_mask.bool()", "attention_mask.bool()", certain=False),
    Seed(
        NEXT,
        "head_loop",
        "torch.ones(block_size, block_size))",
        "torch.ones(block_size, block_size), diagonal=1)",
    ),
    Seed(NEXT, "softcap", "triu(1)", "triu(2)"),
    Seed(ITSELF, "softcap", "triu(1)", "triu(0)"),
    Seed(
        ITSELF,
        "head_loop",
        "torch.ones(block_size, block_size))",
        "torch.ones(block_size, block_size), diagonal=-1)",
    ),
    Seed(
        ITSELF,
        "nanogpt",
        "config.block_size))\n                             .view(1, 1, config.block_size, "
        "config.block_size))",
        "config.block_size), -1)\n                             .view(1, 1, config.block_size,"
        " config.block_size))",
    ),
    Seed(
        NAN,
        "annotated",
        "if mask is not None:\n        p_attn = p_attn.masked_fill(mask == 0, 0.0)",
        "",
        certain=False,
    ),
    Seed(NAN, "functional", "weights = weights.masked_fill(~mask, 0.0)", "pass", certain=False),
    Seed(
        NAN, "cross", "torch.nan_to_num(sim.softmax(dim=-1))", "sim.softmax(dim=-1)", certain=False
    ),
    Seed(
        LEAK,
        "annotated",
        'masked_fill(mask == 0, float("-inf"))\n    p_attn = scores.softmax(dim=-1)\n    if mask is'
        " not None:\n        p_attn = p_attn.masked_fill(mask == 0, 0.0)",
        "masked_fill(mask == 0, -3e4)\n    p_attn = scores.softmax(dim=-1)",
        certain=False,
    ),
    Seed(LEAK, "cross", 'float("-inf")', "-3e4", certain=False),
    Seed(LEAK, "numpy_class", "scores, -np.inf", "scores, -3e4", certain=False),
    Seed(PADDING, "cross", "[:, None, None, :]", "[:, None, :n, None]", certain=False),
    Seed(
        PADDING,
        "time_first",
        'masked_fill(hidden, float("-inf"))',
        "masked_fill(hidden, -5.0)",
        certain=False,
    ),
    # the way out
    Seed(OUTPUT, "textbook_numpy", "return concat @ W_o", "return concat"),
    Seed(OUTPUT, "vit_fused", "x = self.proj(x)", "pass"),
    Seed(OUTPUT, "nanogpt", "self.resid_dropout(self.c_proj(y))", "self.resid_dropout(y)"),
    Seed(
        OUTPUT,
        "sdpa",
        "return self.out_proj(y.transpose(1, 2).reshape(B, L, D))",
        "return y.transpose(1, 2).reshape(B, L, D)",
    ),
    Seed(
        OUTPUT,
        "softcap",
        "self.dense((probs @ v).transpose(1, 2).flatten(2))",
        "(probs @ v).transpose(1, 2).flatten(2)",
    ),
    Seed(AGAIN, "vit_fused", "attn = self.attn_drop(attn)", "attn = attn.softmax(dim=1)"),
    Seed(
        AGAIN,
        "einsum_params",
        "attn = attn.softmax(dim=-1)",
        "attn = attn.softmax(dim=-1).softmax(dim=1)",
    ),
    # grouped heads
    Seed(
        TILE, "gqa", "repeat_interleave(self.group_size, dim=1)", "repeat(1, self.group_size, 1, 1)"
    ),
    Seed(
        TILE,
        "llama",
        "x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)",
        "x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim)",
    ),
    # training and evaluation
    Seed(DROPOUT, "sdpa", "self.dropout if self.training else 0.0", "self.dropout", certain=False),
    Seed(DROPOUT, "time_first", "training=self.training", "training=True", certain=False),
    Seed(
        DROPOUT, "head_loop", "wei = self.dropout(wei)", "wei = F.dropout(wei, 0.2)", certain=False
    ),
    Seed(
        GRADIENT,
        "vit_fused",
        "qkv[0], qkv[1], qkv[2]",
        "qkv[0], qkv[1].detach(), qkv[2]",
        certain=False,
    ),
    Seed(GRADIENT, "sdpa", "y = F.", "q = q.data\n        y = F.", certain=False),
    Seed(
        GRADIENT,
        "einsum_params",
        "attn.softmax(dim=-1)",
        "attn.softmax(dim=-1).detach()",
        certain=False,
    ),
    Seed(
        GRADNAN,
        "nanogpt",
        "att = F.softmax(att, dim=-1)",
        "att = F.softmax(att, dim=-1)\n        att = torch.where(att > 0, att.sqrt() ** 2, 0.0)",
        certain=False,
    ),
    Seed(
        VALUES, "softcap", "(self.query, self.key, self.value)", "(self.query, self.key, self.key)"
    ),
    # batch
    Seed(
        BATCH,
        "vit_fused",
        "B, N, C = x.shape",
        "B, N, C = x.shape\n        x = x / (1 + x.pow(2).mean(0, keepdim=True))",
        certain=False,
    ),
    Seed(
        BATCH,
        "rearranged",
        "b, t, _ = x.shape",
        "b, t, _ = x.shape\n        x = x + x.mean(0, keepdim=True)",
        certain=False,
    ),
    # rotary and caches
    Seed(
        ROTARY,
        "rope_cache",
        "q, k = self.rope(q, start), self.rope(k, start)",
        "q, k, v = self.rope(q, start), self.rope(k, start), self.rope(v, start)",
    ),
    Seed(
        ROTARY,
        "rope_cache",
        "torch.cat([torch.outer(t, self.inv_freq)] * 2, dim=-1)",
        "torch.outer(t, self.inv_freq).repeat_interleave(2, -1)",
    ),
    Seed(ROTARY, "llama", "xk_ * freqs_cis", "xk_"),
    Seed(
        RESTART,
        "rope_cache",
        "self.rope(q, start), self.rope(k, start)",
        "self.rope(q, 0), self.rope(k, 0)",
        certain=False,
    ),
    Seed(OFFSET, "rope_cache", "tril(diagonal=start)", "tril(diagonal=0)", certain=False),
    Seed(OFFSET, "llama", "diagonal=start_pos + 1", "diagonal=1", certain=False),
    Seed(
        CACHE,
        "rope_cache",
        "torch.cat([past_key_value[1], v], dim=2)",
        "torch.cat([v, past_key_value[1]], dim=2)",
        certain=False,
    ),
    Seed(
        CACHE,
        "llama",
        "self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv",
        "self.cache_v[:bsz, :seqlen] = xv",
        certain=False,
    ),
    # latents
    Seed(LATENT, "mla", "kv = self.kv_norm(kv)", "pass"),
    Seed(LATENT, "mla", "self.q_norm(self.wq_a(x))", "self.wq_a(x)"),
    Seed(
        SHARED,
        "mla",
        "k_pe.unsqueeze(2).expand(-1, -1, self.n_heads, -1)",
        "nn.functional.pad(k_pe.unsqueeze(2), (0, 0, 0, self.n_heads - 1))",
    ),
    Seed(ROTARY, "mla", "k_pe = apply_rotary_emb(k_pe.unsqueeze(2), start).squeeze(2)", "pass"),
    Seed(SCALE, "mla", "self.qk_head_dim**-0.5", "qk_nope_head_dim**-0.5"),
    Seed(
        CACHE,
        "mla",
        "(out, (kv, k_pe))",
        "(out, (kv, torch.cat([k_pe[:, :start], self.wkv_a(x)[..., self.kv_lora_rank :]], 1)))",
        certain=False,
    ),
    # numbers
    Seed(
        CAP,
        "softcap",
        "scores = torch.tanh(scores / self.softcap) * self.softcap\n        future = torch.ones(L,"
        ' L, dtype=torch.bool).triu(1)\n        scores = scores.masked_fill(future, float("-inf"))',
        "future = torch.ones(L, L, dtype=torch.bool).triu(1)\n        scores ="
        ' scores.masked_fill(future, float("-inf"))\n        scores = torch.tanh(scores /'
        " self.softcap) * self.softcap",
    ),
    Seed(
        HALF,
        "vit_fused",
        "attn = attn.softmax(dim=-1)",
        "attn = attn.clamp(-60, 60).exp()\n        attn = attn / attn.sum(-1, keepdim=True)",
        certain=False,
    ),
    Seed(
        OVERFLOW,
        "einsum_params",
        "attn = attn.softmax(dim=-1)",
        "attn = attn.exp() / attn.exp().sum(-1, keepdim=True)",
        certain=False,
    ),
    Seed(
        OVERFLOW,
        "textbook_numpy",
        "np.exp(x - x.max(axis=axis, keepdims=True))",
        "np.exp(x)",
        certain=False,
    ),
    Seed(
        CHANGED,
        "vit_fused",
        "B, N, C = x.shape",
        "B, N, C = x.shape\n        x *= 0.5",
        certain=False,
    ),
    Seed(
        STRIDES,
        "functional",
        "scores = torch.einsum",
        "q = q.view(*q.shape[:2], -1).view(q.shape)\n    scores = torch.einsum",
        certain=False,
    ),
    Seed(
        STRIDES,
        "vit_fused",
        "B, N, C = x.shape",
        "B, N, C = x.shape\n        x = x.view(B * N, C)",
        certain=False,
    ),
    Seed(
        WEIGHTS,
        "softcap",
        "out = self.dense",
        "if output_attentions:\n            probs = (q @ k.transpose(2, "
        "3)).softmax(-1)\n        out = self.dense",
        certain=False,
    ),
    Seed(
        WEIGHTS,
        "time_first",
        "y = self.out_proj(y)",
        "y = self.out_proj(y) if need_weights else y",
        certain=False,
    ),
    Seed(
        "batch elements share weights",
        "vit_fused",
        "attn = self.attn_drop(attn)",
        "attn = attn[:1].expand_as(attn)",
    ),
    Seed("weights don't depend on keys", "vit_fused", "q @ k.transpose", "q @ q.transpose"),
    Seed("weights don't depend on queries", "softcap", "scores = q @ k", "scores = k @ k"),
    Seed(
        "missing or wrong soft cap",
        "softcap",
        "scores = torch.tanh(scores / self.softcap) * self.softcap",
        "pass",
        certain=False,
    ),
    Seed("positions have no effect", "rope_cache", "emb = ", "emb = 0 * ", certain=False),
    Seed(
        "weights are negative",
        "vit_fused",
        "attn = attn.softmax(dim=-1)",
        "attn = 1.5 * attn.softmax(dim=-1) - 0.5 / N",
        certain=False,
    ),
    Seed(
        "all heads have the same weights",
        "vit_fused",
        "attn = attn.softmax(dim=-1)",
        "attn = attn.mean(1, keepdim=True).softmax(dim=-1).expand_as(attn)",
        certain=False,
    ),
    Seed(
        "a group's queries are added up",
        "gqa",
        "context = F.",
        "queries = queries.unflatten(1, (2, 2)).sum(2).repeat_interleave(2, dim=1)\n"
        "        context = F.",
        certain=False,
    ),
    # axes that are mixed up, where two have the same size
    Seed(SIZES, "nanogpt", ".contiguous().view(B, T, C)", ".contiguous().view(B, C, T)", False),
    # which projection is which
    Seed(SWAPPED, "slices", "self.fc_q(x), self.fc_k(x),", "self.fc_k(x), self.fc_q(x),"),
    Seed(SWAPPED, "slices", "self.fc_k(x), self.fc_v(x)", "self.fc_v(x), self.fc_k(x)"),
    Seed(TWICE, "slices", "self.fc_k(x), self.fc_v(x)", "self.fc_k(x), self.fc_q(x)"),
    # what no known bug explains, where nothing says that it is attention of another kind
    Seed(
        DIFFERS,
        "slices",
        "torch.softmax(scores, dim=2)",
        "torch.softmax(scores.abs() * scores, dim=2)",
        False,
    ),
]


@cache
def report_of(seed: Seed) -> Report:
    return multihead.check(load(seed.where, seed.old, seed.new), strict=seed.bug in POLICIES)


def bug_table() -> str:
    """The table of bugs in docs/check.md: the files each was put into, and what found it there."""
    lines = ["| bug | put into | found by |", "| --- | --- | --- |"]
    for bug in dict.fromkeys(seed.bug for seed in SEEDS):
        seeds = [seed for seed in SEEDS if seed.bug == bug]
        found_by = dict.fromkeys(
            name
            for seed in seeds
            for finding in report_of(seed).findings
            if finding.bug == bug
            for name in finding.found_by
        )
        files = dict.fromkeys(seed.where for seed in seeds)
        lines.append(f"| {bug} | {', '.join(files)} | {', '.join(found_by)} |")
    return "\n".join(lines)


def property_table() -> str:
    """The table of properties in docs/check.md."""
    rows = [f"| {each.name} | {each.claim} |" for each in PROPERTIES]
    return "\n".join(["| property | claim |", "| --- | --- |", *rows])


def write_page(page: Path) -> None:
    text = page.read_text()
    for table in (property_table(), bug_table()):
        before, header, rest = text.partition(table.partition("\n")[0])
        assert header, f"{page} lacks {table.splitlines()[0]}"
        text = f"{before}{table}\n\n{rest.partition(chr(10) * 2)[2]}"
    page.write_text(text)


if __name__ == "__main__":
    write_page(Path(__file__).parents[2] / "docs" / "check.md")
