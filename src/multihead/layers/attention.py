"""`MultiHeadAttention`, the layer: projections, position encodings, caches, around the operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.call import split_mask_bias
from ..ops.functional import attention
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import IntervalMask
from ..ops.nested import is_nested
from ..ops.numbers import default_scale, to_dropout, to_softcap
from ..ops.slopes import AlibiBias, dense
from ..ops.tensors import TensorLike
from .cache import Cache
from .inputs import check_cache, check_inputs, join_masks, with_padding
from .norms import create_norm, spans_heads
from .options import (
    check_cos_sin,
    check_options,
    check_position_encoding,
    check_sizes,
    describe_options,
    to_clip,
    to_scale,
)
from .packed import attend_packed
from .position_bias import PositionBias
from .position_ids import count_positions
from .rotary import is_hooked, rotate_both
from .visible_keys import Quantization, attend

if TYPE_CHECKING:
    from .shard import HeadShard

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention: project, split into heads, attend, merge, project.

    For queries X `[B, L, D]` and keys and values from Z `[B, S, kdim]`, Z = X without `key`:

        Q = X W_Q   [B, L, H*E] -> [B, H, L, E]          K, V from Z likewise, with G heads
        s = scale * Q K^T       [B, H, L, S]             softcap * tanh(s / softcap) if softcap
        P = softmax(s + bias)   0 where the mask hides   a query without a key has P = 0
        O_h = P_h V_g(h)        g(h) = h // (H / G)
        Y = merge(O) W_O        = sum over h of O_h W_O^(h)

    G = H is multi-head, 1 < G < H grouped-query and G = 1 multi-query attention:

        query heads       0 1 2 3     0 1 2 3     0 1 2 3
                          | | | |      \\| |/       \\| |/
        key/value heads   0 1 2 3     0   1         0
                          MHA, G = H  GQA, G = 2    MQA, G = 1

    B batch, L query length, S key length, D `embed_dim`, H `num_heads`, G `num_kv_heads`,
    E `head_dim`, scale 1 / sqrt(E) unless given; W_O^(h) is rows h*E to (h+1)*E of W_O. The four
    projections are separate modules that are called as such, so hooks, adapters and quantised
    replacements work. Batch first, weights of each head, and one definition in training and
    evaluation (Vaswani et al. 2017; grouped: Ainslie et al. 2023).

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
        qk_norm: norm of queries and keys before positions, over the width of each head: "rms" (Qwen
            3, Gemma 3), "layer" (ViT-22B), or a callable that creates one from `head_dim`;
            "rms_each" and "layer_each" (Cohere) have separate weights for each head, "rms_all"
            (OLMo 2) and "layer_all" are over all heads side by side.
        clip_qkv: queries, keys and values are clipped to -clip_qkv .. clip_qkv (OLMo, DBRX), after
            a norm and before positions.
        scale: factor of the scores, 1 / sqrt(E) unless given (T5: 1).
        mask: an interval mask that holds in every call, together with that of the call. Mistral's
            is `causal() & window(left=4095)`. It may be changed later, `layer.mask`.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks: whether each head learns a logit, 0 at first, that joins its softmax and reads
            nothing (gpt-oss).
        gate: a sigmoid gate, computed from the query, on the head outputs: one number a "head", or
            "elementwise" (Qwen 3 Next).
        bias_kv: whether each head learns one further key and value that every query may read, as
            in `nn.MultiheadAttention`.
        dropout: share of the attention weights that is dropped in training.
        out_dropout: share of the output that is dropped in training (GPT-2's `resid_pdrop`).

    Raises:
        MultiheadError: sizes that don't divide, with both numbers; inputs whose shapes don't fit.
        TypeError: arguments of another type.

    >>> layer = MultiHeadAttention(8, 2)
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    # a reading replaces it for a while
    operator: Callable[..., Any] = staticmethod(attention)
    shard: HeadShard | None = None  # the heads of this rank, where parallel_plan divided them

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
        clip_qkv: float | None = None,
        scale: float | None = None,
        mask: IntervalMask | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: str | None = None,
        bias_kv: bool = False,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
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
        check_options(qk_norm, gate, mask)
        check_position_encoding(positions, num_heads, head_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = default_scale(head_dim) if scale is None else to_scale(scale)
        self.mask = mask
        self.clip_qkv = None if clip_qkv is None else to_clip(clip_qkv)
        self.softcap = None if softcap is None else to_softcap(softcap)
        self.gate = gate
        self.dropout, self.out_dropout = to_dropout(dropout), to_dropout(out_dropout, "out_dropout")
        self.positions = positions
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        factory: Any = {"device": device, "dtype": dtype}

        self.q_proj = nn.Linear(embed_dim, width, bias=bias, **factory)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_width, bias=bias, **factory)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_width, bias=bias, **factory)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(width, out_dim or embed_dim, bias=out_bias, **factory)
        self.q_norm, self.k_norm = (
            create_norm(qk_norm, heads, head_dim, **factory) for heads in (num_heads, num_kv_heads)
        )
        self.norm_spans_heads = spans_heads(qk_norm)
        if gate is not None:
            gate_width = num_heads if gate == "head" else width
            self.gate_proj = nn.Linear(embed_dim, gate_width, bias=bias, **factory)
        self.sinks = nn.Parameter(torch.empty(num_heads, **factory)) if sinks else None
        self.bias_k, self.bias_v = (
            nn.Parameter(torch.empty(num_kv_heads, head_dim, **factory)) if bias_kv else None
            for _ in "kv"
        )
        self.reset_parameters()

    @classmethod
    def from_transformers(
        cls,
        module: nn.Module,
        *,
        is_causal: bool | None = None,
        is_cross: bool | None = None,
        has_positions: bool | None = None,
    ) -> MultiHeadAttention:
        """The layer that computes what an attention module of transformers computes, with copies
        of its weights, its dtype, device, `requires_grad` and training mode.

        `layer(x)` is what the module gives in its model: the layer has the mask (`causal()` in a
        decoder, and `window(...)`; none in an encoder) and the positions. Padding is `valid=`,
        another sequence `key=`, a position bias of another layer (T5's) `attn_bias=`. Of BERT give
        `attention`, whose update before dropout, sum and norm the layer computes, or
        `attention.self`, which has no output projection. Conversion proves itself on a random
        input, also of classes that it doesn't know; docs/attention.md has more.

        Args:
            module: an attention module, such as `model.model.layers[0].self_attn`.
            is_causal, is_cross, has_positions: whether queries read no later keys, keys are those
                of another sequence, and the model passes it cosines and sines; needed only where
                the module doesn't show it, which is an error.

        Raises:
            MultiheadError: what a layer can't express, with the class, the feature and its value.
            TypeError: anything but a module.

        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaAttention
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
        >>> MultiHeadAttention.from_transformers(LlamaAttention(config, 0)).positions
        Rotary(head_dim=8, theta=10000.0)
        """
        from .from_transformers.convert import to_attention

        made: MultiHeadAttention = to_attention(
            cls, module, is_causal=is_causal, is_cross=is_cross, has_positions=has_positions
        )
        return made

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
        return describe_options(self)

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
                unless `key` is given). They start at 0, or where the cache ends, unless given. With
                `Rotary(scaling={"mrope_section": ...})` also `[3, L]` or `[3, B, L]`; a cache that
                holds tokens needs them.
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
        return self._forward(
            query,
            key,
            value,
            mask=mask,
            rule=self.mask,
            attn_bias=attn_bias,
            position_ids=position_ids,
            cos_sin=cos_sin,
            cache=cache,
            valid=valid,
            return_weights=return_weights,
        )

    def _forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: IntervalMask | TensorLike | None,
        rule: IntervalMask | None = None,
        attn_bias: Tensor | AlibiBias | None = None,
        position_ids: TensorLike | None = None,
        key_ids: Tensor | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        valid: TensorLike | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward` of tensors that aren't nested; `rule` is the mask of the layer, `key_ids` the
        positions of a separate key, `[B, S]`, which are counted unless given.
        """
        is_self = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        position_ids, valid = check_inputs(self, query, key, value, position_ids, valid)
        if cos_sin is not None:
            check_cos_sin(self.positions, position_ids, is_self)
        mask, bias = split_mask_bias(mask, attn_bias, query, "attn_bias")
        if cache is not None:
            check_cache(self, cache, mask, position_ids, is_self)
        if self.shard is not None:
            query, key, value = self.shard.enter(query, key, value)
            mask = self.shard.of_heads("mask", mask, self.num_heads)
            bias = self.shard.of_heads("attn_bias", bias, self.num_heads)
        q, k, v = self._project(query, key, value)
        offset = 0 if cache is None else cache.offset(valid)
        q_ids = k_ids = None
        if self.positions is not None and cos_sin is not None:
            q, k = rotate_both(self.positions, q, k, cos_sin)
        elif self.positions is not None:
            q_ids = position_ids
            if q_ids is None:
                q_ids = count_positions(self.positions, query, offset if is_self else 0)
            k_ids = q_ids if is_self else key_ids
            if k_ids is None:
                k_ids = count_positions(self.positions, key, offset)
            if not isinstance(self.positions, PositionBias):
                q, k = self.positions(q, q_ids), self.positions(k, k_ids)
        if not isinstance(mask, Tensor):
            mask, rule = join_masks(mask, rule, query.shape[1], key.shape[1]), None
        elif cache is None:
            mask = join_masks(mask, rule, query.shape[1], key.shape[1])
        if cache is None and valid is not None:
            mask = with_padding(mask, valid, query.shape[1], key.shape[1])
        state, quantized = None if cache is None else cache.state(), None
        try:
            if cache is not None:
                visible = cache.update(k, v, valid)
                placed = visible if is_self else visible._replace(offset=0)
                mask = placed.to_mask(mask, bias, query.shape[1])
                if rule is not None:  # of a dense mask, whose keys are at their positions
                    mask = join_masks(
                        mask, rule.after(placed.offset), query.shape[1], visible.k.shape[2]
                    )
                k, v = visible.k, visible.v
                if isinstance(self.positions, PositionBias):
                    k_ids = visible.key_positions()
                quantized = visible.quantized
            if isinstance(self.positions, PositionBias):
                bias = self._add_position_bias(bias, q_ids, k_ids, q.dtype)
            with nullcontext() if self.shard is None else self.shard.drawing(self, q.device):
                out, weights = self._attend((q, k, v), mask, bias, return_weights, quantized)
            if cache is not None and out.requires_grad:
                cache.hold()
        except Exception:
            if cache is not None and state is not None:
                cache.restore(state)  # so that the call can be repeated
            raise
        if self.gate is not None:
            gate = torch.sigmoid(self.gate_proj(query))
            out = out * self._split(gate, self.num_heads)
        update = self.out_proj(merge_heads(out))
        if self.out_dropout and self.training:
            update = nn.functional.dropout(update, self.out_dropout)
        return update if weights is None else (update, weights)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, L, E]`, keys and values `[B, G, S, E]`, with their norms."""
        if self.shard is None:
            q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        else:
            project = self.shard.project
            q, k = project(self.q_proj, query), project(self.k_proj, key)
            v = project(self.v_proj, value)
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.norm_spans_heads:
            q, k = q_norm(q), k_norm(k)
        q, k, v = (
            self._split(x, n)
            for x, n in ((q, self.num_heads), (k, self.num_kv_heads), (v, self.num_kv_heads))
        )
        if q_norm is not None and k_norm is not None and not self.norm_spans_heads:
            q, k = q_norm(q), k_norm(k)
        if self.clip_qkv is not None:
            q, k, v = (x.clamp(-self.clip_qkv, self.clip_qkv) for x in (q, k, v))
        if self.shard is not None:
            k, v = (self.shard.own(x, self.num_kv_heads) for x in (k, v))
        return q, k, v

    def _split(self, x: Tensor, num_heads: int) -> Tensor:
        return split_heads(x, num_heads) if self.shard is None else self.shard.split(x, num_heads)

    def _own(self, x: Tensor) -> Tensor:
        """A parameter of each head, of those of this rank."""
        return x if self.shard is None else self.shard.parameter(x)

    def _add_position_bias(
        self,
        bias: Tensor | AlibiBias | None,
        q_ids: Tensor | None,
        k_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | AlibiBias:
        positions: Any = self.positions
        shard = self.shard
        # Without hooks, and without another bias, slopes need not become a dense bias.
        if bias is None and not is_hooked(positions):
            slopes = positions.to_alibi(q_ids, k_ids)
            if slopes is not None:
                return slopes if shard is None else shard.of_heads("slopes", slopes, self.num_heads)
        added: Tensor = positions(q_ids, k_ids)
        # tables return those of this rank
        if shard is not None and added.shape[1] == self.num_heads:
            added = shard.of_heads("positions", added, self.num_heads)
        other = dense(bias, dtype)
        return added if other is None else other + added

    def _attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: IntervalMask | Tensor | None,
        bias: Tensor | AlibiBias | None,
        return_weights: bool,
        quantized: Quantization | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The head outputs `[B, H, L, E]`, and the weights if they are requested."""
        dropout = self.dropout if self.training else 0.0
        result = attend(
            *qkv,
            mask,
            quantized=quantized,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self._own(self.sinks),
            dropout=dropout,
            return_lse=self.bias_k is not None,
            return_weights=return_weights,
        )
        out, *more = result if isinstance(result, tuple) else (result,)
        weights = more[-1] if return_weights else None
        if self.bias_k is None:
            return out, weights
        return self._with_bias_kv(qkv[0], out, more[0], weights, dropout)

    def _with_bias_kv(
        self, q: Tensor, out: Tensor, lse: Tensor, weights: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """Join the head outputs with the further key and value: two softmaxes are merged by their
        log-sum-exps.
        """
        assert self.bias_k is not None and self.bias_v is not None
        k, v = self._own(self.bias_k), self._own(self.bias_v)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in (k, v))  # [H, E]
        score = (q.to(lse.dtype) * k[:, None].to(lse.dtype)).sum(-1) * self.scale
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        # as torch.logaddexp, which torch.onnx's exporter by tracing lacks
        top = torch.maximum(lse, score).detach()
        total = top + torch.log(torch.exp(lse - top) + torch.exp(score - top))
        kept, further = torch.exp(lse - total)[..., None], torch.exp(score - total)[..., None]
        weights = None if weights is None else weights * kept.to(weights.dtype)
        further = nn.functional.dropout(further, dropout)
        return (out * kept + further * v[:, None]).to(out.dtype), weights
