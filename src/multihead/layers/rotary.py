"""Position encodings that a layer applies to its queries and keys."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MultiheadError

__all__ = ["Rotary", "rotate"]

# What each kind of scaling reads, in the words of a checkpoint's config.json: what it needs, and
# what it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}
_KEYS_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turns the pairs of every head by angles whose cosines and sines are given (Su et al. 2021,
    equation 34).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Only the first R components of a head are
    turned, R being twice the width of `cos`; the others pass through ("partial rotary").

    Args:
        x: queries or keys `[B, H, L, E]`, floating.
        cos: `[L, R/2]`, or `[B, L, R/2]` where the rows of the batch differ; floating, R at most E.
        sin: of the same shape.
        interleaved: whether pair p is made of the components 2 p and 2 p + 1 (GPT-J, Cohere,
            DeepSeek) rather than of p and p + R/2 ("rotate half": Llama and most others).

    Returns:
        `[B, H, L, E]` in the dtype of `x`. The products are computed in float32 or better, and
        rounded once.

    Raises:
        ValueError: for shapes that don't fit together, with both of them.
        TypeError: for integers.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # cosine and sine of 90 degrees, for one pair of the two
    >>> rotate(x, *quarter).flatten()
    tensor([-2.,  1.,  3.,  4.])
    """
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
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
            f" as in x{list(x.shape)}; give one row of angles for every position of x"
        )
    if 2 * half > width:
        raise MultiheadError(
            f"cos{list(cos.shape)} turns {half} pairs, which need a head at least {2 * half} wide,"
            f" but x{list(x.shape)} has E={width}; give one angle for each pair, not for each"
            " component"
        )
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, 1, L, R/2]: the same for all heads
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    turned = turned.to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    first, second = (
        (first * cos - second * sin).to(x.dtype),
        (second * cos + first * sin).to(x.dtype),
    )
    if interleaved:
        return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), rest), dim=-1)
    return torch.cat((first, second, rest), dim=-1)


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021): turns pair p of every head by `position * theta ** (-2 p /
    rotary_dim)` radians.

    Queries and keys turned this way have scores that depend on the distance of their positions
    alone.

    `scaling` stretches the angles for texts longer than the model was first trained on, as
    `rope_scaling` or `rope_parameters` in a checkpoint's config.json asks for; give that mapping as
    it is (and `theta=` too, where config.json has `rope_theta` beside it and not in it). With
    `rope_type` (or `type`):

    - "default": no stretching.
    - "linear" (Chen et al. 2023): all frequencies divided by `factor`.
    - "dynamic" (NTK-aware, as in transformers): beyond `original_max_position_embeddings` = M
      positions, theta grows with the length n = largest position + 1 by `(1 + factor * (n - M) / M)
      ** (rotary_dim / (rotary_dim - 2))`. n is taken over the whole batch of one call and not
      remembered. config.json has M elsewhere: `max_position_embeddings`.
    - "yarn" (Peng et al. 2023, section 3.2): pairs that turn less than `beta_slow` (1) times within
      `original_max_position_embeddings` are divided by `factor`, those that turn more than
      `beta_fast` (32) times are kept, with a ramp between, whose ends are whole pairs if `truncate`
      (True). Cosines and sines are multiplied by `attention_factor`: 0.1 ln(factor) + 1 unless
      given, or the ratio of `0.1 m ln(factor) + 1` for m = `mscale` and m = `mscale_all_dim` where
      both are there. (A model that scales its scores too, as DeepSeek's, does it itself.)
    - "llama3" (Llama 3.1): the same between `low_freq_factor` and `high_freq_factor` turns, even in
      the number of turns.

    `rope_theta` in `scaling` sets theta, and `partial_rotary_factor` sets `rotary_dim` to that
    share of `head_dim`. A key whose value is None counts as absent.

    Args:
        head_dim: width E of a head.
        theta: base of the angles.
        rotary_dim: how many of the first components of a head are turned, even; all of them unless
            given.
        interleaved: whether neighbours (2 p, 2 p + 1) form a pair, rather than (p, p + rotary_dim /
            2); see `rotate`.
        scaling: how the angles are stretched; not at all unless given.

    Shapes: `x` [B, H, L, E] -> [B, H, L, E], with integer `positions` [L] or [B, L] (0 .. L-1
        unless given). Angles are
    computed in float32 whatever the dtype of `x` or of the module, which has no weights and no
    buffers.

    Raises:
        ValueError: sizes that don't fit, a `theta` that is not positive, a `scaling` of an unknown
            type, with keys missing or unknown, values out of range, or another theta or width than
            the arguments give.
        TypeError: values that aren't numbers, and positions that aren't integers.

    >>> rotary = Rotary(4)
    >>> x = torch.randn(1, 2, 3, 4)
    >>> torch.equal(rotary(x)[:, :, 0], x[:, :, 0])  # position 0 turns nothing
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
        check_whole("head_dim", head_dim)
        _number("theta", theta, "be positive, for instance 10000.0", above=0.0)
        read = _read_scaling(scaling)
        share = read.pop("partial_rotary_factor", None)
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
                    f"head_dim={head_dim}: rotary positions turn pairs of components; give an even"
                    " head_dim"
                )
            rotary_dim = head_dim
        check_whole("rotary_dim", rotary_dim)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise MultiheadError(
                f"rotary_dim={rotary_dim}: rotary positions turn pairs of the components of a head;"
                f" give an even number, at most head_dim={head_dim}"
            )
        own_theta = read.pop("rope_theta", theta)
        # The default counts as not given, so that a checkpoint's mapping is enough; any other theta
        # was meant.
        if theta not in (10000.0, own_theta):
            raise MultiheadError(
                f"theta={theta}, but scaling['rope_theta']={own_theta}; give only one of them"
            )
        self.head_dim = head_dim
        self.theta = float(own_theta)
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.rope_type: str = read.pop("rope_type")
        self.scaling = read
        self.attention_factor = 1.0
        if self.rope_type == "yarn":
            if self.theta <= 1.0:
                raise MultiheadError(
                    f"theta={self.theta}: rope_type='yarn' needs a base above 1, for instance"
                    " 10000.0"
                )
            self.attention_factor = _yarn_attention_factor(read)
        if self.rope_type == "dynamic" and rotary_dim < 4:
            raise MultiheadError(
                f"rotary_dim={rotary_dim}: rope_type='dynamic' stretches all pairs but the first;"
                " give at least 4, or no scaling"
            )

    def extra_repr(self) -> str:
        parts = [f"head_dim={self.head_dim}, theta={self.theta}"]
        if self.rotary_dim != self.head_dim:
            parts.append(f"rotary_dim={self.rotary_dim}")
        if self.interleaved:
            parts.append("interleaved=True")
        if self.rope_type != "default":
            parts.append(f"scaling={dict(rope_type=self.rope_type, **self.scaling)}")
        return ", ".join(parts)

    def frequencies(self, positions: Tensor) -> Tensor:
        """By how many radians one position turns each pair: `[rotary_dim / 2]`, float32, on the
        device of `positions`.

        Only "dynamic" scaling looks at the values of `positions`.

        >>> Rotary(4, theta=100.0).frequencies(torch.arange(3))
        tensor([1.0000, 0.1000])
        """
        # Made here, not kept in a buffer, so that module.to(torch.bfloat16) cannot round them.
        pairs = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=torch.float32)
        plain: Tensor = 1.0 / self.theta ** (pairs / self.rotary_dim)
        if self.rope_type == "default":
            return plain
        factor = self.scaling["factor"]
        if self.rope_type == "linear":
            return plain / factor
        trained = self.scaling["original_max_position_embeddings"]
        if self.rope_type == "dynamic":
            # The trained length stands beside the positions as one more of them: no text counts as
            # shorter, none as empty.
            length = (
                F.pad(positions.to(torch.float32).flatten(), (0, 1), value=trained - 1.0).amax()
                + 1.0
            )
            growth = 1.0 + factor * (length - trained) / trained
            return plain * growth ** (-pairs / (self.rotary_dim - 2))
        if self.rope_type == "yarn":
            kept = 1.0 - _yarn_ramp(pairs / 2.0, self.rotary_dim, self.theta, self.scaling)
        else:  # llama3
            low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
            turns = trained / (
                2.0 * math.pi / plain
            )  # rounded as where the checkpoints were trained
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1.0 - kept) * plain / factor + kept * plain

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, for `rotate`; where many layers share them, they need
        computing only once.

        Shapes: integer `positions` [L] or [B, L] -> twice [L, rotary_dim / 2] or [B, L, rotary_dim
            / 2], float32.

        >>> x, rotary, positions = torch.randn(1, 2, 3, 4), Rotary(4), torch.arange(3)
        >>> torch.equal(rotate(x, *rotary.cos_sin(positions)), rotary(x, positions))
        True
        """
        check_positions("positions", positions, "L")
        # float32 whatever the dtype of x: in bfloat16 the positions from 256 on would no longer be
        # told apart.
        angle = positions.to(torch.float32).unsqueeze(-1) * self.frequencies(positions)
        cos, sin = angle.cos(), angle.sin()
        return (
            (cos, sin)
            if self.attention_factor == 1.0
            else (cos * self.attention_factor, sin * self.attention_factor)
        )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        length, width = x.shape[-2:]
        if width != self.head_dim:
            raise MultiheadError(
                f"x is {width} wide in its last axis, but head_dim={self.head_dim}; split the heads"
                " first"
            )
        if positions is None:
            positions = torch.arange(length, device=x.device)
        check_positions("positions", positions, "L")
        if positions.shape[-1] != length or (
            positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])
        ):
            raise MultiheadError(
                f"positions{list(positions.shape)}: expected [L={length}] or [B={x.shape[0]},"
                f" L={length}], as in x{list(x.shape)}; give one position for every vector of x"
            )
        cos, sin = self.cos_sin(positions.to(x.device))
        return rotate(x, cos, sin, interleaved=self.interleaved)


def check_positions(name: str, positions: Tensor, axis: str) -> None:
    """Refuses what isn't integers of shape [axis] or [B, axis]."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(
            f"{name} is {positions.dtype}: expected integers, the place of each vector; convert it,"
            f" {name}.long()"
        )
    if positions.dim() not in (1, 2):
        raise MultiheadError(
            f"{name}{list(positions.shape)}: expected [{axis}] or [B, {axis}]; give one position a"
            " vector"
        )


