"""`MultiHeadAttention`, the layer: projections, position encodings, caches, around the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.call import split_mask_bias
from ..ops.functional import attention
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import IntervalMask, padding
from ..ops.nested import is_nested
from ..ops.numbers import to_dropout, to_softcap
from ..ops.slopes import AlibiBias, dense
from ..ops.tensors import TensorLike, require_tensor
from .cache import Cache
from .options import NORMS, check_cos_sin, check_options, check_position_encoding, check_sizes
from .packed import attend_packed
from .position_bias import PositionBias
from .require import to_position_ids
from .visible_keys import to_valid

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention: project, split into heads, attend, merge, project.

    For queries X `[B, L, D]` and keys and values from Z `[B, S, kdim]`, Z = X without `key`:

        Q = X W_Q   [B, L, H*E] -> [B, H, L, E]          K, V from Z likewise, with G heads
        s = Q K^T / sqrt(E)     [B, H, L, S]             softcap * tanh(s / softcap) if softcap
        P = softmax(s + bias)   0 where the mask hides   a query without a key has P = 0
        O_h = P_h V_g(h)        g(h) = h // (H / G)
        Y = merge(O) W_O        = sum over h of O_h W_O^(h)

    G = H is multi-head, 1 < G < H grouped-query and G = 1 multi-query attention:

        query heads       0 1 2 3     0 1 2 3     0 1 2 3
                          | | | |      \\| |/       \\| |/
        key/value heads   0 1 2 3     0   1         0
                          MHA, G = H  GQA, G = 2    MQA, G = 1

    B batch, L query length, S key length, D `embed_dim`, H `num_heads`, G `num_kv_heads`,
    E `head_dim`; W_O^(h) is rows h*E to (h+1)*E of W_O. The four projections are separate modules
    that are called as such, so hooks, adapters and quantised replacements work. Batch first,
    weights of each head, and one definition in training and evaluation (Vaswani et al. 2017;
    grouped: Ainslie et al. 2023).

    Args:
        embed_dim: width D of the inputs and of the output.
        num_heads: number of query heads H.
        num_kv_heads: number of key/value heads G, a divisor of H; H unless given.
        head_dim: width E of a head; D / H unless given.
        kdim, vdim: widths of `key` and `value`; D unless given.
        out_dim: width of the output; D unless given.
        bias: whether the projections of queries, keys and values (and a gate) have a bias.
        out_bias: whether the output projection has one; as `bias` unless given.
        positions: a position encoding. A `PositionBias` (`ALiBi`, `T5Bias`, `RelativeBias`) is
            added to the scores; any other module, such as `Rotary`, is called on queries and on
            keys: `positions(x [B, H, L, E], position_ids [L] or [B, L])` -> `[B, H, L, E]`.
        qk_norm: norm over the width of each head of queries and keys, before positions: "rms"
            (Qwen 3, Gemma 3), "layer" (ViT-22B), or a callable that creates one from `head_dim`.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks: whether each head learns a logit, 0 at first, that joins its softmax and reads
            nothing (gpt-oss).
        gate: a sigmoid gate, computed from the query, on the head outputs: one number a "head", or
            "elementwise" (Qwen 3 Next).
        bias_kv: whether each head learns one further key and value that every query may read, as
            in `nn.MultiheadAttention`.
        dropout: share of the attention weights that is dropped in training.

    Raises:
        MultiheadError: sizes that don't divide, with both numbers; inputs whose shapes don't fit.
        TypeError: arguments of another type.

    >>> layer = MultiHeadAttention(8, 2)
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    # a reading replaces it for a while
    operator: Callable[..., Any] = staticmethod(attention)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        # sizes
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        # projections
        bias: bool = True,
        out_bias: bool | None = None,
        # positions, and changes of scores, weights and head outputs
        positions: nn.Module | None = None,
        qk_norm: str | Callable[[int], nn.Module] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: str | None = None,
        bias_kv: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim = check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kdim=kdim,
            vdim=vdim,
            out_dim=out_dim,
        )
        check_options(qk_norm, gate)
        check_position_encoding(positions, num_heads, head_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.softcap = None if softcap is None else to_softcap(softcap)
        self.gate = gate
        self.dropout = to_dropout(dropout)
        self.positions = positions
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        factory: Any = {"device": device, "dtype": dtype}

        def create_norm() -> nn.Module | None:
            if qk_norm is None:
                return None
            return qk_norm(head_dim) if callable(qk_norm) else NORMS[qk_norm](head_dim, **factory)

        self.q_proj = nn.Linear(embed_dim, width, bias=bias, **factory)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_width, bias=bias, **factory)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_width, bias=bias, **factory)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(width, out_dim or embed_dim, bias=out_bias, **factory)
        self.q_norm, self.k_norm = create_norm(), create_norm()
        if gate is not None:
            gate_width = num_heads if gate == "head" else width
            self.gate_proj = nn.Linear(embed_dim, gate_width, bias=bias, **factory)
        self.sinks = nn.Parameter(torch.empty(num_heads, **factory)) if sinks else None
        self.bias_k, self.bias_v = (
            nn.Parameter(torch.empty(num_kv_heads, head_dim, **factory)) if bias_kv else None
            for _ in "kv"
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the layer's direct parameters, `sinks` and `bias_kv`; its modules have their
        `reset_parameters`.
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
        mask: IntervalMask | TensorLike | None = None,
        attn_bias: Tensor | AlibiBias | None = None,
        position_ids: TensorLike | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        valid: TensorLike | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key`.

        Args:
            query: `[B, L, D]`; or nested (jagged) `[B, j, D]`, as are key and value then.
            key: `[B, S, kdim]`; the query unless given.
            value: `[B, S, vdim]`; the key unless given.
            mask: the keys that a query may read, as in `multihead.attention`; all unless given.
                With a cache it concerns all positions so far: `causal()` stays `causal()` at every
                step.
            attn_bias: floating numbers added to the scores, broadcast to `[B, H, L, S]`; or an
                `AlibiBias`.
            position_ids: integers `[L]` or `[B, L]`, positions of the queries (and of their keys,
                unless `key` is given). They start at 0, or where the cache ends, unless given.
            cos_sin: instead of `position_ids`, `positions.cos_sin(position_ids)` of a `Rotary`, for
                layers that share them: one computation serves all layers.
            cache: a `Cache` or `WindowCache` of this layer. The keys and values of this call are
                stored in it, and the queries read all that it holds; a call that fails stores
                nothing. If its sequences differ in length, or it evicts keys, masks must be those
                of distances, `causal()` and `window(...)`; column j of the weights is the key at
                `cache.key_positions[:, j]`.
            valid: bool `[B, S]`, the keys of this call that are real and not padding. They must be
                contiguous in each sequence; padding is not stored in a cache.
            return_weights: also return the weights, those before dropout.

        Returns:
            `[B, L, out_dim]`, and with `return_weights` a tuple with the weights `[B, H, L, S]`.

        Raises:
            MultiheadError: shapes that don't fit; position_ids without a position encoding; a mask
                that is meaningless with this cache.
            TypeError: inputs or a bias that aren't tensors. (The mask, position_ids and `valid` may
                be lists or NumPy arrays.)
        """
        if is_nested(query, key, value):
            return attend_packed(
                self,
                query,
                key,
                value,
                mask=mask,
                attn_bias=attn_bias,
                position_ids=position_ids,
                cos_sin=cos_sin,
                cache=cache,
                valid=valid,
                return_weights=return_weights,
            )
        is_self = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        position_ids, valid = self._check_inputs(query, key, value, position_ids, valid)
        if cos_sin is not None:
            check_cos_sin(self.positions, position_ids, is_self)
        mask, bias = split_mask_bias(mask, attn_bias, query, "attn_bias")
        if cache is not None:
            self._check_cache(cache, mask, position_ids, is_self)
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.num_kv_heads)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        offset = 0 if cache is None else cache.offset(valid)
        q_ids = k_ids = None
        if self.positions is not None and cos_sin is not None:
            q, k = (self.positions(x, cos_sin=cos_sin) for x in (q, k))
        elif self.positions is not None:
            q_ids = position_ids
            if q_ids is None:
                q_ids = _count_positions(query, offset if is_self else 0)
            k_ids = q_ids if is_self else _count_positions(key, offset)
            if not isinstance(self.positions, PositionBias):
                q, k = self.positions(q, q_ids), self.positions(k, k_ids)
        if cache is None and valid is not None:
            mask = _with_padding(mask, valid, query.shape[1], key.shape[1])
        state = None if cache is None else cache.state()
        try:
            if cache is not None:
                visible = cache.update(k, v, valid)
                placed = visible if is_self else visible._replace(offset=0)
                mask = placed.to_mask(mask, bias, query.shape[1])
                k, v, k_ids = visible.k, visible.v, visible.key_positions()
            if isinstance(self.positions, PositionBias):
                bias = self._add_position_bias(bias, q_ids, k_ids, q.dtype)
            out, weights = self._attend((q, k, v), mask, bias, return_weights)
            if cache is not None and out.requires_grad:
                cache.hold()
        except Exception:
            if cache is not None and state is not None:
                cache.restore(state)  # so that the call can be repeated
            raise
        if self.gate is not None:
            gate = torch.sigmoid(self.gate_proj(query))
            out = out * split_heads(gate, self.num_heads)
        update = self.out_proj(merge_heads(out))
        return update if weights is None else (update, weights)

    def _add_position_bias(
        self,
        bias: Tensor | AlibiBias | None,
        q_ids: Tensor | None,
        k_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | AlibiBias:
        positions: Any = self.positions
        # Without hooks, and without another bias, slopes need not become a dense bias.
        if bias is None and not _has_hooks(positions):
            slopes = positions.to_alibi(q_ids, k_ids)
            if slopes is not None:
                return slopes
        added: Tensor = positions(q_ids, k_ids)
        other = dense(bias, dtype)
        return added if other is None else other + added

    def _attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: IntervalMask | Tensor | None,
        bias: Tensor | AlibiBias | None,
        return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The head outputs `[B, H, L, E]`, and the weights if they are requested."""
        dropout = self.dropout if self.training else 0.0
        result = attention(
            *qkv,
            mask,
            bias=bias,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=dropout,
            return_lse=self.bias_k is not None,
            return_weights=return_weights,
        )
        out, *more = result if isinstance(result, tuple) else (result,)
        weights = more[-1] if return_weights else None
        if self.bias_k is None:
            return out, weights
        return self._with_bias_kv(qkv[0], out, more[0], weights, dropout)

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_ids: TensorLike | None,
        valid: TensorLike | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """`position_ids` and `valid` as tensors; raises unless all fit."""
        for name, x, module in (
            ("query", query, self.q_proj),
            ("key", key, self.k_proj),
            ("value", value, self.v_proj),
        ):
            hint = "a tensor (a mask is passed as mask=, a cache as cache=)"
            require_tensor(name, x, hint)
            width = getattr(module, "in_features", x.shape[-1] if x.ndim else 0)
            if x.ndim != 3 or x.shape[-1] != width:
                raise MultiheadError(
                    f"{name}{list(x.shape)}: expected [B, {'L' if name == 'query' else 'S'},"
                    f" {width}], batch first"
                )
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            raise MultiheadError(
                f"query{list(query.shape)}, key{list(key.shape)}, value{list(value.shape)}:"
                " expected one batch size, and one length of key and value; the first axis is the"
                " batch, the second the length"
            )
        if valid is not None:
            valid = to_valid(valid, key.shape[0], key.shape[1], key.device)
        if position_ids is None:
            return None, valid
        if self.positions is None:
            raise MultiheadError(
                f"position_ids={position_ids!r}, but this layer has no position encoding"
                " (positions=), so they would change nothing"
            )
        position_ids = to_position_ids("position_ids", position_ids, "L", query.device)
        if position_ids.shape not in ((query.shape[1],), tuple(query.shape[:2])):
            raise MultiheadError(
                f"position_ids{list(position_ids.shape)}: expected [L] or [B, L] ="
                f" {list(query.shape[:2])}"
            )
        return position_ids, valid

    def _check_cache(
        self,
        cache: Cache,
        mask: IntervalMask | Tensor | None,
        position_ids: Tensor | None,
        is_self: bool,
    ) -> None:
        """Check for what is unknown, or would be counted twice, once the cache holds keys."""
        if not isinstance(cache, Cache):
            raise TypeError(
                f"cache={cache!r}: expected a Cache() or WindowCache(...), one for each layer"
            )
        cache.claim(self)
        if not is_self and self.positions is not None and position_ids is None:
            raise MultiheadError(
                "position_ids: with a cache and a separate key= the positions of the queries are"
                " unknown; give position_ids="
            )
        if is_self and isinstance(self.positions, PositionBias) and position_ids is not None:
            raise MultiheadError(
                "position_ids: a cache counts its tokens and keeps no other positions; leave"
                " position_ids= out, or use Rotary, which rotates keys before they are stored"
            )
        if not isinstance(mask, IntervalMask):
            return
        if not is_self and (mask.low, mask.high) != (None, None):
            raise MultiheadError(
                "mask is one of distances, but with a cache and a separate key= the positions of"
                " the queries are unknown; give padding(...) or a dense mask"
            )
        if is_self and cache.length and mask.high == 1 + cache.length:
            raise MultiheadError(
                f"mask is causal(offset={cache.length}), but the layer itself counts the"
                f" {cache.length} tokens of the cache, so queries would read those after them; give"
                " causal()"
            )

    def _with_bias_kv(
        self, q: Tensor, out: Tensor, lse: Tensor, weights: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """Join the head outputs with the further key and value: two softmaxes are merged by their
        log-sum-exps.
        """
        assert self.bias_k is not None and self.bias_v is not None
        share = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(share, 0) for x in (self.bias_k, self.bias_v))  # [H, E]
        score = (q.to(lse.dtype) * k[:, None].to(lse.dtype)).sum(-1) * self.head_dim**-0.5
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        # as torch.logaddexp, which torch.onnx's exporter by tracing lacks
        top = torch.maximum(lse, score).detach()
        total = top + torch.log(torch.exp(lse - top) + torch.exp(score - top))
        kept, further = torch.exp(lse - total)[..., None], torch.exp(score - total)[..., None]
        weights = None if weights is None else weights * kept.to(weights.dtype)
        further = nn.functional.dropout(further, dropout)
        return (out * kept + further * v[:, None]).to(out.dtype), weights


# ---- Helpers of a call


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _count_positions(x: Tensor, offset: int | Tensor) -> Tensor:
    """Positions of x `[B, L, D]` from `offset` on: `[L]`, or `[B, L]` if sequences differ; 0 for
    padding on the left.
    """
    index = torch.arange(x.shape[1], device=x.device)
    if isinstance(offset, Tensor):
        return (index + offset[:, None]).clamp(min=0)
    return index + offset


def _with_padding(
    mask: IntervalMask | Tensor | None, valid: Tensor, length: int, num_keys: int
) -> IntervalMask | Tensor:
    rule = padding(valid=valid)
    if isinstance(mask, Tensor):
        return mask & rule.dense(length, num_keys, mask.device)
    return rule if mask is None else mask & rule
