"""Run a model layer by layer on a calibration text, and capture the attention calls of each site
while earlier layers change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import MultiheadError
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


class _StopForward(Exception):
    """Ends a pass that has shown what it was run for."""


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
        raise _StopForward

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        slices = self.site.slices()
        for name, rows in (("raw_q", slices.q), ("raw_k", slices.k)):

            def keep(args: Any, kwargs: Any, y: Tensor, name: str = name, rows: Any = rows) -> None:
                if getattr(self.activations, name) is None and y.ndim == 3:
                    by_head = y.detach()[..., rows.index].transpose(1, 2)
                    setattr(self.activations, name, by_head)

            yield ModuleHook(rows.module, after=keep)


class _BlockInputs(Tap):
    """Records the inputs of consecutive blocks, and ends the pass after the last one.

    `is_plain` is False if some block's input isn't the output of the block before it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks, self.is_plain = blocks, True
        self.given: dict[str, list[Any]] = {name: [] for name in blocks}
        self.hidden: list[Any] = []
        self.last_output: Any = None

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        first, last = next(iter(self.blocks)), list(self.blocks)[-1]
        for name, module in self.blocks.items():

            def before(args: Any, kwargs: dict[str, Any], name: str = name) -> None:
                x = args[0] if args else kwargs.get("hidden_states")
                if name == first:
                    self.hidden.append(x)
                elif x is not self.last_output:
                    self.is_plain = False
                rest = {k: v for k, v in kwargs.items() if args or k != "hidden_states"}
                self.given[name].append((args[1:], rest))

            def after(args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self.last_output = output if isinstance(output, Tensor) else output[0]
                if name == last:
                    raise _StopForward

            yield ModuleHook(module, before, after)


class LayerwiseRunner:
    """Runs a model up to one site after another. Within `run_layerwise` only.

    If the blocks of the model simply follow one another, each is run once more for each site; else
    the whole model is run up to the site.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], sites: Iterable[Site]) -> None:
        self.model = model
        self.batches = [forward_kwargs(model, _named(model, batch.inputs)) for batch in batches]
        self.block_of = {site.name: _block_name(site.name) for site in sites}
        self.blocks: list[str] = []
        self.given: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self.hidden: list[Tensor] = []
        self.current = 0  # the block that `hidden` enters
        parents = {name and name.rpartition(".")[0] for name in self.block_of.values()}
        if len(self.block_of) > 1 and None not in parents and len(parents) == 1:
            self._record_block_inputs(str(parents.pop()))

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
                with suppress(_StopForward):
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

    def _record_block_inputs(self, parent: str) -> None:
        modules = dict(self.model.named_modules())
        names = [f"{parent}.{name}" for name, _ in modules[parent].named_children()]
        positions = [names.index(str(name)) for name in self.block_of.values()]
        names = names[min(positions) : max(positions) + 1]
        tap = _BlockInputs({name: modules[name] for name in names})
        with instrument(self.model, tap, sites=[]):
            for batch in self.batches:
                with suppress(_StopForward):
                    self.model(**batch)
        is_once = all(len(calls) == len(self.batches) for calls in tap.given.values())
        if tap.is_plain and is_once and all(isinstance(x, Tensor) for x in tap.hidden):
            self.blocks, self.given, self.hidden = names, tap.given, tap.hidden

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


def _block_name(name: str) -> str | None:
    """The path of the block that holds a module: up to the last number in its own."""
    words = name.split(".")
    last = max((i for i, word in enumerate(words) if word.isdigit()), default=None)
    return None if last is None else ".".join(words[: last + 1])
