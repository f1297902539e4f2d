"""The multi-head attention layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.call import split_mask_bias
from ..ops.functional import attention
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import IntervalMask, padding
from ..ops.slopes import AlibiBias, dense
from .cache import Cache, check_valid
from .position_bias import ALiBi, PositionBias
from .rotary import check_whole

__all__ = ["MultiHeadAttention"]

NORMS: dict[str, Callable[..., nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
GATES = ("head", "elementwise")


class MultiHeadAttention(nn.Module):
    """Multi-head attention over vectors of width D: project, split into heads, attend, merge,
    project.

    Head h of H reads the key/value head h // (H / G), so that G = H is multi-head, 1 < G < H
    grouped-query and G = 1 multi-query attention:

        query heads       0 1 2 3     0 1 2 3     0 1 2 3
                          | | | |      \\| |/       \\| |/
        key/value heads   0 1 2 3     0   1         0
                          MHA, G = H  GQA, G = 2    MQA, G = 1

    The four projections are separate modules, each called as one, so that hooks, adapters and
    quantised replacements work on them. Batch first, weights for each head, and one definition in
    training and evaluation.

    Args:
        embed_dim: width D of the vectors that come in and go out.
        num_heads: number of query heads H.
        num_kv_heads: number of key/value heads G; H must be a multiple of it. As many as
            `num_heads` unless given.
        head_dim: width E of a head; D / H unless given.
        kdim, vdim: widths of `key` and `value`; D unless given.
        out_dim: width of what comes out; D unless given.
        bias: whether the projections of queries, keys and values (and a gate) add a bias.
        out_bias: whether the output projection adds one; as `bias` unless given.
        qk_norm: a norm over the width of each head of the queries and keys, before positions: "rms"
            (Qwen 3, Gemma 3), "layer" (ViT-22B), or what makes a module from `head_dim`.
        positions: a module that turns queries and keys, `(x [B, H, L, E], positions) -> the same`
            such as `Rotary`, or one that adds to the scores, a `PositionBias` such as `ALiBi`,
            `T5Bias` and `RelativeBias`.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: whether each head learns a logit that joins its softmax and reads nothing (gpt-oss),
            from 0 on.
        gate: a sigmoid gate from the query on what each head read: one number a "head", or
            "elementwise" (Qwen 3 Next).
        bias_kv: whether each head learns one further key and value that every row may read, as in
            `nn.MultiheadAttention`.
        dropout: share of the attention weights dropped in training.

    Shapes: `query` [B, L, D], `key` [B, S, kdim], `value` [B, S, vdim] -> [B, L, out_dim], and on
        request the weights
    [B, H, L, S]. Without `key` the layer attends to its `query`; without `value` it reads the
    values from `key`.

    Raises:
        ValueError: sizes that don't divide, with both numbers, or inputs whose shapes don't fit.

    >>> layer = MultiHeadAttention(8, 2)
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    operator = staticmethod(attention)  # a reading puts its own in this place for a while

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: str | Callable[[int], nn.Module] | None = None,
        positions: nn.Module | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: str | None = None,
        bias_kv: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "kdim": kdim,
            "vdim": vdim,
            "out_dim": out_dim,
        }
        for name, size in sizes.items():
            if size is not None:
                check_whole(name, size)
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if num_heads % num_kv_heads:
            raise MultiheadError(
                f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; every"
                " key/value head serves the same number of query heads, so give a divisor of"
                f" {num_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise MultiheadError(
                    f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; change one"
                    " of them, or give head_dim"
                )
            head_dim = embed_dim // num_heads
        if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise MultiheadError(
                f"dropout={dropout}: the share of weights to drop must be at least 0 and below 1"
            )
        if (
            qk_norm is not None
            and qk_norm not in NORMS
            and (isinstance(qk_norm, nn.Module) or not callable(qk_norm))
        ):
            raise MultiheadError(
                f"qk_norm={qk_norm!r}: expected {', '.join(map(repr, NORMS))}, a callable that"
                " makes a module from head_dim, or None"
            )
        if gate is not None and gate not in GATES:
            raise MultiheadError(
                f"gate={gate!r}: expected {' or '.join(map(repr, GATES))}, or None"
            )
        if softcap is not None and (isinstance(softcap, bool) or not 0 < softcap < math.inf):
            raise MultiheadError(
                f"softcap={softcap}: expected a finite number above 0, or None for no cap"
            )
        if positions is not None and not isinstance(positions, nn.Module):
            raise TypeError(
                f"positions={positions!r}: expected a module such as Rotary({head_dim}) or"
                f" ALiBi({num_heads}), or None; the positions of the tokens are forward's position_ids"
            )
        turned_dim = getattr(positions, "head_dim", head_dim)
        if turned_dim != head_dim:
            raise MultiheadError(
                f"positions={positions} turns heads {turned_dim} wide, but head_dim={head_dim}"
            )
        if isinstance(positions, PositionBias) and positions.num_heads != num_heads:
            raise MultiheadError(
                f"positions={positions} is made for {positions.num_heads} heads, but"
                f" num_heads={num_heads}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.softcap = softcap
        self.gate = gate
        self.dropout = dropout
        self.positions = positions
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        where: Any = {"device": device, "dtype": dtype}

        def norm() -> nn.Module | None:
            if qk_norm is None or callable(qk_norm):
                return None if qk_norm is None else qk_norm(head_dim)
            return NORMS[qk_norm](head_dim, **where)

        self.q_proj = nn.Linear(embed_dim, width, bias=bias, **where)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, kv_width, bias=bias, **where)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, kv_width, bias=bias, **where)
        self.out_proj = nn.Linear(
            width,
            embed_dim if out_dim is None else out_dim,
            bias=bias if out_bias is None else out_bias,
            **where,
        )
        self.q_norm, self.k_norm = norm(), norm()
        if gate is not None:
            self.gate_proj = nn.Linear(
                embed_dim, num_heads if gate == "head" else width, bias=bias, **where
            )
        self.sinks = nn.Parameter(torch.empty(num_heads, **where)) if sinks else None
        self.bias_k, self.bias_v = (
            nn.Parameter(torch.empty(num_kv_heads, head_dim, **where)) if bias_kv else None
            for _ in "kv"
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the layer's own parameters, sinks and bias_kv; its modules have a `reset_parameters`
        of their own.
        """
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def extra_repr(self) -> str:
        parts = [
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads},"
            f" head_dim={self.head_dim}"
        ]
        parts += [
            f"{name}={value}"
            for name, value in (("softcap", self.softcap), ("gate", self.gate))
            if value is not None
        ]
        parts += [
            f"{name}=True"
            for name, value in (("sinks", self.sinks), ("bias_kv", self.bias_k))
            if value is not None
        ]
        return ", ".join(parts + ([f"dropout={self.dropout}"] if self.dropout else []))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: IntervalMask | Tensor | None = None,
        attn_bias: Tensor | AlibiBias | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        valid: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args beside the inputs:

        mask: which keys a row reads, as in `multihead.attention`; without it every row reads all of
            them. With a cache it speaks
            of all positions so far: `causal()` stays `causal()` at every step.
        attn_bias: floating, added to the scores; broadcasts to `[B, H, L, S]`. Or `AlibiBias`.
        position_ids: integers `[L]` or `[B, L]`, the positions of the query's rows (and of its keys,
            unless `key` is given). From 0 on, or from where the cache ends, unless given.
        cache: a `Cache` or `WindowCache` of this layer. The keys and values of this call are stored
            in it, and the rows read all that it holds; of a call that fails nothing is stored.
            Where its rows have different lengths, or it lets keys go, masks are those of distances,
            `causal()` and `window(...)`, and weights have a column for each key in the cache.
        valid: bool `[B, S]`, which of the keys given here are real and not padding. They must be
            neighbours in each row; padding is not stored in a cache.
        return_weights: also return the weights `[B, H, L, S]`, those before dropout.
        """
        itself = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        self._check(query, key, value, position_ids, valid)
        mask, add = split_mask_bias(mask, attn_bias, query.dtype)
        if cache is not None:
            self._check_cache(cache, mask, position_ids, itself)
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.num_kv_heads)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)

        turns = self.positions is not None and not isinstance(self.positions, PositionBias)
        if self.positions is not None:
            offset = 0 if cache is None else cache.offset(valid)
            rows = (
                position_ids
                if position_ids is not None
                else _positions(query, offset if itself else 0)
            )
            own = rows if itself else _positions(key, offset)
            if turns:
                q, k = self.positions(q, rows), self.positions(k, own)
        if cache is None and valid is not None:
            mask = _with_padding(mask, valid, query.shape[1], key.shape[1])
        before = None if cache is None else cache.state()
        step = None if cache is None else cache.update(k, v, valid)
        dropout = self.dropout if self.training else 0.0
        try:
            if step is not None:
                mask = (step if itself else step._replace(offset=0)).mask(mask, add, query.shape[1])
                k, v = step.k, step.v
            if self.positions is not None and not turns:
                if step is not None:
                    own = (
                        torch.arange(k.shape[2], device=k.device)
                        if step.positions is None
                        else step.positions
                    )
                if add is None and type(self.positions) is ALiBi and not _hooked(self.positions):
                    add = self.positions.falling(rows, own)
                else:
                    added = self.positions(rows, own)
                    add = added if add is None else dense(add, q.dtype) + added
            found = self.operator(
                q,
                k,
                v,
                mask,
                bias=add,
                softcap=self.softcap,
                sinks=self.sinks,
                dropout=dropout,
                return_lse=self.bias_k is not None,
                return_weights=return_weights,
            )
        except Exception:
            if cache is not None and before is not None:
                cache.restore(before)  # so that the call can be made again as it should have been
            raise
        out, *more = found if isinstance(found, tuple) else (found,)
        weights = more[-1] if return_weights else None
        if self.bias_k is not None and self.bias_v is not None:
            out, weights = self._with_bias_kv(q, out, more[0], weights, dropout)
        if self.gate is not None:
            gate = torch.sigmoid(self.gate_proj(query))
            out = out * split_heads(gate, self.num_heads)
        update = self.out_proj(merge_heads(out))
        return update if weights is None else (update, weights)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_ids: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"{name} is a {type(x).__name__}: expected a tensor; a mask goes to mask=, a"
                    " cache to cache="
                )
        for name, x, module in (
            ("query", query, self.q_proj),
            ("key", key, self.k_proj),
            ("value", value, self.v_proj),
        ):
            width = getattr(module, "in_features", x.shape[-1] if x.ndim else 0)
            if x.ndim != 3 or x.shape[-1] != width:
                raise MultiheadError(
                    f"{name}{list(x.shape)}: expected [B, {'L' if name == 'query' else 'S'},"
                    f" {width}], batch first"
                )
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            raise MultiheadError(
                f"query{list(query.shape)}, key{list(key.shape)}, value{list(value.shape)}:"
                " expected one batch for all, and one length for key and value; the batch is the"
                " first axis, the length the second"
            )
        if valid is not None:
            check_valid(valid, *key.shape[:2])
        if position_ids is not None:
            if self.positions is None:
                raise MultiheadError(
                    f"position_ids={position_ids!r}, but this layer has no position encoding"
                    " (positions=), so they would change nothing"
                )
            if position_ids.shape not in ((query.shape[1],), tuple(query.shape[:2])):
                raise MultiheadError(
                    f"position_ids{list(position_ids.shape)}: expected [L] or [B, L] ="
                    f" {list(query.shape[:2])}"
                )

    def _check_cache(
        self,
        cache: Cache,
        mask: IntervalMask | Tensor | None,
        position_ids: Tensor | None,
        itself: bool,
    ) -> None:
        """What can't be known, or would be counted twice, once keys of earlier calls are there."""
        if not isinstance(cache, Cache):
            raise TypeError(
                f"cache={cache!r}: expected a Cache() or WindowCache(...), one for each layer"
            )
        cache.belongs_to(self)
        if not itself and self.positions is not None and position_ids is None:
            raise MultiheadError(
                "position_ids: with a cache and a separate key= the positions of the queries are"
                " unknown; give position_ids="
            )
        if itself and isinstance(self.positions, PositionBias) and position_ids is not None:
            raise MultiheadError(
                "position_ids: a cache counts its tokens and keeps no other positions; leave"
                " position_ids= out, or turn keys with Rotary, which is done before they are stored"
            )
        if not isinstance(mask, IntervalMask):
            return
        if not itself and (mask.low, mask.high) != (None, None):
            raise MultiheadError(
                "mask speaks of distances, but with a cache and a key= of its own the layer can't"
                " know where its rows stand; give padding(...) or a dense mask"
            )
        if itself and cache.length and mask.high == 1 + cache.length:
            raise MultiheadError(
                f"mask is causal(offset={cache.length}), but the layer itself counts the"
                f" {cache.length} tokens of the cache, so rows would read those after them; give"
                " causal()"
            )

    def _with_bias_kv(
        self, q: Tensor, out: Tensor, lse: Tensor, weights: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """What was read, joined with the one further key and value: two softmaxes make one by their
        log-sum-exps.
        """
        assert self.bias_k is not None and self.bias_v is not None
        share = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(share, 0) for x in (self.bias_k, self.bias_v))  # [H, E]
        score = (q.to(lse.dtype) * k[:, None].to(lse.dtype)).sum(-1) * self.head_dim**-0.5
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        total = torch.logaddexp(lse, score)
        kept, further = torch.exp(lse - total)[..., None], torch.exp(score - total)[..., None]
        weights = None if weights is None else weights * kept.to(weights.dtype)
        further = nn.functional.dropout(further, dropout)
        return (out * kept + further * v[:, None]).to(out.dtype), weights


def _hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see or change what a module takes or gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _positions(x: Tensor, offset: int | Tensor) -> Tensor:
    """Of the rows of x `[B, L, D]`: `[L]`, or `[B, L]` where the rows of the batch differ; 0 for
    padding on the left.
    """
    number = torch.arange(x.shape[1], device=x.device)
    return (
        (number + offset[:, None]).clamp(min=0) if isinstance(offset, Tensor) else number + offset
    )


def _with_padding(
    mask: IntervalMask | Tensor | None, valid: Tensor, length: int, keys: int
) -> IntervalMask | Tensor:
    rule = padding(valid=valid)
    if isinstance(mask, Tensor):
        return mask & rule.dense(length, keys, mask.device)
    return rule if mask is None else mask & rule
