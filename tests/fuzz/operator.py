"""The public operator against its definition: shapes, memory layouts, dtypes, masks, options,
backends, gradients, and the modes of torch, in one process, so that no case leaves anything to the
next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import multihead
from fuzz.draw import TOLERANCE, Draw, arrange, broadcast, interval_mask
from multihead.masks import IntervalMask
from multihead.ops.slopes import AlibiBias
from oracles.definition import attend

NAMES = ("out", "lse", "weights")


@dataclass
class Case:
    """The arguments of one call, and what the definition makes of them."""

    tensors: dict[str, Tensor]  # q, k, v, and those of bias and sinks that are there
    mask: Any
    numbers: dict[str, Any]
    slopes: AlibiBias | None
    dtype: torch.dtype

    def call(self, tensors: dict[str, Tensor], **options: Any) -> Any:
        tensors = dict(tensors)
        if self.slopes is not None:
            tensors["bias"] = self.slopes  # type: ignore[assignment]
        return multihead.attention(mask=self.mask, **tensors, **self.numbers, **options)

    def allowed(self) -> Tensor | None:
        length, keys = self.tensors["q"].shape[2], self.tensors["k"].shape[2]
        if isinstance(self.mask, IntervalMask):
            return self.mask.dense(length, keys)
        return self.mask

    def define(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        doubles = {name: x.double() for name, x in tensors.items()}
        if self.slopes is not None:
            doubles["bias"] = self.slopes.dense(torch.float64)
        allowed = self.allowed()
        if allowed is not None and allowed.is_floating_point():
            doubles["bias"] = allowed.double() + doubles.get("bias", 0.0)
            allowed = None
        return attend(allowed=allowed, **doubles, **self.numbers)

    def __str__(self) -> str:
        shapes = {
            name: f"{list(x.shape)} strides {x.stride()} neg {x.is_neg()}"
            for name, x in self.tensors.items()
        }
        return f"{shapes}, {self.dtype}, mask {self.mask}, slopes {self.slopes}, {self.numbers}"


def draw_case(draw: Draw) -> Case:
    dtype = draw.choice([torch.float32] * 5 + [torch.float64] * 2 + [torch.bfloat16, torch.float16])
    large = draw.maybe(0.15)  # enough work for the compiled kernels to be chosen
    batch, groups, repeats = draw.randint(1, 3), draw.randint(1, 3), draw.choice((1, 1, 2, 3))
    length = draw.choice((1, 2, draw.randint(1, 40), draw.randint(1, 180 if large else 70)))
    keys = draw.choice((length, length, draw.randint(1, 40), draw.randint(1, 300 if large else 90)))
    width, value_width = draw.randint(1, 40), draw.randint(1, 40)
    if large:
        batch, repeats, width, value_width = 2, draw.choice((2, 4)), 32, 48
        length, keys = max(length, 150), max(keys, 150)
    if draw.maybe(0.6):
        value_width = width
    if draw.maybe(0.06):
        length = 0
    if draw.maybe(0.06):
        keys = 0
    if draw.maybe(0.04):
        value_width = 0
    if draw.maybe(0.03):
        batch = 0
    heads = groups * repeats
    full = (batch, heads, length, keys)
    tensors = {
        "q": draw.normal(batch, heads, length, width, dtype=dtype) * draw.choice((1, 1, 3)),
        "k": draw.normal(batch, groups, keys, width, dtype=dtype),
        "v": draw.normal(batch, groups, keys, value_width, dtype=dtype),
    }
    slopes = None
    kind = draw.choice(("none", "none", "bias", "bias", "alibi"))
    if kind == "bias":
        bias = draw.normal(*broadcast(draw, full), dtype=dtype) * draw.choice((1, 4))
        if draw.maybe(0.2):
            bias = bias.masked_fill(bias > 0.5, -torch.inf)
        tensors["bias"] = bias
    elif kind == "alibi":
        slopes = AlibiBias(draw.normal(heads).abs(), torch.arange(length), torch.arange(keys))
    if draw.maybe(0.25):
        tensors["sinks"] = draw.normal(heads, dtype=dtype)
    numbers: dict[str, Any] = {}
    if draw.maybe(0.3):
        numbers["scale"] = draw.choice((0.0, 0.3, 1, 2.5, -0.4))
    if draw.maybe(0.25):
        numbers["softcap"] = draw.choice((0.5, 3.0, 30))
    mask: Any = None
    kind = draw.choice(("none", "interval", "interval", "interval", "bool", "float"))
    if kind == "interval":
        mask = interval_mask(draw, batch, length, keys)
    elif kind == "bool":
        mask = arrange_mask(draw, draw.normal(*broadcast(draw, full)) > -0.5)
    elif kind == "float":
        mask = draw.normal(*broadcast(draw, full), dtype=dtype)
        mask = arrange(draw, mask.masked_fill(mask > 1, -torch.inf))
    tensors = {name: arrange(draw, x) for name, x in tensors.items()}
    for name in "qkv":
        if draw.maybe(0.08) and tensors[name].shape[0] > 1:
            tensors[name] = tensors[name][:1].expand(tensors[name].shape)
    return Case(tensors, mask, numbers, slopes, dtype)


def arrange_mask(draw: Draw, mask: Tensor) -> Tensor:
    if draw.maybe() and mask.ndim > 1:
        return mask.transpose(0, -1).contiguous().transpose(0, -1)
    return mask


def close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Raise unless two results agree; what isn't finite must be so on both sides."""
    assert got.shape == want.shape, f"{name} is {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: other numbers are finite"
    assert torch.equal(got[~finite], want[~finite]), f"{name}: other infinities"
    if finite.any():
        size = max(1.0, float(want[finite].abs().max()))
        off = float((got[finite] - want[finite]).abs().max())
        limit = factor * TOLERANCE[dtype] * size
        assert off <= limit, f"{name} is off by {off:.3g}, where {limit:.3g} is allowed"


