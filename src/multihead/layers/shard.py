"""`HeadShard`: the heads of one rank, where those of a layer are divided among processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..errors import MultiheadError
from ..ops.heads import split_heads
from ..ops.slopes import AlibiBias

Rule = TypeVar("Rule")


class HeadShard:
    """The heads of this rank: of H heads on n ranks, rank r has r * H/n up to (r + 1) * H/n.

    Tensors that all ranks have alike enter by `enter`, `whole` and `of_heads`, and what the ranks
    add to their gradients is summed in the backward pass, once for each of them. In between, each
    rank computes with plain tensors of its heads; the output projection sums over ranks.

    Args:
        mesh: 1-D device mesh of the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.num_ranks = mesh.size()
        self.rank = mesh.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadShard:
        return self  # process groups can't be copied

    def __repr__(self) -> str:
        return f"HeadShard(rank {self.rank} of {self.num_ranks})"

    def heads(self, num_heads: int) -> slice:
        """The heads of this rank. Where fewer key/value heads than ranks are there, several ranks
        have the same one.
        """
        if num_heads % self.num_ranks:
            first = self.rank * num_heads // self.num_ranks
            return slice(first, first + 1)
        count = num_heads // self.num_ranks
        return slice(self.rank * count, (self.rank + 1) * count)

    def project(self, projection: nn.Module, x: Tensor) -> Tensor:
        """`projection(x)`, also of no tokens, `[B, 0, D]`, which `F.linear` of DTensors refuses."""
        if x.numel():
            return projection(x)
        return projection(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def split(self, x: Tensor, num_heads: int) -> Tensor:
        """The output of a projection to `num_heads`, split into heads, `[..., L, columns]` ->
        `[..., heads, L, E]`: those of this rank, or all where they are fewer than ranks.
        """
        is_divided = num_heads % self.num_ranks == 0
        x = x.to_local() if isinstance(x, DTensor) else x
        return split_heads(x, num_heads // self.num_ranks if is_divided else num_heads)

    def own(self, x: Tensor, num_heads: int) -> Tensor:
        """The heads of this rank in what `split` returned."""
        if num_heads % self.num_ranks == 0:
            return x
        return self.whole(x)[..., self.heads(num_heads), :, :]

    def parameter(self, x: Tensor) -> Tensor:
        """The rows of this rank of a parameter `[heads, ...]` that is divided, or the same on all
        ranks.
        """
        if not isinstance(x, DTensor):
            return x
        if any(placement.is_shard() for placement in x.placements):
            return x.to_local()
        return self.whole(x)[self.heads(x.shape[0])]

    def enter(self, *inputs: Tensor) -> list[Tensor]:
        """The inputs of projections as DTensors, the same on all ranks; one for each object."""
        entered: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in entered:
                entered[id(x)] = self._replicated(x) if x.numel() else x
        return [entered[id(x)] for x in inputs]

    def whole(self, x: Tensor) -> Tensor:
        """A tensor that is the same on all ranks; its gradient is the sum of theirs."""
        if not x.requires_grad and not isinstance(x, DTensor):
            return x
        return self._replicated(x).to_local(grad_placements=[Partial()])

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors; its gradient is the sum of theirs."""
        parts = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def of_heads(self, name: str, x: Rule, num_heads: int) -> Rule:
        """The part of this rank of a mask or bias that broadcasts to `[B, H, L, S]`.

        Raises:
            MultiheadError: another number of heads than one or all.
        """
        if isinstance(x, AlibiBias):
            if x.slopes.shape[0] != num_heads:
                raise MultiheadError(
                    f"{name}: slopes{list(x.slopes.shape)} of AlibiBias, expected one for each of"
                    f" the {num_heads} heads of all ranks"
                )
            slopes = x.slopes[self.heads(num_heads)]
            return cast(Rule, AlibiBias(slopes, x.query_positions, x.key_positions))
        if not isinstance(x, Tensor):
            return x
        given = x.shape[-3] if x.ndim > 2 else 1
        if given not in (1, num_heads):
            raise MultiheadError(
                f"{name}{list(x.shape)}: expected one head, or the {num_heads} of all ranks, of"
                f" which rank {self.rank} of {self.num_ranks} takes its part"
            )
        local = self.whole(x)
        return cast(Rule, local if given == 1 else local[..., self.heads(num_heads), :, :])

    @contextmanager
    def drawing(self, layer: Any, device: torch.device) -> Iterator[None]:
        """Context in which a layer with dropout draws different numbers on each rank, though the
        generators of all have one state. They have one afterwards too.
        """
        if not (layer.dropout and layer.training):
            yield
            return
        seed = int(torch.randint(2**62, (), device="cpu")) + self.rank
        is_cpu = device.type == "cpu"
        generators: Any = torch.default_generator if is_cpu else torch.get_device_module(device)
        with torch.random.fork_rng(
            [] if is_cpu else [device], device_type="cuda" if is_cpu else device.type
        ):
            generators.manual_seed(seed)
            yield

    def _replicated(self, x: Tensor) -> DTensor:
        if isinstance(x, DTensor):
            return x.redistribute(self.mesh, [Replicate()])
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