def check_whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected an integer; give one, at least 1")
    if value < 1:
        raise MultiheadError(f"{name}={value}: must be at least 1")


def _number(
    name: str, value: object, must: str, *, above: float = -math.inf, least: float = -math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number; it must {must}")
    if not (above < float(value) < math.inf and least <= float(value)):  # NaN fails both
        raise MultiheadError(f"{name}={value}: must {must}")


def _meant(name: object, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _read_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of `scaling` that are set, checked, with the kind under `rope_type`."""
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        raise TypeError(
            f"scaling={scaling!r}: expected a mapping such as {{'rope_type': 'linear', 'factor':"
            " 2.0}"
        )
    read = {key: value for key, value in scaling.items() if value is not None}
    types = tuple(_KEYS)
    older = read.pop("type", None)  # the name before rope_type; some files have both
    rope_type = read.setdefault("rope_type", older)
    if older not in (None, rope_type):
        raise MultiheadError(
            f"scaling has rope_type={rope_type!r} and type={older!r}; give only one of them"
        )
    if rope_type not in types:
        has = "has no 'rope_type'" if rope_type is None else f"has rope_type={rope_type!r}"
        raise MultiheadError(
            f"scaling {has}: {_meant(rope_type, types)}expected one of {', '.join(types)}"
        )
    needed, optional = _KEYS[rope_type]
    for key in read:
        if key not in needed + optional + _KEYS_OF_ALL:
            known = needed + optional + _KEYS_OF_ALL
            raise MultiheadError(
                f"scaling has {key!r}={read[key]!r}, which rope_type={rope_type!r} does not read:"
                f" {_meant(key, known)}It reads {', '.join(known)}; correct the name or leave"
                " it out"
            )
    for key in needed:
        if key not in read:
            missing = (
                f"scaling lacks {key!r}, which rope_type={rope_type!r} needs; it has"
                f" {', '.join(read)}"
            )
            if key == "original_max_position_embeddings":
                missing += ". Where a config.json has none there, give its max_position_embeddings"
            raise MultiheadError(missing)
    _check_values(read)
    return read


def _check_values(read: Mapping[str, Any]) -> None:
    for key, value in read.items():
        name = f"scaling[{key!r}]"
        if key == "original_max_position_embeddings":
            check_whole(name, value)
        elif key == "truncate":
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected True or False")
        elif key == "factor":
            _number(name, value, "be at least 1: four times longer is 4.0, not 0.25", least=1.0)
        elif key in ("mscale", "mscale_all_dim"):
            _number(name, value, "be 0 (as if absent) or above", least=0.0)
        elif key == "partial_rotary_factor":
            _number(
                name,
                value,
                "be above 0 and at most 1, the share of a head that is turned",
                above=0.0,
            )
            if value > 1.0:
                raise MultiheadError(
                    f"{name}={value}: must be above 0 and at most 1, the share of a head that is"
                    " turned"
                )
        elif key != "rope_type":
            _number(name, value, "be positive", above=0.0)
    if read["rope_type"] == "llama3" and read["low_freq_factor"] >= read["high_freq_factor"]:
        raise MultiheadError(
            f"scaling['low_freq_factor']={read['low_freq_factor']}: must be below "
            f"scaling['high_freq_factor']={read['high_freq_factor']}; Llama 3.1 has 1.0 and 4.0"
        )
    if read["rope_type"] == "yarn" and read.get("beta_slow", 1.0) > read.get("beta_fast", 32.0):
        raise MultiheadError(
            f"scaling['beta_slow']={read.get('beta_slow', 1.0)}: must be at most "
            f"scaling['beta_fast']={read.get('beta_fast', 32.0)}; they are 1 and 32 unless given"
        )


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Equation 22 of Peng et al. 2023, and DeepSeek's ratio of two of it."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(over) / of(under) if over and under else of(1.0)


def _yarn_ramp(pairs: Tensor, rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """0 for the pairs that keep their frequency, 1 for those that are stretched in full (Peng et
    al. 2023, section 3.2).
    """

    def pair(turns: float) -> float:
        """Which pair, as a real number, turns so often within the trained length."""
        trained = scaling["original_max_position_embeddings"]
        return rotary_dim * math.log(trained / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair(scaling.get("beta_fast", 32.0)), pair(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # rotary_dim - 1 counts components, not pairs; kept as every trained model has it (the authors'
    # code, transformers).
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return ((pairs - low) / (high - low)).clamp(0.0, 1.0)
