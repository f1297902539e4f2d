"""Rotary position encoding: `Rotary`, the module, and `rotate`, the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.tensors import TensorLike, require_tensor
from .position_ids import fit_axes
from .require import require_number, require_positive_int, to_position_ids
from .rope_scaling import AXES, axis_of_pairs, parse_scaling, scaled_frequencies

__all__ = ["Rotary", "rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of every head by angles with these cosines and sines (Su et al. 2021,
    equation 34).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). The first R components of a head are
    rotated, R being twice the width of `cos`; the others pass through ("partial rotary").

    Args:
        x: queries or keys `[B, H, L, E]`, floating.
        cos: `[L, R/2]`, or `[B, L, R/2]` if the sequences differ; floating, R at most E.
        sin: of the same shape.
        interleaved: whether pair p consists of the components 2 p and 2 p + 1 (GPT-J, Cohere,
            DeepSeek) rather than p and p + R/2 ("rotate half": Llama and most others).

    Returns:
        `[B, H, L, E]` in the dtype of `x`. The products are computed in float32 or better, and
        rounded once.

    Raises:
        MultiheadError: shapes that don't fit together, with both of them.
        TypeError: integers.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # 90 degrees, for one pair of two
    >>> rotate(x, *quarter).flatten()
    tensor([-2.,  1.,  3.,  4.])
    """
    _check_rotation(x, cos, sin)
    return _turn(x, *_for_heads(cos, sin), interleaved)


def rotate_both(
    positions: Any, q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """`positions(q, cos_sin=cos_sin)` and the same of the keys of the same tokens, checked once."""
    if type(positions).forward is not Rotary.forward or is_hooked(positions):
        return positions(q, cos_sin=cos_sin), positions(k, cos_sin=cos_sin)
    positions.check_angles(cos_sin)
    _check_rotation(q, *cos_sin)
    cos, sin = _for_heads(*cos_sin)
    return _turn(q, cos, sin, positions.interleaved), _turn(k, cos, sin, positions.interleaved)


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        require_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name} is {tensor.dtype}: expected a floating dtype; convert it first,"
                f" {name}.float()"
            )
    if x.dim() != 4:
        raise MultiheadError(f"x{list(x.shape)}: expected [B, H, L, E]; split the heads first")
    if cos.shape != sin.shape:
        raise MultiheadError(
            f"cos{list(cos.shape)} and sin{list(sin.shape)}: expected one shape; take both from the"
            " same angles"
        )
    batch, _, length, width = x.shape
    half = cos.shape[-1] if cos.dim() else 0
    if (
        cos.dim() not in (2, 3)
        or cos.shape[-2] != length
        or (cos.dim() == 3 and cos.shape[0] not in (1, batch))
    ):
        raise MultiheadError(
            f"cos{list(cos.shape)}: expected [L, R/2] or [B, L, R/2] with L={length} and B={batch},"
            f" as in x{list(x.shape)}; give one row of angles for each position of x"
        )
    if 2 * half > width:
        raise MultiheadError(
            f"cos{list(cos.shape)} rotates {half} pairs, which need a width of at least {2 * half},"
            f" but x{list(x.shape)} has E={width}; give one angle for each pair, not for each"
            " component"
        )


