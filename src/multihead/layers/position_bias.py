"""Position biases: position encodings that are added to the scores. `PositionBias` is the base."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.slopes import AlibiBias
from ..ops.tensors import TensorLike
from .require import require_positive_int, to_position_ids

__all__ = ["ALiBi", "PositionBias", "RelativeBias", "T5Bias"]


class PositionBias(nn.Module):
    """Base of position biases: a number for each head, query and key, added to the scores.

    `ALiBi`, `T5Bias` and `RelativeBias` depend on distances alone. A user-defined one overrides
    `of_distance`, or `forward` if the positions themselves matter; a layer takes it as
    `MultiHeadAttention(..., positions=...)`.

    Args:
        num_heads: number of query heads H.

    Shapes: integer `query_positions` [L] or [B, L] and `key_positions` [S] or [B, S] -> floating
    [B, H, L, S], or [1, H, L, S] if neither has a batch; the `bias` of `multihead.attention`.

    Raises:
        MultiheadError: sizes below 1, and positions whose shapes don't fit.
        TypeError: positions that aren't integers.

    >>> class Near(PositionBias):  # keys within two steps weigh e times as much as others
    ...     def of_distance(self, distance):
    ...         return (distance.abs() <= 2).float().unsqueeze(1).expand(-1, self.num_heads, -1, -1)
    >>> Near(4)(torch.arange(3), torch.arange(5)).shape
    torch.Size([1, 4, 3, 5])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        require_positive_int("num_heads", num_heads)
        self.num_heads = num_heads

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def forward(self, query_positions: TensorLike, key_positions: TensorLike) -> Tensor:
        query_positions = to_position_ids("query_positions", query_positions, "L")
        key_positions = to_position_ids("key_positions", key_positions, "S", query_positions.device)
        queries, keys = (
            # int64 first: in uint8 a difference below 0 would wrap around.
            positions.long() if positions.dim() == 2 else positions.long().unsqueeze(0)
            for positions in (query_positions, key_positions)
        )
        if queries.shape[0] != keys.shape[0] and 1 not in (queries.shape[0], keys.shape[0]):
            raise MultiheadError(
                f"query_positions{list(query_positions.shape)} and"
                f" key_positions{list(key_positions.shape)}: expected one batch size B; give the"
                " positions of one batch, or [L] and [S] if all its sequences have the same"
            )
        return self.of_distance(keys.unsqueeze(1) - queries.unsqueeze(2))

    def of_distance(self, distance: Tensor) -> Tensor:
        """The bias `[1 or B, H, L, S]` for `distance`, int64 `[1 or B, L, S]`: position of the key
        minus that of the query.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define of_distance(distance), or forward"
        )

    def to_alibi(self, query_positions: Tensor, key_positions: Tensor) -> AlibiBias | None:
        """The same bias as slopes, which `multihead.attention` doesn't make dense; None if it isn't
        one.
        """
        return None


class ALiBi(PositionBias):
    """Attention with linear biases (Press et al. 2022): adds `-slope[h] * |i - j|`.

    The slopes are those of the authors' code: 2^(-8 / H), 2^(-16 / H), .., 2^-8 if H is a power of
    two; otherwise those of the largest power of two below H, followed by every second one of twice
    that power. Nothing is learned.

    Args:
        num_heads: number of query heads H.

    Shapes: integer [L] or [B, L], and [S] or [B, S] -> float32 [1 or B, H, L, S], whatever the
    dtype of the module.

    Raises:
        MultiheadError: a `num_heads` below 1, and positions whose shapes don't fit.
        TypeError: positions that aren't integers.

    >>> alibi = ALiBi(8)
    >>> alibi.slopes[:3]
    tensor([0.5000, 0.2500, 0.1250])
    >>> alibi(torch.tensor([2]), torch.arange(4))[0, 0]
    tensor([[-1.0000, -0.5000,  0.0000, -0.5000]])
    """

    @property
    def slopes(self) -> Tensor:
        """Slopes `[H]`, float32, on the CPU."""
        return self._slopes(torch.device("cpu"))

    def _slopes(self, device: torch.device) -> Tensor:
        # By arithmetic on the device, not from a buffer, which module.to(torch.bfloat16) would
        # round.
        power = 1 << (self.num_heads.bit_length() - 1)  # the largest power of two, at most H
        exponents = torch.arange(1, power + 1, device=device, dtype=torch.float32) * (8.0 / power)
        between = torch.arange(
            1, 2 * (self.num_heads - power) + 1, 2, device=device, dtype=torch.float32
        ) * (4.0 / power)
        return torch.exp2(-torch.cat((exponents, between)))

    def to_alibi(self, query_positions: Tensor, key_positions: Tensor) -> AlibiBias | None:
        """The same bias as slopes; None for a subclass, which may change it."""
        if type(self) is not ALiBi:
            return None
        return AlibiBias(self._slopes(query_positions.device), query_positions, key_positions)

    def of_distance(self, distance: Tensor) -> Tensor:
        slopes = self._slopes(distance.device).view(-1, 1, 1)
        return slopes * (-distance.abs()).to(torch.float32).unsqueeze(1)


class _Table(PositionBias):
    """A learned number for each head and each class of distances, `weight` `[classes, H]`."""

    def __init__(self, num_heads: int, classes: int) -> None:
        super().__init__(num_heads)
        self.weight = nn.Parameter(torch.empty(classes, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `weight` from a normal distribution of deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def of_distance(self, distance: Tensor) -> Tensor:
        return F.embedding(self.classes(distance), self.weight).permute(0, 3, 1, 2)

    def classes(self, distance: Tensor) -> Tensor:
        """The row of `weight` for each distance; the same shape, int64."""
        raise NotImplementedError


class T5Bias(_Table):
    """Learned position bias of T5 (Raffel et al. 2020, section 2.1): a number for each head and
    bucket of distances.

    Half of the buckets are single distances; the width of the others grows logarithmically, and the
    last one holds all distances from `max_distance` on. `weight` [num_buckets, H] is
    `relative_attention_bias.weight` of a T5 checkpoint. (T5 shares the bias of its first layer
    among all layers, and doesn't divide its scores by sqrt(E).)

    Args:
        num_heads: number of query heads H.
        num_buckets: number of rows of the table.
        max_distance: distances from here on share a bucket.
        bidirectional: whether earlier and later keys have half of the buckets each, as in an
            encoder; otherwise all later keys count as distance 0, as in a decoder.

    Shapes: integer [L] or [B, L], and [S] or [B, S] -> [1 or B, H, L, S] in the dtype of `weight`.

    Raises:
        MultiheadError: sizes that leave a bucket empty, and positions whose shapes don't fit.
        TypeError: positions that aren't integers.

    >>> bias = T5Bias(4, num_buckets=8, max_distance=20)
    >>> bias(torch.arange(3), torch.arange(5)).shape
    torch.Size([1, 4, 3, 5])
    >>> bias.classes(torch.tensor([-100, -2, -1, 0, 1, 2, 3, 100]))
    tensor([3, 2, 1, 0, 5, 6, 6, 7])
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        require_positive_int("num_buckets", num_buckets)
        require_positive_int("max_distance", max_distance)
        directions = 2 if bidirectional else 1
        if num_buckets % directions or num_buckets < 2 * directions:
            raise MultiheadError(
                f"num_buckets={num_buckets} with bidirectional={bidirectional}: expected "
                f"{'an even number, at least 4' if bidirectional else 'at least 2'}; T5 has 32"
            )
        single = num_buckets // directions // 2
        if max_distance <= single:
            raise MultiheadError(
                f"max_distance={max_distance}: with num_buckets={num_buckets} the distances 0 to"
                f" {single - 1} have separate buckets; give at least {single + 1}, or fewer buckets"
            )
        super().__init__(num_heads, num_buckets)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets},"
            f" max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )

    def classes(self, distance: Tensor) -> Tensor:
        """The bucket of each distance; the same shape, int64."""
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        steps = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        single = buckets // 2
        # As in T5's code: the order of these float32 operations decides where a bucket ends.
        share = torch.log(steps.clamp(min=single).float() / single) / math.log(
            self.max_distance / single
        )
        wide = (single + (share * (buckets - single)).long()).clamp(max=buckets - 1)
        bucket = torch.where(steps < single, steps, wide)
        return bucket + (distance > 0).long() * buckets if self.bidirectional else bucket


