"""Baselines for the maps of heads: attention rollout, and the mean over heads and layers.

Both are made of weights alone. **Weights aren't effects**: a head can attend to a token and add
next to nothing from it, and neither baseline knows about values, W_O, MLPs or norms. They are here
because they are widely used; compare them with contributions (`read_maps`) and with what
ablation does (`effect`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.contexts import evaluation
from ..models.introspect import require_model
from ..models.site import Site, list_unreadable
from ..ops.call import AttentionCall
from .context import QueryBlock, TokenContext, Watch
from .maps import HeadMap, one_text
from .session import Reading
from .token_text import group_tokens, label_tokens, require_unit

RESIDUAL = 0.5  # the part of a layer's output that passes by its attention


def read_rollout(
    model: nn.Module,
    text: str | Mapping[str, Any],
    *,
    tokenizer: Any = None,
    stack: str | None = None,
    by: str = "token",
) -> HeadMap:
    """Attention rollout (Abnar and Zuidema 2020) of one text, `[L, L]`: a baseline, not an effect.

    With A_l the mean over heads of the weights of layer l, it is the product over layers, the last
    one first, of 0.5 A_l + 0.5 I, the residual connection being half of each layer.

    **Caveat.** It is made of weights alone: values, output projections, MLPs and norms don't enter,
    and 0.5 is an assumption. Weights aren't effects.

    Args:
        model: as for `multihead.read_maps`. It must have one stack of self-attention with a site in
            each layer.
        text: a string (with `tokenizer`), or model inputs of batch size 1.
        tokenizer: turns the text into ids, and ids into labels.
        stack: the stack to take in a model with several, such as "encoder".
        by: "word" merges the tokens of a word, see `HeadMap.by_word`.

    Returns:
        A map whose `head` is "rollout", without contributions.

    Raises:
        MultiheadError: several stacks, cross-attention, layers without attention that can be read,
            or attention over windows; names them.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> found = multihead.reader.read_rollout(model, "the cat sat", tokenizer=tokenizer)
    >>> bool(abs(found.weights.sum(-1) - 1).max() < 1e-5)
    True
    """
    layers, context = _mean_weights(model, text, tokenizer, stack, "rollout")
    rolled = np.eye(len(layers[0]))
    for weights in layers:
        rolled = ((1 - RESIDUAL) * weights + RESIDUAL * np.eye(len(weights))) @ rolled
    return _as_map("rollout", rolled, context, tokenizer, by)


def read_mean_map(
    model: nn.Module,
    text: str | Mapping[str, Any],
    *,
    tokenizer: Any = None,
    stack: str | None = None,
    by: str = "token",
) -> HeadMap:
    """The mean of the weights over all heads and layers, `[L, L]`: a baseline, not an effect.

    **Caveat.** It is made of weights alone, and heads that do nothing count as much as others.
    Weights aren't effects.

    Args:
        model, text, tokenizer, stack, by: as for `read_rollout`.

    Returns:
        A map whose `head` is "mean", without contributions.

    Raises:
        MultiheadError: as `read_rollout` does.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> found = multihead.reader.read_mean_map(model, "the cat sat", tokenizer=tokenizer)
    >>> bool(abs(found.weights.sum(-1) - 1).max() < 1e-5)
    True
    """
    layers, context = _mean_weights(model, text, tokenizer, stack, "mean")
    return _as_map("mean", np.mean(layers, axis=0), context, tokenizer, by)


class _MeanOverHeads:
    """A watcher that keeps the mean over heads of each attention call, in the order of calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Site, Tensor, TokenContext]] = []

    def at(self, site: Site, call: AttentionCall, context: TokenContext) -> Watch:
        if call.q.shape[0] != 1:
            raise MultiheadError(
                f"{site.name} attends within {call.q.shape[0]} windows or texts at once, so its"
                " weights make no map of one text; give one text, and a model without windows"
            )
        mean = torch.zeros(call.q.shape[2], call.k.shape[2], dtype=torch.float64)
        self.calls.append((site, mean, context))

        def add(block: QueryBlock) -> None:
            mean[block.rows, block.keys] = block.weights[0].double().mean(0).cpu()

        return add


def _mean_weights(
    model: nn.Module, text: Any, tokenizer: Any, stack: str | None, name: str
) -> tuple[list[Any], TokenContext]:
    """The mean over heads of each layer, `[L, L]` float64, and the text's tokens."""
    model = require_model(model)
    batch, _ = one_text(model, text, tokenizer)
    session, watcher = Reading(model, statistics=[]), _MeanOverHeads()
    session.watchers.append(watcher)
    with evaluation(model), torch.no_grad(), session.running():
        model(**batch)
    stacks = list(dict.fromkeys(_label(site) for site, _, _ in watcher.calls))
    if stack is None and len(stacks) > 1:
        raise MultiheadError(
            f"{type(model).__name__} has several stacks of attention, {', '.join(stacks)}, and a"
            f" {name} is of one; give stack={stacks[0]!r} to take one of them"
        )
    if stack is not None and stack not in stacks:
        raise MultiheadError(f"stack={stack!r}: expected one of {', '.join(map(repr, stacks))}")
    chosen = [call for call in watcher.calls if stack is None or _label(call[0]) == stack]
    if not chosen:
        raise MultiheadError(f"{type(model).__name__} called no attention for this text")
    _require_one_sequence(model, chosen, session.sites, name)
    return [mean.numpy() for _, mean, _ in chosen], chosen[0][2]


def _label(site: Site) -> str:
    """The name of a site's stack; "decoder" or "text" of what has no other."""
    return site.stack or "text"


def _require_one_sequence(
    model: nn.Module, calls: list[tuple[Site, Tensor, TokenContext]], sites: list[Site], name: str
) -> None:
    """Raise for layers that read anything but the one sequence, or that can't be read."""
    length = len(calls[0][1])
    for site, mean, _ in calls:
        if site.kind == "cross" or mean.shape != (length, length):
            raise MultiheadError(
                f"{site.name} reads another sequence ({list(mean.shape)} weights of {length}"
                f" tokens): a {name} is of self-attention over one sequence alone; take the"
                " encoder (stack='encoder'), or maps of heads (multihead.read_maps)"
            )
    unread = list_unreadable(model, sites)
    if unread:
        raise MultiheadError(f"a {name} needs all attention of the model; not read: {unread[0]}")
    numbers: dict[str, set[str]] = {}
    for site, _, _ in calls:
        match = re.match(r"(.*?)\.(\d+)\.", f"{site.name}.")
        if match:
            numbers.setdefault(match[1], set()).add(match[2])
    for path, found in numbers.items():
        missing = [n for n, _ in model.get_submodule(path).named_children() if n not in found]
        if missing:
            raise MultiheadError(
                f"layers {', '.join(missing)} of {path} have no attention that was read (another"
                f" mixer, or none), so a {name} over layers would leave out what they do; use maps"
                " of heads (multihead.read_maps)"
            )


def _as_map(name: str, weights: Any, context: TokenContext, tokenizer: Any, by: str) -> HeadMap:
    require_unit(by)
    ids = None if context.given_query_ids is None else context.given_query_ids[0]
    valid, number = context.query_valid[0], len(weights)
    labels = label_tokens(ids, valid, range(number), tokenizer)
    words = [] if tokenizer is None else group_tokens(ids, valid, number, tokenizer)
    found = HeadMap(
        name, labels, list(range(number)), labels, weights.astype(np.float32), None, words, words
    )
    return found.by_word() if by == "word" else found