def _for_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, 1, L, R/2]` or `[L, R/2]`: the same for all heads."""
    return (cos.unsqueeze(1), sin.unsqueeze(1)) if cos.dim() == 3 else (cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`rotate` without checks, with angles for all heads."""
    width, half = x.shape[-1], cos.shape[-1]
    rest = None if 2 * half == width else x[..., 2 * half :]
    rotated = x if rest is None else x[..., : 2 * half]
    rotated = rotated.to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    if pair[0].dtype != x.dtype:
        pair = pair[0].to(x.dtype), pair[1].to(x.dtype)
    if interleaved:
        joined = torch.stack(pair, dim=-1).flatten(-2)
        return joined if rest is None else torch.cat((joined, rest), dim=-1)
    return torch.cat(pair if rest is None else (*pair, rest), dim=-1)


class Rotary(nn.Module):
    """Rotary position encoding (Su et al. 2021): rotates pair p of every head by
    `position * theta ** (-2 p / rotary_dim)` radians.

    Scores of queries and keys rotated this way depend on the distance of their positions alone.

    `scaling` stretches the angles for sequences longer than those of training, as `rope_scaling` or
    `rope_parameters` in a checkpoint's config.json describe it; pass that mapping unchanged (and
    `theta=` too, if config.json has `rope_theta` next to it and not in it). `rope_type` (or `type`)
    is one of:

    - "default": no scaling.
    - "linear" (Chen et al. 2023): all frequencies divided by `factor`.
    - "dynamic" (NTK-aware, as in transformers): beyond `original_max_position_embeddings` = M
      positions, theta grows with the length n = largest position + 1 by `(1 + factor * (n - M) / M)
      ** (rotary_dim / (rotary_dim - 2))`. n is that of the whole batch of one call and isn't
      remembered. config.json has M elsewhere, as `max_position_embeddings`.
    - "yarn" (Peng et al. 2023, section 3.2): pairs with fewer than `beta_slow` (1) turns within
      `original_max_position_embeddings` are divided by `factor`, those with more than `beta_fast`
      (32) turns are kept, with a ramp between, whose ends are whole pairs if `truncate` (True).
      Cosines and sines are multiplied by `attention_factor`: 0.1 ln(factor) + 1 unless given, or
      the ratio of `0.1 m ln(factor) + 1` for m = `mscale` and m = `mscale_all_dim` if both are
      given. (A model that also scales its scores, as DeepSeek's, does that itself.)
    - "llama3" (Llama 3.1): the same between `low_freq_factor` and `high_freq_factor` turns, linear
      in the number of turns.
    - "longrope" (Ding et al. 2024, Phi-3): pair p is divided by `short_factor[p]`, in a call with a
      position of `original_max_position_embeddings` or more by `long_factor[p]`. As with "dynamic"
      that is the largest position of the whole batch of one call, so keys in a cache keep the
      factors of the call that stored them. Cosines and sines are multiplied by `attention_factor`:
      sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) unless given. config.json has
      `factor` elsewhere, as `max_position_embeddings / original_max_position_embeddings`.
    - "proportional" (Gemma 4): `partial_rotary_factor` of all pairs (p, p + head_dim / 2), the
      first ones, are rotated, with the frequencies of all of `head_dim`, divided by `factor` (1).

    `rope_theta` in `scaling` sets theta, and `partial_rotary_factor` sets `rotary_dim` to that
    share of `head_dim`. A key whose value is None counts as absent.

    `mrope_section`, with any type, gives each pair one of three positions (Qwen2-VL, Wang et al.
    2024, section 2.1): the first of its three numbers of pairs turn by time, then those by height
    and width; with `mrope_interleaved` (Qwen3-VL) height has the pairs 1, 4, 7, ..., width 2, 5,
    8, ..., and time the others. Text has one position, the same along all three. (Ernie 4.5 VL and
    HunYuan-VL use the same key for other orders, which are not these.)

    Args:
        head_dim: width E of a head.
        theta: base of the angles.
        rotary_dim: number of components of a head that are rotated, even; all unless given.
        interleaved: whether neighbours (2 p, 2 p + 1) form a pair, rather than (p, p + rotary_dim /
            2); see `rotate`.
        scaling: how the angles are scaled; not at all unless given.

    Shapes: `x` [B, H, L, E] -> [B, H, L, E], with integer `positions` [L] or [B, L] (0 .. L-1
    unless given, with `mrope_section` also [3, L] or [3, B, L]), or with `cos_sin`, what the method
    of this name gives for them. Angles are computed in float32 whatever the dtype of `x` or of the
    module, which has no parameters and no buffers.

    Raises:
        MultiheadError: sizes that don't fit, a `theta` that isn't positive, a `scaling` of an
            unknown type, with missing or unknown keys, values out of range, lists of another
            length, or another theta or width than the arguments; positions [3, L] for a batch of 3,
            which have two meanings.
        TypeError: values that aren't numbers, and positions that aren't integers.

    >>> rotary = Rotary(4)
    >>> x = torch.randn(1, 2, 3, 4)
    >>> torch.equal(rotary(x)[:, :, 0], x[:, :, 0])  # position 0 isn't rotated
    True
    >>> longer = Rotary(4, scaling={"rope_type": "linear", "factor": 2.0})
    >>> torch.allclose(longer(x, torch.tensor([0, 2, 4])), rotary(x))
    True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require_positive_int("head_dim", head_dim)
        require_number("theta", theta, "be positive, for instance 10000.0", above=0.0)
        entries = parse_scaling(scaling)
        share = entries.get("partial_rotary_factor")
        if entries["rope_type"] == "proportional":  # the share of the pairs, not of the width
            if rotary_dim not in (None, head_dim):
                raise MultiheadError(
                    f"rotary_dim={rotary_dim}: rope_type='proportional' pairs the components of all"
                    f" of head_dim={head_dim}; leave rotary_dim out, and give the share that is"
                    " rotated as scaling['partial_rotary_factor']"
                )
            if share is not None and not int(share * head_dim // 2):
                raise MultiheadError(
                    f"scaling['partial_rotary_factor']={share} rotates none of the {head_dim // 2}"
                    f" pairs of head_dim={head_dim}; give at least {2 / head_dim:.2g}, or no Rotary"
                )
            share = None
        else:
            entries.pop("partial_rotary_factor", None)
        rotary_dim = _choose_rotary_dim(head_dim, rotary_dim, share)
        scaling_theta = entries.pop("rope_theta", theta)
        # The default counts as not given, so that a checkpoint's mapping is enough.
        if theta not in (10000.0, scaling_theta):
            raise MultiheadError(
                f"theta={theta}, but scaling['rope_theta']={scaling_theta}; give only one of them"
            )
        self.head_dim = head_dim
        self.theta = float(scaling_theta)
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.rope_type: str = entries.pop("rope_type")
        self.scaling = entries
        self.attention_factor = 1.0
        if self.rope_type == "yarn" and self.theta <= 1.0:
            raise MultiheadError(
                f"theta={self.theta}: rope_type='yarn' needs a base above 1, for instance 10000.0"
            )
        if self.rope_type == "dynamic" and rotary_dim < 4:
            raise MultiheadError(
                f"rotary_dim={rotary_dim}: rope_type='dynamic' scales all pairs but the first; give"
                " at least 4, or no scaling"
            )
        # Numbers, not a buffer, which module.to(torch.bfloat16) would round.
        self._frequencies: tuple[float, ...] | None = None
        if self.rope_type not in ("default", "dynamic"):
            self._frequencies, self.attention_factor = scaled_frequencies(
                rotary_dim, self.theta, self.rope_type, entries
            )
        self._long_frequencies: tuple[float, ...] | None = None
        if self.rope_type == "longrope":
            self._long_frequencies, _ = scaled_frequencies(
                rotary_dim, self.theta, self.rope_type, entries, long=True
            )
        self._axis_of_pairs = axis_of_pairs(rotary_dim, entries)

    @property
    def num_axes(self) -> int:
        """Number of axes of a position: 3 with `mrope_section`, else 1."""
        return 1 if self._axis_of_pairs is None else AXES

    def extra_repr(self) -> str:
        parts = [f"head_dim={self.head_dim}, theta={self.theta}"]
        if self.rotary_dim != self.head_dim:
            parts.append(f"rotary_dim={self.rotary_dim}")
        if self.interleaved:
            parts.append("interleaved=True")
        if self.rope_type != "default" or self.scaling:
            shown = {
                key: f"{len(value)} numbers" if key.endswith("t_factor") else value
                for key, value in self.scaling.items()
            }
            parts.append(f"scaling={dict(rope_type=self.rope_type, **shown)}")
        return ", ".join(parts)

    def frequencies(self, positions: TensorLike) -> Tensor:
        """Radians per position of each pair: `[rotary_dim / 2]`, float32, on the device of
        `positions`, whose values matter for "dynamic" and "longrope" scaling only.

        >>> Rotary(4, theta=100.0).frequencies(torch.arange(3))
        tensor([1.0000, 0.1000])
        """
        positions = to_position_ids("positions", positions, "L", num_axes=self.num_axes)
        device = positions.device
        if self._frequencies is not None:
            found = torch.tensor(self._frequencies, dtype=torch.float32, device=device)
            if self._long_frequencies is None:
                return found
            long = torch.tensor(self._long_frequencies, dtype=torch.float32, device=device)
            trained = self.scaling["original_max_position_embeddings"]
            return torch.where(self._length(positions, trained) > trained, long, found)
        pairs = torch.arange(0, self.rotary_dim, 2, device=device, dtype=torch.float32)
        plain: Tensor = 1.0 / self.theta ** (pairs / self.rotary_dim)
        if self.rope_type == "default":
            return plain
        factor = self.scaling["factor"]
        trained = self.scaling["original_max_position_embeddings"]
        growth = 1.0 + factor * (self._length(positions, trained) - trained) / trained
        return plain * growth ** (-pairs / (self.rotary_dim - 2))

    @staticmethod
    def _length(positions: Tensor, trained: int) -> Tensor:
        """One more than the largest position, and at least the length of training, also for no
        positions at all.
        """
        return (
            F.pad(positions.to(torch.float32).flatten(), (0, 1), value=trained - 1.0).amax(0) + 1.0
        )

    def cos_sin(self, positions: TensorLike) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, for `rotate`: layers can share them.

        Shapes: integer `positions` [L] or [B, L] -> twice [L, rotary_dim / 2] or [B, L, rotary_dim
        / 2], float32; with `mrope_section` from [L], [3, L] or [3, B, L].

        >>> x, rotary, positions = torch.randn(1, 2, 3, 4), Rotary(4), torch.arange(3)
        >>> torch.equal(rotate(x, *rotary.cos_sin(positions)), rotary(x, positions))
        True
        """
        positions = to_position_ids("positions", positions, "L", num_axes=self.num_axes)
        # float32 whatever the dtype of x: bfloat16 can't distinguish positions from 256 on.
        place = positions.to(torch.float32).unsqueeze(-1)
        if self._axis_of_pairs is not None and positions.dim() > 1:
            if positions.shape[0] != AXES:
                raise MultiheadError(
                    f"positions{list(positions.shape)}: expected [L], [{AXES}, L] or [{AXES}, B,"
                    f" L]; for text give positions.expand({AXES}, *positions.shape)"
                )
            axes = torch.tensor(self._axis_of_pairs, device=positions.device)
            place = place[axes, ..., 0].movedim(0, -1)  # [L, R/2] or [B, L, R/2]
        angle = place * self.frequencies(positions)
        cos, sin = angle.cos(), angle.sin()
        if self.attention_factor == 1.0:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor

    def forward(
        self,
        x: Tensor,
        positions: TensorLike | None = None,
        *,
        cos_sin: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        require_tensor("x", x)
        length, width = x.shape[-2:]
        if width != self.head_dim:
            raise MultiheadError(
                f"x is {width} wide in its last axis, but head_dim={self.head_dim}; split the heads"
                " first"
            )
        if cos_sin is not None:
            return self._rotate(x, positions, cos_sin)
        if positions is None:
            positions = torch.arange(length, device=x.device)
        positions = to_position_ids("positions", positions, "L", x.device, num_axes=self.num_axes)
        if self.num_axes > 1:
            positions = fit_axes("positions", positions, x.shape[0], length, self.num_axes)
        fits_batch = positions.dim() == 1 or positions.shape[-2] in (1, x.shape[0])
        if positions.shape[-1] != length or not fits_batch:
            raise MultiheadError(
                f"positions{list(positions.shape)}: expected [L={length}] or [B={x.shape[0]},"
                f" L={length}], as in x{list(x.shape)}; give one position for each vector of x"
            )
        cos, sin = self.cos_sin(positions.to(x.device))
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def _rotate(self, x: Tensor, positions: object, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate by angles that were computed before."""
        if positions is not None:
            raise MultiheadError(
                f"positions={positions!r} and cos_sin=: the cosines are those of positions; give"
                " one of the two"
            )
        self.check_angles(cos_sin)
        return rotate(x, *cos_sin, interleaved=self.interleaved)

    def check_angles(self, cos_sin: Any) -> None:
        """Check angles that were computed before.

        Raises:
            TypeError: anything but two tensors.
            MultiheadError: of another width.
        """
        is_pair = isinstance(cos_sin, tuple) and len(cos_sin) == 2
        if not is_pair or not isinstance(cos_sin[0], Tensor):
            raise TypeError(
                f"cos_sin={cos_sin!r}: expected two tensors, cosines and sines, as"
                " Rotary.cos_sin(positions) returns them"
            )
        if cos_sin[0].shape[-1:] != (self.rotary_dim // 2,):
            raise MultiheadError(
                f"cos_sin has cosines{list(cos_sin[0].shape)}: expected [L, {self.rotary_dim // 2}]"
                f" or [B, L, {self.rotary_dim // 2}], one for each pair of rotary_dim="
                f"{self.rotary_dim}"
            )


def _choose_rotary_dim(head_dim: int, rotary_dim: int | None, share: float | None) -> int:
    """`rotary_dim`, or that share of `head_dim`, or `head_dim`."""
    if share is not None:
        from_share = int(head_dim * share)
        if rotary_dim not in (None, from_share):
            raise MultiheadError(
                f"rotary_dim={rotary_dim}, but scaling['partial_rotary_factor']={share} of"
                f" head_dim={head_dim} is {from_share}; give only one of them"
            )
        rotary_dim = from_share
    if rotary_dim is None:
        if head_dim % 2:
            raise MultiheadError(
                f"head_dim={head_dim}: rotary positions rotate pairs of components; give an even"
                " head_dim"
            )
        rotary_dim = head_dim
    require_positive_int("rotary_dim", rotary_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise MultiheadError(
            f"rotary_dim={rotary_dim}: rotary positions rotate pairs of the components of a head;"
            f" give an even number, at most head_dim={head_dim}"
        )
    return rotary_dim
