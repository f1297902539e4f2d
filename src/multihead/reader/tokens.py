"""`Tokens`: which token each query and key of a pass is.

Models are called with token ids, padding masks and caches in many ways, and their parts (an
encoder, a decoder, a tower for pictures) are called separately. `Tokens` records the arguments of
each such stack during a pass, follows token ids through KV caches from pass to pass, and `locate`
gives the tokens of one attention call as a `TokenContext`. This is the one file that knows which
token is where.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReadingError
from ..layers.block import TransformerBlock
from ..models.foreign import find_decoder_tokens, flatten_features
from ..models.instrument import ModuleHook, PassInputs, Tap
from ..models.introspect import is_encoder_decoder, list_inner_models, num_virtual_tokens
from ..models.labels import stack_of
from ..models.model_masks import find_readable_keys
from ..models.site import Site
from ..ops.call import AttentionCall
from .context import TokenContext
from .empty_queries import PADDING, EmptyQueries
from .followed_caches import FollowedCaches, length_of
from .repeated_text import RepeatedText
from .row_alignment import align_rows
from .stacks import StackInputs, find_stacks, holds_all, ids_among, is_not_text, placeholders_of

ENCODED = ("encoder_outputs", "encoder_hidden_states")  # arguments: what an encoder returned
CACHES = ("cache", "past_key_values")  # of both models take the first


class Tokens(Tap):
    """Records what each stack of the model is called with, and follows ids through caches."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        special_ids: Iterable[int] = (),
        stacks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.model, self.sites, self.special = model, sites, sorted(special_ids)
        self.stacks = find_stacks(model, sites) if stacks is None else stacks
        self.placeholders = placeholders_of(model)
        self.inputs: dict[str, StackInputs] = {}  # of the pass under way, or the last one
        self.announced: Tensor | None = None  # ids [B, L] that the next pass is given as embeddings
        self.empty = EmptyQueries()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._wrappers = [name for name in self.stacks if holds_all(name, sites)]
        inner = list_inner_models(model)
        # without the wrapper's attribute, which may be called anything
        path = self._names[id(inner[0])] if len(inner) == 1 else ""
        self.prefix = f"{path}." if path and holds_all(path, sites) else ""
        self._caches = FollowedCaches()
        self.repeated = RepeatedText()
        self._followed: set[int] = set()  # caches of this pass that an inner stack has followed
        self._entered = ""  # the module at which the pass began
        self._root = model
        self._is_whole = {name: is_encoder_decoder(part) for name, part in self.stacks.items()}
        self._calls = 0

    def begin_pass(self, inputs: PassInputs) -> None:
        self._followed.clear()
        self.empty.clear()
        self.repeated.begin_pass()
        self._begin(inputs)
        self._entered, self._root = self._names[id(inputs.model)], inputs.model
        if self._entered not in self.stacks:
            signature = inspect.signature(inputs.model.forward)
            self._record(self._entered, inputs.model, signature, inputs.args, inputs.kwargs)

    def _begin(self, inputs: PassInputs) -> None:
        """Forget the inputs of the last pass, but for those of an encoder whose output is given."""
        encoders = {n: i for n, i in self.inputs.items() if stack_of(f"{n}.0.") == "encoder"}
        if encoders and not any(inputs.named().get(name) is not None for name in ENCODED):
            encoders = {}
        self.inputs = encoders

    def end_pass(self, outputs: Any) -> None:
        if self._entered not in self.stacks:
            self._follow_cache(self._entered, (), {}, outputs)

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> list[ModuleHook]:
        return [
            ModuleHook(
                module,
                before=functools.partial(
                    self._record, name, module, inspect.signature(module.forward)
                ),
                after=functools.partial(self._follow_cache, name),
                first=True,
            )
            for name, module in self.stacks.items()
        ]

    def clear(self) -> None:
        """Forget the inputs of the last pass; caches stay known."""
        self.inputs.clear()

    def innermost_stack(self, site: Site) -> str:
        """The name of the smallest stack that holds the site."""
        return max((n for n in self.stacks if not n or site.name.startswith(f"{n}.")), key=len)

    def stack_inputs(self, site: Site, length: int) -> StackInputs:
        """Inputs of the innermost stacks around a site that know ids or a mask of this length."""
        path = site.name.removeprefix(self.prefix)
        best = StackInputs()
        for name in sorted(self.inputs, key=len, reverse=True):
            if name and not f"{site.name}.".startswith(f"{name}."):
                continue
            given = self.inputs[name]
            if given.is_whole and stack_of(site.name.removeprefix(name)) == "decoder":
                best.number = best.number or given.number
                continue  # an encoder-decoder as a whole is given the encoder's sequence
            best.number = best.number or given.number
            best.past = max(best.past, given.past)
            if best.cache is None:
                best.cache, best.knows_cache = given.cache, given.knows_cache
            best.positions = given.positions if best.positions is None else best.positions
            best.is_not_text |= given.is_not_text
            best.continues |= given.continues
            if not given.describes(path, length):
                best.masks_others |= given.mask is not None and best.mask is None
                if given.is_not_text and given.ids is None:
                    break  # a separate tower: what is around it has no tokens for its queries
                if best.ids is None and given.ids is not None and not best.reason:
                    best.given_ids = given.ids
                    best.reason = (
                        f"it has {length} rows, which aren't the {given.ids.shape[1]} tokens that"
                        " the model was given"
                    )
                continue
            best.repeats = max(best.repeats, given.repeats)
            if best.encoder_mask is None:
                best.encoder_mask = given.encoder_mask
            if best.mask is None and given.mask is not None and given.mask.shape[1] >= length:
                best.mask = given.mask
            ids = given.ids
            if best.ids is None and ids is not None and ids.ndim == 2 and ids.shape[1] == length:
                best.ids, best.key_ids = ids, given.key_ids
                best.reason, best.found = given.reason, given.found
                best.places, best.given_ids = given.places, given.given_ids
            if given.is_not_text or (best.ids is not None and best.mask is not None):
                # a stack whose mask was made by the model around it leaves padding to that one
                break
        return best

    def past(self, site: Site, call: AttentionCall) -> int:
        """Keys of the call that precede its first query in the sequence."""
        if call.context.offset is not None:
            return call.context.offset
        return self.stack_inputs(site, call.q.shape[2]).past

    def locate(
        self, site: Site, kind: str, call: AttentionCall, select: Tensor | None = None
    ) -> TokenContext:
        """The positions of one attention call. `select` `[B, L]` names the only queries that
        count.
        """
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        device = call.q.device
        given = self.stack_inputs(site, length)
        past = given.past if call.context.offset is None else call.context.offset
        mask = _padding_mask(given, kind, call, past)
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
        real = real if mask is None else mask[:, -length:]
        real, mask = self.empty.leave_out(site, call, past if kind == "self" else None, real, mask)
        if given.places is not None:  # rows that the model added are no tokens of the text
            real = real & (given.places >= 0).to(device)
        if select is not None:
            real = real & _select_rows(given, select.to(device), length)
        if given.repeats:  # they counted before
            real = real & (torch.arange(length, device=device) >= given.repeats)
        shown = given.ids if given.ids is not None and len(given.ids) == batch else None
        if kind == "cross":
            return _across(given, call, real, shown, self._source_ids(batch, keys))
        key_real = torch.ones(batch, keys, dtype=torch.bool, device=device)
        if past == 0 and keys != length and given.cache is None:
            first = torch.full((batch,), -1, device=device)
            reason = (
                f"{keys} keys for {length} queries without a cache: the positions of the queries"
                " among the keys are unknown"
            )
            return _without_ids(real, key_real, first, None, reason, shown)
        hidden = max(past + length - keys, 0)  # keys that a sliding cache has dropped
        first = torch.zeros(batch, dtype=torch.int64, device=device) - hidden
        if mask is not None:
            first = mask.int().argmax(-1) - hidden
            seen = mask[:, hidden : hidden + keys]
            key_real = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]), value=False)
        every_id, reason = given.key_ids, given.reason
        if every_id is not None and every_id.shape[1] != past + length:
            every_id = None
            reason = "earlier keys are in the layers' own caches, and their ids aren't kept"
        if every_id is None or given.ids is None or every_id.shape[0] != batch:
            reason = reason or (
                "pictures and sound have no token ids"
                if given.is_not_text
                else "no token ids were given"
            )
            return _without_ids(real, key_real, first, past - hidden, reason, shown)
        ids, key_ids, before_ids, special = self._ids(given, mask, every_id, length, keys, hidden)
        spare = max(hidden + keys - every_id.shape[1], 0)  # of a cache longer than the text so far
        shown_keys = torch.nn.functional.pad(
            every_id[:, hidden : hidden + keys], (0, spare), value=-1
        )
        if given.positions is not None and past == 0 and given.positions.shape[1] == keys:
            starts = torch.nn.functional.pad(given.positions.diff(dim=1) != 1, (1, 0))
            # several sequences packed into one row
            before_ids = before_ids.masked_fill(starts.expand(batch, -1), -1)
        return TokenContext(
            real,
            key_real,
            first,
            ids,
            key_ids,
            before_ids,
            special,
            past - hidden,
            continues=given.continues,
            repeats=given.repeats,
            given_query_ids=shown,
            given_key_ids=shown_keys,
            sorted_keys=given.found,
        )

    def _source_ids(self, batch: int, keys: int) -> Tensor | None:
        """Ids of the `keys` that cross-attention reads: those given to the encoder, or to the
        encoder-decoder around it.
        """
        encoders = [name for name in self.inputs if stack_of(f"{name}.0.") == "encoder"]
        whole = [name for name, given in self.inputs.items() if given.is_whole]
        for name in (*encoders, *whole):
            ids = self.inputs[name].ids
            if ids is not None and ids.shape == (batch, keys):
                return ids
        return None

    def _ids(
        self,
        given: StackInputs,
        mask: Tensor | None,
        every_id: Tensor,
        length: int,
        keys: int,
        hidden: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids of the queries `[B, L]`, of the keys and of the tokens before them `[B, S]`, and
        which keys are special; negative for padding, placeholders and rows without a token, which
        match no token.
        """
        device, total = every_id.device, every_id.shape[1]
        special = torch.isin(every_id, torch.tensor(self.special, device=device))
        no_token = torch.isin(every_id, torch.tensor(self.placeholders, device=device))
        no_token |= every_id < 0
        if mask is not None:
            no_token |= ~mask
        every_id, special = every_id.masked_fill(no_token, -1), special & ~no_token
        ids = every_id[:, -length:].masked_fill(no_token[:, -length:], -2)
        spare = max(keys - total, 0)  # of a cache longer than the sequence so far
        every_id = torch.nn.functional.pad(every_id, (1, spare), value=-1)
        special = torch.nn.functional.pad(special, (0, spare))[:, hidden : hidden + keys]
        before_ids = every_id[:, hidden : hidden + keys]
        return ids, every_id[:, hidden + 1 : hidden + 1 + keys], before_ids, special

    def _record(
        self,
        name: str,
        module: nn.Module,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A stack is called: keep its ids, masks, cache and positions."""
        self._calls += 1  # it may be called again within a pass, with the same cache
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = dict(kwargs)
        given = {**given, **given.get("kwargs", {})}
        use_cache = given.get("use_cache")
        caches = (given[n] for n in CACHES if given.get(n) is not None)
        cache = next(caches, None)
        self._followed.discard(id(cache))
        given = flatten_features(given)
        if "decoder_input_ids" in signature.parameters:
            cache = None  # the decoder's; the ids and the mask here are the encoder's
        across = not hasattr(module, "config") and any(s.kind == "cross" for s in self.sites)
        is_outermost = name == self._entered or name in self._wrappers
        ids = ids_among(given, outermost=is_outermost, across=across)
        mask = given.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else find_decoder_tokens(given)
        if isinstance(module, TransformerBlock):
            mask = given.get("valid")
        encoder, positions = given.get("encoder_attention_mask"), given.get("position_ids")
        rows = ids if isinstance(ids, Tensor) else given.get("inputs_embeds")
        inputs = StackInputs(
            ids,
            mask,
            encoder if isinstance(encoder, Tensor) and encoder.ndim == 2 else None,
            cache,
            length_of(cache),
            is_not_text(given, outermost=is_outermost),
            positions if isinstance(positions, Tensor) and positions.ndim == 2 else None,
            length=rows.shape[1] if isinstance(rows, Tensor) and rows.ndim > 1 else None,
            number=self._calls,
            knows_cache=self._caches.has_seen(cache),
            is_whole=self._is_whole.get(name, False),
        )
        if ids is None and isinstance(rows, Tensor) and rows.ndim == 3:
            self._align(name, module, inputs, rows)
        inputs.key_ids, inputs.reason = self._key_ids(inputs)
        if inputs.mask is None and inputs.past and inputs.key_ids is not None:
            real = inputs.key_ids != PADDING
            inputs.mask = None if bool(real.all()) else real
        inputs.repeats = self.repeated.count(name, ids, past=inputs.past, use_cache=use_cache)
        inputs.continues = bool(inputs.repeats) or self._continues(inputs)
        self.inputs[name] = inputs

    def _follow_cache(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A stack returned: remember the ids of the positions in its cache."""
        given = self.inputs.get(name)
        values = output.values() if isinstance(output, dict) else output
        values = values if isinstance(output, (dict, tuple, list)) else ()
        found = (value for value in values if hasattr(value, "get_seq_length"))
        cache = next(found, None) if given is None or given.cache is None else given.cache
        if given is None or not hasattr(cache, "get_seq_length") or id(cache) in self._followed:
            return
        if given.ids is None and self._is_around(name):
            return  # a stack around it may know them
        self._followed.add(id(cache))
        ids = given.key_ids
        if ids is not None and ids.shape[1] == length_of(cache):
            inside = (s for s in self.sites if not name or s.name.startswith(f"{name}."))
            self._caches.remember(cache, self.empty.mark_padding(ids, inside))
        else:
            self._caches.remember(cache, None)

    def _is_around(self, name: str) -> bool:
        """Whether a stack around this one was called in this pass."""
        return any(
            other != name and (not other or name.startswith(f"{other}.")) for other in self.inputs
        )

    def _align(self, name: str, module: nn.Module, inputs: StackInputs, rows: Tensor) -> None:
        """A stack is given embeddings: find the tokens among them, where rows were added to those
        that a stack around it, or `announced`, has.
        """
        around = [
            given.ids
            for other, given in self.inputs.items()
            if given.ids is not None and (not other or f"{name}.".startswith(f"{other}."))
        ]
        embed = getattr(module, "get_input_embeddings", lambda: None)()
        ids = around[-1] if around else self.announced
        if not isinstance(embed, nn.Module) or ids is None or ids.ndim != 2:
            return
        if ids.shape[1] == rows.shape[1]:
            return
        inputs.places = align_rows(ids, rows, embed)
        if inputs.places is not None:
            found = ids.gather(1, inputs.places.clamp(min=0).to(ids.device))
            inputs.ids = found.masked_fill(inputs.places.to(ids.device) < 0, -1)
            inputs.given_ids = ids

    def _key_ids(self, given: StackInputs) -> tuple[Tensor | None, str]:
        """Ids of all keys with those in the cache, `[B, past + L]`; or why they are unknown."""
        if given.ids is None:
            return None, "the model was given no token ids"
        if given.ids.ndim != 2:
            return None, "its token ids aren't one a position"
        if given.past == 0:
            return given.ids, ""
        before = self._caches.ids_of(given.cache, given.past)
        adapted = self._root if self.announced is None else self.model
        if before is None and given.past == num_virtual_tokens(adapted):
            before = torch.full_like(given.ids[:, :1], -1).expand(-1, given.past)
        if before is None or before.shape[0] != given.ids.shape[0]:
            return None, (
                "the cache was filled or changed outside this reading, so the ids of its keys are"
                " unknown"
            )
        return torch.cat([before, given.ids], 1), ""

    def _continues(self, given: StackInputs) -> bool:
        """Whether these rows continue the last pass: its cache, each row in its place."""
        if not given.past or given.key_ids is None:
            return False
        return self._caches.continues(given.cache, given.key_ids[:, : given.past])


def _select_rows(given: StackInputs, select: Tensor, length: int) -> Tensor:
    """The rows that count, `[B, L]`, from the given tokens that do, `[B, n]`."""
    if given.places is not None and given.places.shape[1] == length:
        places = given.places.to(select.device)
        if given.given_ids is not None and given.given_ids.shape[1] == select.shape[1]:
            return select.gather(1, places.clamp(min=0)) & (places >= 0)
    if select.shape[1] not in (1, length):
        raise ReadingError(
            f"the model makes {length} rows of {select.shape[1]} tokens, and which row is which"
            " token isn't known, so some of them can't be left out; read without context= or"
            " generate="
        )
    return select


def _padding_mask(given: StackInputs, kind: str, call: AttentionCall, past: int) -> Tensor | None:
    """Mask of the positions so far that are tokens and not padding, bool `[B, past + L]`; None
    where all are.
    """
    batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    mask = given.mask
    if mask is not None and mask.shape[0] not in (1, batch):  # of texts, for queries of pictures
        mask = None
    if mask is not None:  # it may be longer than the sequence so far
        mask = mask.bool()[:, : past + length].expand(batch, -1)
    if kind == "self" and keys == past + length:
        if call.context.key_valid is not None:
            mask = call.context.key_valid.expand(batch, -1)  # given to the module itself
        elif mask is None and given.masks_others:  # keys that no query may read are padding
            mask = find_readable_keys(call)
    return mask


def _across(
    given: StackInputs, call: AttentionCall, real: Tensor, ids: Tensor | None, source: Tensor | None
) -> TokenContext:
    """The positions of a cross-attention call; `ids` of its queries, `source` those of its keys."""
    batch, keys = call.q.shape[0], call.k.shape[2]
    other = given.encoder_mask if call.context.key_valid is None else call.context.key_valid
    if other is not None and other.shape[1] == keys:
        key_real = other.bool().expand(batch, -1)
    else:  # keys that no query may read are padding
        key_real = find_readable_keys(call)
    first = key_real.int().argmax(-1)
    reason = "the keys are of another sequence"
    return _without_ids(real, key_real, first, None, reason, ids, source)


def _without_ids(
    real: Tensor,
    key_real: Tensor,
    first: Tensor,
    offset: int | None,
    reason: str,
    given_ids: Tensor | None = None,
    given_key_ids: Tensor | None = None,
) -> TokenContext:
    return TokenContext(
        real,
        key_real,
        first,
        None,
        None,
        None,
        None,
        offset,
        reason,
        given_query_ids=given_ids,
        given_key_ids=given_key_ids,
    )


def ids_given(special_ids: Any) -> set[int]:
    """Token ids from an iterable, an array or a tensor; `TypeError` for anything else."""
    numbers = special_ids.tolist() if hasattr(special_ids, "tolist") else special_ids
    ids: list[Any] = list(numbers) if isinstance(numbers, Iterable) else [None]
    if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise TypeError(
            f"special_ids={special_ids!r}: expected token ids, such as [0, 2], or None for the"
            " tokenizer's own"
        )
    return {int(i) for i in ids}
