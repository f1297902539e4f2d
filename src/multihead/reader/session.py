"""Reading a model as it runs: `with reading(model) as r: model(**inputs)`, then `r.table()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..models.interface import NAME, Call, compute, implementation, observers
from ..models.sites import Site, find_sites, unread
from .check import Check, ReadingError
from .inputs import NOT_TEXT, Inputs, follow, length_of, marks, placeholders_of, special_ids_of, stacks_of
from .rows import OFFSETS, Capture, Rows, Text, observe
from .site import adds_up, count, fix_contributions
from .statistics import MASSES, PROBED, columns, describe
from .table import Head, Table

__all__ = ["Reading", "ReadingError", "reading"]


@contextmanager
def reading(model: nn.Module, *, special_ids: Iterable[int] | None = None, verify: bool = True) -> Iterator[Reading]:
    """Read every head of a model while it runs, in any loop of one's own.

    Args:
        model: a transformers model (or a module that holds one). Afterwards it is as it was before, also after an error.
        special_ids: token ids that count as special (BOS, CLS, SEP); by default those that the model's config names.
        verify: compare the outputs with those of the model as it came, at the first input of each new kind.

    Raises:
        ValueError: the model's attention can't be reached; names the class.
        ReadingError: outputs under reading differ, or a site's updates don't add up; names the first such site.

    >>> import multihead
    >>> model, tokenizer = multihead.builtin()
    >>> with multihead.reading(model) as r:
    ...     _ = model(**tokenizer("the cat and the dog and the cat", return_tensors="pt"))
    >>> r.table().value("self").shape == (len(r.table().heads),)
    True
    """
    session = Reading(model, special_ids=special_ids, verify=verify)
    with session.running():
        yield session


class Reading:
    """The state of a reading: hooks on the model, the observers of its sites, and the table so far."""

    def __init__(self, model: nn.Module, *, special_ids: Iterable[int] | None = None, verify: bool = True) -> None:
        require_model(model)
        if hasattr(model, "_orig_mod"):
            raise ValueError(f"model is compiled ({type(model).__name__}): its code is fixed, so nothing can be read on the way; "
                             "pass model._orig_mod, the same model before torch.compile")
        self.model = model
        self.sites = find_sites(model)
        self.observers = [_SiteObserver(self, site) for site in self.sites]
        self.verify = verify
        self.check = Check(model)
        self.special = frozenset(special_ids_of(model) if special_ids is None else special_ids)
        self.inputs: dict[str, Inputs] = {}
        self.histories: WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = WeakKeyDictionary()  # cache -> ids, marks
        self.followed: set[int] = set()  # caches whose ids of this pass are known already, from a stack further in
        self.stacks = stacks_of(model)
        self.placeholders = placeholders_of(model)
        self.mapping = False  # only maps are wanted, and only of the sites that have a capture
        self.inside = False  # a pass of the whole model is under way
        self.prefix = ""  # "probe:" while the probe runs
        self.select: Tensor | None = None  # bool [B, L]: the only rows that count, on top of being real
        self.documents = self.tokens = 0
        self.causal: bool | None = None  # whether no self-attention row could read a later key; None: none was there
        # why columns are empty, by name
        self.reasons = {f"probe:{mass}": "the probe was not run; multihead.read runs it" for mass in PROBED}
        self.on_site: Callable[[], None] | None = None  # called each time that a site was read

    # ---- running

    @contextmanager
    def running(self) -> Iterator[Reading]:
        """Under reading; the model's attention, hooks and configs are put back at the end, whatever happens."""
        with ExitStack() as stack:
            for observer in self.observers:
                if observer.site.module in observers:
                    raise ValueError(f"{observer.site.name} is being read already; one reading at a time")
            self._came_with = stack.enter_context(implementation(self.model, NAME))
            for observer in self.observers:
                stack.enter_context(observer.attached())
            for name, module in self.stacks.items():
                handle = module.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            handle = self.model.register_forward_pre_hook(self._verify, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            stack.callback(self.model.register_forward_hook(self._finish, with_kwargs=True).remove)
            yield self

    @contextmanager
    def as_it_came(self) -> Iterator[None]:
        """The model with the attention that it came with, for the length of a check."""
        with ExitStack() as stack:
            for config, name in self._came_with:
                stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
                config._attn_implementation_internal = name
            yield

    def table(self) -> Table:
        """What was read so far, as one table with a row a head."""
        heads = [head for observer in self.observers for head in observer.heads()]
        table = Table(heads, {}, dict(self.reasons),
                      {"model": _name(self.model), "documents": self.documents, "tokens": self.tokens})
        start = 0
        for observer in self.observers:
            for column, sums in observer.table.sums.items():
                table.sums.setdefault(column, np.zeros((len(heads), sums.shape[1])))[start : start + len(sums)] = sums
            start += len(observer.table.heads)
            table.reasons |= observer.reasons()
        _shorten(table.reasons, [o.site.name for o in self.observers if o.reached])
        notes = [f"not read: {name} doesn't go through transformers' attention interface"
                 for name in unread(self.model, self.sites)]
        notes += [f"not read: {o.site.name} wasn't reached" for o in self.observers if self.documents and not o.reached]
        notes += [f"{o.site.label} runs {o.most_calls} times a pass (its weights are shared by layers): its rows pool them"
                  for o in self.observers if o.most_calls > 1]
        if not self.documents and any(o.reached for o in self.observers):
            notes.append("only a part of the model was called, so its outputs weren't compared and tokens weren't counted")
        table.meta["notes"] = notes
        return table

    # ---- hooks

    def _verify(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.check.passing:
            return
        for observer in self.observers:  # what a pass that ended in an error has left behind
            observer.pending, observer.counted, observer.calls = [], None, 0
        self.followed.clear()
        self.inside = True
        if self.verify:
            self.check.before(self, args, kwargs)

    def _finish(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.check.passing:
            return
        self.inside = False
        self.check.after(output)
        if not self.prefix:
            documents, tokens = next((o.counted for o in self.observers if o.counted is not None), (0, 0))
            self.documents += documents
            self.tokens += tokens

    def _before(self, name: str) -> Any:
        signature = inspect.signature(self.stacks[name].forward)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            try:
                given = signature.bind_partial(*args, **kwargs).arguments
            except TypeError:
                given = dict(kwargs)
            given = {**given, **given.get("kwargs", {})}
            cache = next((given[n] for n in ("past_key_values", "cache") if given.get(n) is not None), None)
            ids = given.get("input_ids")
            mask = given.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
            encoder = given.get("encoder_attention_mask")
            encoder = encoder if isinstance(encoder, Tensor) and encoder.ndim == 2 else None
            found = Inputs(ids, mask, encoder, cache, length_of(cache), any(given.get(n) is not None for n in NOT_TEXT))
            positions = given.get("position_ids")
            found.positions = positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
            found.key_ids, found.reason = self.key_ids(found)
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
            if given.key_ids is not None:
                self.histories[cache] = given.key_ids, marks(cache)

        return hook

    def key_ids(self, given: Inputs) -> tuple[Tensor | None, str]:
        """Ids of all keys, those in the cache included, `[B, past + L]`; or the reason why they aren't known."""
        if given.ids is None:
            return None, "the model was given no token ids"
        if given.past == 0:
            return given.ids, ""
        known = None if given.cache is None else self.histories.get(given.cache)
        before = None if known is None else follow(*known, marks(given.cache), given.past)
        if before is None or before.shape[0] != given.ids.shape[0]:
            return None, "the cache was filled or changed outside this reading, so the ids of its keys aren't known"
        return torch.cat([before, given.ids], 1), ""

    def stack_of(self, site: Site, length: int) -> Inputs:
        """The inputs of the innermost stack around a site that knows ids or a mask of this length."""
        around = [n for n in self.stacks if n == "" or site.name.startswith(f"{n}.")]
        best = Inputs(None, None, None)
        for name in sorted(around, key=len, reverse=True):
            given = self.inputs.get(name)
            encodes = getattr(getattr(self.stacks[name], "config", None), "is_encoder_decoder", False)
            if given is None or (encodes and "decoder" in site.name.removeprefix(name)):
                continue  # what an encoder-decoder as a whole is given is the encoder's text
            best.past = max(best.past, given.past)
            best.cache = given.cache if best.cache is None else best.cache
            best.positions = given.positions if best.positions is None else best.positions
            best.other |= given.other
            if best.encoder_mask is None:
                best.encoder_mask = given.encoder_mask
            if best.mask is None and given.mask is not None and given.mask.shape[1] >= length:
                best.mask = given.mask
            if given.ids is not None and given.ids.ndim == 2 and given.ids.shape[1] == length:
                best.ids, best.key_ids, best.reason = given.ids, given.key_ids, given.reason
                break
            if given.other:
                break
        return best


class _SiteObserver:
    """Stands at one site: watches its attention calls, then what reaches its output projection and what leaves it."""

    def __init__(self, session: Reading, site: Site) -> None:
        self.session, self.site = session, site
        self.groups: int | None = None
        self.pending: list[tuple[Tensor, Rows, Text]] = []
        self.capture: Capture | None = None
        self.counted: tuple[int, int] | None = None
        self.ids_reason = ""
        self.reached = False
        self.calls = self.most_calls = 0  # of a pass so far, of any pass
        self.table = Table(self.heads())
        self._weights: tuple[Tensor, Tensor, Tensor] | None = None
        self._weights_of: list[tuple[int, int]] = []

    def heads(self) -> list[Head]:
        site, heads = self.site, self.site.num_heads
        groups = self.groups or max(1, heads // max(1, getattr(site.module, "num_key_value_groups", 1)))
        return [Head(site.head(h), site.name, site.layer, h, h * groups // heads, site.kind) for h in range(heads)]

    def reasons(self) -> dict[str, str]:
        """Why columns are empty at this site: "site column" -> reason."""
        found = {}
        for column in columns():
            name = describe(column).name
            if not self.reached or (self.table.count(column) > 0).any() or name in self.session.reasons:
                continue
            if name == "next" and self.session.causal:
                why = "no row may read a later key: the model is causal"
            elif self.site.kind == "cross" and name in (*OFFSETS, "distance", "duplicate", "induction", "special"):
                why = "cross-attention: the keys are another sequence's"
            elif name in ("special", "duplicate", "induction") and self.ids_reason:
                why = self.ids_reason
            elif column.partition(":")[0] in ("contribution", "even", "cancellation", "reach") and self.site.elementwise:
                why = "a gate or norm of each number by itself stands between the heads and the output projection"
            else:
                why = f"no such row in this text ({describe(column).rows})"
            found[f"{self.site.name} {column}"] = why
        return found

    @contextmanager
    def attached(self) -> Iterator[None]:
        observers[self.site.module] = self.call
        handle = self.site.out.register_forward_hook(self.projected)
        try:
            yield
        finally:
            handle.remove()
            del observers[self.site.module]

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_O `[H*Ev, D]`, its bias `[D]`, and factors `[H, Ev, r]` with ||v W_O^(h)|| = ||v factors_h||.

        The factor is R' of a QR of W_O^(h)': a Gram matrix would do as well, but squares the condition number.
        """
        now = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.site.out.parameters()]
        if self._weights is None or now != self._weights_of:  # an optimizer may step in between
            self._weights_of = now
            weight, bias = self.site.out_weight()
            per_head = weight.detach().double().unflatten(0, (self.site.num_heads, self.site.width))
            factors = torch.linalg.qr(per_head.mT, mode="r").R.mT.contiguous()
            self._weights = weight.detach(), bias.detach(), factors
        return self._weights

    @property
    def idle(self) -> bool:
        """Not to be read: maps of other sites are wanted."""
        return self.session.mapping and self.capture is None

    def call(self, call: Call) -> Tensor:
        """The attention call itself, in place of transformers' own."""
        session, site = self.session, self.site
        if session.check.passing or self.idle:
            return compute(call)
        heads, groups, width = call.q.shape[1], call.k.shape[1], call.v.shape[-1]
        if heads != site.num_heads or width != site.width:
            raise ReadingError(f"{site.name} ({type(site.module).__name__}) can't be read: it has {heads} heads of width "
                               f"{width}, but its output projection {site.out_name} takes {site.num_heads} of {site.width}")
        self.groups, self.reached = groups, True
        self.calls += session.inside  # not what a backward pass computes once more
        self.most_calls = max(self.most_calls, self.calls)
        if self.capture is not None and self.calls > 1:
            raise ValueError(f"{site.name} runs several times a pass (its weights are shared by layers), and a map can't say "
                             "of which; read the table instead, which pools them")
        text = self._text(call)
        self.ids_reason = text.reason
        wanted = frozenset(PROBED if session.prefix else MASSES)
        if self.capture is not None:
            wanted = frozenset()
        out, rows = observe(call, text, self.weights[2], wanted, self.capture)
        if _in_backward():
            return out  # checkpointing computes this site once more: by the same operations, but counted it was before
        if site.kind == "self" and call.q.shape[2] > 1:
            session.causal = rows.causal and session.causal is not False
        if not session.prefix:
            self.counted = (call.q.shape[0] if not session.stack_of(site, call.q.shape[2]).past else 0, int(text.real.sum()))
        self.pending.append((out.detach(), rows, text))
        return out

    def add(self, column: str, x: Tensor, y: Tensor, rows: Tensor) -> None:
        """One batch's sums `[B, H]`, each batch row a document of its own."""
        kind, _, mass = column.rpartition(":")
        name = f"{kind}:{self.session.prefix}{mass}" if kind else self.session.prefix + column
        for b in range(x.shape[0]):
            self.table.add(name, 0, x=x[b].cpu(), y=y[b].cpu(), rows=rows[b].cpu())

    def _text(self, call: Call) -> Text:
        session = self.session
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        device = call.q.device
        given = session.stack_of(self.site, length)
        every = torch.ones(batch, length, dtype=torch.bool, device=device)
        key_real = torch.ones(batch, keys, dtype=torch.bool, device=device)
        mask = given.mask
        if mask is not None:  # it may be longer than the text so far
            mask = mask.bool()[:, : given.past + length].expand(batch, -1)
        real = every if mask is None else mask[:, -length:]
        if session.select is not None:
            real = real & session.select.to(device)
        if self.site.kind == "cross":
            other = given.encoder_mask
            if other is not None and other.shape[1] == keys:
                key_real = other.bool().expand(batch, -1)
            first = key_real.int().argmax(-1)
            return Text(real, key_real, first, None, None, None, None, None, "the keys are of another sequence")
        total = given.past + length
        hidden = max(total - keys, 0)  # keys that a sliding cache has dropped
        if given.past == 0 and keys != length and given.cache is None:
            return Text(real, key_real, torch.full((batch,), -1, device=device), None, None, None, None, None,
                        f"{keys} keys for {length} rows without a cache: where a row stands among the keys isn't known")
        first = torch.zeros(batch, dtype=torch.int64, device=device) - hidden
        if mask is not None:
            first = mask.int().argmax(-1) - hidden
            seen = mask[:, hidden : hidden + keys]
            key_real = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]), value=False)
        every_id, ids = given.key_ids, given.ids
        if every_id is None or ids is None or every_id.shape[0] != batch:
            reason = given.reason or ("pictures and sound have no token ids" if given.other else "no token ids were given")
            return Text(real, key_real, first, None, None, None, None, given.past - hidden, reason)
        special = torch.isin(every_id, torch.tensor(sorted(session.special), device=device))
        nobody = torch.isin(every_id, torch.tensor(session.placeholders, device=device))  # a place for a picture, say
        if mask is not None:
            nobody |= ~mask  # padding is nobody's copy either
        every_id, special = every_id.masked_fill(nobody, -1), special & ~nobody
        ids = every_id[:, -length:].masked_fill(nobody[:, -length:], -2)
        spare = max(keys - total, 0)  # of a cache that is longer than the text
        every_id = torch.nn.functional.pad(every_id, (1, spare), value=-1)
        special = torch.nn.functional.pad(special, (0, spare))[:, hidden : hidden + keys]
        before_ids, key_ids = every_id[:, hidden : hidden + keys], every_id[:, hidden + 1 : hidden + 1 + keys]
        if given.positions is not None and given.past == 0 and given.positions.shape[1] == keys:
            starts = torch.nn.functional.pad(given.positions.diff(dim=1) != 1, (1, 0)).expand(batch, -1)
            before_ids = before_ids.masked_fill(starts, -1)  # texts packed behind one another
        return Text(real, key_real, first, ids, key_ids, before_ids, special, given.past - hidden)

    def projected(self, module: nn.Module, args: Any, output: Any) -> None:
        """The output projection ran: check that the heads' updates add up to what it returned, then count."""
        session = self.session
        if session.check.passing == "plain":
            length = output.shape[-2]
            given = session.stack_of(self.site, length)
            session.check.keep(self.site, output, None if given.mask is None else given.mask[:, : given.past + length])
            return
        if self.idle or _in_backward():
            return
        session.check.at_site(self.site, output)
        if session.check.passing:
            return
        if not self.pending:
            raise ReadingError(f"{self.site.name} ({type(self.site.module).__name__}) can't be read: its projection "
                               f"{self.site.out_name} ran, but its attention didn't go through the interface")
        outs, rows, texts = zip(*self.pending, strict=True)
        self.pending = []
        if len(outs) > 1:
            raise ReadingError(f"{self.site.name} ({type(self.site.module).__name__}) can't be read: it calls attention "
                               f"{len(outs)} times before its projection runs once")
        if self.capture is not None:
            fix_contributions(self.capture, self.site, outs[0], texts[0], args[0].detach())
            return
        entered, left = args[0].detach(), output.detach()
        try:
            adds_up(self.site, self.weights, entered, left, texts[0])
        except ReadingError:  # an adapter was switched since W_O was looked at?
            self._weights = None
            adds_up(self.site, self.weights, entered, left, texts[0])
        count(self.site, self.weights, self.add, outs[0], rows[0], texts[0], entered, left, probing=bool(session.prefix))
        if session.on_site is not None:
            session.on_site()


def require_model(model: object) -> None:
    """`TypeError` for what is no model: a folder's name, most often."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a model, such as AutoModel.from_pretrained(folder) "
                        "gives (the command line takes folders)")


def _name(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _shorten(reasons: dict[str, str], sites: list[str]) -> None:
    """A column that is empty at every site for one reason is said once, by its name alone."""
    for column in columns():
        keys = [f"{site} {column}" for site in sites]
        why = {reasons.get(key) for key in keys}
        if len(why) == 1 and (one := why.pop()) is not None:
            reasons[column] = one
            for key in keys:
                del reasons[key]