Mode = Callable[[Draw, Case], None]


def outputs(draw: Draw, case: Case, **options: Any) -> dict[str, Tensor]:
    """What one call returns, by name, for a random choice of what is asked for."""
    asked = {name: draw.maybe(0.4) for name in ("return_lse", "return_weights")}
    backends = ["auto"] * 6 + ["torch", "cpu", "cpu", "sdpa", "reference"]
    options = {"backend": draw.choice(backends)} | options
    try:
        found = case.call(case.tensors, **asked, **options)
    except multihead.MultiheadError as error:
        if "doesn't support this input" in str(error) and options["backend"] != "auto":
            return {}
        raise
    names = ["out", *(name for name in NAMES[1:] if asked[f"return_{name}"])]
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))


def judge(case: Case, found: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    want = dict(zip(NAMES, case.define(case.tensors), strict=True))
    for name, x in found.items():
        close(name, x, want[name], dtype or case.dtype)


def plain(draw: Draw, case: Case) -> None:
    judge(case, outputs(draw, case))


def inference(draw: Draw, case: Case) -> None:
    with torch.inference_mode():
        found = outputs(draw, case)
    judge(case, {name: x.clone() for name, x in found.items()})


def no_grad(draw: Draw, case: Case) -> None:
    with torch.no_grad():
        judge(case, outputs(draw, case))


def deterministic(draw: Draw, case: Case) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        judge(case, outputs(draw, case))
    finally:
        torch.use_deterministic_algorithms(False)


def other_default_dtype(draw: Draw, case: Case) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        found = outputs(draw, case)
    finally:
        torch.set_default_dtype(torch.float32)
    judge(case, found)


def other_default_device(draw: Draw, case: Case) -> None:
    with torch.device("meta"):
        found = outputs(draw, case)
    judge(case, found)


def autocast(draw: Draw, case: Case) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outputs(draw, case, backend="auto")
    if case.dtype != torch.float64:
        for x in found.values():
            assert x.device.type == "cpu"
        want = dict(zip(NAMES, case.define(case.tensors), strict=True))
        for name, x in found.items():
            assert x.shape == want[name].shape
            assert torch.equal(x.isnan(), want[name].isnan()), f"{name}: NaN under autocast"


def counted(draw: Draw, case: Case) -> None:
    with FlopCounterMode(display=False) as counter:
        found = outputs(draw, case, backend="auto")
    judge(case, found)
    q, k, v = (case.tensors[name] for name in "qkv")
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if case.tensors["k"].shape[2]:
        want = 2 * pairs * (q.shape[3] + v.shape[3])
        assert counter.get_total_flops() == want, f"{counter.get_total_flops()} FLOPs, not {want}"


def meta(draw: Draw, case: Case) -> None:
    there = Case(
        {name: x.to("meta") for name, x in case.tensors.items()},
        case.mask.to("meta") if isinstance(case.mask, Tensor) else case.mask,
        case.numbers,
        None,
        case.dtype,
    )
    shapes_only(outputs(draw, there, backend="auto"), case, "meta")


def fake(draw: Draw, case: Case) -> None:
    if case.slopes is not None or (isinstance(case.mask, IntervalMask) and case.mask.rules):
        return  # a mask of real tensors doesn't go into a mode of fake ones
    with FakeTensorMode() as mode:
        there = Case(
            {name: mode.from_tensor(x) for name, x in case.tensors.items()},
            mode.from_tensor(case.mask) if isinstance(case.mask, Tensor) else case.mask,
            case.numbers,
            None,
            case.dtype,
        )
        found = outputs(draw, there, backend="auto")
    shapes_only(found, case, "cpu")


def shapes_only(found: dict[str, Tensor], case: Case, device: str) -> None:
    want = dict(zip(NAMES, case.define(case.tensors), strict=True))
    work = torch.promote_types(case.dtype, torch.float32)
    for name, x in found.items():
        assert x.shape == want[name].shape, f"{name} is {list(x.shape)}"
        assert x.device.type == device, f"{name} is on {x.device}"
        assert x.dtype == (work if name == "lse" else case.dtype), f"{name} is {x.dtype}"


def inputs_of(case: Case) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in case.tensors.items()}


