"""Checks of layers whose heads are divided among processes. `test_parallel.py` starts this program
once: it imports torch, becomes four processes, and runs each check in all of them.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from multihead.layers import (
    MLP,
    ALiBi,
    Cache,
    LatentAttention,
    MultiHeadAttention,
    PositionBias,
    QuantizedCache,
    RelativeBias,
    Rotary,
    T5Bias,
    TransformerBlock,
    WindowCache,
    parallel_plan,
    to_torch,
)
from multihead.masks import causal, window
from multihead.models.foreign import kind_of
from multihead.ops.slopes import AlibiBias

RANKS = 4
TIMEOUT = timedelta(seconds=100)  # of one collective
D, H = 16, 8
CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS[function.__name__] = function
    return function


class Meshes:
    """`two[tp]` divides heads in two, with the same twice, `four` in four."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.four = init_device_mesh("cpu", (4,))
        self.two = self.grid["tp"]


class Communication(TorchDispatchMode):
    """Counts collectives, by name and shape. (CommDebugMode raises on a module that is called
    twice, as a position encoding is.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if DTensor in types:
            return NotImplemented
        name = func._schema.name.rpartition(":")[2]
        if "c10d" in func.namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.calls.append((name, list(args[0].shape)))
        return func(*args, **(kwargs or {}))


# ---- Layers


class Near(PositionBias):
    """A learned number for each head, of which no style knows."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.factor = nn.Parameter(torch.randn(num_heads))

    def of_distance(self, distance: Tensor) -> Tensor:
        return torch.exp(-distance.abs()).unsqueeze(1) * self.factor[:, None, None]


class Fixed(PositionBias):
    """The same without parameters."""

    def of_distance(self, distance: Tensor) -> Tensor:
        heads = torch.arange(self.num_heads) - 3.0
        return distance.unsqueeze(1).tanh() * heads[:, None, None]


class Direction(nn.Module):
    """A norm of a user."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True) * self.factor


class Waves(nn.Module):
    """A learned position encoding of queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x + torch.sin(position_ids[..., None] * self.factor)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mha": lambda: MultiHeadAttention(D, H, head_dim=4, positions=Rotary(4), clip_qkv=1.5),
    "gqa": lambda: MultiHeadAttention(D, H, num_kv_heads=4, sinks=True, gate="head", softcap=5.0),
    "g2": lambda: MultiHeadAttention(D, H, num_kv_heads=2, qk_norm="rms_each", bias_kv=True),
    "mqa": lambda: MultiHeadAttention(
        D, H, num_kv_heads=1, qk_norm="layer", bias_kv=True, positions=Rotary(2)
    ),
    "alibi": lambda: MultiHeadAttention(
        D, H, positions=ALiBi(H), gate="elementwise", bias_kv=True, softcap=3.0
    ),
    "t5": lambda: MultiHeadAttention(
        D, H, positions=T5Bias(H, num_buckets=8), scale=1.0, out_dim=6
    ),
    "relative": lambda: MultiHeadAttention(
        D, H, positions=RelativeBias(H, 3), bias=False, out_bias=True
    ),
    "user": lambda: MultiHeadAttention(D, H, qk_norm=Direction, positions=Waves(2)),
    "bias": lambda: MultiHeadAttention(D, H, positions=Near(H)),
    "fixed": lambda: MultiHeadAttention(D, H, positions=Fixed(H)),
    "rms_all": lambda: MultiHeadAttention(D, H, qk_norm="rms_all"),
    "layer_all": lambda: MultiHeadAttention(D, H, num_kv_heads=2, qk_norm="layer_all"),
    "latent": lambda: LatentAttention(
        D, H, kv_latent_dim=6, rotary_dim=2, head_dim=4, q_latent_dim=5, v_head_dim=3, bias=True
    ),
    "latent_q": lambda: LatentAttention(D, H, kv_latent_dim=6, rotary_dim=2, head_dim=4),
}


