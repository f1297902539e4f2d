"""`cost()`: what the attention of a model costs, and what it would cost with other heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from ..io import write_text
from .fits import Fit, compute_fit
from .shape import DTYPES, Arithmetic, Shape, format_heads, num_bytes
from .show import draw, show
from .sizes import Sizes
from .states import State
from .totals import COMPUTED, CostTotals, Weights

if TYPE_CHECKING:  # transformers is imported where a model is built
    from torch import nn
    from transformers import PretrainedConfig

DEFAULT_CONTEXT = 4096  # tokens, unless the model takes fewer
STORAGES = ("theory", "transformers", "paged")
LAYER_FIELDS = (
    "label",
    "name",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "latent_dim",
    "rope_dim",
    "query_latent_dim",
    "causal",
    "window",
    "chunked",
    "cross",
    "cached",
    "has_keys",
    "calls",
)
STATE_FIELDS = ("label", "name", "kind", "parameters", "products", "uses")


class Cost(CostTotals):
    """The cost of a model's attention for sequences of one length, as `cost` returns it.

    `print` shows tables, `to_dict`, `save` and `plot` give all numbers. Operations count a
    multiply-add as two; docs/cost.md has the formulas.

    >>> import multihead
    >>> gqa = multihead.cost(embed_dim=64, num_heads=8, num_kv_heads=2, context_length=100)
    >>> gqa.prefill().total, gqa.decode().scores, gqa.memory["probabilities"]
    (3340800, 12928, 160000)
    >>> [name for name, other in gqa.alternatives() if other.cache() < gqa.cache()]
    ['MQA']
    """

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values: bytes, operations, and a dict for each layer."""
        layers = [
            {
                **{field: getattr(shape, field) for field in LAYER_FIELDS},
                **_numbers(replace(self, shapes=(shape,), states=())),
            }
            for shape in self.shapes
        ]
        return {
            "model": self.name,
            "context_length": self.context_length,
            "source_length": self.source_length,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "notes": list(self.notes),
            **_numbers(self),
            "layers": layers,
            "states": [
                {
                    **{field: getattr(state, field) for field in STATE_FIELDS},
                    "cache": self.batch_size * state.cache(self.dtype),
                }
                for state in self.states
            ],
            "alternatives": [
                {"attention": name, "heads": format_heads(*other.shapes), **_numbers(other)}
                for name, other in self.alternatives()
            ],
        }

    def save(self, path: str | Path, fit: Fit | None = None) -> None:
        """Write `to_dict` as JSON, with what fits under "fit"."""
        content = self.to_dict() | ({} if fit is None else {"fit": fit.to_dict()})
        write_text(path, json.dumps(content, indent=1) + "\n")

    def fit(
        self,
        memory: int | str | None = None,
        *,
        tensor_parallel: int = 1,
        weights: int | str | None = None,
    ) -> Fit:
        """Compute how much fits on a device: the longest context at this batch size, and the
        largest batch at this context length.

        Counted are the weights of the whole model and the cache in whole pages, as a server keeps
        it; what activations and the framework need is to be taken off `memory`.

        Args:
            memory: bytes of one device, or a size: "80GiB", "24GB". None: only what a device holds.
            tensor_parallel: devices that share the model; key/value heads are copied where there
                are fewer than devices, a latent is on all of them.
            weights: bytes of all weights; those of the weight files unless given, or without files
                those of the parameters in the dtype.

        Raises:
            MultiheadError: a size that isn't one, heads that the devices can't share evenly,
                weights that are quantised and whose size isn't known.

        >>> llama = cost(embed_dim=4096, num_heads=32, num_kv_heads=8, num_layers=32)
        >>> llama.fit("24GiB", tensor_parallel=2, weights="15GiB").max_batch_size
        66
        """
        return compute_fit(self, memory, tensor_parallel=tensor_parallel, weights=weights)

    def plot(self, path: str | Path) -> None:
        """Draw cache and arithmetic over the context length, as it is and with other heads, as PNG
        or SVG. Needs matplotlib ('multihead[plot]').
        """
        draw(self, Path(path))

    def __str__(self) -> str:
        return show(self)


