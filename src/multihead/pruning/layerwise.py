"""A calibration text, and what a site's attention is called with on it: layer by layer, as the
layers change one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.attending import attending
from ..models.foreign import Kind, kind_of
from ..models.introspect import forward_kwargs
from ..models.site import Site
from ..models.transformers import NAME, evaluation, implementation, observers
from ..ops.call import AttentionCall
from ..ops.functional import compute
from .pieces import documents_of

__all__ = ["Held", "Walk", "batches_of", "walking"]

# tokens of a window: short ones, since a sink is fitted on as many rows as there are windows; each
# is a pass
CONTEXT = 128
Batch = Mapping[str, Any]


def batches_of(
    model: nn.Module,
    texts: str | Sequence[str] | Sequence[Batch],
    tokenizer: Any,
    *,
    context: int = CONTEXT,
    tokens: int | None = None,
) -> list[dict[str, Tensor]]:
    """The texts in windows of at most `context` tokens, one a pass, to about `tokens` in all;
    ready-made batches stay.

    Raises:
        ValueError: no text, an empty one, no tokenizer, a context that leaves no room.
    """
    listed: Any = [texts] if isinstance(texts, str) else list(texts)
    if listed and all(isinstance(batch, Mapping) for batch in listed):
        return [dict(batch) for batch in listed]
    return [
        {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        for ids, *_ in documents_of(model, listed, tokenizer, 1, None, tokens, context)
    ]


@dataclass
class Held:
    """What a site was called with on each batch: its calls, what entered W_O `[rows, H*Ev]`, and
    the queries and keys of one batch as they left their projections, `[B, heads, rows, E]`, before
    norms and positions.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    raw_q: Tensor | None = None
    raw_k: Tensor | None = None


class _Stop(Exception):
    """Thrown where a pass has given what it was for."""


@contextmanager
def _listening(site: Site, held: Held) -> Iterator[None]:
    """What reaches the site is kept, and the pass ends there."""
    rows = site.slices()

    def attend(call: AttentionCall) -> Tensor:
        held.calls.append(call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach()))
        return compute(call)

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        held.entered.append(args[0].detach().flatten(0, -2))
        raise _Stop

    def keep(name: str, index: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if getattr(held, name) is None and output.ndim == 3:
                setattr(held, name, output.detach()[..., index].transpose(1, 2))

        return hook

    with ExitStack() as stack:
        if isinstance(kind_of(site.module), Kind):
            stack.enter_context(attending([site.module]))
        observers[site.module] = attend
        stack.callback(observers.pop, site.module)
        stack.callback(rows.q.module.register_forward_hook(keep("raw_q", rows.q.index)).remove)
        stack.callback(rows.k.module.register_forward_hook(keep("raw_k", rows.k.index)).remove)
        stack.callback(site.out.register_forward_pre_hook(enter).remove)
        yield


class Walk:
    """Runs a model up to one site after another, each block once more rather than the whole model,
    where its blocks follow one another plainly; the whole model up to the site where they don't.
    Within `walking` only.

    `hold(site)` gives what reaches a site now, with all that was changed before it; sites must be
    asked for in their order.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], sites: Iterable[Site]) -> None:
        self.model, self.batches = model, [forward_kwargs(model, dict(batch)) for batch in batches]
        self.block_of = {site.name: _block(site.name) for site in sites}
        self.blocks: list[str] = []
        self.given: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self.hidden: list[Tensor] = []
        self.at = 0
        lists = {name and name.rpartition(".")[0] for name in self.block_of.values()}
        if len(self.block_of) > 1 and None not in lists and len(lists) == 1:
            self._open(str(lists.pop()))

    def hold(self, site: Site) -> Held:
        held = Held()
        block = self.block_of[site.name]
        stepping = block in self.blocks
        if stepping:
            self._forward(self.blocks.index(str(block)))
        with _listening(site, held):
            for number, batch in enumerate(self.batches):
                with suppress(_Stop):
                    if stepping:
                        self._run(self.at, number)
                    else:
                        self.model(**batch)
        if not held.calls or len(held.calls) != len(held.entered):
            raise MultiheadError(
                f"{site.name} can't be calibrated: the calibration text doesn't reach it as one"
                " call of attention"
            )
        return held

    def _open(self, parent: str) -> None:
        """The inputs of the blocks, from one pass of the model as it came."""
        modules = dict(self.model.named_modules())
        names = [f"{parent}.{name}" for name, _ in modules[parent].named_children()]
        first = min(names.index(str(name)) for name in self.block_of.values())
        last = max(names.index(str(name)) for name in self.block_of.values())
        names = names[first : last + 1]
        given: dict[str, list[Any]] = {name: [] for name in names}
        hidden: list[Tensor] = []
        left: list[Any] = [None]
        plain = [True]

        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x: Any = args[0] if args else kwargs.get("hidden_states")
                if name == names[0]:
                    hidden.append(x)
                elif x is not left[0]:
                    plain[0] = False
                given[name].append(
                    (args[1:], {k: v for k, v in kwargs.items() if args or k != "hidden_states"})
                )

            return hook

        def after(module: nn.Module, args: Any, output: Any) -> None:
            left[0] = output if isinstance(output, Tensor) else output[0]
            if module is modules[names[-1]]:
                raise _Stop

        with ExitStack() as stack:
            for name in names:
                stack.callback(
                    modules[name].register_forward_pre_hook(before(name), with_kwargs=True).remove
                )
                stack.callback(modules[name].register_forward_hook(after).remove)
            for batch in self.batches:
                with suppress(_Stop):
                    self.model(**batch)
        each = all(len(calls) == len(self.batches) for calls in given.values())
        if plain[0] and each and all(isinstance(x, Tensor) for x in hidden):
            self.blocks, self.given, self.hidden = names, given, hidden

    def _run(self, block: int, number: int) -> Tensor:
        name = self.blocks[block]
        args, kwargs = self.given[name][number]
        output = self.model.get_submodule(name)(self.hidden[number], *args, **kwargs)
        found: Tensor = output if isinstance(output, Tensor) else output[0]
        return found

    def _forward(self, block: int) -> None:
        if block < self.at:
            raise MultiheadError("sites must be calibrated in the order of the layers")
        while self.at < block:
            self.hidden = [self._run(self.at, number) for number in range(len(self.batches))]
            self.at += 1


@contextmanager
def walking(model: nn.Module, batches: Sequence[Batch], sites: Sequence[Site]) -> Iterator[Walk]:
    """A `Walk` over a model, which is in evaluation mode and computes with `multihead.attention`
    meanwhile.
    """
    with evaluation(model), implementation(model, NAME), torch.no_grad():
        yield Walk(model, batches, sites)


def _block(name: str) -> str | None:
    """The path of the block that holds a module: up to the last number in its own."""
    words = name.split(".")
    at = max((i for i, word in enumerate(words) if word.isdigit()), default=None)
    return None if at is None else ".".join(words[: at + 1])