def sharp(create: Callable[[], nn.Module]) -> Any:
    """The same layer on every rank, with weights that count."""
    layer = create().double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def divide(layer: Any, mesh: DeviceMesh) -> Any:
    layer = copy.deepcopy(layer)
    return parallelize_module(layer, mesh, parallel_plan(layer))


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(got: Tensor, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(whole(got), want, atol=1e-9, rtol=1e-9, msg=lambda m: f"{what}: {m}")


def same_gradients(got: nn.Module, want: nn.Module) -> None:
    for name, parameter in want.named_parameters():
        found = got.get_parameter(name)
        if isinstance(found, DTensor):
            assert found.grad is not None and found.grad.placements == found.placements, name
        close(found.grad, parameter.grad, name)


def raises(words: str, call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert words in str(raised.value)


# ---- Checks


def layer_equals_one(name: str, mesh: DeviceMesh) -> None:
    """Output, weights and all gradients; one all-reduce of the size of the output."""
    one = sharp(LAYERS[name])
    divided = divide(one, mesh)
    n, rank = mesh.size(), mesh.get_local_rank()
    x, bias = torch.randn(2, 5, D), torch.randn(1, H, 5, 5)
    inputs = [[y.clone().requires_grad_() for y in (x, bias)] for _ in range(2)]
    mask = torch.rand(2, H, 5, 5) > 0.3
    results = []
    for layer, (query, added) in zip((one, divided), inputs):
        with Communication() as forward:
            out = layer(query, mask=mask, attn_bias=added, return_weights=True)
        with Communication() as backward:
            (out[0] * torch.linspace(-1, 1, out[0].shape[-1])).sum().backward()
        results.append((out, forward.calls, backward.calls))
    (want, weights), calls, _ = results[0]
    assert not calls
    (got, part), calls, back = results[1]
    moments = [("all_reduce", [2, 5, 1])] * {"rms_all": 2, "layer_all": 4 if n == 2 else 2}.get(
        name, 0
    )
    assert calls == [*moments, ("all_reduce", list(got.shape))], calls
    if name == "mha":  # that of the input, and that of the bias
        assert back == [("all_reduce", [1, H, 5, 5]), ("all_reduce", [2, 5, D])], back
    close(got, want)
    close(part, weights[:, rank * H // n : (rank + 1) * H // n])
    same_gradients(divided, one)
    for a, b in zip(*inputs):
        close(b.grad, a.grad)
    with torch.no_grad():  # step by step
        cache = Cache()
        steps = [
            divided(x[:, i:j], mask=causal(), cache=cache) for i, j in ((0, 3), (3, 4), (4, 5))
        ]
        close(torch.cat(steps, 1), one(x, mask=causal()), "cached")
        assert isinstance(cache._k, Tensor) and not isinstance(cache._k, DTensor)
        heads = getattr(one, "num_kv_heads", 1)
        assert cache._k.shape[1] == max(heads // n, 1)


for layer_name in LAYERS:
    for size in ("two", "four"):
        CHECKS[f"{layer_name} on {size}"] = lambda meshes, name=layer_name, size=size: (
            layer_equals_one(name, getattr(meshes, size))
        )


@check
def inputs_of_all_kinds(meshes: Meshes) -> None:
    """Cross attention, padding, evicting caches, slopes, nested inputs."""
    one = sharp(lambda: MultiHeadAttention(D, H, kdim=6, vdim=7, num_kv_heads=2))
    divided = divide(one, meshes.four)
    x, key, value = torch.randn(2, 4, D), torch.randn(2, 5, 6), torch.randn(2, 5, 7)
    valid = torch.arange(5) < torch.tensor([[5], [3]])
    close(divided(x, key, value, valid=valid), one(x, key, value, valid=valid))
    slopes = AlibiBias(torch.rand(H), range(4), range(5))
    close(divided(x, key, value, attn_bias=slopes), one(x, key, value, attn_bias=slopes))
    one = sharp(lambda: MultiHeadAttention(D, H, positions=Rotary(2), mask=causal()))
    divided = divide(one, meshes.two)
    nested = torch.nested.nested_tensor([torch.randn(n, D) for n in (3, 1, 4)], layout=torch.jagged)
    close(divided(nested).values(), one(nested).values())
    caches = WindowCache(left=2, sinks=1), WindowCache(left=2, sinks=1)
    valid = torch.arange(4) >= torch.tensor([[0], [2]])
    for step, real in ((x, valid), (x[:, :1], None), (x[:, 1:3], None)):
        with torch.no_grad():
            want, got = (f(step, cache=c, valid=real) for f, c in zip((one, divided), caches))
        if real is not None:
            want, got = want[real], got[real]
        close(got, want)
    close(copy.deepcopy(divided)(x), one(x))
    for layer in (one, sharp(LAYERS["latent"])):  # int8, with a scale for each head and token
        pair = [(part, QuantizedCache()) for part in (layer, divide(layer, meshes.four))]
        for step in (x, x[:, :1]):
            with torch.no_grad():
                want, got = (part(step, mask=causal(), cache=cache) for part, cache in pair)
            close(got, want)
    close(divided(distribute_tensor(x, meshes.two, [Shard(1)])), one(x))


@check
def latent_forms(meshes: Meshes) -> None:
    """Both forms, with gradients through a cache of latents."""
    for form in ("absorbed", "expanded"):
        one = sharp(LAYERS["latent"])
        divided = divide(one, meshes.four)
        x, bias = torch.randn(2, 5, D), torch.randn(H, 1, 1)
        for layer in (one, divided):
            layer.form, cache = form, Cache()
            steps = [
                layer(part, mask=causal() & window(left=3), cache=cache, attn_bias=bias)
                for part in x.split([2, 3], 1)
            ]
            torch.cat(steps, 1).square().sum().backward()
            assert cache._k is not None and cache._k.shape == (2, 1, cache._k.shape[2], 8)
        same_gradients(divided, one)


@check
def block_trains_as_one(meshes: Meshes) -> None:
    """Two steps of AdamW over all parameters, with gradients clipped by their norm."""
    create = lambda: TransformerBlock(  # noqa: E731
        D, H, hidden_dim=12, num_kv_heads=2, positions=Rotary(2), qk_norm="rms", sinks=True,
        cross_attention=True, memory_dim=6, norm="layer", bias=True,
    )  # fmt: skip
    one = sharp(create)
    divided = divide(one, meshes.four)
    x, memory = torch.randn(2, 5, D), torch.randn(2, 3, 6)
    norms = []
    for block in (one, divided):
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            with Communication() as communication:
                y = block(x, memory, mask=causal())
            y.square().mean().backward()
            norm = nn.utils.clip_grad_norm_(block.parameters(), 0.1)
            optimizer.step()
        norms.append(norm)
    assert communication.calls == [("all_reduce", [2, 5, D])] * 3
    close(norms[1], norms[0], "norm")
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(
            whole(divided.get_parameter(name)), parameter, atol=1e-5, rtol=1e-5, msg=name
        )
    caches = Cache(), Cache()
    with torch.no_grad():
        want = divided(x, memory, mask=causal())
        steps = [divided(x[:, :3], memory, mask=causal(), cache=caches[0], memory_cache=caches[1])]
        steps += [divided(x[:, 3:], mask=causal(), cache=caches[0], memory_cache=caches[1])]
    close(torch.cat(steps, 1), want)


class Model(nn.Module):
    def __init__(self, *biases: PositionBias) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerBlock(D, H, hidden_dim=12, positions=bias, feed_forward=MLP(D, 8))
            for bias in biases
        )
        self.head = nn.Linear(D, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=causal())
        return self.head(x)


@check
def plan_of_a_larger_model(meshes: Meshes) -> None:
    """Merged with a plan of the user, from the whole model or from one layer with a prefix."""
    one = sharp(lambda: Model(*[T5Bias(H, num_buckets=8)] * 2))  # one bias for both layers
    x = torch.randn(2, 5, D)
    want = one(x)
    want.square().sum().backward()
    head = {"head": ColwiseParallel(output_layouts=Replicate())}
    for plan in (parallel_plan(one), parallel_plan(one.layers[0], prefix="layers.*")):
        model = copy.deepcopy(one)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # names that match nothing
            parallelize_module(model, meshes.four, plan | head)
        got = model(x)
        got.square().sum().backward()
        close(got, want)
        same_gradients(model, one)


@check
def dropout_differs_between_ranks(meshes: Meshes) -> None:
    """Ranks whose generators have one state drop different weights, and have one state again."""
    create = lambda: MultiHeadAttention(64, H, bias=False, dropout=0.5, out_dropout=0.5)  # noqa: E731
    one = sharp(create)
    for (
        parameter
    ) in one.parameters():  # so that the update of head h is what it kept of its weights
        nn.init.constant_(parameter, 0.0)
    nn.init.constant_(one.v_proj.weight, 1 / 64)
    with torch.no_grad():
        one.out_proj.weight.copy_(torch.eye(64))
    divided = divide(one, meshes.four)
    torch.manual_seed(5)
    divided.out_dropout = 0.0
    kept = divided(torch.ones(1, 30, 64))[0].unflatten(-1, (H, 8))[..., 0]  # [L, H]
    assert 0.8 < float(kept.mean()) < 1.2
    for i in range(H):
        for j in range(i):
            assert not torch.equal(kept[:, i], kept[:, j]), (i, j)
    divided.out_dropout = 0.5
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(RANKS)]
    dist.all_gather(states, torch.get_rng_state())
    outputs = [torch.empty(1, 30, 64) for _ in range(RANKS)]
    dist.all_gather(outputs, divided(torch.ones(1, 30, 64)).detach())
    assert all(torch.equal(state, states[0]) for state in states)
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    torch.manual_seed(7)
    divided.eval()
    close(divided(torch.ones(1, 3, 64)), one.eval()(torch.ones(1, 3, 64)))


@check
def refusals(meshes: Meshes) -> None:
    """By name, with both numbers, before anything is divided."""
    four = meshes.four

    def refuse(words: str, layer: nn.Module, mesh: DeviceMesh = four) -> None:
        raises(words, lambda: parallelize_module(layer, mesh, parallel_plan(layer)))
        assert not any(isinstance(x, DTensor) for x in layer.parameters())

    refuse("num_heads=6 is not divisible by the 4 ranks", MultiHeadAttention(12, 6))
    refuse("num_kv_heads=6 and the 4 ranks of the mesh", MultiHeadAttention(24, 12, num_kv_heads=6))
    refuse("num_heads=6 is not divisible", TransformerBlock(12, 6, hidden_dim=8))
    refuse("hidden_dim=6 of MLP is not divisible by the 4 ranks", MLP(8, 6))
    refuse(
        "num_heads=6 is not divisible",
        LatentAttention(12, 6, kv_latent_dim=4, rotary_dim=2, head_dim=2),
    )
    layer = MultiHeadAttention(8, 4)
    layer.v_proj = nn.Sequential(layer.v_proj)
    refuse("v_proj is a Sequential: expected an nn.Linear", layer)
    refuse("has parameters, which a divided LatentAttention", LatentAttention(
        8, 4, kv_latent_dim=4, rotary_dim=2, head_dim=2, positions=Waves(2)))  # fmt: skip
    refuse("a mesh of 2 dimensions", MultiHeadAttention(8, 4), meshes.grid)
    layer = MultiHeadAttention(8, 4)
    divided = divide(layer, four)
    raises("divided among ranks already", lambda: divide_again(divided, four))
    raises("heads divided among ranks", lambda: to_torch(divided))
    assert "its heads are divided among ranks" in str(kind_of(divided))
    style = parallel_plan(layer)[""]
    raises(
        "create the plan from the module", lambda: parallelize_module(nn.Linear(2, 2), four, style)
    )
    x = torch.randn(1, 3, 8)
    raises("attn_bias[1, 2, 3, 3]: expected one head, or the 4",
           lambda: divided(x, attn_bias=torch.zeros(1, 2, 3, 3)))  # fmt: skip
    raises("slopes[3] of AlibiBias, expected one for each of the 4",
           lambda: divided(x, attn_bias=AlibiBias(torch.ones(3), range(3), range(3))))  # fmt: skip


def divide_again(layer: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(layer, mesh, parallel_plan(layer))


@check
def compiled_in_one_graph(meshes: Meshes) -> None:
    if dist.get_rank() < 2:  # a pair is enough, and compiling takes long
        one = sharp(
            lambda: MultiHeadAttention(D, H, num_kv_heads=1, sinks=True, positions=ALiBi(H))
        )
        compiled = torch.compile(divide(one, meshes.two), backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 5, D)
        close(compiled(x, mask=causal()), one(x, mask=causal()))


# ---- Checkpoints and FSDP


def create_saved() -> nn.Module:
    """What is saved by two ranks, and loaded by four and by one."""
    return nn.ModuleList(
        [
            TransformerBlock(
                D, H, hidden_dim=12, num_kv_heads=2, sinks=True, positions=T5Bias(H, num_buckets=8)
            ),
            MultiHeadAttention(D, H, bias_kv=True, qk_norm="rms_all", positions=Rotary(2)),
            LAYERS["latent"](),
        ]
    )


@check
def checkpoints_of_another_number_of_ranks(meshes: Meshes) -> None:
    saved = sharp(create_saved)
    pair, path = dist.new_group([0, 1]), meshes.folder / "saved"
    divided = divide(saved, meshes.two)
    if dist.get_rank() < 2:
        dcp.save({"model": divided.state_dict()}, checkpoint_id=path, process_group=pair)
    dist.barrier()
    torch.manual_seed(1)
    loaded = divide(create_saved(), meshes.four)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=path)
    loaded.load_state_dict(state["model"])
    for name, parameter in saved.named_parameters():
        assert torch.equal(whole(loaded.get_parameter(name)), parameter), name


@check
def fsdp(meshes: Meshes) -> None:
    """`fully_shard` of parts and whole, of heads divided before or not; each group has a batch."""
    model = lambda: Model(T5Bias(H, num_buckets=8), RelativeBias(H, 3))  # noqa: E731
    for tp, dp in ((None, meshes.four), (meshes.grid["tp"], meshes.grid["dp"])):
        groups, mine = dp.size(), dp.get_local_rank()
        for create in (LAYERS["gqa"], LAYERS["g2"], LAYERS["layer_all"], LAYERS["latent"], model):
            one = sharp(create)
            shared = copy.deepcopy(one) if tp is None else divide(one, tp)
            for layer in getattr(shared, "layers", []):
                fully_shard(layer.attention, mesh=dp)
                fully_shard(layer, mesh=dp)
            fully_shard(shared, mesh=dp)
            x = torch.randn(groups, 5, D)
            want = one(x)
            (want.square().sum() / groups).backward()
            got = shared(x[mine : mine + 1])
            got.square().sum().backward()
            close(got, want[mine : mine + 1])
            for key, parameter in one.named_parameters():
                close(shared.get_parameter(key).grad, parameter.grad, key)


# ---- The processes


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    meshes = Meshes(folder)
    for name, function in CHECKS.items():
        try:
            function(meshes)
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            raise
        (folder / f"{name}.{rank}").write_text("equal")
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        for name in set(CHECKS) - set(sys.argv[2:]):
            del CHECKS[name]
    context = multiprocessing.get_context("fork")  # torch is imported once
    ranks = [context.Process(target=run, args=(rank, folder)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    stop = time.monotonic() + 200
    for rank in ranks:
        rank.join(max(0.0, stop - time.monotonic()))
        rank.kill()


if __name__ == "__main__":
    main()
