"""`parallel_plan`: the heads of a layer divided among processes (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import MultiheadError
from .attention import MultiHeadAttention
from .block import MLP, SwiGLU, TransformerBlock
from .latent import LatentAttention
from .norms import HeadNorm
from .position_bias import PositionBias, RelativeBias, T5Bias
from .shard import HeadShard

__all__ = ["parallel_plan"]


def parallel_plan(layer: nn.Module, prefix: str = "") -> dict[str, ParallelStyle]:
    """Plan for `torch.distributed.tensor.parallel.parallelize_module`: each rank has a group of the
    heads.

    The update of a layer is a sum of one update per head, so ranks that have H/n heads each compute
    their part of the sum, and one all-reduce at the output projection adds them up (Shoeybi et al.
    2019, section 3). Rank r of n has query heads r * H/n to (r + 1) * H/n and the key/value heads
    that they read; if those are fewer than ranks, G < n, each rank has one, and the weights of keys
    and values are on all ranks. A cache holds the heads of its rank, and `return_weights` returns
    theirs, `[B, H/n, L, S]`. Everything else is as in one process: inputs and outputs are whole, on
    every rank; masks and biases of single heads are those of all H heads.

    Feed-forward layers `MLP` and `SwiGLU` have a part of their width on each rank, and one
    all-reduce. Parameters become DTensors, norms' too, so that one optimizer takes them all; DCP
    loads them on any number of ranks, and `fully_shard` divides them further.

    Args:
        layer: a `MultiHeadAttention`, a `LatentAttention`, a `TransformerBlock`, an `MLP` or a
            `SwiGLU`, or a module that holds such.
        prefix: name of `layer` in the module that is parallelized, such as "layers.*".

    Returns:
        A style for each module, by name. Merge it with that of other modules,
        `{**parallel_plan(model), "head": ColwiseParallel(output_layouts=Replicate())}`.

    Raises:
        MultiheadError: nothing in `layer` has a plan. From `parallelize_module`: heads or widths
            that the ranks don't divide, with both numbers; a mesh of more than one dimension;
            projections that are no `nn.Linear`.
        TypeError: `layer` isn't a module.

    >>> block = TransformerBlock(8, 2, hidden_dim=24)
    >>> sorted(parallel_plan(block))
    ['attention', 'attention_norm', 'feed_forward', 'feed_forward_norm']
    >>> sorted(parallel_plan(block.attention, prefix="layers.*.attention"))
    ['layers.*.attention']
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"layer={layer!r}: expected a module, such as a MultiHeadAttention")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r}: expected a name of modules, such as 'layers.*'")
    plan: dict[str, ParallelStyle] = {}
    norms: dict[str, ParallelStyle] = {}  # last, since the others can be refused
    for name, module in layer.named_modules(prefix=prefix):
        if isinstance(module, MultiHeadAttention):
            plan[name] = HeadParallel()
        elif isinstance(module, LatentAttention):
            plan[name] = LatentParallel()
        elif isinstance(module, MLP | SwiGLU):
            plan[name] = FeedForwardParallel()
        elif isinstance(module, TransformerBlock):
            for norm in ("attention_norm", "cross_attention_norm", "feed_forward_norm"):
                if getattr(module, norm) is not None:
                    norms[f"{name}.{norm}".lstrip(".")] = PlainInterface(Replicate())
    if not plan:
        raise MultiheadError(
            f"layer={type(layer).__name__} has no part that is one of MultiHeadAttention,"
            " LatentAttention, TransformerBlock, MLP and SwiGLU; write its plan with"
            " ColwiseParallel and RowwiseParallel"
        )
    return plan | norms


# ---- Styles


