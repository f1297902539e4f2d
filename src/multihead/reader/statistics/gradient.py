"""Effects of heads on the loss: `importance` by one backward pass, `effect` and `effect_mean` by
ablating one head at a time (Michel et al. 2019, arXiv:1905.10650).

The loss is the sum over tokens of -log p(token), in nats, so that neither number depends on the
length of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MultiheadError
from ...models.ablate import collect_head_means
from ...models.instrument import HeadIntervention, instrument
from ..loss import losses, whole_of


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
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        batch = {
            k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v
            for k, v in batch.items()
        }
        for observer in session.observers:
            stack.callback(observer.site.out.register_forward_pre_hook(_leaf).remove)
        session.entered = []
        try:
            output = forward(batch)
            total, _ = losses(model, batch, output, causal=session.causal, counts=session.select)
            entered, session.entered = session.entered, None
            grads = torch.autograd.grad(total.sum(), [x for _, x, _ in entered], allow_unused=True)
        finally:
            session.entered = None
    for (observer, x, real), grad in zip(entered, grads):
        if grad is None:
            session.why[f"{observer.site.name} importance"] = "the loss does not depend on it"
            continue
        shape = (*real.shape, observer.site.num_heads, observer.site.head_dim)
        values = (x.detach() * grad).reshape(shape).double().sum(-1).abs()  # [B, L, H]
        rows = real.sum(-1, keepdim=True).double().expand(-1, shape[2])
        observer.add("importance", torch.where(real[..., None], values, 0).sum(1), rows, rows)
    return output


def _leaf(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Frozen parameters give a graph without a beginning: the first site becomes one."""
    return args if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])


def add_ablation_effect(
    session: Any, batch: Mapping[str, Any], means: Mapping[str, Tensor]
) -> None:
    """One pass a head over a batch without it, adding `effect` (its update zero) or, given means,
    `effect_mean`.
    """
    model, causal = session.model, session.causal
    with session.aside(), torch.no_grad():
        whole = whole_of(model, batch)
        base, count = losses(model, batch, model(**whole), causal=causal, counts=session.select)
        for observer in session.observers:
            site, found = observer.site, []
            if not observer.reached:
                continue
            for h in range(site.num_heads):
                mean = {site.name: means[site.name][h]} if means else None
                off = HeadIntervention({site.name: [h]}, constant=mean)
                with instrument(model, off, sites=[site]):
                    output = model(**whole)
                loss, _ = losses(model, batch, output, causal=causal, counts=session.select)
                found.append(loss - base)
                if session.on_site is not None:
                    session.on_site()
            rows = count.double()[:, None].expand(-1, site.num_heads)
            observer.add(
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
        return RecordedPass(
            batch, session.document_of, session.opened, session.select, session.documents
        )


def add_mean_ablation_effects(session: Any, passes: list[RecordedPass]) -> None:
    """Add `effect_mean`, which needs the means over all texts."""
    if not passes:
        return
    model = session.model
    with session.aside():
        means = collect_head_means(model, session.sites, [whole_of(model, p.batch) for p in passes])
    for _, group in itertools.groupby(passes, key=lambda p: p.number):
        for recorded in group:
            session.open(recorded.document_of, recorded.documents)
            session.select = recorded.select
            add_ablation_effect(session, recorded.batch, means)
        for observer in session.observers:
            observer.close()
    session.open(None)
    session.select = None
