"""KV caches in int8: a quarter of the memory of float32, and of the time that reading it takes.

Of each head and token the key, and the value, is a row of int8 with one float32 scale. Before
rounding, rows are multiplied with an orthonormal matrix, which spreads components that are far
larger than the others over all (as QuaRot does with a Hadamard matrix: Ashkboos et al. 2024,
section 3); queries enter the same basis, so that scores stay what they are, and head outputs leave
that of the values. Keys are stored as they come, after rotary positions: rotated once, not at every
step. docs/attention.md has what was measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MultiheadError
from .cache import Cache, WindowCache
from .visible_keys import Quantization, VisibleKeys, to_basis

__all__ = ["QuantizedCache", "QuantizedWindowCache"]

LARGEST = 127  # of the int8 numbers, on both sides
SCALE_BYTES = 4  # a float32 after each row, which so is filled up to whole fours


def create_basis(width: int, device: torch.device | None = None) -> Tensor:
    """The cosine transform (DCT-II) as an orthonormal matrix `[width, width]`, float32.

    >>> basis = create_basis(6)
    >>> torch.allclose(basis @ basis.T, torch.eye(6), atol=1e-6)
    True
    """
    index = torch.arange(width, dtype=torch.float64, device="cpu")
    angles = (index[:, None] + 0.5) * index * (math.pi / max(width, 1))
    basis = angles.cos() * (2.0 / max(width, 1)) ** 0.5
    basis[:, :1] *= 0.5**0.5
    return basis.to(device, torch.float32)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[..., E]` and float32 scales `[...]` of x `[..., E]`, E at least 1: the largest number
    of a row, by its absolute value, becomes 127.

    `|x - int8 * scale|` is at most half a scale. Rows of zeros stay zeros. A row with a number that
    isn't finite has such a scale too and zeros, so that it is NaN as a whole.

    >>> numbers, scale = quantize(torch.tensor([[0.5, -1.27]]))
    >>> numbers.tolist(), round(float(scale), 4)
    ([[50, -127]], 0.01)
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (x.abs().amax(-1) / LARGEST).to(torch.float32)
    # not 0, of zeros, and not subnormal
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (x / scale.unsqueeze(-1)).round()
    return numbers.nan_to_num(0.0).to(torch.int8), scale


class _Quantized(Cache if TYPE_CHECKING else object):  # type: ignore[misc]
    """A cache whose rows are int8 with their scales. The rest it inherits: a row with its scale is
    moved, copied, evicted and reordered as any other.
    """

    _k_basis: Tensor | None = None
    _v_basis: Tensor | None = None
    _widths: tuple[int, int] = (0, 0)  # E and Ev

    def _append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> VisibleKeys:
        turned = v.shape[3] > 0  # else values are a part of the keys (LatentAttention's)
        self._k_basis = self._basis(self._k_basis, k) if turned else None
        self._v_basis = self._basis(self._v_basis, v) if turned else None
        if turned and k.shape == v.shape and k.dtype == v.dtype:
            # at once, of a step's few numbers the time is that of the calls
            rows_k, rows_v = _pack(torch.stack([k, v]), self._k_basis).unbind(0)
        else:
            rows_k, rows_v = _pack(k, self._k_basis), _pack(v, self._v_basis)
        visible = super()._append(rows_k, rows_v, valid)
        stored_k, k_scale = _unpack(visible.k, k.shape[3])
        stored_v, v_scale = _unpack(visible.v, v.shape[3])
        self._widths = k.shape[3], v.shape[3]
        how = Quantization(k_scale, v_scale, self._k_basis, self._v_basis)
        return visible._replace(k=stored_k, v=stored_v, quantized=how)

    def _basis(self, basis: Tensor | None, x: Tensor) -> Tensor:
        if basis is None or basis.shape[0] != x.shape[3] or basis.device != x.device:
            return create_basis(x.shape[3], x.device)
        return basis

    def _check(self, k: Tensor, v: Tensor, valid: object) -> Tensor | None:
        found = super()._check(k, v, valid)
        for name, x in (("k", k), ("v", v)):
            if not x.is_floating_point():
                raise TypeError(
                    f"{name} is {x.dtype}: expected floating numbers, which the cache itself rounds"
                )
            if x.requires_grad and torch.is_grad_enabled():
                raise MultiheadError(
                    f"{name}{list(x.shape)} requires a gradient, but rounding to int8 has none;"
                    " call the layer under torch.no_grad(), or train with Cache() or WindowCache()"
                )
        return found

    def _check_fit(self, name: str, x: Tensor, old: Tensor) -> None:
        width = self._widths[name == "v"]
        if old.shape[:2] != x.shape[:2] or width != x.shape[3]:
            raise MultiheadError(
                f"{name}{list(x.shape)} doesn't fit the cache, which holds [B, G, tokens, width] ="
                f" {[*old.shape[:2], self.length, width]} in int8; every layer and every batch"
                " needs a separate cache"
            )


class QuantizedCache(_Quantized, Cache):
    """A `Cache` in int8, with a float32 scale for each head and token.

    Its memory is B G S (E + Ev + 8) bytes for S reserved tokens, with E and Ev rounded up to a
    multiple of 4; float32 takes B G S (E + Ev) 4. All queries, also those of the call that stores
    them, read the rounded keys and values, so that steps of any size give the same. On a CPU a
    decoding step reads int8 as it lies in memory.

    Keys and values of float64, float32, bfloat16 or float16 may be given in turn. A token of which
    a number isn't finite is NaN in all components of that head's key or value. Rounding has no
    gradient: keys or values that require one are refused under grad mode. Otherwise it is used
    like `Cache`.

    Args:
        max_length: number of tokens to reserve memory for at the first update; None to grow, by
            doubling.

    Raises:
        MultiheadError: as `Cache`; keys or values that require gradients.
        TypeError: keys or values that aren't floating numbers.

    >>> from multihead import MultiHeadAttention
    >>> from multihead.masks import causal
    >>> layer, x = MultiHeadAttention(128, 2), torch.randn(1, 50, 128)
    >>> cache, exact = QuantizedCache(max_length=50), Cache(max_length=50)
    >>> with torch.no_grad():
    ...     outputs = [layer(x, mask=causal(), cache=c) for c in (cache, exact)]
    >>> torch.allclose(*outputs, atol=0.02), cache.nbytes, exact.nbytes
    (True, 13600, 51200)
    """


class QuantizedWindowCache(_Quantized, WindowCache):
    """A `WindowCache` in int8, as `QuantizedCache` is a `Cache`: the last `left` tokens before the
    next one and the first `sinks`, in B G (left + 1 + sinks) (E + Ev + 8) bytes.

    Args:
        left: number of keys before its own that a query reads.
        sinks: number of first keys that every query reads as well.

    Raises:
        MultiheadError: numbers below 0; keys or values that require gradients.

    >>> cache = QuantizedWindowCache(left=2, sinks=1)
    >>> k = torch.randn(1, 1, 7, 4)
    >>> cache.update(k, k).k.dtype, cache.nbytes
    (torch.int8, 64)
    """


# ---- Rows: int8 numbers, filled up to whole fours, and the bytes of their scale


def _pack(x: Tensor, basis: Tensor | None) -> Tensor:
    """Rows `[..., bytes]` of x `[..., E]`."""
    x, width = x.detach(), x.shape[-1]
    if not width:
        return x.to(torch.int8)
    numbers, scale = quantize(to_basis(x.to(torch.promote_types(x.dtype, torch.float32)), basis))
    if width % SCALE_BYTES:
        numbers = F.pad(numbers, (0, -width % SCALE_BYTES))
    return torch.cat([numbers, scale.unsqueeze(-1).view(torch.int8)], -1)


def _unpack(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """int8 `[B, G, S, E]` and scales `[B, G, S]` of rows."""
    if not width:
        return rows, rows.new_ones(rows.shape[:3], dtype=torch.float32)
    return rows[..., :width], rows[..., -SCALE_BYTES:].view(torch.float32).squeeze(-1)
