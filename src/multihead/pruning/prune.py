"""Pruning from beginning to end: scores on a calibration text, a plan, surgery, and what it cost on
another text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import MultiheadError
from ..io import Progress
from ..models.introspect import require_model
from ..models.pruned import finalize_config
from ..models.resize import unprunable_reason
from ..models.site import Site, find_sites
from ..models.transformers import evaluation
from .calibration import batches_of
from .checkpoint import save
from .compensation import COMPENSATIONS, Fill, fills_of, without
from .criteria import Scores, base_of, score
from .evaluate import Difference, Losses, difference
from .plan import KINDS, Plan, how_many, plans
from .surgery import remove_heads, survey

__all__ = ["Candidate", "Pruned", "Pruner", "prune", "sites_in"]

CANDIDATES = (
    "fisher",
    "fisher/zscore",
    "departure",
    "gradient",
    "gradient/layer",
    "fluctuation",
    "fluctuation/zscore",
    "share",
    "norm",
    "weights",
)
HELD_OUT = 0.2  # of the calibration text, on which criteria are chosen
RANDOM = 10  # plans by random numbers, to compare with
TOKENS = 16384  # of the calibration text, unless told otherwise

Measure = Callable[[nn.Module], Losses]


@dataclass(frozen=True)
class Candidate:
    """One way to choose heads, tried on the held-out part of the calibration text."""

    criterion: str
    compensate: str
    plan: Plan
    loss: float  # mean loss a token; minus the base's it is what pruning costs
    spread: float = 0.0  # standard deviation over seeds, of `random`


@dataclass
class Pruned:
    """A smaller model, and how it came about."""

    model: nn.Module
    tokenizer: Any
    plan: Plan
    criterion: str
    compensate: str
    plain: bool  # whether plain transformers loads it
    heads: tuple[int, int]  # before and after
    parameters: tuple[int, int]
    base_loss: float  # on the held-out part
    candidates: list[Candidate] = field(default_factory=list)
    before: Losses | None = None  # on the evaluation text
    after: Losses | None = None
    whole: dict[str, str] = field(default_factory=dict)  # layers that stay as they are, and why

    @property
    def difference(self) -> Difference | None:
        return (
            None
            if self.before is None or self.after is None
            else difference(self.before, self.after)
        )

    def save(self, out: str | Path, report: Mapping[str, Any] | None = None) -> None:
        """Writes model, tokenizer, plan.json and pruning.json to a new folder, all or nothing, and
        loads it in a fresh process.

        Raises:
            ValueError: something is there already, or what was loaded again isn't the same.
            OSError: a full disk, say; nothing is left behind then.
        """
        save(
            self.model,
            self.tokenizer,
            out,
            plain=self.plain,
            extra={
                "plan.json": self.plan.to_json(),
                "pruning.json": dict(report or self.to_json()),
            },
        )

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "plan": self.plan.to_json(),
            "criterion": self.criterion,
            "compensate": self.compensate,
            "loads in plain transformers": self.plain,
            "heads": list(self.heads),
            "parameters": list(self.parameters),
            "held-out loss before": self.base_loss,
            "criteria": [
                {
                    "criterion": c.criterion,
                    "compensate": c.compensate,
                    "held-out loss": c.loss,
                    "spread": c.spread,
                    "heads": len(c.plan.remove),
                }
                for c in self.candidates
            ],
        }
        change = self.difference
        if self.before is not None and self.after is not None and change is not None:
            told["evaluation"] = {
                "measure": self.before.name,
                "before": self.before.mean,
                "after": self.after.mean,
                "difference": change.mean,
                "interval": [change.low, change.high],
                "documents": change.documents,
            }
        return told


class Pruner:
    """A model and its calibration text, from which plans are made and tried, as many as wanted.

    Scores and moments are taken once; trying a plan is one pass over the held-out part, by hooks,
    without surgery.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        calibrate: str | Iterable[str],
        *,
        layers: Iterable[str] | None = None,
        context: int | None = None,
        tokens: int | None = TOKENS,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        require_model(model)
        self.every = find_sites(model)
        some = self.every if layers is None else sites_in(self.every, layers)
        self.whole = {
            site.label: why for site in some if (why := unprunable_reason(site))
        }  # that stay as they are
        self.sites = [site for site in some if site.label not in self.whole]
        if not self.sites:
            raise MultiheadError(next(iter(self.whole.values())))
        texts = [calibrate] if isinstance(calibrate, str) else calibrate
        batches = batches_of(model, texts, tokenizer, context=context, tokens=tokens)
        held = max(1, round(HELD_OUT * len(batches)))
        if len(batches) - held < 1:
            raise MultiheadError(
                f"calibrate holds one batch of {batches[0].inputs['input_ids'].numel()} tokens, and"
                " a part of it is held out to choose the criterion on; give a longer text, or a"
                " smaller context"
            )
        self.batches, self.held = batches[:-held], batches[-held:]
        self.progress = progress or (lambda done, total, stage: None)
        there, self.droppable = survey(model, self.sites, self.sample)
        self.whole |= {
            site.label: (
                f"the calibration text doesn't reach {site.name}, so nothing is known of its heads"
            )
            for site in self.sites
            if site.name not in there
        }
        self.sites = [site for site in self.sites if site.name in there]
        if not self.sites:
            raise MultiheadError(next(iter(self.whole.values())))
        self.scores: Scores | None = None
        self.base = self.loss({}, {})

    @property
    def sample(self) -> dict[str, Any]:
        """A few tokens on which surgery is proved."""
        ids = self.batches[0].inputs["input_ids"][:2]
        return {
            "input_ids": ids[
                :, : min(64, int(self.batches[0].inputs["attention_mask"][:2].sum(1).min()))
            ]
        }

    @property
    def heads(self) -> int:
        return sum(site.num_heads for site in self.sites)

    @torch.no_grad()
    def loss(self, removed: Mapping[str, Sequence[int]], fills: Mapping[str, Fill]) -> float:
        """Mean loss a token on the held-out part without these heads."""
        total, count = 0.0, 0
        with evaluation(self.model), without(self.sites, removed, fills):
            for batch in self.held:
                value, tokens = batch.loss(self.model)
                total, count = total + float(value), count + tokens
        return total / count

    def score(self, criteria: Sequence[str]) -> Scores:
        """The scores by these criteria, those that are there already included."""
        wanted = {base_of(name) for name in criteria}
        if self.scores is None or not wanted <= self.scores.values.keys():
            have = set(self.scores.values) if self.scores else set()
            self.scores = score(
                self.model,
                self.sites,
                self.batches,
                sorted(wanted | have),
                seed=self.seed,
                progress=self.progress,
            )
        return self.scores

    def fills(self, removed: Mapping[str, Sequence[int]], compensate: str) -> dict[str, Fill]:
        return fills_of(self.sites, removed, self.score([]).moments, compensate)

    def choose(self, number: int, kind: str, name: str) -> list[Plan]:
        return plans(self.score([name]).of(name), self.sites, number, kind, self.droppable)

    def candidates(
        self,
        number: int,
        kind: str,
        criteria: Sequence[str] = CANDIDATES,
        compensations: Sequence[str] = COMPENSATIONS[:2],
    ) -> list[Candidate]:
        """All ways to choose, tried on the held-out part, the best first; `random` with its mean
        and spread among them.
        """
        self.score(criteria)
        jobs = [
            (name, plan, compensate)
            for name in criteria
            for plan in self.choose(number, kind, name)
            for compensate in compensations
        ]
        found = []
        tried: dict[
            tuple[frozenset[str], str], float
        ] = {}  # criteria that agree make the same plan
        for done, (name, plan, compensate) in enumerate(jobs):
            key = frozenset(plan.remove), compensate
            if key not in tried:
                removed = plan.by_site(self.sites)
                tried[key] = self.loss(removed, self.fills(removed, compensate))
            found.append(Candidate(name, compensate, plan, tried[key]))
            self.progress(done + 1, len(jobs) + RANDOM, "trying criteria")
        best: dict[tuple[str, str], Candidate] = {}
        for candidate in sorted(
            found, key=lambda c: -c.loss
        ):  # of several plans of one criterion, the better
            best[candidate.criterion, candidate.compensate] = candidate
        found = sorted(best.values(), key=lambda c: c.loss)
        return sorted(
            [*found, self.random(number, kind, found[0].compensate, len(jobs))],
            key=lambda c: c.loss,
        )

    def random(self, number: int, kind: str, compensate: str, done: int = 0) -> Candidate:
        """Ten plans by random numbers: the mean of their losses, and its spread."""
        losses, plan = [], Plan((), kind)
        for seed in range(RANDOM):
            draw = torch.Generator().manual_seed(1000 * self.seed + seed)
            values = {
                site.name: torch.rand(site.num_heads, generator=draw, dtype=torch.float64)
                for site in self.sites
            }
            options = plans(values, self.sites, number, kind, self.droppable)
            plan = options[seed % len(options)]
            removed = plan.by_site(self.sites)
            losses.append(self.loss(removed, self.fills(removed, compensate)))
            self.progress(done + seed + 1, done + RANDOM, "trying criteria")
        return Candidate(
            "random", compensate, plan, float(np.mean(losses)), float(np.std(losses, ddof=1))
        )

    def step_by_step(
        self, number: int, kind: str, name: str, compensate: str, steps: int
    ) -> tuple[Plan, dict[str, Fill]]:
        """A plan made in several steps: after each the heads that are left are scored again, the
        removed ones being gone.
        """
        # type: tuple[Plan, dict[str, list[int]], dict[str, Fill]]
        plan, removed, fills = Plan((), kind), {}, {}
        for step in range(1, steps + 1):
            found = score(
                self.model,
                self.sites,
                self.batches,
                [name],
                removed=removed,
                fills=fills,
                seed=self.seed,
            )
            values = {site: value.clone() for site, value in found.of(name, removed).items()}
            for site, heads in removed.items():
                values[site][heads] = -torch.inf  # they stay gone
            try:
                plan = plans(
                    values, self.sites, max(1, round(number * step / steps)), kind, self.droppable
                )[0]
            except ValueError:  # so few are no whole group, say: a later step takes them
                if step == steps:
                    raise
                continue
            removed = plan.by_site(self.sites)
            fills = fills_of(self.sites, removed, found.moments, compensate)
            self.progress(step, steps, "pruning step by step")
        return plan, fills

    def cut(
        self, plan: Plan, compensate: str, fills: Mapping[str, Fill] | None = None
    ) -> tuple[nn.Module, bool]:
        """The smaller model, proved and with its config settled; and whether plain transformers
        loads it.
        """
        removed = plan.check(self.every, self.droppable)
        inside = {site.name for site in self.sites}
        if outside := [name for name in removed if name not in inside]:
            label = next(site.label for site in self.every if site.name == outside[0])
            raise MultiheadError(
                self.whole.get(
                    label,
                    f"the plan takes heads of {label}, which isn't among the layers asked for",
                )
            )
        if compensate != "none" and fills is None:
            fills = self.fills(removed, compensate)
        model = remove_heads(
            self.model, removed, self.sample, fills=fills if compensate != "none" else None
        )
        return model, finalize_config(model)


