"""Nothing that is kept depends on the mode it was made in, and nothing is read around torch's
dispatcher that listens, or that isn't dense memory of a CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from multihead import MultiHeadAttention, attention
from multihead.errors import MultiheadError
from multihead.layers import ALiBi, Cache, Rotary, WindowCache
from multihead.masks import causal, documents, intervals, padding, prefix, window
from multihead.ops import AlibiBias
from multihead.ops.call import AttentionCall
from multihead.ops.modes import has_plain_memory

L = 40


class OwnTensor(torch.Tensor):
    """A subclass without methods."""


class Passing(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default_dtype": default_dtype,
    "default_device": default_device,
    "with_device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "function_mode": Passing,
    "dispatch_mode": Recording,
    "flops": lambda: FlopCounterMode(display=False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "forward_mode": forward_ad.dual_level,
    "saved_tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(), lambda x: x
    ),
}
HIDING = ("fake", "vmap", "make_fx", "trace", "functionalize")  # modes that a call runs inside of


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
    )


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _valid() -> Tensor:
    return torch.arange(L, device="cpu") < ints([L], [L - 3])


# Whatever holds tensors or numbers from its creation on: made in one mode, used in another.
MASKS: dict[str, Callable[[], Any]] = {
    "causal": causal,
    "window": lambda: window(left=3, right=2),
    "offsets": lambda: causal(ints(1, 3)),
    "lengths": lambda: padding(ints(L, L - 5)) & causal(),
    "valid": lambda: padding(valid=_valid()) & causal(),
    "documents": lambda: documents(torch.arange(L, device="cpu") // 7) & causal(),
    "prefix": lambda: prefix(ints(2, 5)),
    "intervals": lambda: intervals(ints([0] * L), ints([*range(1, L + 1)])),
}


class MaskUser:
    """A mask of each kind, with each backend."""

    def __init__(self) -> None:
        self.masks = {name: make() for name, make in MASKS.items()}
        positions = torch.arange(L, device="cpu")
        self.bias = AlibiBias(torch.full((4,), 0.1, device="cpu"), positions, positions)

    def __call__(self, x: Tensor) -> Tensor:
        parts = [
            attention(x, x[:, :2], x[:, :2], mask, bias=bias, backend=backend)
            for mask in self.masks.values()
            for backend, bias in (("cpu", self.bias), ("torch", None), ("sdpa", self.bias))
        ]
        return torch.stack(parts)


def _layers() -> list[MultiHeadAttention]:
    torch.manual_seed(0)
    return [
        MultiHeadAttention(32, 4, num_kv_heads=2, positions=Rotary(8), sinks=True).requires_grad_(
            False
        ),
        MultiHeadAttention(32, 4, positions=ALiBi(4)).requires_grad_(False),
    ]


# Parameters are made in the mode of whoever makes the layer, so here they are made outside of all
LAYERS = _layers()


class LayerUser:
    """Layers with what they might keep from their first call: rotary frequencies, slopes."""

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(2)
        return torch.stack([layer(flat, mask=causal()) for layer in LAYERS])


class CacheUser:
    """Caches with a prompt from one mode, whose next tokens come in another."""

    def __init__(self) -> None:
        self.caches = Cache(), WindowCache(16)
        with torch.no_grad():
            for cache in self.caches:
                LAYERS[0](numbers(2, L, 32, seed=5), mask=causal(), cache=cache)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x[:, :, :3].transpose(1, 2).flatten(2)
        return torch.stack([LAYERS[0](flat, mask=causal(), cache=c) for c in self.caches])


USERS: dict[str, Callable[[], Any]] = {"masks": MaskUser, "layers": LayerUser, "caches": CacheUser}


def run_hidden(mode: str, user: Any, x: Tensor) -> None:
    """Run where values can't be read, which must leave nothing for calls that come later."""
    if mode == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            user(fake.from_tensor(x))
    elif mode == "vmap":
        torch.vmap(user)(x[None])
    elif mode == "make_fx":
        make_fx(user)(x)
    elif mode == "trace":
        with torch.no_grad():
            torch.jit.trace(user.__call__, (x,), check_trace=False)
    else:
        torch.func.functionalize(user)(x)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("first", [*MODES])
def test_what_is_made_and_used_in_one_mode_works_in_every_other(user: str, first: str) -> None:
    """In particular: evaluate in inference mode, then train."""
    x = numbers(2, 4, L, 8)
    want = USERS[user]()(x)
    for second in MODES:
        AttentionCall.lower.__globals__["_band"].cache_clear()
        with MODES[first]():
            made = USERS[user]()
            if user != "caches":
                made(x)
        with MODES[second]():
            got = made(x)
        torch.testing.assert_close(got, want, msg=lambda m, s=second: f"{first}, {s}: {m}")
        if user == "caches":
            continue
        y = x.clone().requires_grad_()
        made(y).square().sum().backward()
        assert y.grad is not None and bool(y.grad.isfinite().all()), second


