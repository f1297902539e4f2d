"""The blocks of a model that follow one another, each on the output of the one before it: their
inputs, and passes that begin at one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from .contexts import temporary_attributes
from .instrument import ModuleHook, Tap, instrument
from .site import Site

__all__ = ["BlockInputs", "StopForward", "begin_at", "block_name", "find_blocks"]


class StopForward(Exception):
    """Ends a pass that has shown what it was run for."""


class BlockInputs(Tap):
    """Records the inputs of consecutive blocks, and with `stops` ends the pass after the last one.

    `is_plain` is False if some block's input isn't the output of the block before it, or a block
    isn't run once.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, stops: bool = True) -> None:
        self.blocks, self.is_plain, self.stops = blocks, True, stops
        # by block: what it was given besides its hidden states, and those
        self.given: dict[str, list[Any]] = {name: [] for name in blocks}
        self.hidden: dict[str, list[Any]] = {name: [] for name in blocks}
        self.last_output: Any = None
        self.in_tuple: dict[str, int] = {}  # 0, or the length of the tuple that a block returns

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        first, last = next(iter(self.blocks)), list(self.blocks)[-1]
        for name, module in self.blocks.items():

            def before(args: Any, kwargs: dict[str, Any], name: str = name) -> None:
                x = args[0] if args else kwargs.get("hidden_states")
                if name != first and x is not self.last_output:
                    self.is_plain = False
                self.hidden[name].append(x)
                rest = {k: v for k, v in kwargs.items() if args or k != "hidden_states"}
                self.given[name].append((args[1:], rest))

            def after(args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self.last_output = output if isinstance(output, Tensor) else output[0]
                self.in_tuple[name] = 0 if isinstance(output, Tensor) else len(output)
                if name == last and self.stops:
                    raise StopForward

            yield ModuleHook(module, before, after)

    def ran_once(self, passes: int = 1) -> bool:
        """Whether each block ran once in each pass, on hidden states alone."""
        counts = {len(calls) for calls in self.given.values()}
        inputs = (x for calls in self.hidden.values() for x in calls)
        return self.is_plain and counts == {passes} and all(isinstance(x, Tensor) for x in inputs)


def block_name(name: str) -> str | None:
    """The path of the block that holds a module: up to the last number in its own.

    >>> block_name("model.layers.3.self_attn"), block_name("encoder.attention")
    ('model.layers.3', None)
    """
    words = name.split(".")
    last = max((i for i, word in enumerate(words) if word.isdigit()), default=None)
    return None if last is None else ".".join(words[: last + 1])


def find_blocks(model: nn.Module, sites: Iterable[Site]) -> dict[str, nn.Module]:
    """The blocks of one list from the first to the last that hold the sites, by path; empty where
    they are in several lists, or in none.

    >>> import multihead
    >>> from multihead.models import find_sites
    >>> model, _ = multihead.load_builtin()
    >>> list(find_blocks(model, find_sites(model)))[0]
    'model.layers.0'
    """
    held = [block_name(site.name) for site in sites]
    parents = {name and name.rpartition(".")[0] for name in held}
    if len(set(held)) < 2 or None in parents or len(parents) > 1:
        return {}
    parent = str(parents.pop())
    modules = dict(model.named_modules())
    names = [f"{parent}.{name}" for name, _ in modules[parent].named_children()]
    positions = [names.index(str(name)) for name in held]
    return {name: modules[name] for name in names[min(positions) : max(positions) + 1]}


def record_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], passes: Iterable[Mapping[str, Any]]
) -> BlockInputs:
    """Run a model up to its last block on some inputs, and return what entered the blocks."""
    tap = BlockInputs(blocks)
    with instrument(model, tap, sites=[]):
        for inputs in passes:
            with suppress(StopForward):
                model(**inputs)
    return tap


@contextmanager
def begin_at(name: str, hidden: Tensor, recorded: BlockInputs) -> Iterator[None]:
    """For the length of the `with` passes begin at a block with these hidden states: the blocks
    before it compute nothing.
    """
    with ExitStack() as stack:
        for earlier, module in recorded.blocks.items():
            if earlier == name:
                break
            length = recorded.in_tuple[earlier]
            output: Any = (hidden, *[None] * (length - 1)) if length else hidden
            stack.enter_context(
                temporary_attributes(module, forward=lambda *_, output=output, **__: output)
            )
        yield