class HeadParallel(ParallelStyle):
    """Style of `MultiHeadAttention`: a group of the heads on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require(module, MultiHeadAttention, self)
        ranks, shard = _check_mesh(device_mesh), HeadShard(device_mesh)
        _check_heads(layer.num_heads, layer.num_kv_heads, ranks)
        projections = ["q_proj", "k_proj", "v_proj"] + ["gate_proj"] * (layer.gate is not None)
        _check_linear(layer, [*projections, "out_proj"])
        styles = {name: by_columns() for name in projections} | {"out_proj": by_rows()}
        extra: dict[str, Placement] = dict.fromkeys(("sinks", "bias_k", "bias_v"), Shard(0))
        divided = ["q_norm", "k_norm"]  # in one order on all ranks, which exchange the weights
        if layer.num_kv_heads % ranks:  # fewer than ranks: all compute them, each takes its one
            styles |= {name: PlainInterface(Replicate()) for name in ("k_proj", "v_proj", "k_norm")}
            extra |= {"bias_k": Replicate(), "bias_v": Replicate()}
            divided = ["q_norm"]
        for name in divided:
            norm = getattr(layer, name)
            if norm is not None and layer.norm_spans_heads:
                setattr(layer, name, DividedNorm(norm, shard, self.src_data_rank))
            else:
                rows = ("weight", "bias") if isinstance(norm, HeadNorm) else ()
                styles[name] = PlainInterface(Shard(1), parameters=dict.fromkeys(rows, Shard(0)))
        styles |= _style_of_positions(layer.positions)
        _apply_all(layer, styles, device_mesh, self.src_data_rank)
        for name, placement in extra.items():
            if getattr(layer, name) is not None:
                _distribute(layer, name, device_mesh, placement, self.src_data_rank)
        layer.shard = shard
        return layer


class LatentParallel(ParallelStyle):
    """Style of `LatentAttention`: a group of the heads on each rank, and the latents on all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require(module, LatentAttention, self)
        ranks = _check_mesh(device_mesh)
        _check_heads(layer.num_heads, layer.num_heads, ranks)
        up = "q_proj" if layer.q_latent_dim is None else "q_up_proj"
        _check_linear(layer, [up, "kv_up_proj", "out_proj"])
        styles = {up: by_columns(), "out_proj": by_rows()}
        for name in ("q_down_proj", "q_norm", "kv_down_proj", "kv_norm"):
            styles[name] = PlainInterface(Replicate())
        if _style_of_positions(layer.positions):
            raise MultiheadError(
                f"positions={layer.positions} has parameters, which a divided LatentAttention"
                " doesn't support: its rotary key is on all ranks, its queries are not"
            )
        _apply_all(layer, styles, device_mesh, self.src_data_rank)
        # without hooks, for the absorbed form reads its weight
        _distribute(layer.kv_up_proj, "weight", device_mesh, Shard(0), self.src_data_rank)
        layer.shard = HeadShard(device_mesh)
        return layer


class FeedForwardParallel(ParallelStyle):
    """Style of `MLP` and `SwiGLU`: a part of their width on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require(module, (MLP, SwiGLU), self)
        ranks = _check_mesh(device_mesh)
        columns = ["up_proj"] + ["gate_proj"] * isinstance(layer, SwiGLU)
        _check_linear(layer, [*columns, "down_proj"])
        width = layer.up_proj.out_features
        if width % ranks:
            raise MultiheadError(
                f"hidden_dim={width} of {type(layer).__name__} is not divisible by the {ranks}"
                f" ranks of the mesh; give a multiple of {ranks}"
            )
        styles = {name: by_columns() for name in columns} | {"down_proj": by_rows()}
        _apply_all(layer, styles, device_mesh, self.src_data_rank)
        _enter(layer, device_mesh, Replicate())  # so that both projections share one
        return layer


class PlainInterface(ParallelStyle):
    """Style of any other module: it computes with DTensors, takes and returns plain tensors.

    Args:
        inputs: placement of the floating inputs (others are the same on all ranks).
        outputs: placement of the output; that of the inputs unless given.
        parameters: placements by name; the same on all ranks unless given.
    """

    def __init__(
        self,
        inputs: Placement,
        *,
        outputs: Placement | None = None,
        parameters: Mapping[str, Placement] | None = None,
    ) -> None:
        self.inputs = inputs
        self.outputs = inputs if outputs is None else outputs
        self.parameters = parameters or {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_mesh(device_mesh)
        for part in module.modules():
            for name, x in list(part.named_parameters(recurse=False)):
                if isinstance(x, DTensor):
                    return module  # a position bias that several layers share
                placement = self.parameters.get(name, Replicate())
                _distribute(part, name, device_mesh, placement, self.src_data_rank)
        _enter(module, device_mesh, self.inputs)
        outputs = [self.outputs]
        module.register_forward_hook(
            lambda module, inputs, output: output.redistribute(placements=outputs).to_local()
        )
        return module


def by_columns() -> PlainInterface:
    """Style of an `nn.Linear` of whose outputs each rank computes a part."""
    parameters = dict.fromkeys(("weight", "bias"), Shard(0))
    return PlainInterface(Replicate(), outputs=Shard(-1), parameters=parameters)


def by_rows() -> PlainInterface:
    """Style of an `nn.Linear` that takes a part of its inputs: an all-reduce sums the outputs, and
    its bias is added once.
    """
    return PlainInterface(Shard(-1), outputs=Replicate(), parameters={"weight": Shard(1)})


class DividedNorm(nn.Module):
    """RMSNorm or LayerNorm over the width of all heads, `[..., H*E]`, of which each rank has a
    part: ranks exchange no more than the moments of each token.
    """

    def __init__(self, norm: Any, shard: HeadShard, source: int | None) -> None:
        super().__init__()
        self.width, self.eps, self.shard = norm.normalized_shape[0], norm.eps, shard
        self.has_mean = isinstance(norm, nn.LayerNorm)
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name, None))
            if getattr(self, name) is not None:
                _distribute(self, name, shard.mesh, Shard(0), source)

    def forward(self, x: Tensor) -> Tensor:
        like, x = x, x.to(torch.promote_types(x.dtype, torch.float32))
        if self.has_mean:
            x = x - self._mean(x)
        eps = torch.finfo(like.dtype).eps if self.eps is None else self.eps
        x = (x * torch.rsqrt(self._mean(x.square()) + eps)).to(like.dtype)
        if self.weight is not None:
            x = x * self.shard.parameter(self.weight)
        return x if self.bias is None else x + self.shard.parameter(self.bias)

    def _mean(self, x: Tensor) -> Tensor:
        return self.shard.sum(x.sum(-1, keepdim=True)) / self.width


def _style_of_positions(positions: nn.Module | None) -> dict[str, PlainInterface]:
    """The plan of a position encoding with parameters; without, the layer takes its heads."""
    if positions is None or next(positions.parameters(), None) is None:
        return {}
    if type(positions) in (T5Bias, RelativeBias):
        table = {"weight": Shard(1)}
        return {"positions": PlainInterface(Replicate(), outputs=Shard(1), parameters=table)}
    inputs = Replicate() if isinstance(positions, PositionBias) else Shard(1)
    return {"positions": PlainInterface(inputs, outputs=Shard(1))}


# ---- Helpers of styles


def _enter(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Let a module take DTensors: its floating inputs so placed, others the same on all ranks."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.is_nested:
            return x
        placed = placement if x.is_floating_point() else Replicate()
        return DTensor.from_local(x, mesh, [placed], run_check=False)

    module.register_forward_pre_hook(
        lambda module, args, kwargs: (
            tuple(map(convert, args)),
            {name: convert(x) for name, x in kwargs.items()},
        ),
        with_kwargs=True,
    )


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Make a parameter a DTensor, in place."""
    old = module.get_parameter(name)
    new = nn.Parameter(
        distribute_tensor(old, mesh, [placement], src_data_rank=source),
        requires_grad=old.requires_grad,
    )
    if new.requires_grad:
        # Each rank computes a part of the gradient of what all have; optimizers expect the sum.
        new.register_hook(lambda grad: grad.redistribute(placements=[placement]))
    module.register_parameter(name, new)