@pytest.mark.parametrize("mode", HIDING)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_recorded_calls_leave_nothing_to_later_ones(mode: str) -> None:
    x = numbers(2, 4, L, 8)
    for user in (MaskUser(), LayerUser()):
        want = user(x)
        AttentionCall.lower.__globals__["_band"].cache_clear()
        if mode == "vmap" and isinstance(user, MaskUser):
            del user.masks["valid"], user.masks["documents"]
        run_hidden(mode, user, x)
        got = user(x)
        torch.testing.assert_close(got, want[: len(got)] if mode != "vmap" else user(x))
        y = x.clone().requires_grad_()
        user(y).sum().backward()


# Inputs that aren't dense, resolved memory of exactly a tensor


def negated(x: Tensor) -> Tensor:
    """x, as a view whose numbers have to be negated."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": negated,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "subclass": lambda x: x.as_subclass(OwnTensor),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "buffer": lambda x: nn.Buffer(x),
    "inference": lambda x: _in_inference(x),
    "two": lambda x: TwoTensor(x, x.clone()),
}


def _in_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def arguments(length: int = 160) -> dict[str, Tensor]:
    """Enough work for the compiled kernels."""
    return {
        "q": numbers(1, 4, length, 64, seed=1),
        "k": numbers(1, 2, length, 64, seed=2),
        "v": numbers(1, 2, length, 64, seed=3),
        "bias": numbers(1, 4, length, length, seed=4),
        "sinks": numbers(4, seed=5),
    }


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "all"])
def test_every_kind_of_tensor_gives_the_same(name: str, kind: str, backend: str) -> None:
    given = arguments()
    want = attention(**given, mask=causal(), backend=backend)
    changed = {key: ALIKE[kind](x) if name in (key, "all") else x for key, x in given.items()}
    got = attention(**changed, mask=causal(), backend=backend)
    got = got.a if isinstance(got, TwoTensor) else got
    torch.testing.assert_close(got.as_subclass(Tensor), want, atol=1e-5, rtol=1e-5)


def test_a_boolean_mask_of_a_subclass() -> None:
    given = arguments()
    mask = torch.ones(160, 160, dtype=torch.bool).tril()
    got = attention(**given, mask=mask.as_subclass(OwnTensor), backend="cpu")
    torch.testing.assert_close(got.as_subclass(Tensor), attention(**given, mask=mask))


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_other_layouts_are_named(name: str) -> None:
    given: dict[str, Any] = arguments(9) | {"mask": torch.ones(9, 9, dtype=torch.bool)}
    given[name] = given[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} is of the layout torch.sparse_coo"):
        attention(**given)
    if name not in ("mask", "bias"):
        given[name] = given[name].to_dense().to_mkldnn()
        with pytest.raises(TypeError, match=f"{name} is of the layout torch._mkldnn"):
            attention(**given)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_serve_other_lengths() -> None:
    q, k, v = list(arguments().values())[:3]
    for mask, options in ((causal(), {}), (window(left=5), {}), (None, {"softcap": 3.0})):
        for traced_length in (9, 160):
            with torch.no_grad():
                traced = torch.jit.trace(
                    lambda *x, m=mask, o=options: attention(*x, m, **o),
                    [x[:, :, :traced_length] for x in (q, k, v)],
                )
            for length in (1, 5, 150):
                x = [y[:, :, :length] for y in (q, k, v)]
                torch.testing.assert_close(traced(*x), attention(*x, mask, **options))


def test_zeros_without_memory() -> None:
    """torch makes such zeros for gradients that nothing reaches."""
    given = arguments()
    zero = torch._efficientzerotensor(given["v"].shape)
    assert zero._is_zerotensor() and not has_plain_memory(zero)
    for backend in ("auto", "cpu", "torch"):
        assert not attention(given["q"], given["k"], zero, backend=backend).any()
        bias = torch._efficientzerotensor((160, 160))
        torch.testing.assert_close(
            attention(given["q"], given["k"], given["v"], bias=bias, backend=backend),
            attention(given["q"], given["k"], given["v"]),
        )


def test_freed_storage_is_an_error() -> None:
    """FSDP frees the storage of parameters that aren't needed."""
    given = arguments()
    given["k"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"k\[.*no memory"):
        attention(**given, backend="cpu")


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_whoever_listens_sees_the_operator(backend: str) -> None:
    given = arguments()
    want = attention(**given, backend=backend)
    with Recording() as seen:
        torch.testing.assert_close(attention(**given, backend=backend), want)
    assert "multihead.attend.default" in seen.seen
    with LoggingTensorMode():
        torch.testing.assert_close(attention(**given, backend=backend), want)
    with torch.profiler.profile() as profile:
        attention(**given, backend=backend)
    assert "multihead::attend" in {event.key for event in profile.key_averages()}
    graph = make_fx(lambda *x: attention(*x, sinks=given["sinks"], backend=backend))(
        given["q"], given["k"], given["v"]
    )
    assert "multihead.attend" in graph.code
    q = given["q"] + 1
    torch.testing.assert_close(
        graph(q, given["k"], given["v"]),
        attention(q, given["k"], given["v"], sinks=given["sinks"], backend=backend),
    )


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch", "sdpa"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_modules_compute(backend: str) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal(), backend=backend)

    for length in (9, 160):
        q, k, v = list(arguments(length).values())[:3]
        with torch.no_grad():
            traced = torch.jit.trace(f, (q, k, v))
        torch.testing.assert_close(traced(q + 1, k, v), f(q + 1, k, v))