def prune(
    model: nn.Module,
    tokenizer: Any,
    calibrate: str | Iterable[str],
    *,
    heads: str | float | None = None,
    keep: str | float | None = None,
    plan: Plan | None = None,
    kind: str = "any",
    layers: Iterable[str] | None = None,
    criterion: str | None = None,
    compensate: str | None = None,
    steps: int = 1,
    measure: Measure | None = None,
    context: int | None = None,
    tokens: int | None = TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Pruned:
    """Takes heads out of a model: which ones, what stands in for them, and what it cost.

    Args:
        model: a model with sites (see `multihead.read`); it stays as it is.
        tokenizer: the model's own.
        calibrate: texts to score heads on; the last fifth is held out to choose the criterion on.
            Not the text that the result is judged on.
        heads: how many to take out: "20%", 0.2 or a number. Or `keep`: how many to keep. Or `plan`:
            which.
        kind: "any", "even" (the same number from each group), "groups" (whole groups) or "uniform"
            (the same numbers in
            every layer: what plain transformers loads).
        layers: labels or numbers of the layers to prune in, such as ["3-10", "L12"]; all unless
            given.
        criterion: one of `multihead.pruning.criteria.CRITERIA`; without it, what does best on the
            held-out part.
        compensate: what stands in for removed heads: "refit" (what those that stay foretell of
            them, by least squares: W_O is fitted again), "mean", or "none"; without it the better
            of the first two.
        steps: score again after each of so many steps.
        measure: called with the model before and after, gives losses on an evaluation text.
        context: tokens of a window of the calibration text, 512 unless given.
        tokens: how many of the calibration text to use, `None` for all.
        seed: of random plans.
        progress: called with units done, units in all, and the stage, such as "scoring heads".

    Raises:
        ValueError: nothing or too much said about which heads; a plan or kind that can't be, with
            what could.
        SurgeryError: the smaller model isn't what the whole one is with these heads gone.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> pruned = prune(model, tokenizer, "One head reads the word before, and another one itself. " * 40, heads=2,
    ...                criterion="fisher", context=32)
    >>> pruned.heads, pruned.plain, len(pruned.plan.remove)
    ((32, 30), False, 2)
    """
    if sum(given is not None for given in (heads, keep, plan)) != 1:
        raise MultiheadError(f"heads={heads!r}, keep={keep!r}, plan={plan!r}: give one of them")
    if kind not in KINDS:
        raise MultiheadError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if compensate is not None and compensate not in COMPENSATIONS:
        raise MultiheadError(
            f"compensate={compensate!r}: expected one of {', '.join(COMPENSATIONS)}"
        )
    if criterion is not None:
        base_of(criterion)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MultiheadError(f"steps={steps}: expected at least 1, a whole number")
    if plan is not None:
        _only_plan(plan, kind, criterion, steps)
    pruner = Pruner(
        model,
        tokenizer,
        calibrate,
        layers=layers,
        context=context,
        tokens=tokens,
        seed=seed,
        progress=progress,
    )
    if kind == "uniform" and plan is None and len(pruner.sites) < len(pruner.every):
        left = next(site.label for site in pruner.every if site not in pruner.sites)
        raise MultiheadError(
            f"kind='uniform' takes the same numbers from every layer, and {left} stays"
            f" whole{f' ({pruner.whole[left]})' if left in pruner.whole else ''}; give another"
            " kind, or no layers"
        )
    found: list[Candidate] = []
    fills = None
    if plan is not None:
        plan.check(pruner.every, pruner.droppable)  # before any scoring
        name, how = "given", compensate or "refit"
    else:
        number = how_many(keep if heads is None else heads, pruner.heads, keep=heads is None)  # type: ignore[arg-type]
        found = pruner.candidates(
            number,
            kind,
            CANDIDATES if criterion is None else (criterion,),
            COMPENSATIONS[:2] if compensate is None else (compensate,),
        )
        best = next(
            candidate
            for candidate in found
            if candidate.criterion != "random" or criterion == "random"
        )
        plan, name, how = best.plan, best.criterion, best.compensate
        if steps > 1:
            plan, fills = pruner.step_by_step(number, kind, name, how, steps)
    smaller, plain = pruner.cut(plan, how, fills)
    pruned = Pruned(
        smaller,
        tokenizer,
        plan,
        name,
        how,
        plain,
        (_heads(model), _heads(smaller)),
        (_size(model), _size(smaller)),
        pruner.base,
        found,
        whole=pruner.whole,
    )
    if measure is not None:
        pruned.before, pruned.after = measure(model), measure(smaller)
    return pruned


def _only_plan(plan: Plan, kind: str, criterion: str | None, steps: int) -> None:
    """A plan says which heads go, so whatever else would choose them is refused rather than passed
    over.
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is a {type(plan).__name__}: expected a Plan, such as Plan(('L0.H3',)) or"
            " Plan.load(file)"
        )
    for name, value, clashes in (
        ("criterion", criterion, criterion is not None),
        ("steps", steps, steps > 1),
        ("kind", kind, kind not in ("any", plan.kind)),
    ):
        if clashes:
            raise MultiheadError(
                f"{name}={value!r} with a plan (of kind {plan.kind!r}): the plan says which heads"
                " go; give one of them"
            )


def _heads(model: nn.Module) -> int:
    return sum(site.num_heads for site in find_sites(model))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def sites_in(sites: list[Site], layers: Iterable[str]) -> list[Site]:
    """The sites of some layers, by labels ("L3", "decoder.L0.cross"), numbers ("3") or ranges of
    them ("3-10").
    """
    found: list[Site] = []
    for given in [layers] if isinstance(layers, (str, int)) else layers:
        first, dash, last = str(given).partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            some = [
                site
                for site in sites
                if site.layer is not None and int(first) <= site.layer <= int(last or first)
            ]
        else:
            some = [site for site in sites if site.label == given]
        if not some:
            raise MultiheadError(
                f"layers: {given!r} names no layer; expected labels, numbers or ranges of"
                f" {sites[0].label} to {sites[-1].label}"
            )
        found += some
    return [site for site in sites if site in found]
