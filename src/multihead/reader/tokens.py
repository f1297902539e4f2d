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
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.block import TransformerBlock
from ..models.foreign import find_decoder_tokens, flatten_features
from ..models.instrument import ModuleHook, PassInputs, Tap
from ..models.introspect import is_encoder_decoder
from ..models.labels import stack_of
from ..models.model_masks import find_readable_keys
from ..models.site import Site
from ..ops.call import AttentionCall
from .context import TokenContext
from .empty_queries import EmptyQueries

TOWER = re.compile(r"(^|[._])(vision|visual|vit|image|video|audio|speech)")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
IDS = ("input_ids", "token_ids", "tokens", "ids", "idx")
PLAIN_IDS = ("x", "input", "inputs")  # of the outermost module alone, where they are integers
Marks = tuple[Tensor, Tensor]  # ids [B, past] and marks of a cache


@dataclass
class StackInputs:
    """Arguments of one stack of a model (an encoder, a decoder, the whole) in one pass."""

    ids: Tensor | None = None  # [B, L]
    mask: Tensor | None = None  # [B, past + L], nonzero for tokens, zero for padding
    encoder_mask: Tensor | None = None  # [B, S] of the sequence that cross-attention reads
    cache: Any = None
    past: int = 0  # positions in the cache
    is_not_text: bool = False  # it was given pictures or sound
    positions: Tensor | None = None  # [B, L], if given
    key_ids: Tensor | None = None  # [B, past + L]
    reason: str = ""  # why key_ids is unknown
    found: dict[Any, Any] = field(default_factory=dict)  # key positions by token, sorted once
    continues: bool = False  # the rows continue the sequences of the last pass
    length: int | None = None  # L: queries of another number aren't its tokens

    def describes(self, name: str, length: int) -> bool:
        """Whether its ids and mask can be those of `length` queries of the site `name`."""
        return self.length in (None, length) and not (self.is_not_text and TOWER.search(name))


class Tokens(Tap):
    """Records what each stack of the model is called with, and follows ids through caches."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        special_ids: Iterable[int] = (),
        stacks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.sites, self.special = sites, sorted(special_ids)
        self.stacks = find_stacks(model) if stacks is None else stacks
        self.placeholders = placeholders_of(model)
        self.inputs: dict[str, StackInputs] = {}
        self._histories: weakref.WeakKeyDictionary[Any, Marks] = weakref.WeakKeyDictionary()
        self.empty = EmptyQueries()
        self._followed: set[int] = set()  # caches of this pass that an inner stack has followed
        self._latest: Any = None  # weak reference to the cache of the last pass

    def begin_pass(self, inputs: PassInputs) -> None:
        self._followed.clear()
        self.empty.clear()

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
        around = [n for n in self.stacks if n == "" or site.name.startswith(f"{n}.")]
        best = StackInputs()
        for name in sorted(around, key=len, reverse=True):
            given = self.inputs.get(name)
            encodes = is_encoder_decoder(self.stacks[name])
            if given is None or (encodes and stack_of(site.name.removeprefix(name)) == "decoder"):
                continue  # an encoder-decoder as a whole is given the encoder's sequence
            best.past = max(best.past, given.past)
            best.cache = given.cache if best.cache is None else best.cache
            best.positions = given.positions if best.positions is None else best.positions
            best.is_not_text |= given.is_not_text
            best.continues |= given.continues
            if not given.describes(site.name, length):
                if given.is_not_text and given.ids is None:
                    break  # a separate tower: what is around it has no tokens for its queries
                continue
            if best.encoder_mask is None:
                best.encoder_mask = given.encoder_mask
            if best.mask is None and given.mask is not None and given.mask.shape[1] >= length:
                best.mask = given.mask
            ids = given.ids
            if best.ids is None and ids is not None and ids.ndim == 2 and ids.shape[1] == length:
                best.ids, best.key_ids = ids, given.key_ids
                best.reason, best.found = given.reason, given.found
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
        real = real if select is None else real & select.to(device)
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
            given_query_ids=shown,
            given_key_ids=shown_keys,
            sorted_keys=given.found,
        )

    def _source_ids(self, batch: int, keys: int) -> Tensor | None:
        """Ids of the `keys` that cross-attention reads: those given to the encoder, or to the
        encoder-decoder around it.
        """
        encoders = [name for name in self.inputs if stack_of(f"{name}.0.") == "encoder"]
        whole = [name for name in self.inputs if is_encoder_decoder(self.stacks[name])]
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
        which keys are special; negative for padding and placeholders, which match no token.
        """
        device, total = every_id.device, every_id.shape[1]
        special = torch.isin(every_id, torch.tensor(self.special, device=device))
        no_token = torch.isin(every_id, torch.tensor(self.placeholders, device=device))
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
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = dict(kwargs)
        given = {**given, **given.get("kwargs", {})}
        caches = (given[n] for n in ("past_key_values", "cache") if given.get(n) is not None)
        cache = next(caches, None)
        given = flatten_features(given)
        if "decoder_input_ids" in signature.parameters:
            cache = None  # the decoder's; the ids and the mask here are the encoder's
        across = not hasattr(module, "config") and any(s.kind == "cross" for s in self.sites)
        ids = ids_among(given, outermost=name == "", across=across)
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
            is_not_text(given, outermost=name == ""),
            positions if isinstance(positions, Tensor) and positions.ndim == 2 else None,
            length=rows.shape[1] if isinstance(rows, Tensor) and rows.ndim > 1 else None,
        )
        inputs.key_ids, inputs.reason = self._key_ids(inputs)
        inputs.continues = self._continues(inputs)
        self.inputs[name] = inputs

    def _follow_cache(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A stack returned a cache: remember the ids of its positions."""
        given = self.inputs.get(name)
        values = output.values() if isinstance(output, dict) else output
        values = values if isinstance(output, (dict, tuple)) else ()
        cache = next((value for value in values if hasattr(value, "get_seq_length")), None)
        if given is None or cache is None or given.ids is None or id(cache) in self._followed:
            return
        self._followed.add(id(cache))
        self._histories.pop(cache, None)
        self._latest = weakref.ref(cache)
        if given.key_ids is not None:
            self._histories[cache] = given.key_ids, marks(cache)

    def _key_ids(self, given: StackInputs) -> tuple[Tensor | None, str]:
        """Ids of all keys with those in the cache, `[B, past + L]`; or why they are unknown."""
        if given.ids is None:
            return None, "the model was given no token ids"
        if given.ids.ndim != 2:
            return None, "its token ids aren't one a position"
        if given.past == 0:
            return given.ids, ""
        known = None if given.cache is None else self._histories.get(given.cache)
        before = None if known is None else follow(*known, marks(given.cache), given.past)
        if before is None or before.shape[0] != given.ids.shape[0]:
            return None, (
                "the cache was filled or changed outside this reading, so the ids of its keys are"
                " unknown"
            )
        return torch.cat([before, given.ids], 1), ""

    def _continues(self, given: StackInputs) -> bool:
        """Whether these rows continue the last pass: its cache, each row in its place."""
        if not given.past or given.key_ids is None or self._latest is None:
            return False
        if self._latest() is not given.cache:
            return False
        ids, past = self._histories[given.cache][0], given.key_ids[:, : given.past]
        return ids.shape == past.shape and torch.equal(ids, past)


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
    if call.context.key_valid is not None and kind == "self" and keys == past + length:
        mask = call.context.key_valid.expand(batch, -1)  # given to the module itself
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


def find_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name that are called with token ids or a padding mask; the model itself is ""."""
    stacks = {}
    for name, module in model.named_modules():
        try:
            names = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            continue
        masked = (
            "attention_mask" in names and "hidden_states" not in names and hasattr(module, "config")
        )
        of_torch = "tgt_key_padding_mask" in names or isinstance(module, TransformerBlock)
        if masked or of_torch or not names.keys().isdisjoint((*IDS, *NOT_TEXT)):
            stacks[name] = module
    return stacks | {"": model}


def ids_among(given: Mapping[str, Any], *, outermost: bool, across: bool) -> Tensor | None:
    """The token ids `[B, L]` among the arguments of a stack.

    Where sequences are read `across` and several arguments could be ids, there are none: which
    sequence is whose isn't known.
    """
    integers = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor)
        and value.ndim == 2
        and value.dtype in (torch.int64, torch.int32)
        and "mask" not in name
    }
    if across and len(integers) > 1:
        return None
    if given.get("input_ids") is not None:
        return given["input_ids"]
    names = IDS + PLAIN_IDS if outermost else IDS
    return next((integers[name] for name in names if name in integers), None)


