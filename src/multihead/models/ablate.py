"""Switching heads off, or turning them up and down: what a head adds is one term of a sum, so it
can be taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .attending import attending
from .calls import target
from .foreign import Kind, kind_of
from .site import Site, find_sites, select_heads
from .transformers import Call, compute, evaluation, observers

Gates = Mapping[str, Tensor] | Tensor
# Heads of a site in whose place something else reaches W_O: a reading measures what is there, and
# has no contributions.
replaced: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()


@contextmanager
def ablate_heads(
    model: nn.Module,
    off: str | Iterable[str] = (),
    *,
    to: str = "zero",
    over: Iterable[Mapping[str, Any]] | None = None,
    gates: Gates | None = None,
) -> Iterator[None]:
    """Switch heads of a model off, or multiply each head's update by a number, for as long as the
    `with` lasts.

    Args:
        model: a model with sites (see `multihead.read`).
        off: labels of heads, such as "L12.H3".
        to: what a head that is off adds: "zero", or "mean", its average update over `over`.
        over: batches of model inputs; "mean" needs them (the mean over the running text would tell
            each row of its future).
        gates: one number a head, differentiable: what transformers called `head_mask`. A tensor
            `[sites, heads]`, or a dict from a site's label ("L12") to `[heads]`; sites that aren't
            named stay as they are.

    Raises:
        ValueError: a head or site that doesn't exist (with the nearest name), gates of another
            shape, "mean" without `over`.

    >>> import torch, multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = tokenizer("it was the best of times", return_tensors="pt")
    >>> with torch.no_grad(), multihead.ablate_heads(model, off=["L0.H0", "L1.H3"]):
    ...     without = model(**text).logits
    """
    labels = [off] if isinstance(off, str) else list(off) if isinstance(off, Iterable) else [off]
    if not all(isinstance(label, str) for label in labels):
        raise TypeError(f"off={off!r}: expected labels of heads such as 'L2.H3'")
    sites = find_sites(model)
    chosen = select_heads(sites, labels)
    if to not in ("zero", "mean"):
        raise MultiheadError(f"to={to!r}: expected 'zero' or 'mean'")
    if to == "mean" and over is None:
        raise MultiheadError(
            "to='mean' needs over=[...]: batches of model inputs over which a head's mean is taken"
        )
    closed = {site.name: [h for s, h in chosen if s.name == site.name] for site, _ in chosen}
    with ExitStack() as stack:
        kinds = [(site.module, kind_of(site.module)) for site in sites]
        # those that don't call their projection as a module, so that a hook on it would never run
        stack.enter_context(
            attending(m for m, kind in kinds if isinstance(kind, Kind) and not kind.projects)
        )
        means = (
            means_of(model, [s for s in sites if s.name in closed], over)
            if to == "mean" and over is not None
            else {}
        )
        open_ = _gates(sites, gates)
        for site in sites:
            off_here, gate = closed.get(site.name, []), open_.get(site.label)
            if not off_here and gate is None:
                continue
            hook = entry_hook(site, off_here, gate, means.get(site.name))
            stack.callback(site.out.register_forward_pre_hook(hook).remove)
            if site.name in means:
                before = replaced.get(site.module, [])
                replaced[site.module] = [*before, *off_here]
                stack.callback(replaced.__setitem__, site.module, before)
        yield


def entry_hook(site: Site, off: list[int], gate: Tensor | None, mean: Tensor | None) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].unflatten(-1, (site.num_heads, site.head_dim))
        if gate is not None:
            x = x * gate.to(x.device, x.dtype)[:, None]
        if off:
            keep = torch.ones(site.num_heads, 1, dtype=torch.bool, device=x.device)
            keep[off] = False
            x = torch.where(
                keep, x, x.new_zeros(()) if mean is None else mean.to(x.device, x.dtype)
            )
        return (x.flatten(-2), *args[1:])

    return hook


def _gates(sites: list[Site], gates: Gates | None) -> dict[str, Tensor]:
    if gates is None:
        return {}
    if isinstance(gates, Tensor):
        counts = {site.num_heads for site in sites}
        if len(counts) > 1 or gates.shape != (len(sites), min(counts)):
            raise MultiheadError(
                f"gates{list(gates.shape)}: expected [{len(sites)} sites, {sorted(counts)} heads]; "
                "give a dict from site label to [heads] where sites differ"
            )
        return {site.label: gate for site, gate in zip(sites, gates, strict=True)}
    known = {site.label: site for site in sites}
    for label, gate in gates.items():
        if label not in known:
            raise MultiheadError(
                f"gates name the site {label!r}, which doesn't exist; this model's are"
                f" {', '.join(known)}"
            )
        if gate.shape != (known[label].num_heads,):
            raise MultiheadError(
                f"gates[{label!r}]{list(gate.shape)}: expected one number for each of its "
                f"{known[label].num_heads} heads"
            )
    return dict(gates)


def means_of(
    model: nn.Module, sites: list[Site], over: Iterable[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Mean of what enters each site's projection `[H, Ev]`, over the real rows of some batches."""
    sums = {
        site.name: torch.zeros(site.num_heads, site.head_dim, dtype=torch.float64) for site in sites
    }
    rows = dict.fromkeys(sums, 0)
    told: dict[str, Tensor | None] = {}  # which rows are text, from the attention itself
    batch: Mapping[str, Any] = {}
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)

    def keep(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach()
            real = batch.get(
                (
                    "decoder_attention_mask"
                    if encodes and "decoder" in site.name.split(".")
                    else "attention_mask"
                ),
                told.get(site.name),
            )
            real = real if isinstance(real, Tensor) and real.shape == x.shape[:2] else None
            x = x.reshape(-1, x.shape[-1]) if real is None else x[real.bool()]
            sums[site.name] += (
                x.unflatten(-1, (site.num_heads, site.head_dim)).double().sum(0).cpu()
            )
            rows[site.name] += x.shape[0]

        return hook

    def listen(site: Site) -> Any:
        def call(call: Call) -> Tensor:
            told[site.name] = target(batch) if call.cross else call.key_real
            return compute(call)

        return call

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(evaluation(model))
        stack.enter_context(
            attending(s.module for s in sites if isinstance(kind_of(s.module), Kind))
        )
        for site in sites:
            if isinstance(kind_of(site.module), Kind) and site.module not in observers:
                observers[site.module] = listen(site)
                stack.callback(observers.pop, site.module)
            stack.callback(site.out.register_forward_pre_hook(keep(site)).remove)
        for batch in over:
            model(**batch)
    if not all(rows.values()):
        raise MultiheadError(
            "over is empty: expected at least one batch of model inputs to take a mean over"
        )
    return {name: total / rows[name] for name, total in sums.items()}
