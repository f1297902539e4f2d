"""What attention.py times: each workload our way, torch's plain way, and the other ways that a
torch user could write it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import multihead
from multihead import attention
from multihead.masks import causal, documents, intervals, window
from multihead.ops import AttentionCall

HEADS_CHECKED, ROWS_CHECKED = 3, 256
LAYERS = 12  # caches that decoding cycles through, as a model does
CAP = 30.0
Ways = dict[str, Callable[[], Any]]


class Case(NamedTuple):
    """One row of the table. `ways` begins with "ours" and "plain"."""

    name: str
    goal: tuple[float, float | None]  # ratios to plain and to best
    ways: Ways
    expected: Tensor  # in float64
    pick: Callable[[Any], Tensor]  # the same numbers out of what a way returns
    work: float  # floating-point operations, or bytes read, of one call
    of: str  # what `work` is a share of: "arithmetic", "memory"
    calls: int = 1  # calls to a way


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
) -> Tensor:
    """The definition, in float64; k and v of as many heads as q. A row that may read nothing gives
    zeros.
    """
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores if bias is None else scores + bias.double()
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v.double()


def sample(n: int, many: int) -> Tensor:
    """So many numbers below n, the first and the last among them."""
    return (
        torch.cat([torch.tensor([0, n - 1]), torch.randperm(n)[: many - 2]]).unique()
        if n > many
        else torch.arange(n)
    )


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def flex(
    q: Tensor, k: Tensor, v: Tensor, mask_mod: Any = None, score_mod: Any = None
) -> Callable[[], Tensor] | None:
    """FlexAttention compiled for this input, where there is a C++ compiler and it takes it."""
    if not shutil.which("g++"):
        return None
    try:
        import torch._inductor.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._inductor.config.compile_threads = 1  # no processes beside what is timed
        torch._dynamo.reset()
        block = (
            None
            if mask_mod is None
            else create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
        )
        run = partial(
            torch.compile(flex_attention, dynamic=False),
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        run()
        return run
    except Exception:
        return None


def forward(
    name: str,
    goal: tuple[float, float | None],
    B: int,
    H: int,
    G: int,
    n: int,
    E: int,
    *,
    mask: Any = None,
    mask_mod: Any = None,
    score_mod: Any = None,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    bias: Tensor | None = None,
    our_bias: Any = None,
    plain: Any = None,
    others: Any = None,
    flexed: bool = True,
) -> Case:
    """A pass over n rows and keys. `plain` and `others` take q, k, v: where torch is better called
    in another way.
    """
    q = torch.randn(B, H, n, E).to(dtype)
    k, v = (torch.randn(B, G, n, E).to(dtype) for _ in range(2))
    is_causal = mask is not None and mask.static(n, n) == "causal"
    start, stop = (mask or multihead.masks.IntervalMask()).bounds(n, n)
    dense = None if mask is None or is_causal else mask.dense(n, n)
    grouped = {"enable_gqa": True} if G != H else {}
    ways: Ways = {
        "ours": lambda: attention(
            q,
            k,
            v,
            mask,
            bias=bias if our_bias is None else our_bias,
            softcap=softcap,
            backend="cpu",
        )
    }
    ways["plain"] = (
        (lambda: F.scaled_dot_product_attention(q, k, v, dense, is_causal=is_causal, **grouped))
        if plain is None
        else (lambda: plain(q, k, v))
    )
    if G != H:
        rk, rv = repeated(k, H), repeated(v, H)
        ways["repeated"] = lambda: F.scaled_dot_product_attention(q, rk, rv, is_causal=is_causal)
    if dtype == torch.bfloat16:
        wide = {"is_causal": is_causal, **grouped}
        ways["float32"] = lambda: F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), **wide
        ).to(dtype)
    ways |= {} if others is None else others(q, k, v)
    if flexed and (found := flex(q, k, v, mask_mod, score_mod)):
        ways["flex"] = found
    heads, rows = sample(H, HEADS_CHECKED), sample(n, ROWS_CHECKED)
    at = torch.arange(n)
    allowed = (at >= start[:, rows, None]) & (at < stop[:, rows, None])
    expected = exact(
        q[:, heads][:, :, rows],
        *(x[:, heads // (H // G)] for x in (k, v)),
        allowed[:, None],
        softcap,
        None if bias is None else bias[:, heads][:, :, rows],
    )
    filled = allowed.any(-1)[:, None, :, None]
    pairs = float((stop - start).sum()) * H * B / start.shape[0]
    if (
        not filled.all()
    ):  # plain torch gives rows of padding something, which is nobody's; ours gives zeros
        assert not (ways["ours"]()[:, heads][:, :, rows] * ~filled).any()
    return Case(
        name,
        goal,
        ways,
        expected,
        lambda out: out[:, heads][:, :, rows] * filled,
        4 * E * pairs,
        "arithmetic",
    )


def decode(B: int, H: int, G: int, S: int, E: int, *, flexed: bool = True) -> Case:
    """One row a head against the caches of several layers, one after the other."""
    q = torch.randn(B, H, 1, E)
    caches = [(torch.randn(B, G, S, E), torch.randn(B, G, S, E)) for _ in range(LAYERS)]
    sdpa = F.scaled_dot_product_attention

    def over(
        one: Callable[[Tensor, Tensor], Tensor], kept: list[tuple[Tensor, Tensor]] = caches
    ) -> Callable[[], Tensor]:
        return lambda: [one(k, v) for k, v in kept][-1]

    folded = q.view(B, G, H // G, E)
    ways: Ways = {
        "ours": over(lambda k, v: attention(q, k, v, backend="cpu")),
        "plain": over(lambda k, v: sdpa(q, k, v, enable_gqa=True)),
        "folded": over(lambda k, v: sdpa(folded, k, v).view(B, H, 1, E)),
    }
    size = 8 * B * G * S * E
    if LAYERS * size * (H // G) < 2**31:
        ways["repeated"] = over(
            lambda k, v: sdpa(q, k, v), [(repeated(k, H), repeated(v, H)) for k, v in caches]
        )
    if flexed and (found := flex(q, *caches[0])):  # the compiled function alone, not its arguments
        compiled = found.func  # type: ignore[attr-defined]
        ways["flex"] = over(lambda k, v: compiled(q, k, v, enable_gqa=True))
    expected = exact(q, *(repeated(x, H) for x in caches[-1]), None, None, None)
    return Case(
        f"decode {B},{H}/{G},S={S:,},{E}",
        (1.5, 1.2),
        ways,
        expected,
        lambda out: out,
        size,
        "memory",
        LAYERS,
    )


def statistics_too(H: int, n: int, E: int) -> Case:
    """With log-sum-exp and the statistics of a reading; torch's operator has none."""
    from multihead.ops.backends import cpu

    q, k, v = (torch.randn(1, H, n, E) for _ in range(3))
    call = AttentionCall.lower(q, k, v, causal())
    columns, places = torch.rand(1, H, n, 3), torch.randint(0, n, (1, 4, n))
    token = torch.randint(0, 1000, (1, n))
    before = torch.cat([torch.full((1, 1), -1), token[:, :-1]], 1)
    real = torch.ones(1, n, dtype=torch.bool)
    ways: Ways = {
        "ours": lambda: cpu.attend_with_statistics(
            call, columns, places, 0, (token, token, before), real
        )[0],
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    rows = sample(n, ROWS_CHECKED)
    expected = exact(q[:, :, rows], k, v, torch.arange(n) <= rows[:, None], None, None)
    return Case(
        f"causal with statistics 1,{H}/{H},{n},{E}; torch without",
        (0.87, None),
        ways,
        expected,
        lambda out: out[:, :, rows],
        2 * E * n * (n + 1) * H,
        "arithmetic",
    )


def gradients(
    name: str,
    goal: tuple[float, float | None],
    mask: Any,
    H: int,
    n: int,
    E: int,
    others: Any = None,
) -> Case:
    """Forward and backward."""
    q, k, v = (torch.randn(1, H, n, E, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, H, n, E)
    is_causal = mask.static(n, n) == "causal"
    dense = mask.dense(n, n)

    def both(one: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            with torch.enable_grad():
                out = one()
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

        return run

    ways: Ways = {
        "ours": both(lambda: attention(q, k, v, mask, backend="cpu")),
        "plain": both(
            lambda: F.scaled_dot_product_attention(
                q, k, v, None if is_causal else dense, is_causal=is_causal
            )
        ),
    }
    ways |= {} if others is None else {way: both(call) for way, call in others(q, k, v).items()}
    heads = sample(H, 2)
    with torch.enable_grad():
        wide = [x.detach()[:, heads].double().requires_grad_() for x in (q, k, v)]
        out = exact(*wide, dense, None, None)
        expected = torch.stack(
            [out.detach(), *torch.autograd.grad(out, wide, grad[:, heads].double())]
        )
    start, stop = mask.bounds(n, n)
    return Case(
        name,
        goal,
        ways,
        expected,
        lambda found: torch.stack([x[:, heads] for x in found]),
        14 * E * float((stop - start).sum()) * H,
        "arithmetic",
    )


def in_chunks(left: int, chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A window, by chunks of rows with none but their keys."""
    n = q.shape[2]
    masks = {}
    pieces = [(i, min(i + chunk, n), max(0, i - left)) for i in range(0, n, chunk)]
    for i, end, low in pieces:
        rows, keys = torch.arange(i, end)[:, None], torch.arange(low, end)
        masks[i] = (keys <= rows) & (keys >= rows - left)
    return lambda: torch.cat(
        [
            F.scaled_dot_product_attention(
                q[:, :, i:end], k[:, :, low:end], v[:, :, low:end], masks[i]
            )
            for i, end, low in pieces
        ],
        2,
    )


def windowed(n: int, size: int, goal: tuple[float, float | None], *, flexed: bool = True) -> Case:
    return forward(
        f"window {size} 1,12/12,{n},64",
        goal,
        1,
        12,
        12,
        n,
        64,
        mask=causal() & window(left=size - 1),
        mask_mod=lambda b, h, i, j: (j <= i) & (j > i - size),
        others=lambda *x: {
            f"chunks of {c}": in_chunks(size - 1, c, *x) for c in (size // 4, size // 2, size)
        },
        flexed=flexed,
    )


def padded(B: int, H: int, n: int, E: int, *, flexed: bool = True) -> Case:
    lengths = torch.linspace(32, n, B).long()
    stop = (torch.arange(n) < lengths[:, None]) * lengths[:, None]  # a row of padding reads nothing
    keys = torch.arange(n) < lengths[:, None, None, None]

    def trimmed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for b, length in enumerate(lengths.tolist()):
            part = slice(b, b + 1), slice(None), slice(length)
            out[part] = F.scaled_dot_product_attention(q[part], k[part], v[part])
        return out

    dense = multihead.masks.padding(lengths).dense(n, n)
    return forward(
        f"padded to {n}, lengths 32..{n}, {B},{H}/{H},{n},{E}",
        (2.0, 1.3),
        B,
        H,
        H,
        n,
        E,
        mask=intervals(torch.zeros_like(stop), stop),
        mask_mod=lambda b, h, i, j: (i < lengths[b]) & (j < lengths[b]),
        plain=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dense),
        others=lambda *x: {
            "trimmed": lambda: trimmed(*x),
            "mask of keys": lambda: F.scaled_dot_product_attention(*x, keys),
        },
        flexed=flexed,
    )


def packed(H: int, n: int, E: int, many: int, *, flexed: bool = True) -> Case:
    cuts = [0, *sorted((torch.randperm(n // 64 - 1)[: many - 1] + 1).mul(64).tolist()), n]
    ids = torch.repeat_interleave(torch.arange(many), torch.tensor(cuts).diff())

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat(
            [
                F.scaled_dot_product_attention(*(x[:, :, i:j] for x in (q, k, v)), is_causal=True)
                for i, j in pairwise(cuts)
            ],
            2,
        )

    return forward(
        f"{many} documents packed, causal, 1,{H}/{H},{n},{E}",
        (15.0, 1.3),
        1,
        H,
        H,
        n,
        E,
        mask=documents(ids) & causal(),
        mask_mod=lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
        others=lambda *x: {"each document": lambda: each(*x)},
        flexed=flexed,
    )


def biased(H: int, n: int, E: int, *, flexed: bool = True) -> Case:
    """ALiBi with a causal mask."""
    at, alibi = torch.arange(n), multihead.layers.ALiBi(H)
    bias, slopes = alibi(at, at), alibi.slopes
    falling = (
        alibi.to_alibi(at, at) if hasattr(alibi, "to_alibi") else None
    )  # where ours needs no dense bias
    both = bias.masked_fill(at > at[:, None], -torch.inf)

    def chunks(q: Tensor, k: Tensor, v: Tensor, size: int = 256) -> Tensor:
        return torch.cat(
            [
                F.scaled_dot_product_attention(
                    q[:, :, i : i + size],
                    k[:, :, : i + size],
                    v[:, :, : i + size],
                    both[:, :, i : i + size, : i + size],
                )
                for i in range(0, n, size)
            ],
            2,
        )

    return forward(
        f"causal with ALiBi 1,{H}/{H},{n},{E}",
        (1.8, 1.3),
        1,
        H,
        H,
        n,
        E,
        mask=causal(),
        bias=bias,
        our_bias=falling,
        mask_mod=lambda b, h, i, j: j <= i,
        score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i),
        plain=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, both),
        others=lambda *x: {"chunks of rows": lambda: chunks(*x)},
        flexed=flexed,
    )


def capped(H: int, n: int, E: int, *, flexed: bool = True) -> Case:
    """A soft cap with a causal mask."""

    def rows(q: Tensor, k: Tensor, v: Tensor, i: int, end: int) -> Tensor:
        scores = CAP * torch.tanh(q[:, :, i:end] @ k[:, :, :end].mT * (E**-0.5 / CAP))
        later = torch.arange(end) > torch.arange(i, end)[:, None]
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, :, :end]

    return forward(
        f"causal with soft cap 1,{H}/{H},{n},{E}",
        (4.0, 1.5),
        1,
        H,
        H,
        n,
        E,
        mask=causal(),
        softcap=CAP,
        mask_mod=lambda b, h, i, j: j <= i,
        score_mod=lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
        plain=lambda q, k, v: rows(q, k, v, 0, n),
        others=lambda *x: {
            "chunks of rows": lambda: torch.cat(
                [rows(*x, i, min(i + 128, n)) for i in range(0, n, 128)], 2
            )
        },
        flexed=flexed,
    )


def later(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def cases(toy: bool = False) -> Iterator[Callable[[], Case]]:
    """All workloads; as toys with few tokens, and without FlexAttention, which takes a compiler."""

    def size(n: int) -> int:
        return max(16, n // 64) if toy else n

    def full(
        B: int, H: int, G: int, n: int, E: int, goal: float, kind: str = "full", **more: Any
    ) -> Callable[[], Case]:
        name, n = f"{kind} {B},{H}/{G},{size(n)},{E}", size(n)
        return partial(forward, name, (goal, goal), B, H, G, n, E, flexed=not toy, **more)

    is_causal: dict[str, Any] = {"mask": causal(), "mask_mod": later}
    half = torch.bfloat16
    for B, H, n, E, goal in (
        (1, 12, 1024, 64, 1.0),
        (1, 12, 4096, 64, 1.0),
        (1, 32, 2048, 128, 1.0),
        (8, 12, 512, 64, 1.0),
        (32, 12, 128, 32, 1.3),
        (64, 12, 64, 64, 1.3),
    ):
        yield full(B, H, H, n, E, goal)
    for H, G, n, E, goal in (
        (12, 12, 512, 64, 1.5),
        (12, 12, 1024, 64, 1.35),
        (12, 12, 4096, 64, 1.15),
        (9, 3, 2048, 64, 1.25),
        (32, 8, 2048, 128, 1.2),
    ):
        yield full(1, H, G, n, E, goal, "causal", **is_causal)
    flexed = not toy
    yield partial(padded, 16, 12, max(64, size(512)), 32, flexed=flexed)
    yield partial(packed, 12, max(1024, size(8192)), 64, 16, flexed=flexed)
    yield partial(windowed, size(4096), max(8, size(512) // 2), (7.0, 1.4), flexed=flexed)
    yield partial(windowed, size(16384), size(1024), (10.0, 1.4), flexed=flexed)
    yield partial(biased, 12, size(2048), 64, flexed=flexed)
    yield partial(capped, 12, size(2048), 64, flexed=flexed)
    yield full(1, 32, 8, 2048, 128, 1.8, "bfloat16, causal", dtype=half, **is_causal)
    yield full(1, 12, 12, 4096, 64, 1.8, "bfloat16, full", dtype=half)
    for B, H, G, n, E in (
        (1, 9, 3, 4096, 64),
        (1, 32, 8, 4096, 64),
        (8, 32, 8, 1024, 64),
        (1, 9, 3, 32768, 64),
    ):
        yield partial(decode, B, H, G, size(n), E, flexed=flexed)
    yield partial(statistics_too, 12, size(4096), 64)
    n, left = size(2048), size(512) - 1
    yield partial(
        gradients, f"forward and backward, causal 1,12/12,{n},64", (1.2, 1.2), causal(), 12, n, 64
    )
    yield partial(
        gradients,
        f"forward and backward, window {left + 1} 1,12/12,{n},64",
        (3.0, None),
        causal() & window(left=left),
        12,
        n,
        64,
        lambda *x: {f"chunks of {size(256)}": in_chunks(left, size(256), *x)},
    )
