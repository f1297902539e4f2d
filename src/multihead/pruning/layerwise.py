"""Run a model layer by layer on a calibration text, and capture the attention calls of each site
while earlier layers change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import MultiheadError
from ..models.blocks import StopForward, block_name, find_blocks, record_blocks
from ..models.contexts import evaluation
from ..models.instrument import Compute, ModuleHook, Tap, instrument
from ..models.introspect import forward_kwargs, text_inputs
from ..models.site import Site
from ..ops.call import AttentionCall

__all__ = ["LayerActivations", "LayerwiseRunner", "run_layerwise"]


@dataclass
class LayerActivations:
    """One site on each batch: its attention calls, what entered W_O `[rows, H*Ev]`, and the queries
    and keys of one batch as they left their projections `[B, heads, L, E]`, before norms and
    positions.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    raw_q: Tensor | None = None
    raw_k: Tensor | None = None


class _Capture(Tap):
    """Captures one site, and ends the pass when its heads' outputs are about to enter W_O."""

    def __init__(self, site: Site) -> None:
        self.site, self.activations = site, LayerActivations()

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        detached = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        self.activations.calls.append(detached)
        return compute(call)

    def heads_out(self, site: Site, x: Tensor) -> None:
        self.activations.entered.append(x.detach().flatten(0, -2))
        raise StopForward

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        slices = self.site.slices()
        for name, rows in (("raw_q", slices.q), ("raw_k", slices.k)):

            def keep(args: Any, kwargs: Any, y: Tensor, name: str = name, rows: Any = rows) -> None:
                if getattr(self.activations, name) is None and y.ndim == 3:
                    by_head = y.detach()[..., rows.index].transpose(1, 2)
                    setattr(self.activations, name, by_head)

            yield ModuleHook(rows.module, after=keep)


class LayerwiseRunner:
    """Runs a model up to one site after another. Within `run_layerwise` only.

    If the blocks of the model simply follow one another, each is run once more for each site; else
    the whole model is run up to the site.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], sites: Sequence[Site]) -> None:
        self.model = model
        self.batches = [forward_kwargs(model, _named(model, batch.inputs)) for batch in batches]
        self.block_of = {site.name: block_name(site.name) for site in sites}
        self.blocks: list[str] = []
        self.given: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self.hidden: list[Tensor] = []
        self.current = 0  # the block that `hidden` enters
        blocks = find_blocks(model, sites)
        if blocks:
            tap = record_blocks(model, blocks, self.batches)
            if tap.ran_once(len(self.batches)):
                self.blocks, self.given = list(blocks), tap.given
                self.hidden = tap.hidden[self.blocks[0]]

    def capture(self, site: Site) -> LayerActivations:
        """Capture what reaches a site on each batch, after all changes to earlier layers.

        Raises:
            MultiheadError: the text doesn't reach the site, or sites come out of order.
        """
        block = self.block_of[site.name]
        steps = block in self.blocks
        if steps:
            self._advance(self.blocks.index(str(block)))
        tap = _Capture(site)
        with instrument(self.model, tap, sites=[site]):
            for number, batch in enumerate(self.batches):
                with suppress(StopForward):
                    if steps:
                        self._run_block(self.current, number)
                    else:
                        self.model(**batch)
        activations = tap.activations
        if not activations.calls or len(activations.calls) != len(activations.entered):
            raise MultiheadError(
                f"{site.name} can't be calibrated: on the calibration text it isn't called once a"
                " pass"
            )
        return activations

    def _run_block(self, block: int, number: int) -> Tensor:
        name = self.blocks[block]
        args, kwargs = self.given[name][number]
        output = self.model.get_submodule(name)(self.hidden[number], *args, **kwargs)
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        return hidden

    def _advance(self, block: int) -> None:
        if block < self.current:
            raise MultiheadError("sites must be captured in the order of the layers")
        while self.current < block:
            self.hidden = [self._run_block(self.current, n) for n in range(len(self.batches))]
            self.current += 1


@contextmanager
def run_layerwise(
    model: nn.Module, batches: Sequence[Batch], sites: Sequence[Site]
) -> Iterator[LayerwiseRunner]:
    """A `LayerwiseRunner` over a model, which is in evaluation mode and computes with
    `multihead.attention` meanwhile.
    """
    with evaluation(model), instrument(model, sites=[], attention=True), torch.no_grad():
        yield LayerwiseRunner(model, batches, sites)


def _named(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    return text_inputs(model, inputs) if "input_ids" in inputs else inputs
