"""`Pruner`: scores heads once, then makes, tries and carries out any number of plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.documents import Document
from ..errors import MultiheadError
from ..io import Progress
from ..models.head_intervention import HeadIntervention
from ..models.instrument import suspend
from ..models.introspect import unwrap
from ..models.plain import Plain
from ..models.pruned import finalize_config
from ..models.resize import unprunable_reason
from ..models.site import find_sites
from .calibration import calibration_batches, proof_inputs
from .compensation import COMPENSATIONS, fit_compensation
from .criteria import Scores, base_criterion, mean_loss, score_heads
from .plan import Plan, make_plans, select_sites
from .surgery import remove_heads, survey_sites

__all__ = ["CANDIDATES", "TOKENS", "Candidate", "Pruner"]

CANDIDATES = (
    "fisher",
    "fisher/zscore",
    "taylor_mean",
    "taylor",
    "taylor/layer",
    "flap",
    "flap/zscore",
    "share",
    "norm",
    "weights",
)
HELD_OUT = 0.2  # of the calibration text, on which criteria are compared
RANDOM_PLANS = 10
TOKENS = 16384  # of the calibration text, by default


@dataclass(frozen=True)
class Candidate:
    """One way to choose heads, tried on the held-out part of the calibration text.

    Attributes:
        criterion, compensate: as in `multihead.prune`.
        plan: the heads it removes.
        loss: mean loss a token; minus `Pruner.base_loss` it is the cost of pruning.
        spread: standard deviation over plans, of "random".

    >>> Candidate("fisher", "refit", Plan(("L0.H3",)), 3.2).loss
    3.2
    """

    criterion: str
    compensate: str
    plan: Plan
    loss: float
    spread: float = 0.0


class Pruner:
    """A model and its calibration text, for any number of plans.

    Scores and moments are computed once; a plan is tried in one pass over the held-out part of the
    text, without surgery. The model is taken as it came, without what an instrumentation around the
    call changes in it (`multihead.models.suspend`).

    Args:
        model, texts, tokenizer, layers, context, tokens, seed, progress: as in `multihead.prune`.

    Attributes:
        sites: the sites that can be pruned; `unprunable` has the reasons of the others, by label.
        droppable: names of the sites that can lose all their heads.
        loss_name: the loss that heads are scored by, such as "token loss".
        base_loss: mean loss a token (or a sequence) of the whole model on the held-out part.

    Raises:
        MultiheadError: no layer can be pruned, too little text, labels that the model doesn't have.

    >>> import multihead
    >>> from multihead.pruning import Pruner
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "One head attends to the previous word, and another one to itself. " * 40
    >>> pruner = Pruner(model, text, tokenizer=tokenizer, context=32)
    >>> plan = pruner.make_plans(number=3, kind="any", criterion="fisher")[0]
    >>> removed = plan.by_site(pruner.sites)
    >>> pruner.loss(pruner.compensation(removed, "refit")) < pruner.base_loss + 1
    True
    """

    def __init__(
        self,
        model: nn.Module,
        texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
        *,
        tokenizer: Any = None,
        layers: Iterable[int | str] | None = None,
        context: int | None = None,
        tokens: int | None = TOKENS,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        model = unwrap(model)
        self.model, self.seed = model, seed
        self.progress = progress or (lambda done, total, stage: None)
        self.all_sites = find_sites(model)
        chosen = self.all_sites if layers is None else select_sites(self.all_sites, layers)
        self.unprunable = {
            site.label: reason for site in chosen if (reason := unprunable_reason(site))
        }
        self.sites = [site for site in chosen if site.label not in self.unprunable]
        self._require_sites()
        with suspend(model):
            self.loss_name, batches = calibration_batches(
                model, texts, tokenizer, context=context, tokens=tokens
            )
            held_out = max(1, round(HELD_OUT * len(batches)))
            self.batches, self.held_out = batches[:-held_out], batches[-held_out:]
            reached, self.droppable = survey_sites(model, self.sites, self.sample)
        self.unprunable |= {
            site.label: (
                f"the calibration text doesn't reach {site.name}, so its heads can't be scored"
            )
            for site in self.sites
            if site.name not in reached
        }
        self.sites = [site for site in self.sites if site.name in reached]
        self._require_sites()
        self._scores: Scores | None = None
        self.base_loss = self.loss(HeadIntervention())

    def _require_sites(self) -> None:
        if not self.sites:
            raise MultiheadError(next(iter(self.unprunable.values())))

    @property
    def sample(self) -> dict[str, Any]:
        """A few inputs, without padding, on which surgery is proved."""
        return proof_inputs(self.model, self.batches[0])

    @property
    def num_heads(self) -> int:
        return sum(site.num_heads for site in self.sites)

    def loss(self, compensation: HeadIntervention) -> float:
        """Mean loss a token on the held-out part with these heads replaced."""
        with suspend(self.model):
            return mean_loss(self.model, self.sites, self.held_out, compensation)

    def score(self, criteria: Sequence[str]) -> Scores:
        """Scores by these criteria, and by those that were asked for before."""
        wanted = {base_criterion(name) for name in criteria}
        known = set(self._scores.values) if self._scores else set()
        if self._scores is None or not wanted <= known:
            self._scores = self._score(sorted(wanted | known), progress=self.progress)
        return self._scores

    def _score(self, criteria: Sequence[str], **options: Any) -> Scores:
        with suspend(self.model):
            return score_heads(
                self.model, self.sites, self.batches, criteria, seed=self.seed, **options
            )

    def compensation(
        self, removed: Mapping[str, Sequence[int]], compensate: str
    ) -> HeadIntervention:
        """Compensation for heads, given by the name of their site; `compensate` is "refit", "mean"
        or "none".
        """
        return fit_compensation(self.sites, removed, self.score([]).moments, compensate)

    def make_plans(self, number: int, kind: str, criterion: str) -> list[Plan]:
        """Plans that remove about `number` heads, those with the lowest scores; see
        `plan.make_plans`.
        """
        return self._make_plans(self.score([criterion]).by_site(criterion), number, kind)

    def _make_plans(self, scores: Mapping[str, Tensor], number: int, kind: str) -> list[Plan]:
        return make_plans(scores, self.sites, number, kind, self.droppable)

    def try_criteria(
        self,
        number: int,
        kind: str,
        criteria: Sequence[str] = CANDIDATES,
        compensations: Sequence[str] = COMPENSATIONS[:2],
    ) -> list[Candidate]:
        """Try all combinations on the held-out part, with random plans among them; the best first.

        Of several plans of one criterion, the best counts.
        """
        self.score(criteria)
        jobs = [
            (name, plan, compensate)
            for name in criteria
            for plan in self.make_plans(number, kind, name)
            for compensate in compensations
        ]
        best: dict[tuple[str, str], Candidate] = {}
        losses: dict[tuple[frozenset[str], str], float] = {}  # criteria may make the same plan
        for done, (name, plan, compensate) in enumerate(jobs):
            key = frozenset(plan.remove), compensate
            if key not in losses:
                losses[key] = self._try(plan, compensate)
            candidate = Candidate(name, compensate, plan, losses[key])
            if candidate.loss < best.get((name, compensate), candidate).loss:
                best[name, compensate] = candidate
            best.setdefault((name, compensate), candidate)
            self.progress(done + 1, len(jobs) + RANDOM_PLANS, "trying criteria")
        chosen = min(best.values(), key=lambda candidate: candidate.loss)
        random = self.try_random_plans(number, kind, chosen.compensate, len(jobs))
        return sorted([*best.values(), random], key=lambda candidate: candidate.loss)

    def _try(self, plan: Plan, compensate: str) -> float:
        return self.loss(self.compensation(plan.by_site(self.sites), compensate))

    def random_plan(self, number: int, kind: str, seed: int) -> Plan:
        """A plan by random scores."""
        draw = torch.Generator().manual_seed(seed)
        scores = {
            site.name: torch.rand(site.num_heads, generator=draw, dtype=torch.float64, device="cpu")
            for site in self.sites
        }
        options = self._make_plans(scores, number, kind)
        return options[seed % len(options)]

    def try_random_plans(self, number: int, kind: str, compensate: str, done: int = 0) -> Candidate:
        """Ten random plans: the mean of their losses, and its spread."""
        losses, plan = [], Plan((), kind)
        for n in range(RANDOM_PLANS):
            plan = self.random_plan(number, kind, 1000 * self.seed + n)
            losses.append(self._try(plan, compensate))
            self.progress(done + n + 1, done + RANDOM_PLANS, "trying criteria")
        mean, spread = float(np.mean(losses)), float(np.std(losses, ddof=1))
        return Candidate("random", compensate, plan, mean, spread)

    def make_plan_in_steps(
        self, number: int, kind: str, criterion: str, compensate: str, steps: int
    ) -> tuple[Plan, HeadIntervention]:
        """A plan made in several steps: after each, the heads that are left are scored again
        without the removed ones. Returns it with its compensation.
        """
        plan, compensation = Plan((), kind), HeadIntervention()
        for step in range(1, steps + 1):
            scores = self._score([criterion], compensation=compensation)
            by_site = {
                name: value.clone()
                for name, value in scores.by_site(criterion, compensation.removed).items()
            }
            for name, heads in compensation.removed.items():
                by_site[name][heads] = -torch.inf  # they stay removed
            try:
                plan = self._make_plans(by_site, max(1, round(number * step / steps)), kind)[0]
            except MultiheadError:  # so few may be no whole group: a later step takes them
                if step == steps:
                    raise
                continue
            compensation = fit_compensation(
                self.sites, plan.by_site(self.sites), scores.moments, compensate
            )
            self.progress(step, steps, "pruning step by step")
        return plan, compensation

    def remove(
        self, plan: Plan, compensate: str, compensation: HeadIntervention | None = None
    ) -> tuple[nn.Module, Plain]:
        """Carry out a plan on a copy of the model, with proof; returns it, and whether plain
        transformers can load its checkpoint.

        Raises:
            MultiheadError: heads that can't be removed.
            SurgeryError: the copy differs from the model with these heads replaced.
        """
        removed = plan.check(self.all_sites, self.droppable)
        prunable = {site.name for site in self.sites}
        for site in self.all_sites:
            if site.name in removed and site.name not in prunable:
                raise MultiheadError(
                    self.unprunable.get(
                        site.label,
                        f"the plan removes heads of {site.label}, which isn't among the layers",
                    )
                )
        if compensate == "none":
            compensation = None
        elif compensation is None:
            compensation = self.compensation(removed, compensate)
        smaller = remove_heads(self.model, removed, self.sample, compensation=compensation)
        return smaller, finalize_config(smaller, self.sample)
