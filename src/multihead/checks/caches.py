"""Caches: a text given in pieces must give what it gives at once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MultiheadError
from .calling import Subject
from .facts import Facts, Finding, NotApplicable, gap, shape_words

Way = Callable[[Facts, Tensor, tuple[int, ...]], Tensor]
PIECES = ((4, 1, 1), (3, 3), (1, 1, 1, 1))


def cached(facts: Facts) -> list[Finding]:
    """Pieces of a text, with a cache, give what the whole text gives: one token a step, and
    several.
    """
    subject = facts.subject
    ways = list(_ways(subject))
    if not ways:
        raise NotApplicable(
            "it has no cache that I recognise (an argument such as cache, past_key_value, or"
            " start_pos)"
        )
    if facts.future_hidden is None:
        raise NotApplicable("it isn't causal, and a cache needs that")
    if subject.form == "heads":
        raise NotApplicable("its inputs are split by heads already")
    errors: list[str] = []
    for name, way in ways:
        found, tried = [], 0
        for pieces in PIECES:
            total = sum(pieces)
            x = subject.x(2, total)
            want = subject(x, **facts.options(total))
            try:
                out = way(facts, x, pieces)
            except Exception as error:
                errors.append(
                    f"{name}, pieces {pieces}: {type(error).__name__}:"
                    f" {' '.join(str(error).split())[:100]}"
                )
                continue
            tried += 1
            if not gap(out, want) <= subject.tolerance() and want.isfinite().all():
                found.append((pieces, out, want))
        if not tried:
            continue
        if not found:
            return []
        pieces, out, want = min(found, key=lambda f: sum(f[0]))
        first = pieces[0]
        row = int(((out - want).abs().amax((0, 2)) > 1e-6 * want.abs().max()).nonzero()[0])
        size = gap(out, want)
        only = {len(set(p)) == 1 and p[0] == 1 for p, _, _ in found}
        chunks = (
            " Only where several tokens come at once: the causal mask of the new rows must begin"
            " where the cache ends, tril(diagonal=S - L), not at the top left."
            if only == {False} and len(found) < len(PIECES) and all(p[-1] > 1 for p, _, _ in found)
            else ""
        )
        if chunks:
            bug = "top-left instead of offset alignment"
        elif _reads_only_the_first(facts, way):
            bug = "top-left instead of offset alignment"
            chunks = (
                " A row that comes alone reads the first token and no other of the cache: the"
                " causal mask is laid at the top left, so that new rows count from 0. It must begin"
                " where the cache ends: tril(diagonal=S - L)."
            )
        else:
            bug = _positions_hint(facts, way, pieces, want) or "cache differs from the full pass"
        return [
            Finding(
                bug,
                f"With its cache ({name}) a text in pieces of {', '.join(map(str, pieces))} gives"
                f" another output than at once, from row {row} on (the first piece has {first}), by"
                f" {size:.2g} of its size.{chunks}",
                f"{shape_words(subject, 1, first + 1)} in pieces",
                "Positions of the new rows (they begin where the cache ends), the mask of the new"
                " rows against all keys so far, the order of cached and new keys, and whether keys"
                " are cached before or after positions.",
            )
        ]
    raise NotApplicable("its cache couldn't be tried: " + "; ".join(errors[:2]))


def _reads_only_the_first(facts: Facts, way: Way) -> bool:
    """Whether a row that comes alone, behind a cache of four, reads the first of them only."""
    x = facts.subject.x(2, 5, size=0.5)
    base = way(facts, x, (4, 1))[:, -1]
    changes = []
    for j in range(4):
        other = x.clone()
        other[:, j] = facts.subject.x(2, 5, seed=30 + j, size=0.5)[:, j]
        changes.append(gap(way(facts, other, (4, 1))[:, -1], base))
    return changes[0] > facts.zero and max(changes[1:]) <= facts.zero


def _positions_hint(facts: Facts, way: Way, pieces: tuple[int, ...], want: Tensor) -> str | None:
    """Whether it's positions alone: with rotary angles set to zero, pieces and the whole then
    agree.
    """
    trial = facts.subject.copy()
    if not facts.positions or trial.module is None or not _stop_turning(trial):
        return None
    still = Facts(trial, facts.declared, facts.target)
    x = trial.x(2, sum(pieces))
    try:
        same = (
            gap(way(still, x, pieces), trial(x, **still.options(sum(pieces)))) <= trial.tolerance()
        )
    except Exception:
        return None
    return "positions restart at the cache" if same else None


def _stop_turning(subject: Subject) -> bool:
    """Sets angles to zero, where they come from a buffer or an attribute, or from this check."""
    found = False
    for owner in subject.module.modules() if subject.module is not None else ():
        for name, buffer in owner.named_buffers(recurse=False):
            low = name.lower()
            if "sin" in low:
                buffer.zero_()
                found = True
            elif "cos" in low:
                buffer.fill_(1.0)
                found = True
            elif "freq" in low:
                if buffer.is_complex():
                    buffer.fill_(1.0)
                else:
                    buffer.zero_()
                found = True
        for name, value in list(vars(owner).items()):
            if name.lower() in (
                "theta",
                "rope_theta",
                "base",
                "rope_base",
                "rotary_base",
            ) and isinstance(value, int | float):
                setattr(owner, name, float("inf"))
    return found


def _ways(subject: Subject) -> Iterator[tuple[str, Way]]:
    cache, use, start = (subject.named(role) for role in ("cache", "use_cache", "start"))
    if subject.library == "multihead" and cache:
        yield f"{cache}=multihead.Cache()", lambda f, x, p: _held(f, x, p, cache, _own_cache())
    if subject.library == "transformers" and cache:
        yield f"{cache}=DynamicCache()", lambda f, x, p: _held(f, x, p, cache, _dynamic_cache())
    if cache:
        yield f"{cache}=what the last call returned", lambda f, x, p: _handed(f, x, p, cache, use)
        for made, what in ((dict, "{}"), (list, "[]")):
            yield f"{cache}={what}", partial(_fresh, name=cache, made=made)
    if not cache and start:
        yield f"{start}= with a cache of its own", lambda f, x, p: _inside(f, x, p, {})
    if not cache and use:
        yield f"{use}=True with a cache of its own", lambda f, x, p: _inside(f, x, p, {use: True})


def _own_cache() -> Any:
    from ..layers.cache import Cache

    return Cache()


def _dynamic_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _piecewise(
    facts: Facts, x: Tensor, pieces: tuple[int, ...]
) -> Iterator[tuple[Tensor, dict[str, Any], int]]:
    start = 0
    for size in pieces:
        options = facts.options(size, start + size)
        if (
            facts.subject.library == "transformers" and facts.subject.mask is not None
        ):  # a model hands its layers this mask
            options = {"may": torch.ones(size, start + size, dtype=torch.bool).tril(start)}
        yield x[:, start : start + size], options, start
        start += size


def _fresh(
    facts: Facts, x: Tensor, pieces: tuple[int, ...], name: str, made: Callable[[], Any]
) -> Tensor:
    return _held(facts, x, pieces, name, made())


def _held(facts: Facts, x: Tensor, pieces: tuple[int, ...], name: str, cache: Any) -> Tensor:
    """A cache that is handed in and changed in place."""
    outs = []
    for part, options, start in _piecewise(facts, x, pieces):
        outs.append(_call(facts.subject, part, options, start, {name: cache}))
    if isinstance(cache, dict | list) and not cache:
        raise MultiheadError("nothing was put into it")
    return torch.cat(outs, 1)


def _handed(facts: Facts, x: Tensor, pieces: tuple[int, ...], name: str, use: str | None) -> Tensor:
    """A cache that each call returns and the next one takes."""
    from .calling import _flatten

    outs, cache = [], None
    for part, options, start in _piecewise(facts, x, pieces):
        more = {**({name: cache} if cache is not None else {}), **({use: True} if use else {})}
        result: list[Any] = []
        outs.append(_call(facts.subject, part, options, start, more, result))
        first = result[0]
        rest = (
            list(first[1:])
            if isinstance(first, tuple | list)
            else list(first.values())[1:]
            if isinstance(first, dict)
            else []
        )
        held = [
            r
            for r in rest
            if r is not None
            and any(isinstance(t, Tensor) and t.ndim >= 3 for t in _flatten(r))
            and not (
                isinstance(r, Tensor) and r.shape[-2:] == (part.shape[1], start + part.shape[1])
            )
        ]
        cache = (
            tuple(held)
            if len(held) == 2 and all(isinstance(h, Tensor) for h in held)
            else held[-1]
            if held
            else None
        )
        if cache is None:
            raise MultiheadError("the call returned nothing that could be a cache")
    return torch.cat(outs, 1)


def _inside(facts: Facts, x: Tensor, pieces: tuple[int, ...], more: dict[str, Any]) -> Tensor:
    """A cache that the module keeps itself; a copy starts without."""
    subject = facts.subject.copy()
    outs = [
        _call(subject, part, options, start, more)
        for part, options, start in _piecewise(facts, x, pieces)
    ]
    return torch.cat(outs, 1)


def _call(
    subject: Subject,
    part: Tensor,
    options: dict[str, Any],
    start: int,
    more: dict[str, Any],
    result: list[Any] | None = None,
) -> Tensor:
    if result is not None:
        function = subject.function
        subject = copy.copy(subject)

        def kept(*args: Any, **kwargs: Any) -> Any:
            result.append(function(*args, **kwargs))
            return result[-1]

        kept.__signature__ = inspect.signature(function) if callable(function) else None  # type: ignore[attr-defined]
        subject.function = kept
    return subject(part, **options | {"more": {**options.get("more", {}), **more}}, start=start)