def cost(
    model: nn.Module | PretrainedConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_layers: int | None = None,
    kv_latent_dim: int | None = None,
    rotary_dim: int | None = None,
    q_latent_dim: int | None = None,
    v_head_dim: int | None = None,
    num_window_layers: int | None = None,
    context_length: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    window: int | None = None,
) -> Cost:
    """Compute the parameters, arithmetic, memory and KV cache of a model's attention, exactly, from
    its config alone.

    The model is built from its config on torch's meta device: nothing is allocated, no weights are
    read, and the modules that are counted are those that transformers would run. In
    encoder-decoders the source is as long as the config's `max_source_positions`, else as
    `context_length`.

    Args:
        model: a folder or config.json, a GGUF file, a hub name, a config (or a dict of one), or a
            model. Without it and without `embed_dim`: the built-in model.
        embed_dim, num_heads, num_kv_heads, head_dim, num_layers: causal attention of these sizes in
            place of a model: `num_kv_heads` is `num_heads`, `head_dim` is embed_dim / num_heads
            and `num_layers` 1 unless given.
        kv_latent_dim, rotary_dim, q_latent_dim, v_head_dim: with `embed_dim`, attention with a
            latent (MLA) of these sizes, as `LatentAttention` has them: `head_dim` is then the width
            of a head without its rotary part, and `v_head_dim` is `head_dim` unless given.
        num_window_layers: with `embed_dim`, how many of the layers have the window; all unless
            given.
        context_length: tokens of a sequence, and in the cache; 4,096 unless given, or as many as
            the model takes, if fewer.
        batch_size: sequences at a time.
        dtype: of all numbers, cached ones too: "float32", "bfloat16", "float16", ..., "float8"; or
            of the cache alone, with bfloat16 elsewhere: "int8", "int4", "int2" as transformers
            quantises, "q8_0" ... "q4_0" as llama.cpp does. The config's unless given, and bfloat16
            where it has none.
        window: limits every causal layer to this many keys a query, its own included.

    Raises:
        FileNotFoundError: a path that doesn't exist, a folder without config.json.
        MultiheadError: sizes that don't fit, an unknown dtype, a config without the sizes, a model
            that isn't known.

    >>> llama = cost(embed_dim=4096, num_heads=32, num_kv_heads=8, num_layers=32)
    >>> llama.parameters, llama.cache_per_token, llama.cache() == 4096 * llama.cache_per_token
    ({'query': 536870912, 'key': 134217728, 'value': 134217728, 'output': 536870912}, 131072, True)
    """
    sizes = Sizes(
        embed_dim,
        num_heads,
        num_kv_heads,
        head_dim,
        num_layers,
        kv_latent_dim,
        rotary_dim,
        q_latent_dim,
        v_head_dim,
        num_window_layers,
    )
    sizes.require_whole(context_length=context_length, batch_size=batch_size, window=window)
    if dtype is not None and dtype not in DTYPES:
        raise MultiheadError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    notes: list[str] = []
    states: list[State] = []
    weights = limit = source_length = None
    if embed_dim is not None:
        if model is not None:
            raise MultiheadError(
                f"model={str(model)!r} and embed_dim={embed_dim}: give one of them, a model or its"
                " sizes"
            )
        name, shapes = "attention", sizes.to_shapes(window)
    else:
        sizes.require_none()
        from .from_model import shapes_of
        from .sources import count_weights, max_lengths, open_source

        source = open_source(model)
        name, module, config = source.name, source.module, source.config
        shapes, states, notes = shapes_of(module, config, source.twin)
        shapes, notes = source.opened.revise(shapes), [*source.opened.notes, *notes]
        limit, source_length = max_lengths(config)
        stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
        computed = dtype if dtype in COMPUTED or dtype == "float8" else None
        weights = count_weights(model, source, shapes, computed)
        dtype = dtype or (stored if stored in DTYPES else None)
        if window is not None:
            shapes = [_limit(shape, window) for shape in shapes]
    if context_length is not None and limit is not None and context_length > limit:
        notes.append(f"the config has {limit:,} positions, fewer than the context length")
    context_length = context_length or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if source_length is not None:
        notes.append(f"the encoder's source is {source_length:,} tokens long")
    if weights is None:
        parameters = sum(sum(shape.parameters.values()) for shape in shapes)
        size = num_bytes(dtype if dtype in (*COMPUTED, "float8") else "bfloat16", parameters)
        weights = Weights(parameters, parameters, 0, size)
    return Cost(
        name=name,
        shapes=tuple(shapes),
        context_length=context_length,
        source_length=source_length or context_length,
        batch_size=batch_size,
        dtype=dtype or "bfloat16",
        weights=weights,
        max_positions=limit,
        notes=tuple(notes),
        states=tuple(states),
    )


def _limit(shape: Shape, window: int) -> Shape:
    """The shape with a window, at most; chunks and layers that aren't causal keep theirs."""
    if not shape.causal or shape.chunked:
        return shape
    return replace(shape, window=min(window, shape.window or window))


def _numbers(cost: CostTotals) -> dict[str, Any]:
    """The numbers of a cost as plain values."""

    def arithmetic(operations: Arithmetic) -> dict[str, int]:
        return {**operations._asdict(), "total": operations.total}

    return {
        "parameters": {**cost.parameters, "total": sum(cost.parameters.values())},
        "prefill": arithmetic(cost.prefill()),
        "prefill_full": arithmetic(cost.prefill(full=True)),
        "decode": arithmetic(cost.decode()),
        "decode_transformers": arithmetic(cost.decode(expanded=True)),
        "memory": cost.memory,
        "cache_per_token": cost.cache_per_token,
        "cache_per_sequence": cost.cache_per_sequence,
        "cache": {storage: cost.cache(storage) for storage in STORAGES},
    }
