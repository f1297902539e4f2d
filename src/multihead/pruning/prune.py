"""Prune heads from beginning to end: score them on a calibration text, choose a plan, remove the
heads with proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..data.documents import Document
from ..data.scoring import TOKEN_LOSS
from ..errors import MultiheadError
from ..io import Progress
from ..models.introspect import unwrap
from ..models.resize import unprunable_reason
from ..models.site import find_sites
from .compensation import COMPENSATIONS
from .criteria import base_criterion
from .plain import warn_unless_plain
from .plan import KINDS, Plan, count_to_remove
from .pruner import CANDIDATES, TOKENS, Candidate, Pruner
from .result import SmallerModel, count_parameters

__all__ = ["Pruned", "prune"]


@dataclass
class Pruned(SmallerModel):
    """A model with fewer heads; see `SmallerModel` for what `share` returns too.

    Attributes:
        num_heads: query heads of all layers, before and after.
        plan: the heads that were removed.
        criterion: by which they were chosen; "given" if the plan was.
        compensate: "refit", "mean" or "none".
        base_loss: mean loss a token (or a sequence) of the whole model on the held-out part of the
            text.
        candidates: all criteria that were tried, the best first.
        unprunable: labels of the layers that can't be pruned, with the reason.
        loss_name: the loss by which heads were scored, such as "token loss".

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "One head attends to the previous word, and another one to itself. " * 20
    >>> plan = multihead.Plan(("L0.H3", "L2.H1"))
    >>> pruned = prune(model, text, tokenizer=tokenizer, remove=plan, context=32)
    >>> pruned.criterion, pruned.num_heads, pruned.to_json()["heads"]
    ('given', (32, 30), [32, 30])
    """

    num_heads: tuple[int, int]
    plan: Plan
    criterion: str
    compensate: str
    base_loss: float
    candidates: list[Candidate] = field(default_factory=list)
    unprunable: dict[str, str] = field(default_factory=dict)
    loss_name: str = TOKEN_LOSS

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "criterion": self.criterion,
            "compensate": self.compensate,
            **super().to_json(),
            "heads": list(self.num_heads),
            "loss": self.loss_name,
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

    @property
    def summary(self) -> str:
        before, after = self.num_heads
        return (
            f"{before - after} of {before} attention heads were removed: kind {self.plan.kind},"
            f" criterion {self.criterion}, compensation {self.compensate}; plan.json names them."
        )

    def _files(self, report: dict[str, Any]) -> dict[str, Any]:
        return {"plan.json": self.plan.to_json(), "pruning.json": report}


def prune(
    model: nn.Module,
    texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    remove: str | float | Plan | None = None,
    keep: str | float | None = None,
    kind: str = "any",
    layers: Iterable[int | str] | None = None,
    criterion: str | None = None,
    compensate: str | None = None,
    steps: int = 1,
    context: int | None = None,
    tokens: int | None = TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Pruned:
    """Copy a model without some of its heads.

    The model itself stays as it is. It is taken as it came, without what an instrumentation around
    the call changes in it (`multihead.models.suspend`).

    Args:
        model: a model with sites (see `multihead.read`).
        texts: calibration texts or conversations (see `multihead.read`) to score heads on; the
            last fifth is held out to compare criteria. Not those that the result is judged on.
            Rows with a text and a label for a classifier, with a source and a target for an
            encoder-decoder; without, the loss is the distance from the model's own outputs, or
            that of what it generates. For pictures and sound ready-made batches of model inputs,
            perhaps with labels.
        tokenizer: the model's tokenizer, for texts.
        remove: how many heads to remove: "20%", 0.2 or a number; or a `Plan` with their labels.
        keep: how many to keep instead.
        kind: "any", "even" (the same number from each group), "groups" (whole groups) or "uniform"
            (the same numbers in every layer, which plain transformers loads).
        layers: labels, numbers or ranges of layers, such as ["3-10", "L12"]; all by default.
        criterion: one of `multihead.pruning.criteria.CRITERIA`, perhaps with "/layer" or "/zscore";
            by default the best one on the held-out part.
        compensate: "refit" (least-squares prediction from the kept heads, merged into W_O), "mean"
            or "none"; by default the better of the first two.
        steps: score again after each of so many steps.
        context: tokens of a window of the texts, 512 by default.
        tokens: calibration tokens to use, None for all.
        seed: of random plans.
        progress: called with units done, units in all, and the stage.

    Raises:
        MultiheadError: neither or both of `remove` and `keep`; a number, plan or kind that the
            model doesn't allow, with the nearest that it does.
        SurgeryError: the copy differs from the model with these heads replaced.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "One head attends to the previous word, and another one to itself. " * 40
    >>> pruned = prune(model, text, tokenizer=tokenizer, remove=2, criterion="fisher", context=32)
    >>> pruned.num_heads, len(pruned.plan.remove), pruned.loads_in_transformers
    ((32, 30), 2, False)
    """
    _check_options(remove, keep, kind, compensate, steps)
    if criterion is not None:
        base_criterion(criterion)
    if isinstance(remove, Plan):
        _require_plan_alone(remove, kind, criterion, steps)
    if (remove.kind if isinstance(remove, Plan) else kind) == "uniform" and layers is None:
        _warn_unless_plain(unwrap(model), remove, keep, compensate)
    pruner = Pruner(
        model,
        texts,
        tokenizer=tokenizer,
        layers=layers,
        context=context,
        tokens=tokens,
        seed=seed,
        progress=progress,
    )
    candidates: list[Candidate] = []
    compensation = None
    if isinstance(remove, Plan):
        plan, name, how = remove, "given", compensate or "refit"
        plan.check(pruner.all_sites, pruner.droppable)  # before any scoring
    else:
        if kind == "uniform":
            _require_all_layers(pruner)
        amount: Any = keep if remove is None else remove
        number = count_to_remove(amount, pruner.num_heads, keep=remove is None)
        candidates = pruner.try_criteria(
            number,
            kind,
            CANDIDATES if criterion is None else (criterion,),
            COMPENSATIONS[:2] if compensate is None else (compensate,),
        )
        best = next(c for c in candidates if c.criterion != "random" or criterion == "random")
        plan, name, how = best.plan, best.criterion, best.compensate
        if steps > 1:
            plan, compensation = pruner.make_plan_in_steps(number, kind, name, how, steps)
    smaller, plain = pruner.remove(plan, how, compensation)
    return Pruned(
        smaller,
        tokenizer,
        bool(plain),
        (count_parameters(model), count_parameters(smaller)),
        (_count_heads(model), _count_heads(smaller)),
        plan,
        name,
        how,
        pruner.base_loss,
        candidates,
        pruner.unprunable,
        pruner.loss_name,
        why_not_plain=plain.reason,
        proof=pruner.sample,
    )


def _check_options(remove: Any, keep: Any, kind: str, compensate: str | None, steps: int) -> None:
    if remove is not None and not isinstance(remove, (str, int, float, Plan)):
        raise TypeError(
            f"remove is a {type(remove).__name__}: expected a share, a number or a Plan, such as"
            " Plan(('L0.H3',)) or Plan.load(file)"
        )
    if (remove is None) == (keep is None):
        raise MultiheadError(f"remove={remove!r}, keep={keep!r}: give one of them")
    if kind not in KINDS:
        raise MultiheadError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if compensate is not None and compensate not in COMPENSATIONS:
        raise MultiheadError(
            f"compensate={compensate!r}: expected one of {', '.join(COMPENSATIONS)}"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MultiheadError(f"steps={steps}: expected a whole number from 1 on")


def _warn_unless_plain(model: nn.Module, remove: Any, keep: Any, compensate: str | None) -> None:
    """Warn before any work if plain transformers won't load the result."""
    sites = find_sites(model)
    if isinstance(remove, Plan):
        remove.check(sites, [site.name for site in sites])
        warn_unless_plain(model, remove, compensate=compensate)
    elif not any(map(unprunable_reason, sites)):  # else an error that names the layer follows
        total = sum(site.num_heads for site in sites)
        amount = count_to_remove(keep if remove is None else remove, total, keep=remove is None)
        warn_unless_plain(model, amount, compensate=compensate)


def _require_plan_alone(plan: Plan, kind: str, criterion: str | None, steps: int) -> None:
    """Raise if something else would choose heads next to a plan."""
    for name, value, clashes in (
        ("criterion", criterion, criterion is not None),
        ("steps", steps, steps > 1),
        ("kind", kind, kind not in ("any", plan.kind)),
    ):
        if clashes:
            raise MultiheadError(
                f"{name}={value!r} with a plan (of kind {plan.kind!r}): the plan names the heads to"
                " remove; give one of them"
            )


def _require_all_layers(pruner: Pruner) -> None:
    others = [site.label for site in pruner.all_sites if site not in pruner.sites]
    if others:
        reason = pruner.unprunable.get(others[0])
        raise MultiheadError(
            f"kind='uniform' removes the same numbers from every layer, and {others[0]} isn't"
            f" pruned{f' ({reason})' if reason else ''}; give another kind, or no layers"
        )


def _count_heads(model: nn.Module) -> int:
    return sum(site.num_heads for site in find_sites(model))
