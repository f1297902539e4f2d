"""How long a model takes, and how much its cache holds: measured, since half the heads are seldom
half the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from ..data.tokenizing import max_positions
from ..errors import MultiheadError
from ..models.introspect import find_special_ids, is_encoder_decoder, require_model
from ..models.transformers import evaluation

__all__ = ["Latency", "cache_bytes", "latencies", "latency"]

STEPS = 8  # decoded after each prefill


@dataclass(frozen=True)
class Latency:
    """Medians in seconds, and of each turn's ratio to the first model (below 1 is faster).

    `prefill` is one pass over the whole text, `step` one more token from the cache; None where a
    model has no cache.
    """

    prefill: float
    step: float | None
    prefill_ratio: float = 1.0
    step_ratio: float | None = None


def latencies(
    models: Mapping[str, nn.Module], *, batch: int = 1, tokens: int = 512, repeats: int = 10
) -> dict[str, Latency]:
    """Times several models in turns, so that what else the machine does meets them all.

    Each model first runs once untimed; then in each of `repeats` turns every model runs once, the
    order reversed from turn to turn, on the same random tokens. Ratios are those of one turn, and
    their median is given.

    Args:
        models: by name; the first is what the others are compared with.
        batch: texts in a pass.
        tokens: of each text, before the 8 that are decoded.
        repeats: turns.

    Raises:
        TypeError, ValueError: no model, numbers below 1, a text that is longer than a model's
            positions.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> found = latencies({"base": model, "again": model}, tokens=16, repeats=2)
    >>> list(found), found["base"].prefill > 0, found["base"].prefill_ratio
    (['base', 'again'], True, 1.0)
    """
    if not models:
        raise MultiheadError("models={} is empty: expected at least one model to time")
    if repeats < 1:
        raise MultiheadError(f"repeats={repeats}: expected at least 1")
    ids = {name: _ids(model, batch, tokens + STEPS) for name, model in models.items()}
    turns: dict[str, list[tuple[float, float | None]]] = {name: [] for name in models}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name in list(models)[:: 1 if turn % 2 else -1]:
                with evaluation(models[name]):
                    found = _turn(models[name], ids[name], tokens)
                if turn:
                    turns[name].append(found)
    first = turns[next(iter(models))]
    return {name: _medians(own, first) for name, own in turns.items()}


def latency(model: nn.Module, *, batch: int = 1, tokens: int = 512, repeats: int = 10) -> Latency:
    """One model's time; see `latencies`. Times of two models from two calls don't compare: other
    work comes between them.
    """
    return latencies({"model": model}, batch=batch, tokens=tokens, repeats=repeats)["model"]


def cache_bytes(model: nn.Module, tokens: int, batch: int = 1) -> int:
    """What the cache holds that the model gives back after reading `batch` texts of `tokens`
    tokens: all its tensors.

    Raises:
        TypeError, ValueError: as `latencies`; a model that keeps no cache.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> c = model.config
    >>> cache_bytes(model, 10) == 2 * c.num_hidden_layers * c.num_key_value_heads * 10 * c.head_dim * 4
    True
    """
    ids = _ids(model, batch, tokens)
    with evaluation(model), torch.no_grad():
        cache = _cache_of(model(**_inputs(model, ids)))
    if cache is None:
        raise MultiheadError(
            f"{type(model).__name__} keeps no cache, as models do that write text; there is nothing"
            " to count"
        )
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in {id(t): t for t in _tensors(cache, set())}.values()
    )


def _ids(model: nn.Module, batch: int, tokens: int) -> Tensor:
    require_model(model)
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise MultiheadError(f"{name}={value}: expected at least 1")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or is_encoder_decoder(config):
        raise MultiheadError(
            f"{type(model).__name__}: expected a transformers model that reads one text, so that it"
            " is known what to give it"
        )
    limit = max_positions(config)
    if limit is not None and tokens > limit:
        raise MultiheadError(
            f"tokens={tokens:,} (with those that are decoded): the model has {limit:,} positions;"
            " give fewer"
        )
    # Ordinary tokens: padding in the middle of a text would be no text to some models.
    text = config.get_text_config()
    special = find_special_ids(model) | {text.pad_token_id}
    ordinary = torch.tensor([i for i in range(min(text.vocab_size, 2048)) if i not in special])
    drawn = torch.randint(
        len(ordinary), (batch, tokens), generator=torch.Generator().manual_seed(0)
    )
    return ordinary[drawn].to(next(model.parameters()).device)


def _inputs(model: nn.Module, ids: Tensor, cache: Any = None) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    given = {"input_ids": ids} | {
        k: v for k, v in {"use_cache": True, "logits_to_keep": 1}.items() if k in names
    }
    return (
        given
        if cache is None
        else given | {"cache" if "cache" in names else "past_key_values": cache}
    )


def _cache_of(output: Any) -> Any:
    """transformers called it past_key_values before it was cache."""
    return next(
        (
            found
            for name in ("cache", "past_key_values")
            if (found := getattr(output, name, None)) is not None
        ),
        None,
    )


def _turn(model: nn.Module, ids: Tensor, tokens: int) -> tuple[float, float | None]:
    start = timer()
    output = model(**_inputs(model, ids[:, :tokens]))
    prefill = timer() - start
    if (cache := _cache_of(output)) is None:
        return prefill, None
    start = timer()
    for at in range(tokens, ids.shape[1]):
        cache = _cache_of(model(**_inputs(model, ids[:, at : at + 1], cache)))
    return prefill, (timer() - start) / STEPS


def _medians(
    own: list[tuple[float, float | None]], first: list[tuple[float, float | None]]
) -> Latency:
    steps = [step for _, step in own if step is not None]
    ratios = [
        step / base
        for (_, step), (_, base) in zip(own, first)
        if step is not None and base is not None
    ]
    return Latency(
        median(prefill for prefill, _ in own),
        median(steps) if steps else None,
        median(prefill / base for (prefill, _), (base, _) in zip(own, first)),
        median(ratios) if ratios else None,
    )


def _tensors(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors inside but counters, whatever kinds of cache a model mixes."""
    if isinstance(held, Tensor):
        if held.ndim:
            yield held
    elif id(held) not in seen and not isinstance(
        held, (str, bytes, int, float, type(None), torch.device, torch.dtype)
    ):
        seen.add(id(held))
        inside = (
            held.values()
            if isinstance(held, Mapping)
            else held
            if isinstance(held, (list, tuple))
            else ()
        )
        for each in [*inside, *getattr(held, "__dict__", {}).values()]:
            yield from _tensors(each, seen)
