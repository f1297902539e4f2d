"""What each share of heads costs and saves: loss, parameters, arithmetic, cache and measured time,
from 10% to 90%.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ..data.texts import max_positions
from ..errors import MultiheadError
from ..io import atomic_file, write_text
from ..models.site import find_sites
from ..models.slices import is_transposed, outputs_first
from .latency import STEPS, cache_bytes, latencies
from .prune import Pruner

__all__ = ["Point", "arithmetic", "curve", "require_curve", "save_curve"]

SHARES = tuple(n / 10 for n in range(1, 10))
BATCHES = (1, 16)
TOKENS = 256  # of each text that is timed
TURNS = 5
NO_MATPLOTLIB = (
    "drawing needs matplotlib; run: pip install 'multihead[plot]', or give a name that ends in"
    " .json"
)


@dataclass(frozen=True)
class Point:
    """One pruned model. Ratios are to the whole one, paired in turns: below 1 is faster."""

    taken: float  # share of the heads
    heads: int  # left
    loss: float
    parameters: int
    arithmetic: float  # multiply-adds a token of a text of 256 tokens
    cache: (
        int | None
    )  # bytes that 256 tokens take, counted in the real cache; None where there is none
    prefill: dict[int, float]  # ratio of times, by batch size
    step: dict[int, float]  # of one more token


def curve(
    pruner: Pruner,
    kind: str,
    criterion: str,
    compensate: str,
    measure: Callable[[nn.Module], float],
    *,
    shares: Sequence[float] = SHARES,
) -> list[Point]:
    """Prunes to each share that the kind allows, and measures; the first point is the whole
    model.
    """
    found = [_point(pruner, pruner.model, 0.0, measure)]
    last = 0
    for done, share in enumerate(shares):
        pruner.progress(done, len(shares), "sweeping")
        try:
            plan = pruner.choose(round(share * pruner.heads), kind, criterion)[0]
        except ValueError:  # a share that the kind can't come near
            continue
        if (
            len(plan.by_site(pruner.sites))
            and (number := sum(map(len, plan.by_site(pruner.sites).values()))) != last
        ):
            smaller, _ = pruner.cut(plan, compensate)
            found.append(_point(pruner, smaller, number / pruner.heads, measure))
            last = number
    pruner.progress(len(shares), len(shares), "sweeping")
    return found


def _point(
    pruner: Pruner, model: Any, taken: float, measure: Callable[[nn.Module], float]
) -> Point:
    times = (
        {
            batch: latencies(
                {"whole": pruner.model, "pruned": model}, batch=batch, tokens=TOKENS, repeats=TURNS
            )["pruned"]
            for batch in BATCHES
        }
        if taken
        else {}
    )
    try:
        cache = cache_bytes(model, TOKENS)
    except ValueError:
        cache = None
    sites = find_sites(model)
    return Point(
        taken,
        sum(site.num_heads for site in sites),
        measure(model),
        sum(p.numel() for p in model.parameters()),
        arithmetic(model),
        cache,
        {batch: t.prefill_ratio for batch, t in times.items()} or dict.fromkeys(BATCHES, 1.0),
        {batch: t.step_ratio for batch, t in times.items() if t.step_ratio is not None}
        or ({} if taken or cache is None else dict.fromkeys(BATCHES, 1.0)),
    )


def arithmetic(model: nn.Module, tokens: int = TOKENS) -> float:
    """Multiply-adds a token, in a text of `tokens`: one for each number of a matrix, and what
    causal attention takes.
    """
    matrices = sum(
        outputs_first(module).numel()
        for module in model.modules()
        if isinstance(module, nn.Linear) or is_transposed(module)
    )
    return matrices + sum(
        2 * site.num_heads * site.head_dim * tokens / 2 for site in find_sites(model)
    )


def require_curve(path: Path, model: Any) -> None:
    """`ValueError` where a sweep could not be measured or drawn, before hours of work end in it."""
    if path.suffix != ".json" and find_spec("matplotlib") is None:
        raise MultiheadError(f"curve={str(path)!r}: {NO_MATPLOTLIB}")
    limit = max_positions(model.config)
    if limit is not None and limit < TOKENS + STEPS:
        raise MultiheadError(
            f"curve={str(path)!r}: times are taken of {TOKENS + STEPS} tokens, and the model has"
            f" {limit} positions; leave the curve out"
        )


def save_curve(points: Sequence[Point], path: Path) -> None:
    """The points as JSON or, for a name that ends in .png or .svg, drawn (needs matplotlib, the
    extra `plot`).
    """
    if path.suffix == ".json":
        write_text(path, json.dumps([asdict(point) for point in points], indent=1))
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MultiheadError(f"curve={str(path)!r}: {NO_MATPLOTLIB}") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    (loss, size), (cache, time) = figure.subplots(2, 2)
    taken, first = [point.taken * 100 for point in points], points[0]
    loss.plot(taken, [point.loss for point in points], "o-")
    loss.set_title("loss")
    for name, values in (
        ("parameters", [p.parameters / first.parameters for p in points]),
        ("arithmetic", [p.arithmetic / first.arithmetic for p in points]),
    ):
        size.plot(taken, values, "o-", label=name)
    size.set_title(f"size, of {first.parameters:,} parameters")
    if first.cache:
        cache.plot(taken, [(p.cache or 0) / first.cache for p in points], "o-", label="cache")
    cache.set_title(f"cache, of {first.cache or 0:,} bytes ({TOKENS} tokens)")
    for batch in BATCHES:
        time.plot(taken, [p.prefill[batch] for p in points], "o-", label=f"prefill, batch {batch}")
        if all(batch in p.step for p in points):
            time.plot(
                taken, [p.step[batch] for p in points], "o--", label=f"a token more, batch {batch}"
            )
    time.set_title("measured time, of the whole model's")
    for axes in (size, cache, time):
        axes.set_ylim(0, None)
    for axes in (size, time):
        axes.legend(frameon=False)
    for axes in (loss, size, cache, time):
        axes.set_xlabel("heads taken out, %")
        axes.grid(alpha=0.3)
    with atomic_file(path, argument="curve") as part:
        figure.savefig(part, dpi=150)
