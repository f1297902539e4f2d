"""Reading a model as it runs: `with reading(model) as r: model(**inputs)`, then `r.table()`."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MultiheadError, ReadingError
from ..layers.block import TransformerBlock
from ..models.attending import attending
from ..models.calls import flat, target
from ..models.foreign import Kind, kind_of
from ..models.introspect import find_special_ids, is_encoder_decoder, require_model
from ..models.labels import stack_of
from ..models.site import Site, elementwise, find_sites, list_unsupported
from ..models.transformers import NAME, having, implementation, observers
from .head_pairs import Pairs
from .moments import TERMS
from .observer import Observer, Watcher
from .statistics import Statistic, columns, resolve_statistics
from .statistics.columns import PROBED, REQUESTABLE, is_user_defined
from .statistics.masses import TokenClass
from .stream import Stream
from .table import Table
from .tokens import (
    Inputs,
    follow,
    ids_among,
    ids_given,
    length_of,
    marks,
    not_text,
    placeholders_of,
    stacks_of,
)
from .verify import Check, own_caches

__all__ = ["Reading", "ReadingError", "reading"]


@contextmanager
def reading(
    model: nn.Module,
    *,
    special_ids: Iterable[int] | None = None,
    verify: bool = True,
    statistics: str | Statistic | Iterable[str | Statistic] = (),
) -> Iterator[Reading]:
    """Read every head of a model while it runs, in any loop of one's own.

    Args:
        model: a transformers model, or a module of another make (see `multihead.read`). Afterwards
            it is as it was before, also after an error.
        special_ids: token ids that count as special (BOS, CLS, SEP); by default those that the
            model's config names.
        verify: compare the outputs with those of the model as it came, at the first input of each
            new kind.
        statistics: user-defined statistics, and "nearest", to measure besides the built-in ones
            (see `multihead.Statistic`). What needs the loss or more passes is left to
            `multihead.read`.

    Raises:
        ValueError: the model's attention can't be reached; names the class.
        ReadingError: outputs under reading differ, or a site's updates don't add up; names the
            first such site.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> with multihead.reading(model) as r:
    ...     _ = model(**tokenizer("the cat and the dog and the cat", return_tensors="pt"))
    >>> r.table().value("self").shape == (len(r.table().heads),)
    True
    """
    chosen = resolve_statistics(statistics)
    for statistic in chosen:
        if statistic.implements("run_pass") or statistic.implements("finish"):
            raise MultiheadError(
                f"statistics={statistic.name!r} needs passes of its own kind; multihead.read"
                " measures it"
            )
    session = Reading(model, special_ids=special_ids, verify=verify, statistics=chosen)
    with session.running():
        for statistic in chosen:
            statistic.begin(session)
        yield session


class Reading:
    """The state of a reading: hooks on the model, the observers of its sites, and the table so
    far.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        special_ids: Iterable[int] | None = None,
        verify: bool = True,
        statistics: list[Statistic] | None = None,
    ) -> None:
        require_model(model)
        if hasattr(model, "_orig_mod"):
            raise MultiheadError(
                f"model is compiled ({type(model).__name__}): its code is fixed, so nothing can be"
                " read on the way; pass model._orig_mod, the same model before torch.compile"
            )
        self.model = model
        self.statistics = resolve_statistics() if statistics is None else statistics
        self.sites = find_sites(model)
        self.observers = [Observer(self, site) for site in self.sites]
        self.stream = Stream(self)
        self.verify = verify
        self.check = Check(model)
        self.special = frozenset(
            find_special_ids(model) if special_ids is None else ids_given(special_ids)
        )
        self.inputs: dict[str, Inputs] = {}
        self.histories: weakref.WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = (
            weakref.WeakKeyDictionary()
        )  # -> ids, marks
        self.followed: set[int] = (
            set()
        )  # caches whose ids of this pass are known already, from a stack further in
        self.stacks = stacks_of(model)
        self.placeholders = placeholders_of(model)
        self.mapping = False  # only maps are wanted, and only of the sites that have a capture
        self.watchers: list[Watcher] = []  # see every block of weights on the way past
        self.counting = True  # False: only the watchers look, nothing is added to the table
        self.inside = False  # a pass of the whole model is under way
        self.again: tuple[Any, Any] | None = None  # its inputs, should it have to be run once more
        self.passed = False  # one pass is over: from here on, caches aren't copied for that
        self.prefix = ""  # "probe:" while the probe runs
        self.select: Tensor | None = (
            None  # bool [B, L]: the only rows that count, on top of being real
        )
        self.document_of: Tensor | None = (
            None  # [B]: each row's document, of those opened; None: each row begins its own
        )
        self.opened = 0  # documents that are being read, in windows or in steps
        self.latest: Any = None  # weak reference to the cache of the last pass
        self.documents = self.tokens = 0
        self.meta: dict[str, Any] = {}  # what else the table's meta is to say
        self.notes: list[str] = []
        self.pairs: Pairs | None = None  # what a watcher found of pairs of heads
        self.causal: bool | None = (
            None  # whether no self-attention row could read a later key; None: none was there
        )
        # why columns are empty, by name
        self.reasons = {
            f"probe:{mass}": "the probe was not run; multihead.read runs it" for mass in PROBED
        }
        asked = {s.name for s in self.statistics}
        self.reasons |= {
            name: f"only on request: multihead.read(..., statistics=[{name!r}]), --also {name}"
            for name in REQUESTABLE
            if name not in asked
        }
        self.entered: list[tuple[Observer, Tensor, Tensor]] | None = (
            None  # what entered each W_O and its real rows, if asked
        )
        self.why: dict[str, str] = {}  # why a column is empty at one site, by "site column"
        self.on_site: Callable[[], None] | None = None  # called each time that a site was read

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.model).__name__} is being read: copy or save it before or after, for what"
            " stands in it while it is read would stay in the copy"
        )

    # ---- running

    @contextmanager
    def running(self) -> Iterator[Reading]:
        """Under reading; the model's attention, hooks and configs are put back at the end, whatever
        happens.
        """
        with ExitStack() as stack:
            if (
                "torch._dynamo" in sys.modules
            ):  # of compiled parts the code is fixed, and nothing could be read on the way
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for observer in self.observers:
                if observer.site.module in observers:
                    raise MultiheadError(
                        f"{observer.site.name} is being read already; one reading at a time"
                    )
            for observer in self.observers:  # found out anew: what stood there may be gone
                elementwise.discard(observer.site.module)
            self._came_with = stack.enter_context(implementation(self.model, NAME))
            own = [site.module for site in self.sites if isinstance(kind_of(site.module), Kind)]
            self._came_as = stack.enter_context(attending(own))
            for observer in self.observers:
                stack.enter_context(observer.attached())
            self.stream.attach(stack)
            for name, module in self.stacks.items():
                handle = module.register_forward_pre_hook(
                    self._before(name), with_kwargs=True, prepend=True
                )
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            handle = self.model.register_forward_pre_hook(
                self._verify, with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
            stack.callback(self.model.register_forward_hook(self._finish, with_kwargs=True).remove)
            stack.callback(self._forget)
            yield self

    def _forget(self) -> None:
        """What only a pass needs goes at once: sessions are cycles, which wait long to be
        collected.
        """
        self.inputs.clear()
        self.stream.begin()
        self.stream.last.clear()
        for observer in self.observers:
            observer.forget()

    @contextmanager
    def as_it_came(self) -> Iterator[None]:
        """The model with the attention that it came with, for the length of a check."""
        with ExitStack() as stack:
            for config, name in self._came_with:
                stack.callback(
                    setattr,
                    config,
                    "_attn_implementation_internal",
                    config._attn_implementation_internal,
                )
                config._attn_implementation_internal = name
            stack.enter_context(self._came_as())
            for module in (
                self.model.modules()
            ):  # its fused path cuts padding out, and zeros are there in the end
                if isinstance(module, nn.TransformerEncoder):
                    stack.enter_context(having(module, use_nested_tensor=False))
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes that count for nothing: no statistics, no checks."""
        before, self.check.passing, self.check.kept = self.check.passing, "aside", {}
        try:
            yield
        finally:
            self.check.passing = before

    def add(self, site: Site, name: str, values: Tensor) -> None:
        """Add a value for each head of a site, `[H]`, to the column `name`."""
        if values.shape != (site.num_heads,):
            raise MultiheadError(
                f"{name}: add() got {list(values.shape)}, expected a value for each head,"
                f" [{site.num_heads}]"
            )
        one = torch.ones(1, site.num_heads, dtype=torch.float64)
        (observer,) = (o for o in self.observers if o.site is site)
        observer.add(name, values.double().cpu()[None], one, one)

    def open(self, document_of: Tensor | None, number: int = 0) -> None:
        """From here on the rows `[B]` of each pass belong to `number` documents, as `document_of`
        says, until `close`.
        """
        self.document_of, self.opened = document_of, number

    def close(self) -> None:
        """What was opened is at its end; from here on each row is a document again."""
        for observer in self.observers:
            observer.close()
        self.documents += self.opened
        self.open(None)

    def table(self) -> Table:
        """What was read so far, as one table with a row a head."""
        heads = [head for observer in self.observers for head in observer.heads()]
        table = Table(
            heads,
            {},
            dict(self.reasons),
            {"model": _name(self.model), "documents": self.documents, "tokens": self.tokens}
            | self.meta,
            None if self.pairs is None else self.pairs + Pairs.empty(len(heads)),
        )
        start = 0
        for observer in self.observers:
            own = observer.so_far()
            for column, sums in own.sums.items():
                table.sums.setdefault(column, np.zeros((len(heads), sums.shape[1])))[
                    start : start + len(sums)
                ] = sums
            start += len(own.heads)
            table.reasons |= observer.reasons(own)
        # a class without tokens at any site is an empty column, not an unknown one
        for statistic in self.statistics:
            if is_user_defined(statistic) or isinstance(statistic, TokenClass):
                table.sums.setdefault(statistic.name, np.zeros((len(heads), TERMS + 1)))
            if is_user_defined(statistic):
                table.meta.setdefault("statistics", {})[statistic.name] = statistic.to_dict()
        for column in table.columns:
            table.reasons.pop(column, None)
        _shorten(table.reasons, [o.site.name for o in self.observers if o.reached])
        notes = [f"not read: {what}" for what in list_unsupported(self.model, self.sites)]
        notes += [
            f"not read: {o.site.name} wasn't reached"
            for o in self.observers
            if self.documents and not o.reached
        ]
        notes += [
            f"{o.site.label} runs {o.most_calls} times a pass (its weights are shared by layers):"
            " its rows pool them"
            for o in self.observers
            if o.most_calls > 1
        ]
        if not self.documents and any(o.reached for o in self.observers):
            notes.append(
                "only a part of the model was called, so its outputs weren't compared and tokens"
                " weren't counted"
            )
        table.meta["notes"] = notes + self.notes
        return table

    # ---- hooks

    def _verify(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.check.passing:
            return
        for observer in self.observers:  # what a pass that ended in an error has left behind
            observer.pending, observer.counted, observer.calls = [], None, 0
        self.followed.clear()
        self.stream.begin()
        self._tell("begin_pass")
        self.inside = True
        cached = any(length_of(v) for v in [*args, *kwargs.values()])
        self.again = None if cached and self.passed else (own_caches(args), own_caches(kwargs))
        if self.verify:
            self.check.before(self, args, kwargs)

    def _finish(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.check.passing:
            return
        self.inside, self.passed = False, True
        self.check.after(output)
        self.check.zeros_stay(self, self.again)
        self.again = None
        self.stream.finish(output)
        self._tell("end_pass")
        if not self.prefix and self.counting:
            documents, tokens = next(
                (o.counted for o in self.observers if o.counted is not None), (0, 0)
            )
            self.documents += documents
            self.tokens += tokens

    def _tell(self, what: str) -> None:
        """Watchers that want to know when a pass begins and ends are told."""
        for watcher in self.watchers:
            getattr(watcher, what, lambda: None)()

    def _before(self, name: str) -> Any:
        signature = inspect.signature(self.stacks[name].forward)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            try:
                given = signature.bind_partial(*args, **kwargs).arguments
            except TypeError:
                given = dict(kwargs)
            given = {**given, **given.get("kwargs", {})}
            cache = next(
                (given[n] for n in ("past_key_values", "cache") if given.get(n) is not None), None
            )
            given = flat(given)
            if "decoder_input_ids" in signature.parameters:
                cache = None  # the decoder's; the ids and the mask here are the encoder's
            across = not hasattr(module, "config") and any(
                site.kind == "cross" for site in self.sites
            )
            ids = ids_among(given, outermost=name == "", across=across)
            mask = given.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else target(given)
            if isinstance(module, TransformerBlock):
                mask = given.get("valid")
            encoder = given.get("encoder_attention_mask")
            encoder = encoder if isinstance(encoder, Tensor) and encoder.ndim == 2 else None
            found = Inputs(
                ids, mask, encoder, cache, length_of(cache), not_text(given, outermost=name == "")
            )
            rows = ids if isinstance(ids, Tensor) else given.get("inputs_embeds")
            found.length = rows.shape[1] if isinstance(rows, Tensor) and rows.ndim > 1 else None
            positions = given.get("position_ids")
            found.positions = (
                positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
            )
            found.key_ids, found.reason = self.key_ids(found)
            found.continues = self._continues(found)
            self.inputs[name] = found

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            given = self.inputs.get(name)
            values = output.values() if isinstance(output, dict) else ()
            cache = next((value for value in values if hasattr(value, "get_seq_length")), None)
            if given is None or cache is None or given.ids is None or self.check.passing:
                return
            if id(cache) in self.followed:
                return
            self.followed.add(id(cache))
            self.histories.pop(cache, None)
            self.latest = weakref.ref(cache)
            if given.key_ids is not None:
                self.histories[cache] = given.key_ids, marks(cache)

        return hook

    def key_ids(self, given: Inputs) -> tuple[Tensor | None, str]:
        """Ids of all keys, those in the cache included, `[B, past + L]`; or the reason why they
        aren't known.
        """
        if given.ids is None or given.ids.ndim != 2:
            return (
                None,
                (
                    "the model was given no token ids"
                    if given.ids is None
                    else "its token ids aren't one a position"
                ),
            )
        if given.past == 0:
            return given.ids, ""
        known = None if given.cache is None else self.histories.get(given.cache)
        before = None if known is None else follow(*known, marks(given.cache), given.past)
        if before is None or before.shape[0] != given.ids.shape[0]:
            return (
                None,
                (
                    "the cache was filled or changed outside this reading, so the ids of its keys"
                    " aren't known"
                ),
            )
        return torch.cat([before, given.ids], 1), ""

    def _continues(self, given: Inputs) -> bool:
        """Whether these rows go on with the last pass's texts: its cache, with each row in its
        place.
        """
        if (
            not given.past
            or given.key_ids is None
            or self.latest is None
            or self.latest() is not given.cache
        ):
            return False
        ids = self.histories[given.cache][0]
        return ids.shape == given.key_ids[:, : given.past].shape and torch.equal(
            ids, given.key_ids[:, : given.past]
        )

    def stack_of(self, site: Site, length: int) -> Inputs:
        """The inputs of the innermost stack around a site that knows ids or a mask of this
        length.
        """
        around = [n for n in self.stacks if n == "" or site.name.startswith(f"{n}.")]
        best = Inputs(None, None, None)
        for name in sorted(around, key=len, reverse=True):
            given = self.inputs.get(name)
            encodes = is_encoder_decoder(self.stacks[name])
            if given is None or (encodes and stack_of(site.name.removeprefix(name)) == "decoder"):
                continue  # what an encoder-decoder as a whole is given is the encoder's text
            best.past = max(best.past, given.past)
            best.cache = given.cache if best.cache is None else best.cache
            best.positions = given.positions if best.positions is None else best.positions
            best.other |= given.other
            best.continues |= given.continues
            if not given.speaks_of(site.name, length):
                if given.other and given.ids is None:
                    break  # a tower of its own, with no text around its rows
                continue
            if best.encoder_mask is None:
                best.encoder_mask = given.encoder_mask
            if best.mask is None and given.mask is not None and given.mask.shape[1] >= length:
                best.mask = given.mask
            if (
                best.ids is None
                and given.ids is not None
                and given.ids.ndim == 2
                and given.ids.shape[1] == length
            ):
                best.ids, best.key_ids, best.reason, best.found = (
                    given.ids,
                    given.key_ids,
                    given.reason,
                    given.found,
                )
            if given.other or (best.ids is not None and best.mask is not None):
                # a stack that was handed a mask of its whole's making leaves it to the whole to say
                # what is padding
                break
        return best


def _name(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


def _shorten(reasons: dict[str, str], sites: list[str]) -> None:
    """A column that is empty at every site for one reason is said once, by its name alone."""
    for column in columns([key.rpartition(" ")[2] for key in reasons]):
        keys = [f"{site} {column}" for site in sites]
        why = {reasons.get(key) for key in keys}
        if len(why) == 1 and (one := why.pop()) is not None:
            reasons[column] = one
            for key in keys:
                del reasons[key]
