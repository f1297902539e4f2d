"""KV caches: a sequence passed in pieces must give what it gives in one pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..layers.cache import Cache
from .callee import Callee, CallSpec, flatten
from .factors import CannotRead
from .facts import Facts, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable, NotJudged
from .readers import open_reader
from .recompute import THETAS

# A pass in pieces: the sequence `[B, L, D]` and the lengths of its pieces -> `[B, L, D]`.
Run = Callable[[Facts, Tensor, tuple[int, ...]], Tensor]
NOTHING_STORED = "nothing was stored in it"
PIECES = ((4, 1, 1), (3, 3), (1, 1, 1, 1))


@dataclass
class _Mismatch:
    pieces: tuple[int, ...]
    got: Tensor
    expected: Tensor


def find_wrong_caches(facts: Facts) -> list[Finding]:
    """Pieces of a sequence, with a cache, that give another output than one pass: one token a step,
    and several.
    """
    runs = list(cached_runs(facts.callee))
    if not runs:
        raise NotApplicable(
            "no cache was recognised (an argument such as cache, past_key_value, or start_pos)"
        )
    if facts.causal_by is None:
        raise NotApplicable("it isn't causal, which a cache requires")
    if facts.callee.is_split:
        raise NotApplicable("its inputs are split by heads already")
    errors: list[str] = []
    for name, run in runs:
        mismatches, num_tried = _try_pieces(facts, name, run, errors)
        if num_tried:
            return [_to_finding(facts, name, run, mismatches)] if mismatches else []
    reason = "its cache couldn't be tried: " + "; ".join(errors[:2])
    # Where it stores nothing in what it is given, it may need one that is filled elsewhere.
    is_elsewhere = any(NOTHING_STORED in error for error in errors)
    if facts.callee.library is not None or is_elsewhere:
        raise NotApplicable(reason)
    raise NotJudged(reason)


def _try_pieces(
    facts: Facts, name: str, run: Run, errors: list[str]
) -> tuple[list[_Mismatch], int]:
    callee, mismatches, num_tried = facts.callee, [], 0
    for pieces in PIECES:
        total = sum(pieces)
        x = callee.x(2, total)
        expected = callee(x, spec=facts.causal_spec(total))
        try:
            got = run(facts, x, pieces)
        except Exception as error:
            text = " ".join(str(error).split())[:100]
            errors.append(f"{name}, pieces {pieces}: {type(error).__name__}: {text}")
            continue
        num_tried += 1
        is_equal = relative_difference(got, expected) <= callee.tolerance()
        if not is_equal and expected.isfinite().all():
            mismatches.append(_Mismatch(pieces, got, expected))
    return mismatches, num_tried


def _to_finding(facts: Facts, name: str, run: Run, mismatches: list[_Mismatch]) -> Finding:
    shortest = min(mismatches, key=lambda m: sum(m.pieces))
    pieces, got, expected = shortest.pieces, shortest.got, shortest.expected
    difference = (got - expected).abs().amax((0, 2))
    row = int((difference > 1e-6 * expected.abs().max()).nonzero()[0])
    one_token_works = len(mismatches) < len(PIECES) and all(m.pieces[-1] > 1 for m in mismatches)
    if one_token_works:
        bug = BugName.CACHE_ALIGNMENT
        hint = (
            " Only where several tokens come at once: the causal mask of the new queries must begin"
            " where the cache ends, tril(diagonal=S - L), not at the top left."
        )
    elif _reads_only_first(facts, run):
        bug = BugName.CACHE_ALIGNMENT
        hint = (
            " A single new query reads the first token of the cache and no other: the causal mask"
            " is aligned at the top left, so that new queries count from 0. It must begin where the"
            " cache ends: tril(diagonal=S - L)."
        )
    else:
        bug, hint = (
            BugName.CACHE_POSITIONS if _is_by_positions(facts, run, shortest) else BugName.CACHE,
            "",
        )
    lengths = ", ".join(map(str, pieces))
    size = relative_difference(got, expected)
    return Finding(
        bug,
        f"With its cache ({name}), a sequence in pieces of {lengths} gives another output than in"
        f" one pass, from position {row} on (the first piece has {pieces[0]}), by {size:.2g} of its"
        f" size.{_first_weight(facts, run, pieces)}{hint}",
        f"{format_shape(facts.callee, 1, pieces[0] + 1)} in pieces",
        "Positions of the new queries (they begin where the cache ends), the mask of the new"
        " queries for all keys so far, the order of cached and new keys, and whether keys are"
        " cached before or after positions.",
    )


def read_cached_weights(facts: Facts, run: Run, pieces: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A `[H, L, S]` of a sequence in pieces, and that of one pass.

    Raises:
        CannotRead: they can't be read out, or the call with a cache fails.
    """
    reader = open_reader(facts.callee)
    x = facts.callee.x(1, sum(pieces), size=0.5)
    try:
        cached = reader.read(x, run=lambda inputs: run(facts, inputs, pieces))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise CannotRead(" ".join(str(error).split())[:200]) from None
    return cached.weights, reader.read(x, facts.causal_spec(sum(pieces))).weights


