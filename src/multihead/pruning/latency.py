"""Measured latency of a model and size of its KV cache: half the heads are seldom half the time."""

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
from ..models.contexts import evaluation
from ..models.introspect import (
    config_of,
    device_of,
    find_special_ids,
    forward_kwargs,
    is_encoder_decoder,
    text_config,
    unwrap,
)

__all__ = ["Latency", "measure_cache", "measure_latencies", "measure_latency"]

STEPS = 8  # tokens decoded after each prefill


@dataclass(frozen=True)
class Latency:
    """Medians over turns: seconds, and ratios to the first model in the same turn (below 1 is
    faster).

    `prefill` is one pass over all tokens, on both sides of an encoder-decoder; `step` is one more
    token with the cache, None for a model without one.
    """

    prefill: float
    step: float | None
    prefill_ratio: float = 1.0
    step_ratio: float | None = None


def measure_latencies(
    models: Mapping[str, nn.Module], *, batch: int = 1, tokens: int = 512, repeats: int = 10
) -> dict[str, Latency]:
    """Time several models in turns, so that other load on the machine affects them all.

    Each model first runs once untimed. In each of `repeats` turns every model then runs once on the
    same random tokens, in an order that is reversed from turn to turn. The clock is
    `torch.utils.benchmark.timer`, which waits for the accelerator.

    Args:
        models: by name; the others are compared with the first.
        batch: sequences in a pass.
        tokens: of each sequence, before the 8 that are decoded.
        repeats: turns.

    Raises:
        TypeError: not a model.
        MultiheadError: no model, numbers below 1, more tokens than a model has positions.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> times = measure_latencies({"base": model, "again": model}, tokens=16, repeats=2)
    >>> list(times), times["base"].prefill > 0, times["base"].prefill_ratio
    (['base', 'again'], True, 1.0)
    """
    if not models:
        raise MultiheadError("models={} is empty: expected at least one model to time")
    if repeats < 1:
        raise MultiheadError(f"repeats={repeats}: expected at least 1")
    models = {name: unwrap(model) for name, model in models.items()}
    ids = {name: _random_ids(model, batch, tokens + STEPS) for name, model in models.items()}
    turns: dict[str, list[_Turn]] = {name: [] for name in models}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name in list(models)[:: 1 if turn % 2 else -1]:
                with evaluation(models[name]):
                    times = _time_turn(models[name], ids[name], tokens)
                if turn:  # the first one warms up
                    turns[name].append(times)
    first = turns[next(iter(models))]
    return {name: _summarize(own, first) for name, own in turns.items()}


def measure_latency(
    model: nn.Module, *, batch: int = 1, tokens: int = 512, repeats: int = 10
) -> Latency:
    """One model's latency; see `measure_latencies`. Times from two calls don't compare, since the
    load on the machine changes between them.
    """
    return measure_latencies({"model": model}, batch=batch, tokens=tokens, repeats=repeats)["model"]


