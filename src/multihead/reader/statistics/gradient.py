"""Effects of heads on the loss: `importance` by one backward pass, `effect` and `effect_mean` by
ablating one head at a time (Michel et al. 2019, arXiv:1905.10650).

The loss is the sum over tokens of -log p(token), in nats, so that neither number depends on the
length of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data.batch import Batch, scored_inputs, token_logits
from ...errors import MultiheadError
from ...models.ablate import collect_head_means
from ...models.instrument import Compute, HeadIntervention, Tap, instrument
from ...models.site import Site
from ...ops.call import AttentionCall
from ..verify import is_in_backward


def run_with_importance(
    session: Any, batch: Mapping[str, Any], forward: Callable[[Mapping[str, Any]], Any]
) -> Any:
    """Run one pass and its backward pass, adding `importance`: abs(O_h,i . dL/dO_h,i) of every
    real query of every head.

    To first order that is the change of the loss if the head's update at that query is zero. The
    `.grad` of parameters stays as it is.
    """
    model = session.model
    if any(p.is_inference() for p in model.parameters()):
        raise MultiheadError(
            "importance needs gradients, and the model was loaded under torch.inference_mode():"
            " load it outside, or leave importance out"
        )
    with torch.inference_mode(False), torch.enable_grad():
        batch = {
            k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v
            for k, v in batch.items()
        }
        with instrument(model, entered := _Entered(session), sites=session.sites):
            output = forward(batch)
        total, _ = _losses(session, batch, output)
        xs = [x for _, x, _ in entered.values]
        grads = torch.autograd.grad(total.sum(), xs, allow_unused=True)
    for (site, x, real), grad in zip(entered.values, grads):
        if grad is None:
            session.why[f"{site.name} importance"] = "the loss does not depend on it"
            continue
        shape = (*real.shape, site.num_heads, site.head_dim)
        values = (x.detach() * grad).reshape(shape).double().sum(-1).abs()  # [B, L, H]
        rows = real.sum(-1, keepdim=True).double().expand(-1, shape[2])
        sums = torch.where(real[..., None], values, 0).sum(1)
        session.record(site).add("importance", sums, rows, rows)
    return output


def _losses(session: Any, batch: Mapping[str, Any], output: Any) -> tuple[Tensor, Tensor]:
    """The loss of each sequence of a pass and the number of its scored tokens, `[B]` both."""
    token_logits(session.model, output)  # raises where there are none
    scored = Batch(dict(batch), valid=session.settings.select)
    scored = scored.with_targets(session.model, causal=session.causal)
    return scored.losses(session.model, output)


class _Entered(Tap):
    """Collects what enters each W_O, as a part of a graph, and which of its rows count."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.values: list[tuple[Site, Tensor, Tensor]] = []  # site, x, bool [B, L]
        self._real: dict[str, list[Tensor]] = {}

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        out = compute(call)
        kind, select = self.session.record(site).kind, self.session.settings.select
        text = self.session.tokens.locate(site, kind, call, select)
        self._real.setdefault(site.name, []).append(text.real)
        return out

    def heads_out(self, site: Site, x: Tensor) -> Tensor:
        """With frozen parameters the graph has no leaf: the first site becomes one."""
        return x if x.requires_grad else x.detach().requires_grad_()

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        real = self._real.pop(site.name, [])
        if x is not None and len(real) == 1 and not is_in_backward():
            self.values.append((site, x, real[0]))


def add_ablation_effect(
    session: Any, batch: Mapping[str, Any], means: Mapping[str, Tensor]
) -> None:
    """One pass a head over a batch without it, adding `effect` (its update zero) or, given means,
    `effect_mean`.
    """
    model = session.model
    with session.aside(), torch.no_grad():
        whole = scored_inputs(model, batch)
        on_site = session.settings.on_site
        base, count = _losses(session, batch, model(**whole))
        for record in session.records:
            site, found = record.site, []
            if not record.reached:
                continue
            for h in range(site.num_heads):
                mean = {site.name: means[site.name][h]} if means else None
                off = HeadIntervention({site.name: [h]}, constant=mean)
                with instrument(model, off, sites=[site]):
                    output = model(**whole)
                loss, _ = _losses(session, batch, output)
                found.append(loss - base)
                if on_site is not None:
                    on_site()
            rows = count.double()[:, None].expand(-1, site.num_heads)
            record.add(
                "effect_mean" if means else "effect", torch.stack(found, 1).double(), rows, rows
            )


class RecordedPass(NamedTuple):
    """A batch that is run again later, with the documents that its queries belong to."""

    batch: Mapping[str, Any]
    document_of: Tensor | None
    documents: int
    select: Tensor | None
    number: int  # of documents before: passes of the same documents share it

    @staticmethod
    def of(session: Any, batch: Mapping[str, Any]) -> RecordedPass:
        now = session.settings
        return RecordedPass(batch, now.document_of, now.documents, now.select, session.documents)


def add_mean_ablation_effects(session: Any, passes: list[RecordedPass]) -> None:
    """Add `effect_mean`, which needs the means over all texts."""
    if not passes:
        return
    model = session.model
    with session.aside():
        means = collect_head_means(
            model, session.sites, [scored_inputs(model, p.batch) for p in passes]
        )
    for _, group in itertools.groupby(passes, key=lambda p: p.number):
        for recorded in group:
            with session.passes(
                document_of=recorded.document_of,
                documents=recorded.documents,
                select=recorded.select,
            ):
                add_ablation_effect(session, recorded.batch, means)
        for record in session.records:
            record.close_documents()