def _first_weight(facts: Facts, run: Run, pieces: tuple[int, ...]) -> str:
    """The first weight that differs, as a sentence."""
    try:
        cached, full = read_cached_weights(facts, run, pieces)
    except CannotRead:
        return ""
    wrong = (cached - full).abs() > 1e-6
    if cached.shape != full.shape or not wrong.any():
        return ""
    # By query, then by head: all queries before it are right.
    i, h, j = wrong.transpose(0, 1).nonzero()[0].tolist()
    return (
        f" In head {h} query {i} reads key {j} with the weight {cached[h, i, j]:.4g} instead of"
        f" {full[h, i, j]:.4g}."
    )


def _reads_only_first(facts: Facts, run: Run) -> bool:
    """Whether a single query, after a cache of four tokens, reads only the first of them."""
    x, pieces = facts.callee.x(2, 5, size=0.5), (4, 1)
    base = run(facts, x, pieces)[:, -1]
    changes = []
    for j in range(4):
        other = x.clone()
        other[:, j] = facts.callee.x(2, 5, seed=30 + j, size=0.5)[:, j]
        changes.append(relative_difference(run(facts, other, pieces)[:, -1], base))
    return changes[0] > facts.threshold and max(changes[1:]) <= facts.threshold


def _is_by_positions(facts: Facts, run: Run, mismatch: _Mismatch) -> bool:
    """Whether pieces and one pass agree once rotary angles are set to zero."""
    trial, pieces = facts.callee.copy(), mismatch.pieces
    if not facts.positions or trial.module is None or not _stop_rotating(trial):
        return False
    still = Facts(trial, facts.declared_causal, facts.target)
    x = trial.x(2, sum(pieces))
    try:
        expected = trial(x, spec=still.causal_spec(sum(pieces)))
        return relative_difference(run(still, x, pieces), expected) <= trial.tolerance()
    except Exception:
        return False


def _stop_rotating(callee: Callee) -> bool:
    """Set rotary angles in buffers and bases in attributes so that nothing is rotated; whether a
    buffer was found.
    """
    has_buffer = False
    for owner in callee.module.modules() if callee.module is not None else ():
        for name, buffer in owner.named_buffers(recurse=False):
            name = name.lower()
            if not any(part in name for part in ("sin", "cos", "freq")):
                continue
            is_one = "sin" not in name and ("cos" in name or buffer.is_complex())
            buffer.fill_(1.0 if is_one else 0.0)
            has_buffer = True
        for name, value in list(vars(owner).items()):
            if name.lower() in THETAS and isinstance(value, int | float):
                setattr(owner, name, float("inf"))
    return has_buffer


