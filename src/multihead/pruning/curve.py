"""Costs and savings of removing 10% to 90% of the heads: loss, parameters, multiply-adds, KV cache
and measured time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ..data.tokenizing import max_tokens
from ..errors import MultiheadError
from ..io import atomic_file, write_text
from ..models.site import find_sites
from ..models.slices import is_transposed, outputs_first
from .latency import STEPS, measure_cache, measure_latencies
from .pruner import Pruner
from .result import count_parameters

__all__ = ["Point", "measure_curve", "multiply_adds", "require_curve", "save_curve"]

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
    """One pruned model.

    Attributes:
        taken: share of the heads that was removed.
        heads: number of heads left.
        loss: as measured.
        parameters: in all.
        arithmetic: multiply-adds a token, in a text of 256 tokens.
        cache: bytes of the KV cache of 256 tokens, counted in the cache itself; None without one.
        prefill: time of a text relative to the whole model's, by batch size; paired in turns.
        step: the same of one more token.
    """

    taken: float
    heads: int
    loss: float
    parameters: int
    arithmetic: float
    cache: int | None
    prefill: dict[int, float]
    step: dict[int, float]


def measure_curve(
    pruner: Pruner,
    kind: str,
    criterion: str,
    compensate: str,
    measure: Callable[[nn.Module], float],
    *,
    shares: Sequence[float] = SHARES,
) -> list[Point]:
    """Prune to each share of heads that the kind allows, and measure; the first point is the whole
    model.

    Args:
        pruner: whose scores are used for all shares.
        kind, criterion, compensate: as in `multihead.prune`.
        measure: gives the loss of a model.
        shares: of the heads, to remove.
    """
    points = [_measure_point(pruner, pruner.model, 0.0, measure)]
    last = 0
    for done, share in enumerate(shares):
        pruner.progress(done, len(shares), "measuring the curve")
        try:
            plan = pruner.make_plans(round(share * pruner.num_heads), kind, criterion)[0]
        except MultiheadError:  # the kind allows no number near this share
            continue
        number = sum(map(len, plan.by_site(pruner.sites).values()))
        if number not in (0, last):
            smaller, _ = pruner.remove(plan, compensate)
            points.append(_measure_point(pruner, smaller, number / pruner.num_heads, measure))
            last = number
    pruner.progress(len(shares), len(shares), "measuring the curve")
    return points


def _measure_point(
    pruner: Pruner, model: Any, taken: float, measure: Callable[[nn.Module], float]
) -> Point:
    try:
        cache = measure_cache(model, TOKENS)
    except MultiheadError:
        cache = None
    prefill: dict[int, float] = {}
    step: dict[int, float] = {}
    if not taken:
        prefill = dict.fromkeys(BATCHES, 1.0)
        step = {} if cache is None else dict(prefill)
    for batch in BATCHES if taken else ():
        models = {"whole": pruner.model, "pruned": model}
        times = measure_latencies(models, batch=batch, tokens=TOKENS, repeats=TURNS)["pruned"]
        prefill[batch] = times.prefill_ratio
        if times.step_ratio is not None:
            step[batch] = times.step_ratio
    return Point(
        taken,
        sum(site.num_heads for site in find_sites(model)),
        measure(model),
        count_parameters(model),
        multiply_adds(model),
        cache,
        prefill,
        step,
    )


def multiply_adds(model: nn.Module, tokens: int = TOKENS) -> float:
    """Multiply-adds a token, in a text of `tokens`: one for each entry of a matrix, and those of
    causal attention.
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
    """Raise `MultiheadError` if the curve couldn't be measured or drawn, before any work."""
    if path.suffix != ".json" and find_spec("matplotlib") is None:
        raise MultiheadError(f"curve={str(path)!r}: {NO_MATPLOTLIB}")
    limit = max_tokens(model)
    if limit is not None and limit < TOKENS + STEPS:
        raise MultiheadError(
            f"curve={str(path)!r}: a curve's times are taken on {TOKENS + STEPS} tokens, and the"
            f" model has {limit} positions; prune and evaluate it at single shares instead"
        )


def save_curve(points: Sequence[Point], path: Path) -> None:
    """Write the points as JSON, or draw them if the name ends in .png or .svg (needs matplotlib,
    the extra `plot`).
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
                taken,
                [p.step[batch] for p in points],
                "o--",
                label=f"one more token, batch {batch}",
            )
    time.set_title("measured time, relative to the whole model")
    for axes in (size, cache, time):
        axes.set_ylim(0, None)
    for axes in (size, time):
        axes.legend(frameon=False)
    for axes in (loss, size, cache, time):
        axes.set_xlabel("heads removed, %")
        axes.grid(alpha=0.3)
    with atomic_file(path, argument="curve") as part:
        figure.savefig(part, dpi=150)
