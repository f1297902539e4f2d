"""`LatentAttention`, the layer whose keys and values of all heads come from one small latent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.call import split_mask_bias
from ..ops.heads import merge_heads, split_heads
from ..ops.masks import IntervalMask
from ..ops.nested import is_nested
from ..ops.numbers import default_scale, to_dropout
from ..ops.slopes import AlibiBias
from ..ops.tensors import TensorLike
from .cache import Cache
from .inputs import check_cache, check_width, join_masks, with_padding
from .norms import KINDS as NORMS
from .options import check_cos_sin, check_latent_options, to_scale
from .packed import attend_packed
from .position_ids import check_position_ids, count_positions
from .require import require_positive_int
from .rotary import Rotary
from .visible_keys import Quantization, attend, to_valid

if TYPE_CHECKING:
    from .shard import HeadShard

__all__ = ["LatentAttention"]

FORMS = ("auto", "absorbed", "expanded")
# How many times as many multiplications the absorbed form may take to be chosen: it writes no keys
# and values. Measured (benchmarks/latent.py), both forms take equally long at 1.2 times as many
# with 512 tokens held, at 1.6 to 2.2 with 4,096 and more.
MORE_MULTIPLICATIONS = 1.5


def absorbed_is_faster(length: int, keys: int, latent_dim: int, up_dim: int) -> bool:
    """Whether the absorbed form is chosen for `length` queries and `keys` keys, theirs included,
    that a cache holds: latents of R `latent_dim`, from which E + Ev `up_dim` numbers are projected.

    >>> absorbed_is_faster(1, 4096, 512, 256), absorbed_is_faster(4096, 4096, 512, 256)
    (True, False)
    """
    # Multiplications of a head: R (E + Ev) for each query in both forms, and for each key that is
    # held in the expanded one. Each query and key take E + r + Ev there, and 2 R + r in the
    # absorbed form.
    more = length * keys * (2 * latent_dim - up_dim)
    return more <= MORE_MULTIPLICATIONS * (keys - length) * latent_dim * up_dim


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values of all heads are
    projections of one latent a token, which is all that a cache holds, with a rotary key that all
    heads share.

    For inputs X `[B, L, D]`, with C their latents, R `kv_latent_dim`, r `rotary_dim`, E `head_dim`,
    and for each head h:

        C, K' = X W_DKV                     [B, L, R], [B, L, r]     C = norm(C)
        Q_h, Q'_h = X W_Q                   [B, L, E], [B, L, r]     or norm(X W_DQ) W_UQ
        K_h = C W_UK^(h)                    [B, L, E]
        V_h = C W_UV^(h)                    [B, L, Ev]
        s = scale * (Q_h K_h^T + rotate(Q'_h) rotate(K')^T)
        O_h = softmax(s) V_h                Y = merge(O) W_O

    That is the expanded form. The absorbed form computes the same without keys and values:

        s = scale * ((Q_h W_UK^(h)T) C^T + rotate(Q'_h) rotate(K')^T)
        O_h = (softmax(s) C) W_UV^(h)

    which is attention of all heads with one key/value head of the stored rows [C ; rotate(K')],
    read as they lie. It is used with a cache and few queries, where projecting all that the cache
    holds would take longer. Where `kv_up_proj` isn't a plain `nn.Linear` (adapters, quantised
    replacements, hooks, parametrizations), the expanded form is used, which calls it.

    Args:
        embed_dim: width D of the inputs and of the output.
        num_heads: number of heads H.
        kv_latent_dim: width R of the latent of keys and values.
        rotary_dim: width r of the rotary part of queries and keys, even.
        head_dim: width E of the other part.
        v_head_dim: width Ev of the values of a head; E unless given.
        q_latent_dim: width of a latent of the queries; no latent unless given.
        out_dim: width of the output; D unless given.
        bias: whether the projections of the inputs have a bias (those of latents have none).
        out_bias: whether the output projection has one; as `bias` unless given.
        positions: called on the rotary parts of queries and of the key, as in
            `MultiHeadAttention`: `Rotary(rotary_dim)` unless given.
        norm: norm of the latents: "rms" (DeepSeek), "layer", a callable that creates one from their
            width, or None.
        scale: factor of the scores, 1 / sqrt(E + r) unless given. (DeepSeek's models multiply it by
            the square of yarn's `0.1 mscale_all_dim ln(factor) + 1`.)
        mask: the keys that a query may read in every call, joined with the mask of the call.
        dropout: share of the attention weights that is dropped in training.

    Attributes:
        form: "auto"; "absorbed" or "expanded" for that form in every call.

    Raises:
        MultiheadError: sizes that don't fit, with both numbers; inputs whose shapes don't fit.
        TypeError: arguments of another type.

    >>> from multihead import Cache
    >>> from multihead.masks import causal
    >>> layer = LatentAttention(16, 4, kv_latent_dim=6, rotary_dim=2, head_dim=4)
    >>> x, cache = torch.randn(2, 3, 16), Cache()
    >>> layer(x, mask=causal(), cache=cache).shape
    torch.Size([2, 3, 16])
    >>> cache.nbytes == 4 * 2 * 3 * (6 + 2)  # float32 of 2 sequences of 3 tokens
    True
    """

    form = "auto"
    shard: HeadShard | None = None  # the heads of this rank, where parallel_plan divided them

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        # sizes
        kv_latent_dim: int,
        rotary_dim: int,
        head_dim: int,
        v_head_dim: int | None = None,
        q_latent_dim: int | None = None,
        out_dim: int | None = None,
        # projections
        bias: bool = False,
        out_bias: bool | None = None,
        # positions, norms, scores and weights
        positions: nn.Module | None = None,
        norm: str | Callable[[int], nn.Module] | None = "rms",
        scale: float | None = None,
        mask: IntervalMask | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "kv_latent_dim": kv_latent_dim,
            "rotary_dim": rotary_dim,
            "head_dim": head_dim,
            "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
            "q_latent_dim": embed_dim if q_latent_dim is None else q_latent_dim,
            "out_dim": embed_dim if out_dim is None else out_dim,
        }.items():
            require_positive_int(name, size)
        check_latent_options(positions, rotary_dim, norm, mask)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_latent_dim = kv_latent_dim
        self.rotary_dim = rotary_dim
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.q_latent_dim = q_latent_dim
        self.scale = default_scale(head_dim + rotary_dim) if scale is None else to_scale(scale)
        self.mask = mask
        self.dropout = to_dropout(dropout)
        self.positions = Rotary(rotary_dim) if positions is None else positions
        factory: Any = {"device": device, "dtype": dtype}

        def create_norm(width: int) -> nn.Module | None:
            if norm is None:
                return None
            return NORMS[norm](width, **factory) if isinstance(norm, str) else norm(width)

        q_width = num_heads * (head_dim + rotary_dim)
        if q_latent_dim is None:
            self.q_proj = nn.Linear(embed_dim, q_width, bias=bias, **factory)
        else:
            self.q_down_proj = nn.Linear(embed_dim, q_latent_dim, bias=bias, **factory)
            self.q_norm = create_norm(q_latent_dim)
            self.q_up_proj = nn.Linear(q_latent_dim, q_width, bias=False, **factory)
        self.kv_down_proj = nn.Linear(embed_dim, kv_latent_dim + rotary_dim, bias=bias, **factory)
        self.kv_norm = create_norm(kv_latent_dim)
        # of each head first the keys, then the values
        self.kv_up_proj = nn.Linear(
            kv_latent_dim, num_heads * (head_dim + self.v_head_dim), bias=False, **factory
        )
        self.out_proj = nn.Linear(
            num_heads * self.v_head_dim,
            embed_dim if out_dim is None else out_dim,
            bias=bias if out_bias is None else out_bias,
            **factory,
        )

    @classmethod
    def from_transformers(
        cls, module: nn.Module, *, is_causal: bool | None = None
    ) -> LatentAttention:
        """The layer that computes what a latent attention module of transformers computes
        (DeepSeek-V2, V3 and their relatives), with copies of its weights; proved and refused as by
        `MultiHeadAttention.from_transformers`.

        >>> from transformers import DeepseekV3Config
        >>> from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
        >>> sizes = dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=4)
        >>> widths = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
        >>> config = DeepseekV3Config(qk_nope_head_dim=4, v_head_dim=4, **widths, **sizes)
        >>> LatentAttention.from_transformers(DeepseekV3Attention(config, 0)).kv_latent_dim
        8
        """
        from .from_transformers.convert_latent import to_latent

        made: LatentAttention = to_latent(cls, module, is_causal=is_causal)
        return made

    def extra_repr(self) -> str:
        parts = [
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, rotary_dim={self.rotary_dim},"
            f" v_head_dim={self.v_head_dim}, kv_latent_dim={self.kv_latent_dim}"
        ]
        parts += [f"q_latent_dim={self.q_latent_dim}"] if self.q_latent_dim is not None else []
        if self.scale != default_scale(self.head_dim + self.rotary_dim):
            parts.append(f"scale={self.scale}")
        parts += [f"mask={self.mask}"] if self.mask is not None else []
        return ", ".join(parts + ([f"dropout={self.dropout}"] if self.dropout else []))

    def forward(
        self,
        query: Tensor,
        *,
        mask: IntervalMask | TensorLike | None = None,
        attn_bias: Tensor | AlibiBias | None = None,
        position_ids: TensorLike | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        valid: TensorLike | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to itself, and to what the cache holds.

        Args:
            query: `[B, L, D]`; or nested (jagged) `[B, j, D]`.
            mask: the keys that a query may read, as in `multihead.attention`; all unless given.
                With a cache it concerns all positions so far: `causal()` stays `causal()` at every
                step.
            attn_bias: floating numbers added to the scores, broadcast to `[B, H, L, S]`; or an
                `AlibiBias`.
            position_ids: integers `[L]` or `[B, L]`, as in `MultiHeadAttention`. They start at 0,
                or where the cache ends, unless given.
            cos_sin: instead of `position_ids`, `positions.cos_sin(position_ids)`, as there.
            cache: a `Cache` or `WindowCache` of this layer, as there. Its keys
                are `[B, 1, S, R + r]`, latents and rotated rotary keys, and its values of width 0.
            valid: bool `[B, L]`, the tokens that are real and not padding, as there.
            return_weights: also return the weights, those before dropout.

        Returns:
            `[B, L, out_dim]`, and with `return_weights` a tuple with the weights `[B, H, L, S]`.

        Raises:
            MultiheadError: shapes that don't fit; a mask that is meaningless with this cache;
                `form="absorbed"` where `kv_up_proj` isn't a plain `nn.Linear`.
            TypeError: inputs or a bias that aren't tensors.
        """
        if is_nested(query):
            return attend_packed(
                self,
                query,
                None,
                None,
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
        *,
        mask: IntervalMask | TensorLike | None,
        rule: IntervalMask | None = None,
        attn_bias: Tensor | AlibiBias | None = None,
        position_ids: TensorLike | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        valid: TensorLike | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward` of a tensor that isn't nested; `rule` is the mask of the layer."""
        check_width("query", query, self.kv_down_proj, "L")
        length = query.shape[1]
        if valid is not None:
            valid = to_valid(valid, query.shape[0], length, query.device)
        if position_ids is not None:
            position_ids = check_position_ids(self.positions, position_ids, query)
        if cos_sin is not None:
            check_cos_sin(self.positions, position_ids, True)
        mask, bias = split_mask_bias(mask, attn_bias, query, "attn_bias")
        if cache is not None:
            check_cache(self, cache, mask, position_ids, True)
        if self.shard is not None:
            mask = self.shard.of_heads("mask", mask, self.num_heads)
            bias = self.shard.of_heads("attn_bias", bias, self.num_heads)
        self._check_form()
        offset = 0 if cache is None else cache.offset(valid)
        if cos_sin is None and position_ids is None:
            position_ids = count_positions(self.positions, query, offset)
        q, rows = self._project(query, position_ids, cos_sin)
        if not isinstance(mask, Tensor) or cache is None:
            mask, rule = join_masks(mask, rule, length, length), None
        if cache is None and valid is not None:
            mask = with_padding(mask, valid, length, length)
        state, quantized = None if cache is None else cache.state(), None
        try:
            if cache is not None:
                visible = cache.update(rows, rows[..., :0], valid)
                mask, rows = visible.to_mask(mask, bias, length), visible.k
                if visible.quantized is not None:  # values are a part of the rows, scales too
                    quantized = visible.quantized._replace(v_scale=visible.quantized.k_scale)
                if rule is not None:  # of a dense mask, whose keys are at their positions
                    rule = rule.after(visible.offset)
                    mask = join_masks(mask, rule, length, rows.shape[2])
            with nullcontext() if self.shard is None else self.shard.drawing(self, q.device):
                absorbs = self._absorbs(length, 0 if cache is None else rows.shape[2])
                if quantized is not None and (not absorbs or self.shard is not None):
                    rows, quantized = quantized.keys_to_numbers(rows, q.dtype), None
                compute = self._attend_absorbed if absorbs else self._attend_expanded
                out, weights = compute(q, rows, mask, bias, return_weights, quantized)
            if cache is not None and out.requires_grad:
                cache.hold()
        except Exception:
            if cache is not None and state is not None:
                cache.restore(state)  # so that the call can be repeated
            raise
        update = self.out_proj(merge_heads(out))
        return update if weights is None else (update, weights)

    def _project(
        self, x: Tensor, ids: TensorLike | None, cos_sin: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Queries `[B, H, L, E + r]`, and rows `[B, 1, L, R + r]`, with rotated rotary parts."""
        if self.q_latent_dim is None:
            q = self.q_proj(x)
        else:
            latent = self.q_down_proj(x)
            q = self.q_up_proj(latent if self.q_norm is None else self.q_norm(latent))
        q = self._split(q)
        sizes = [self.kv_latent_dim, self.rotary_dim]
        latent, key = self.kv_down_proj(x).unsqueeze(1).split(sizes, -1)
        if self.kv_norm is not None:
            latent = self.kv_norm(latent).to(key.dtype)  # autocast may give another
        plain, rotary = q.split([self.head_dim, self.rotary_dim], -1)
        if cos_sin is not None:
            rotary, key = (self.positions(part, cos_sin=cos_sin) for part in (rotary, key))
        else:
            rotary, key = self.positions(rotary, ids), self.positions(key, ids)
        return torch.cat([plain, rotary], -1), torch.cat([latent, key], -1)

    def _split(self, x: Tensor) -> Tensor:
        shard = self.shard
        return split_heads(x, self.num_heads) if shard is None else shard.split(x, self.num_heads)

    # ---- The two forms

    def _check_form(self) -> None:
        if self.form not in FORMS:
            raise MultiheadError(f"form={self.form!r}: expected {', '.join(map(repr, FORMS))}")
        if self.form == "absorbed" and not self._can_absorb():
            raise MultiheadError(
                "form='absorbed' reads the weight of kv_up_proj, which isn't a plain nn.Linear"
                " without bias (an adapter, a quantised replacement, a parametrization, a hook);"
                " set form='auto'"
            )

    def _absorbs(self, length: int, keys: int) -> bool:
        """Whether the absorbed form computes a call of `length` queries and so many keys, 0 without
        a cache.
        """
        if self.form != "auto" or not keys or not self._can_absorb():
            return self.form == "absorbed"
        return absorbed_is_faster(length, keys, self.kv_latent_dim, self.head_dim + self.v_head_dim)

    def _can_absorb(self) -> bool:
        return _is_plain(self.kv_up_proj, self.shard is not None)

    def _attend_expanded(self, q: Tensor, rows: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        """Head outputs `[B, H, L, Ev]` and weights, of keys and values of each head."""
        if self.shard is not None:
            (rows,) = self.shard.enter(rows)
        latent, key = rows.split([self.kv_latent_dim, self.rotary_dim], -1)
        if self.shard is not None:
            key = self.shard.whole(key)
        up = self._split(self.kv_up_proj(latent[:, 0]))
        k, v = up.split([self.head_dim, self.v_head_dim], -1)
        k = torch.cat([k, key.to(k.dtype).expand(-1, k.shape[1], -1, -1)], -1)
        # side by side: many queries read the values again and again, and in the projection's output
        # each lies on another page (512 queries of 32,768 keys take 1.6 times as long)
        return self._attend(q, k, v.contiguous(), *rest)

    def _attend_absorbed(self, q: Tensor, rows: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
        """The same, of the rows as they lie: one key/value head, whose values are a part of its
        keys.
        """
        weight = self.kv_up_proj.weight
        if self.shard is not None:
            rows, weight = self.shard.whole(rows), self.shard.parameter(weight)
        weight = weight.unflatten(0, (-1, self.head_dim + self.v_head_dim))
        w_uk, w_uv = weight.split([self.head_dim, self.v_head_dim], 1)
        plain, rotary = q.split([self.head_dim, self.rotary_dim], -1)
        # not a product with an expanded W_UK, which would be copied for each sequence
        plain = torch.einsum("bhle,her->bhlr", plain, w_uk)
        q = torch.cat([plain, rotary.to(plain.dtype)], -1)
        out, weights = self._attend(q, rows, rows[..., : self.kv_latent_dim], *rest)
        return torch.einsum("bhlr,hvr->bhlv", out, w_uv), weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: IntervalMask | Tensor | None,
        bias: Tensor | AlibiBias | None,
        return_weights: bool,
        quantized: Quantization | None,
    ) -> tuple[Tensor, Tensor | None]:
        result = attend(
            q,
            k,
            v,
            mask,
            quantized=quantized,
            bias=bias,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
        return result if isinstance(result, tuple) else (result, None)  # type: ignore[return-value]


def _is_plain(module: nn.Module, is_divided: bool) -> bool:
    """Whether a module is a product with its weight and nothing else."""
    return (
        type(module) is nn.Linear
        and module.bias is None
        and (is_divided or type(module.weight) in (Tensor, nn.Parameter))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in vars(module)
    )