class _Layers:
    """Keys and values by layer, with an `update` such as transformers' caches have."""

    def __init__(self) -> None:
        self.layers: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: Any = 0, *_: Any, **__: Any) -> Any:
        """All keys and values so far, those of this call last."""
        if layer in self.layers:
            k, v = (torch.cat(pair, -2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return k, v

    def get_seq_length(self, layer: Any = 0) -> int:
        return self.layers[layer][0].shape[-2] if layer in self.layers else 0


# ---- Ways to call with a cache


def cached_runs(callee: Callee) -> Iterator[tuple[str, Run]]:
    cache, use, start = (callee.find_argument(role) for role in ("cache", "use_cache", "start"))
    if cache and callee.library == "multihead":
        yield f"{cache}=multihead.Cache()", partial(_run_in_place, name=cache, create=Cache)
    if cache and callee.library == "transformers":
        run = partial(_run_in_place, name=cache, create=_dynamic_cache)
        yield f"{cache}=DynamicCache()", run
    if cache:
        run = partial(_run_with_result, name=cache, use=use)
        yield f"{cache}=the cache that the last call returned", run
        yield f"{cache}={{}}", partial(_run_in_place, name=cache, create=dict)
        yield f"{cache}=[]", partial(_run_in_place, name=cache, create=list)
        yield f"{cache} with update(k, v)", partial(_run_in_place, name=cache, create=_Layers)
        if callee.library is None:  # a user's module may take this library's, which counts tokens
            run = partial(_run_in_place, name=cache, create=Cache, passes_positions=False)
            yield f"{cache}=multihead.Cache()", run
    elif start:
        yield f"{start}= with an internal cache", partial(_run_inside, arguments={})
    if use and not cache:
        yield f"{use}=True with an internal cache", partial(_run_inside, arguments={use: True})


def _dynamic_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _split_pieces(
    facts: Facts, x: Tensor, pieces: tuple[int, ...]
) -> Iterator[tuple[Tensor, CallSpec]]:
    """Each piece of the sequence, and how to call with it."""
    start = 0
    # A transformers model passes this mask to its layers.
    passes_mask = facts.callee.library == "transformers" and facts.callee.mask is not None
    for size in pieces:
        end = start + size
        spec = facts.causal_spec(size, end)
        if passes_mask:
            spec = CallSpec(allowed=torch.ones(size, end, dtype=torch.bool).tril(start))
        yield x[:, start:end], replace(spec, start=start)
        start = end


def _run_in_place(
    facts: Facts,
    x: Tensor,
    pieces: tuple[int, ...],
    name: str,
    create: Callable[[], Any],
    passes_positions: bool = True,
) -> Tensor:
    """With a cache that is passed in and changed in place."""
    cache, outs = create(), []
    for part, spec in _split_pieces(facts, x, pieces):
        spec = spec if passes_positions else replace(spec, start=0)
        outs.append(facts.callee(part, spec=spec.with_arguments(**{name: cache})))
        if isinstance(cache, dict | list) and not cache:
            raise MultiheadError(NOTHING_STORED)
    return torch.cat(outs, 1)


def _run_with_result(
    facts: Facts, x: Tensor, pieces: tuple[int, ...], name: str, use: str | None
) -> Tensor:
    """With a cache that each call returns and the next one takes."""
    outs, arguments = [], {use: True} if use else {}
    callee, results = _record_results(facts.callee)
    for part, spec in _split_pieces(facts, x, pieces):
        outs.append(callee(part, spec=spec.with_arguments(**arguments)))
        # The first result: of a single sequence, each batch element is a separate call.
        weights_shape = (part.shape[1], spec.start + part.shape[1])
        arguments[name] = _find_cache(results[0], weights_shape)
        results.clear()
    return torch.cat(outs, 1)


def _record_results(callee: Callee) -> tuple[Callee, list[Any]]:
    """The callee, and a list that gets whatever each call returns."""
    callee, function, results = copy.copy(callee), callee.function, []

    @functools.wraps(function, updated=())
    def recorded(*args: Any, **kwargs: Any) -> Any:
        results.append(function(*args, **kwargs))
        return results[-1]

    callee.function = recorded
    return callee, results


def _find_cache(result: Any, weights_shape: tuple[int, int]) -> Any:
    """The part of a result that holds keys and values; a pair of tensors as one."""
    parts: list[Any] = []
    if isinstance(result, tuple | list):
        parts = list(result[1:])
    elif isinstance(result, dict):
        parts = list(result.values())[1:]
    caches = [
        part
        for part in parts
        if any(isinstance(t, Tensor) and t.ndim >= 3 for t in flatten(part))
        and not (isinstance(part, Tensor) and part.shape[-2:] == weights_shape)
    ]
    if not caches:
        raise MultiheadError("the call returned nothing that could be a cache")
    is_pair = len(caches) == 2 and all(isinstance(c, Tensor) for c in caches)
    return tuple(caches) if is_pair else caches[-1]


def _run_inside(
    facts: Facts, x: Tensor, pieces: tuple[int, ...], arguments: dict[str, Any]
) -> Tensor:
    """With a cache that the module keeps itself; a copy starts without."""
    callee = facts.callee.copy()
    outs = [
        callee(part, spec=spec.with_arguments(**arguments))
        for part, spec in _split_pieces(facts, x, pieces)
    ]
    return torch.cat(outs, 1)
