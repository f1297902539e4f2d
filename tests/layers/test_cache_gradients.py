"""Gradients through caches: as those of one pass, whatever modes the steps ran in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import Cache, MultiHeadAttention, TransformerBlock, WindowCache
from multihead.layers.rotary import Rotary
from multihead.masks import causal, window

CACHES: dict[str, Callable[[], Cache]] = {
    "grows": Cache,
    "reserved": lambda: Cache(16),
    "window": lambda: WindowCache(3),
    "window and sinks": lambda: WindowCache(2, sinks=2),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
PARTS = [slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 8)]
kinds = pytest.mark.parametrize("kind", CACHES)


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(12, 2, positions=Rotary(6), **options).double()


def mask_of(cache: Cache) -> Any:
    if not isinstance(cache, WindowCache):
        return causal()
    near = (causal() & window(left=cache.left)).dense(8, 8)
    return near | (causal().dense(8, 8) & (torch.arange(8) < cache.sinks))


def keys(model: MultiHeadAttention, x: Tensor, part: slice) -> Tensor:
    """What a step stores, as the uncached layer sees it."""
    return x[:, part]


@kinds
@pytest.mark.parametrize(
    "modes",
    [
        ["grad", "no_grad", "grad", "grad"],
        ["no_grad", "grad", "no_grad", "grad"],
        ["inference", "grad", "inference", "grad"],
        ["grad", "inference", "grad", "inference"],
        ["inference", "no_grad", "inference", "grad"],
        ["grad", "grad", "inference", "no_grad"],
    ],
    ids="-".join,
)
def test_steps_in_any_modes(kind: str, modes: list[str]) -> None:
    """The gradient of all outputs that have one, with the inputs of the other steps constant."""
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)
    outputs: list[Tensor] = []
    for part, mode in zip(PARTS, modes):
        with MODES[mode]():
            outputs.append(model(x[:, part], mask=causal(), cache=cache))
    ours = [y for y, mode in zip(outputs, modes) if mode == "grad"]
    grads = torch.autograd.grad(
        sum((y.square().sum() for y in ours), torch.zeros(())), [x, *model.parameters()]
    )
    # one pass, in which the keys and values of the other steps are detached
    constant = torch.zeros(8, dtype=torch.bool)
    for part, mode in zip(PARTS, modes):
        constant[part] = mode != "grad"

    def cut(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.where(constant[:, None], output.detach(), output)

    handles = [m.register_forward_hook(cut) for m in (model.k_proj, model.v_proj)]
    whole = model(x, mask=mask_of(cache))
    for handle in handles:
        handle.remove()
    want = torch.autograd.grad(whole[:, ~constant].square().sum(), [x, *model.parameters()])
    assert torch.allclose(torch.cat([y.detach().clone() for y in outputs], 1), whole)
    for a, b in zip(grads, want):
        assert torch.allclose(a, b, atol=1e-10)


@kinds
def test_only_the_queries_are_trained(kind: str) -> None:
    """Keys have no gradient, but the backward pass needs them as they were."""
    model, cache = layer(), CACHES[kind]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "q_proj.weight")
    x = torch.randn(1, 8, 12, dtype=torch.float64)
    outputs = [model(x[:, part], mask=causal(), cache=cache) for part in PARTS]
    torch.cat(outputs, 1).square().sum().backward()
    got = model.q_proj.weight.grad
    model.q_proj.weight.grad = None
    model(x, mask=mask_of(cache)).square().sum().backward()
    assert got is not None and torch.allclose(got, model.q_proj.weight.grad)


@kinds
def test_a_step_without_gradients_leaves_the_graph_before_as_it_was(kind: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(1, 8, 12, dtype=torch.float64)
    first = model(x[:, :5], mask=causal(), cache=cache)
    with torch.no_grad():
        model(x[:, 5:6], mask=causal(), cache=cache)
    with torch.inference_mode():
        model(x[:, 6:7], mask=causal(), cache=cache)
    first.sum().backward()
    got = model.k_proj.weight.grad
    model.k_proj.weight.grad = None
    mask = mask_of(cache)
    mask = mask[..., :5, :5] if isinstance(mask, Tensor) else mask
    model(x[:, :5], mask=mask).sum().backward()
    assert torch.allclose(got, model.k_proj.weight.grad)


@kinds
def test_backward_after_every_few_steps(kind: str) -> None:
    """Truncated backpropagation: `detach_` between two backward passes."""
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(1, 8, 12, dtype=torch.float64)
    model(x[:, :4], mask=causal(), cache=cache).sum().backward()
    undetached = copy.deepcopy(cache)  # numbers alone
    cache.detach_()
    outputs = []
    for one in (cache, undetached):
        model.zero_grad()
        out = model(x[:, 4:], mask=causal(), cache=one)
        out.sum().backward()
        outputs.append((out, model.k_proj.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*outputs))
    Cache().detach_()


@kinds
@pytest.mark.parametrize("mode", MODES)
def test_copies(kind: str, mode: str) -> None:
    """Copies hold the numbers, have no gradient, and go separate ways."""
    model, cache = layer().eval(), CACHES[kind]()
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    with MODES[mode]():
        model(x[:, :5], mask=causal(), cache=cache)
    copies = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]  # noqa: S301
    want = model(x, mask=mask_of(cache))[:, 5:]
    for one in copies:
        assert torch.equal(one.key_positions, cache.key_positions) and one.length == 5
        other = x.flip(0)
        with torch.no_grad():
            model(other[:, 5:], mask=causal(), cache=copy.copy(one))  # leaves it unchanged
        got = model(x[:, 5:], mask=causal(), cache=one)
        assert torch.allclose(got, want) and got.requires_grad
        got.sum().backward()
    assert torch.allclose(model(x[:, 5:], mask=causal(), cache=cache), want)


@kinds
def test_reordered_and_cropped_memory_keeps_its_gradient(kind: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    model(x[:, :3], mask=causal(), cache=cache)
    with torch.no_grad():
        cache.reorder([1, 1])
    if kind in ("grows", "reserved"):
        with torch.inference_mode():
            cache.crop([2, 2])
    swapped = x.detach()[[1, 1]]
    out = model(swapped[:, 3:], mask=causal(), cache=cache)
    (got,) = torch.autograd.grad(out.sum(), [x])
    assert not got[0].any() and got[1].any()


@pytest.mark.parametrize("modes", [("grad", "no_grad"), ("inference", "grad")], ids="-".join)
def test_blocks_with_a_memory_cache(modes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    block = TransformerBlock(12, 2, hidden_dim=16, cross_attention=True).double()
    x, memory = (torch.randn(1, n, 12, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    cache, memory_cache = Cache(), Cache()
    outputs = []
    for i, mode in enumerate(modes):
        given = {"memory": memory} if i == 0 else {}
        with MODES[mode]():
            outputs.append(
                block(
                    x[:, 2 * i : 2 * i + 2],
                    mask=causal(),
                    cache=cache,
                    memory_cache=memory_cache,
                    **given,
                )
            )
    want = block(x, memory, mask=causal())
    assert torch.allclose(torch.cat([y.detach().clone() for y in outputs], 1), want)
    next(y for y, mode in zip(outputs, modes) if mode == "grad").sum().backward()
    assert x.grad is not None


def test_ragged_lengths_of_inference_mode() -> None:
    model, cache = layer(), Cache()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    valid = [[False, True, True, True], [True] * 4]
    with torch.inference_mode():
        model(x[:, :4], mask=causal(), cache=cache, valid=valid)
    out = model(x[:, 4:], mask=causal(), cache=cache)
    out.sum().backward()
    row = torch.cat([x[:1, 1:4], x[:1, 4:]], 1)
    assert torch.allclose(out[:1], model(row, mask=causal())[:, 3:])


@kinds
@pytest.mark.parametrize("first", ["nothing", "padding"])
def test_a_step_of_inference_mode_that_stores_nothing(kind: str, first: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    with torch.inference_mode():
        own = x[:, :0].clone() if first == "nothing" else x[:, :2].clone()
        valid = None if first == "nothing" else torch.zeros(2, 2, dtype=torch.bool)
        model(own, mask=causal(), cache=cache, valid=valid)
    assert cache.length == 0
    steps = [model(x[:, part], mask=causal(), cache=cache) for part in (slice(0, 1), slice(1, 3))]
    want = model(x[:, :3], mask=causal())
    torch.testing.assert_close(torch.cat(steps, 1), want)
    torch.cat(steps, 1).sum().backward()


@kinds
def test_an_empty_step_of_inference_mode_between_steps(kind: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    for step in (x[:, :1], x[:, :0], x[:, 1:2], x[:, :0]):
        with torch.inference_mode():
            model(step, mask=causal(), cache=cache)
    out = model(x[:, 2:], mask=causal(), cache=cache)
    out.sum().backward()
    torch.testing.assert_close(out, model(x, mask=causal())[:, 2:])


@kinds
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("use", ["filled inside", "restored", "copied", "stepwise"])
@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "vmap"])
def test_filled_caches_under_transforms(kind: str, mode: str, use: str, transform: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(1, 6, 12, dtype=torch.float64)

    def fill(cache: Cache) -> Cache:
        with MODES[mode]():
            model(x[:, :4], mask=causal(), cache=cache)
        return cache

    state = fill(cache).state()

    def steps(y: Tensor) -> Tensor:
        taken = cache
        if use == "restored":
            cache.restore(state)
        elif use == "copied":
            taken = copy.deepcopy(cache)
        else:
            taken = fill(CACHES[kind]())
        parts = [y[:, :1], y[:, 1:]] if use == "stepwise" else [y]
        return torch.cat([model(part, mask=causal(), cache=taken) for part in parts], 1)

    def whole(y: Tensor) -> Tensor:
        mask = mask_of(cache)
        mask = mask[..., :6, :6] if isinstance(mask, Tensor) else mask
        return model(torch.cat([x[:, :4], y], 1), mask=mask)[:, 4:]

    def result(f: Callable[[Tensor], Tensor]) -> Tensor:
        if transform == "vmap":
            return torch.vmap(f)(torch.stack([x[:, 4:], x[:, 2:4]]))
        found: Tensor = getattr(torch.func, transform)(f)(x[:, 4:])
        return found

    torch.testing.assert_close(result(steps), result(whole))