def measure_cache(model: nn.Module, tokens: int, batch: int = 1) -> int:
    """Bytes of all tensors in the KV cache after a pass over `batch` sequences of `tokens` tokens.

    Raises:
        TypeError: not a model.
        MultiheadError: as `measure_latencies`; a model without a cache.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> c = model.config
    >>> one_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
    >>> measure_cache(model, 10) == 10 * one_token
    True
    """
    model = unwrap(model)
    ids = _random_ids(model, batch, tokens)
    with evaluation(model), torch.no_grad():
        cache = _cache_of(model(**_inputs(model, ids)))
    if cache is None:
        raise MultiheadError(
            f"{type(model).__name__} returns no KV cache, as models that generate text do; there is"
            " nothing to count"
        )
    tensors = {id(tensor): tensor for tensor in _tensors_in(cache, set())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _random_ids(model: nn.Module, batch: int, tokens: int) -> Tensor:
    """Ids `[batch, tokens]` of ordinary tokens: padding within a text changes some models."""
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise MultiheadError(f"{name}={value}: expected at least 1")
    config = config_of(model)
    reads = getattr(model, "main_input_name", "input_ids")
    if not hasattr(config, "get_text_config") or reads != "input_ids":
        raise MultiheadError(
            f"{type(model).__name__} can't be timed on random tokens: expected a transformers model"
            " that takes input_ids"
        )
    limit = max_positions(config)
    if limit is not None and tokens > limit:
        raise MultiheadError(
            f"tokens={tokens:,} (with those that are decoded): the model has {limit:,} positions;"
            " give fewer"
        )
    text = text_config(model)
    special = find_special_ids(model) | {text.pad_token_id}
    ordinary = torch.tensor(
        [i for i in range(min(text.vocab_size, 2048)) if i not in special], device="cpu"
    )
    draw = torch.Generator().manual_seed(0)
    which = torch.randint(len(ordinary), (batch, tokens), generator=draw, device="cpu")
    return ordinary[which].to(device_of(model))


def _inputs(model: nn.Module, ids: Tensor, before: Any = None) -> dict[str, Any]:
    """The inputs of a pass over tokens, after those of the output `before` if there is one. Both
    sides of an encoder-decoder read them, and afterwards the decoder alone reads more.
    """
    given: dict[str, Any] = {"input_ids": ids}
    if is_encoder_decoder(model):
        given = {"input_ids": _with_end(model, ids), "decoder_input_ids": ids}
        if before is not None:
            given = {
                "encoder_outputs": (before.encoder_last_hidden_state,),
                "decoder_input_ids": ids,
            }
    inputs = forward_kwargs(model, given, cache=True)
    if before is not None:
        names = inspect.signature(model.forward).parameters
        inputs["cache" if "cache" in names else "past_key_values"] = _cache_of(before)
    return inputs


def _with_end(model: nn.Module, ids: Tensor) -> Tensor:
    """The tokens, of which the last ends the text: classifiers of BART's kind read there."""
    end = text_config(model).eos_token_id
    return ids if not isinstance(end, int) else torch.cat((ids[:, :-1], ids[:, :1] * 0 + end), 1)


def _can_step(model: nn.Module, output: Any) -> bool:
    """Whether the model takes one token more after an output."""
    names = inspect.signature(model.forward).parameters
    takes_cache = not {"cache", "past_key_values"}.isdisjoint(names)
    return _cache_of(output) is not None and (
        not is_encoder_decoder(model) or ("encoder_outputs" in names and takes_cache)
    )


def _cache_of(output: Any) -> Any:
    """The cache in an output: transformers calls it `past_key_values`, some models `cache`."""
    caches = (getattr(output, name, None) for name in ("cache", "past_key_values"))
    return next((cache for cache in caches if cache is not None), None)


_Turn = tuple[float, float | None]  # seconds of the prefill, and of one step


def _time_turn(model: nn.Module, ids: Tensor, tokens: int) -> _Turn:
    start = timer()
    output = model(**_inputs(model, ids[:, :tokens]))
    prefill = timer() - start
    if not _can_step(model, output):
        return prefill, None
    start = timer()
    for position in range(tokens, ids.shape[1]):
        output = model(**_inputs(model, ids[:, position : position + 1], output))
    return prefill, (timer() - start) / STEPS


def _summarize(own: list[_Turn], first: list[_Turn]) -> Latency:
    steps = [step for _, step in own if step is not None]
    pairs = [(step, base) for (_, step), (_, base) in zip(own, first)]
    ratios = [step / base for step, base in pairs if step is not None and base is not None]
    return Latency(
        median(prefill for prefill, _ in own),
        median(steps) if steps else None,
        median(prefill / base for (prefill, _), (base, _) in zip(own, first)),
        median(ratios) if ratios else None,
    )


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in a cache of any kind, without scalars (counters)."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield value
        return
    plain = (str, bytes, int, float, type(None), torch.device, torch.dtype)
    if id(value) in seen or isinstance(value, plain):
        return
    seen.add(id(value))
    inner = list(value.values()) if isinstance(value, Mapping) else []
    inner += list(value) if isinstance(value, (list, tuple)) else []
    for each in [*inner, *getattr(value, "__dict__", {}).values()]:
        yield from _tensors_in(each, seen)