def test_a_function_mode_sees_every_argument() -> None:
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    given = arguments(9)
    for name in ("bias", "sinks"):
        seen.clear()
        attention(**given | {name: given[name].as_subclass(Own)})
        assert attention in seen
    seen.clear()
    attention(given["q"], given["k"], given["v"], torch.ones(9, 9).bool().as_subclass(Own))
    assert attention in seen


# Where the memory is

BACKENDS = ("auto", "cpu", "torch", "sdpa", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "added", "bias", "sinks", "intervals"])
def test_another_device_is_an_error_that_names_the_argument(name: str, backend: str) -> None:
    given: dict[str, Any] = arguments()
    if name == "mask":
        given["mask"] = torch.ones(160, 160, dtype=torch.bool, device="meta")
    elif name == "added":
        given["mask"] = torch.ones(160, 160, device="meta")
    elif name == "intervals":
        given["mask"] = padding(torch.ones(1, dtype=torch.int64, device="meta"))
    else:
        given[name] = given[name].to("meta")
    argument = {"q": "k", "added": "mask", "intervals": "mask"}.get(name, name)
    pattern = f"Expected all tensors to be on the same device, but found q on .* {argument} on"
    with pytest.raises(RuntimeError, match=pattern) as found:
        attention(**given, backend=backend)
    assert isinstance(found.value, MultiheadError)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [9, 160])
def test_meta_tensors_give_shapes(backend: str, dtype: torch.dtype, length: int) -> None:
    given = {name: x.to("meta", dtype) for name, x in arguments(length).items()}
    q, k, v = given["q"], given["k"], given["v"]
    for options in (
        {},
        {"mask": causal()},
        {"mask": padding(ints(7))},
        {"mask": torch.ones(length, length, dtype=torch.bool, device="meta")},
        {"bias": given["bias"]},
        *([] if backend == "sdpa" else [{"sinks": given["sinks"]}, {"return_lse": True}]),
        *([] if backend in ("sdpa", "cpu") else [{"return_weights": True}]),
    ):
        got = attention(q, k, v, backend=backend, **options)
        real = attention(
            *(torch.ones_like(x, device="cpu") for x in (q, k, v)),
            **{
                name: torch.ones_like(x, device="cpu") if isinstance(x, Tensor) else x
                for name, x in options.items()
            },
        )
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, real)), strict=True):
            assert a.is_meta and a.shape == b.shape and a.dtype == b.dtype, options


def test_empty_tensors_are_given() -> None:
    """Their address is 0, which isn't that of something that wasn't given."""
    q, none = numbers(1, 4, 5, 8), numbers(1, 4, 0, 8)
    for mask in (None, torch.ones(5, 0, dtype=torch.bool), padding(ints(0))):
        for bias in (None, numbers(5, 0)):
            for sinks in (None, numbers(4)):
                out, lse = attention(
                    q, none, none, mask, bias=bias, sinks=sinks, return_lse=True, backend="cpu"
                )
                assert not out.any()
                want = torch.full((4,), -torch.inf) if sinks is None else sinks
                torch.testing.assert_close(lse, want[None, :, None].expand(1, 4, 5))


@pytest.mark.parametrize("mode", ["default_device", "default_dtype", "deterministic", "inference"])
def test_modes_that_change_new_tensors(mode: str) -> None:
    """Nothing that wasn't written is read, and scratch memory is where q is."""
    for length, options in itertools.product((1, 9, 160), ({}, {"softcap": 5.0})):
        given = arguments(length)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            cast = {name: x.to(dtype) for name, x in given.items()}
            want = attention(**cast, mask=window(left=3), return_lse=True, **options)
            with MODES[mode]():
                got = attention(**cast, mask=window(left=3), return_lse=True, **options)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