def _apply_all(
    module: nn.Module, styles: Mapping[str, PlainInterface], mesh: DeviceMesh, source: int | None
) -> None:
    for name, style in styles.items():
        part = getattr(module, name, None)
        if part is not None:
            style.src_data_rank = source
            style._apply(part, mesh)


def _require(module: nn.Module, kind: Any, style: ParallelStyle) -> Any:
    if not isinstance(module, kind):
        raise TypeError(
            f"{type(style).__name__} is the style of another module than {type(module).__name__};"
            " create the plan from the module that is parallelized, parallel_plan(module)"
        )
    return module


def _check_mesh(mesh: DeviceMesh) -> int:
    """Number of ranks."""
    if mesh.ndim != 1:
        raise MultiheadError(
            f"a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: expected one; give a part,"
            " such as mesh['tp']"
        )
    return mesh.size()


def _check_heads(heads: int, groups: int, ranks: int) -> None:
    """Raise unless each rank has as many heads, and whole groups of them."""
    if heads % ranks:
        raise MultiheadError(
            f"num_heads={heads} is not divisible by the {ranks} ranks of the mesh; use a number of"
            f" ranks that divides {heads}"
        )
    if groups % ranks and ranks % groups:
        raise MultiheadError(
            f"num_kv_heads={groups} and the {ranks} ranks of the mesh: expected a multiple or a"
            f" divisor of {ranks}, so that each rank has whole groups of heads, or a part of one"
        )


def _check_linear(layer: nn.Module, names: list[str]) -> None:
    for name in names:
        module = getattr(layer, name)
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear) or weight is None or not weight.is_floating_point():
            raise MultiheadError(
                f"{name} is a {type(module).__name__}: expected an nn.Linear of floating numbers,"
                " whose weight is divided by rows or columns; parallelize the layer before adding"
                " adapters or quantising it"
            )
        if isinstance(module.weight, DTensor):
            raise MultiheadError(
                f"{name}.weight is divided among ranks already, {module.weight.placements}:"
                " parallelize a layer once, and before fully_shard"
            )