class RelativeBias(_Table):
    """Learned relative position bias: a number for each head and distance j - i, clipped to
    `max_distance`.

    Distances are clipped as in Shaw et al. 2018 (section 3.2), but the learned values are added to
    the scores, as in T5 and Swin, instead of being vectors. Row `d + max_distance` of `weight`
    [2 * max_distance + 1, H] is for keys d positions after the query.

    Args:
        num_heads: number of query heads H.
        max_distance: larger distances count as this one; at least 1.

    Shapes: integer [L] or [B, L], and [S] or [B, S] -> [1 or B, H, L, S] in the dtype of `weight`.

    Raises:
        MultiheadError: sizes below 1, and positions whose shapes don't fit.
        TypeError: positions that aren't integers.

    >>> bias = RelativeBias(1, max_distance=2)
    >>> with torch.no_grad():
    ...     _ = bias.weight.copy_(torch.arange(5.0).view(5, 1))
    >>> bias(torch.tensor([3]), torch.arange(7)).detach()[0, 0]
    tensor([[0., 0., 1., 2., 3., 4., 4.]])
    """

    def __init__(self, num_heads: int, max_distance: int) -> None:
        require_positive_int("max_distance", max_distance)
        super().__init__(num_heads, 2 * max_distance + 1)
        self.max_distance = max_distance

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, max_distance={self.max_distance}"

    def classes(self, distance: Tensor) -> Tensor:
        """The row of `weight` for each distance; the same shape, int64."""
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
