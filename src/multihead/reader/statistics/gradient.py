"""Effects of heads on the loss: `importance` by one backward pass, `effect` and `effect_mean` by
ablating one head at a time (Michel et al. 2019, arXiv:1905.10650).

The loss is the sum over tokens of -log p(token), in nats, so that neither number depends on the
length of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data.batch import Batch, scored_inputs, token_logits
from ...data.token_range import count_tokens
from ...errors import MultiheadError
from ...models.ablate import collect_head_means
from ...models.blocks import BlockInputs, begin_at, block_name, find_blocks
from ...models.contexts import is_in_backward
from ...models.head_updates import first_order_effects
from ...models.instrument import Compute, Tap, instrument
from ...models.site import Site
from ...ops.call import AttentionCall
from .base import Run

MOST_LOGITS = 1 << 26  # of the heads that are removed in one pass


def run_with_importance(
    run: Run, batch: Mapping[str, Any], forward: Callable[[Mapping[str, Any]], Any]
) -> Any:
    """Run a pass and its backward pass, adding `importance`: abs(O_h,i . dL/dO_h,i) of every query
    and head.

    To first order that is the change of the loss if the head's update at that query is removed.
    The `.grad` of parameters stays as it is.
    """
    model = run.model
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
        with instrument(model, entered := _Entered(run), sites=run.sites):
            output = forward(batch)
        total, _ = _losses(run, batch, output)
        xs = [x for _, x, _ in entered.values]
        if total.requires_grad:
            grads = torch.autograd.grad(total.sum(), xs, allow_unused=True)
        else:  # no token has a loss
            grads = tuple(map(torch.zeros_like, xs))
    for (site, x, counts), grad in zip(entered.values, grads):
        if grad is None:
            run.why[f"{site.name} importance"] = "the loss does not depend on it"
            continue
        effects = first_order_effects(x.detach(), grad, site.num_heads)  # [..., H]
        effects = effects.reshape(*counts.shape, site.num_heads).abs()
        rows = counts.sum(-1, keepdim=True).double().expand(-1, site.num_heads)
        sums = torch.where(counts[..., None], effects, 0).sum(1)
        run.record(site).add("importance", sums, rows, rows)
    return output


def _losses(run: Run, batch: Mapping[str, Any], output: Any) -> tuple[Tensor, Tensor]:
    """The loss of each sequence of a pass and the number of its scored tokens, `[B]` both."""
    token_logits(run.model, output)  # raises where there are none
    scored = Batch(dict(batch), valid=run.settings.select)
    scored = scored.with_targets(run.model, causal=run.causal)
    return scored.losses(run.model, output)


class _Entered(Tap):
    """Collects what enters each W_O, as part of a graph, and which of its queries count."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.values: list[tuple[Site, Tensor, Tensor]] = []  # site, x, bool [B, L]
        self._counts: dict[str, list[Tensor]] = {}

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        out = compute(call)
        kind, select = self.run.record(site).kind, self.run.settings.select
        context = self.run.tokens.locate(site, kind, call, select)
        self._counts.setdefault(site.name, []).append(context.query_valid)
        return out

    def heads_out(self, site: Site, x: Tensor) -> Tensor:
        """With frozen parameters the graph has no leaf: the first site becomes one."""
        return x if x.requires_grad else x.detach().requires_grad_()

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        counts = self._counts.pop(site.name, [])
        if x is not None and len(counts) == 1 and not is_in_backward():
            self.values.append((site, x, counts[0]))


def add_ablation_effect(run: Run, batch: Mapping[str, Any], means: Mapping[str, Tensor]) -> None:
    """Add `effect`, the loss without each head (its update zero), or given means `[H, Ev]` by site,
    `effect_mean`.

    Without a head a pass differs from its layer on, so it begins there; heads of a layer are
    batch elements of one pass.
    """
    model = run.model
    with run.aside(), torch.no_grad():
        inputs = scored_inputs(model, batch)
        scored = Batch(dict(batch), valid=run.settings.select)
        blocks = find_blocks(model, run.sites) if count_tokens(inputs) is not None else {}
        recorded = BlockInputs(blocks, stops=False)
        with instrument(model, *([recorded] if blocks else []), sites=[]):
            output = model(**inputs)
        logits = token_logits(model, output)  # raises where there are none
        scored = scored.with_targets(model, causal=run.causal)
        base, tokens = scored.losses(model, output)
        from_block = bool(blocks) and recorded.ran_once()
        most = max(1, MOST_LOGITS // max(1, logits.numel())) if from_block else 1
        del output, logits
        for record in run.records:
            site = record.site
            if not record.reached:
                continue
            effects = []
            for first in range(0, site.num_heads, most):
                heads = range(first, min(site.num_heads, first + most))
                without = _HeadOfEach(site, heads, means.get(site.name))
                given = inputs
                begins: AbstractContextManager[None] = nullcontext()
                if from_block:
                    given = _repeat(inputs, len(heads))
                    name = str(block_name(site.name))
                    hidden = recorded.hidden[name][0].repeat(len(heads), 1, 1)
                    begins = begin_at(name, hidden, recorded)
                with begins, instrument(model, without, sites=[site]):
                    output = model(**given)
                targets = scored.targets.repeat(len(heads), 1)  # type: ignore[union-attr]
                losses, _ = Batch(given, targets=targets).losses(model, output)
                effects += [loss - base for loss in losses.view(len(heads), -1)]
                if run.settings.on_site is not None:
                    for _ in heads:
                        run.settings.on_site()
            rows = tokens.double()[:, None].expand(-1, site.num_heads)
            record.add("effect_mean" if means else "effect", torch.stack(effects, 1), rows, rows)


def _repeat(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Inputs with the batch so many times one after another."""
    return {
        name: value.repeat(times, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


class _HeadOfEach(Tap):
    """Removes another head from each part of a batch: its output is zero, or its mean."""

    changes_model = True

    def __init__(self, site: Site, heads: range, means: Tensor | None) -> None:
        self.heads, self.width = heads, site.head_dim
        self.means = means  # [H, Ev]

    def heads_out(self, site: Site, x: Tensor) -> Tensor:
        x = x.clone()
        for part, h in zip(x.chunk(len(self.heads)), self.heads, strict=True):
            mean = 0 if self.means is None else self.means[h].to(x.device, x.dtype)
            part[..., h * self.width : (h + 1) * self.width] = mean
        return x


class RecordedPass(NamedTuple):
    """A batch that is run again later, with the documents that its queries belong to."""

    batch: Mapping[str, Any]
    document_of: Tensor | None
    documents: int
    select: Tensor | None
    number: int  # of documents before: passes of the same documents share it

    @staticmethod
    def of(run: Run, batch: Mapping[str, Any]) -> RecordedPass:
        now = run.settings
        return RecordedPass(batch, now.document_of, now.documents, now.select, run.documents)


def add_mean_ablation_effects(run: Run, passes: list[RecordedPass]) -> None:
    """Add `effect_mean`, which needs the means over all texts."""
    if not passes:
        return
    model = run.model
    with run.aside():
        means = collect_head_means(
            model, run.sites, [scored_inputs(model, p.batch) for p in passes]
        )
    for _, group in itertools.groupby(passes, key=lambda p: p.number):
        for recorded in group:
            with run.passes(
                document_of=recorded.document_of,
                documents=recorded.documents,
                select=recorded.select,
            ):
                add_ablation_effect(run, recorded.batch, means)
        for record in run.records:
            record.close_documents()