def is_not_text(given: Mapping[str, Any], *, outermost: bool) -> bool:
    """Whether a stack was given pictures or sound."""
    pictures = (
        isinstance(value, Tensor)
        and value.ndim >= 4
        and value.is_floating_point()
        and "mask" not in name
        for name, value in given.items()
    )
    return any(given.get(name) is not None for name in NOT_TEXT) or (outermost and any(pictures))


def marks(cache: Any) -> Tensor:
    """A number for each of the last cached positions, `[B, n]`, by which a cache is recognised
    after rows were reordered, repeated or cut.

    It is taken from the layer that holds most positions, and of such layers the last: its keys
    depend on what other layers have dropped, too.
    """
    inner, length = getattr(cache, "self_attention_cache", cache), length_of(cache)
    best = torch.empty(0, 0)
    for layer in getattr(inner, "layers", ()):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.numel():
            continue
        if min(keys.shape[2], length) >= best.shape[1]:
            best = keys[:, 0, :length, 0].detach()
    return best.clone()


def follow(ids: Tensor, before: Tensor, now: Tensor, past: int) -> Tensor | None:
    """Ids of the `past` positions in a cache whose marks are `now`, from `ids` and the marks
    `before`; None where the cache holds other sequences.
    """
    length = ids.shape[1]
    # marks cover the last positions: before has length - n .. length, now has past - m .. past
    start = max(length - before.shape[1], past - now.shape[1])
    if past > length or past <= start or not before.numel() or not now.numel():
        return None
    old = before[:, start - (length - before.shape[1]) : past - (length - before.shape[1])]
    new = now[:, start - (past - now.shape[1]) :]
    same = (old[None] == new[:, None]).all(-1)
    # of rows that look alike, the one in its own place
    stays = torch.eye(*same.shape, device=same.device) * same
    return ids[(same + stays).argmax(1), :past] if bool(same.any(1).all()) else None


def length_of(cache: Any) -> int:
    """Positions in a transformers cache; 0 for anything else."""
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


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


def placeholders_of(model: nn.Module) -> list[int]:
    """Token ids that only keep a place for a picture or a sound."""
    config: Any = getattr(model, "config", None)
    found = set[int]()
    for part in (config, getattr(config, "thinker_config", None)):
        for kind in ("image", "video", "audio", "img_context", "video_context", "sound_context"):
            for end in ("id", "index"):
                value = getattr(part, f"{kind}_token_{end}", None)
                if isinstance(value, int) and not isinstance(value, bool):
                    found.add(value)
    return sorted(found)