def gradients(draw: Draw, case: Case) -> None:
    """Gradients of a random sum of everything that is returned."""
    backend = draw.choice(("auto", "auto", "torch", "cpu", "sdpa"))
    tensors = {name: x.detach().requires_grad_(draw.maybe(0.8)) for name, x in case.tensors.items()}
    asked = draw.choice(({}, {}, {"return_lse": True}, {"return_weights": True}))
    own = {name: inputs_of(case)[name].double().requires_grad_() for name in tensors}
    want = case.define(own)
    try:
        found = case.call(tensors, backend=backend, **asked)
    except multihead.MultiheadError as error:
        if "doesn't support this input" in str(error) and backend != "auto":
            return
        raise
    found = found if isinstance(found, tuple) else (found,)
    chosen = {"return_lse": (0, 1), "return_weights": (0, 2)}.get(next(iter(asked), ""), (0,))
    total = torch.zeros((), dtype=torch.float64)
    defined = torch.zeros((), dtype=torch.float64)
    for n, x in zip(chosen, found, strict=True):
        close(NAMES[n], x, want[n], case.dtype)
        factor = draw.normal(*x.shape).to(case.dtype)
        finite = want[n].isfinite()
        total = total + (x.masked_fill(~finite, 0).double() * factor).sum()
        defined = defined + (want[n].masked_fill(~finite, 0) * factor.double()).sum()
    tracked = [name for name, x in tensors.items() if x.requires_grad]
    if not tracked or not total.requires_grad:
        return
    got = torch.autograd.grad(total, [tensors[name] for name in tracked], allow_unused=True)
    should = torch.autograd.grad(defined, [own[name] for name in tracked], allow_unused=True)
    for name, a, b in zip(tracked, got, should, strict=True):
        b = torch.zeros_like(own[name]) if b is None else b
        close(f"gradient of {name}", torch.zeros_like(b) if a is None else a, b, case.dtype, 4)


def functional_gradients(draw: Draw, case: Case) -> None:
    """torch.func.grad with respect to one of the inputs."""
    if case.dtype not in (torch.float32, torch.float64):
        return
    name = draw.choice([n for n in case.tensors if n != "bias" or case.slopes is None])
    factor = draw.normal(*case.define(case.tensors)[0].shape)

    def total(x: Tensor) -> Tensor:
        return (case.call(case.tensors | {name: x}) * factor).sum()

    got = torch.func.grad(total)(case.tensors[name])
    x = inputs_of(case)[name].double().requires_grad_()
    want = torch.autograd.grad(
        (case.define(case.tensors | {name: x})[0] * factor).sum(), x, allow_unused=True
    )[0]
    want = torch.zeros_like(x) if want is None else want
    close(f"torch.func.grad of {name}", got, want, case.dtype, 4)


def forward_mode(draw: Draw, case: Case) -> None:
    if case.dtype not in (torch.float32, torch.float64):
        return
    name = draw.choice("qkv")
    x = inputs_of(case)[name]
    tangent = draw.normal(*x.shape, dtype=case.dtype)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        out = case.call(case.tensors | {name: dual})
        got = forward_ad.unpack_dual(out).tangent
        defined = forward_ad.make_dual(x.double(), tangent.double())
        want = forward_ad.unpack_dual(case.define(case.tensors | {name: defined})[0]).tangent
        got = torch.zeros_like(out) if got is None else got
        want = torch.zeros_like(out, dtype=torch.float64) if want is None else want
        close(f"tangent of {name}", got, want, case.dtype, 4)


def traced(draw: Draw, case: Case) -> None:
    tensors = inputs_of(case)
    if not case.tensors["q"].numel():
        return

    def run(q: Tensor) -> Tensor:
        found: Tensor = case.call(tensors | {"q": q})
        return found

    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            module = torch.jit.trace(run, tensors["q"], check_trace=False)
        other = draw.normal(*tensors["q"].shape, dtype=case.dtype)
        close("traced", module(other), case.define(tensors | {"q": other})[0], case.dtype)


MODES: tuple[Mode, ...] = (
    *[plain] * 5,
    *[gradients] * 5,
    *[inference] * 2,
    *[no_grad] * 2,
    deterministic,
    other_default_dtype,
    other_default_device,
    autocast,
    counted,
    meta,
    fake,
    functional_gradients,
    forward_mode,
    traced,
)


def run(seed: int) -> str:
    """Run one case; return its mode. Raises with the case where a result is wrong."""
    draw = Draw(seed)
    case = draw_case(draw)
    mode = draw.choice(MODES)
    try:
        mode(draw, case)
    except Exception as error:
        error.add_note(f"seed {seed}, mode {mode.__name__}: {case}")
        raise
    return mode.__name__
