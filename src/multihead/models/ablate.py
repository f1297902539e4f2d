"""`ablate_heads`: switch heads off or scale them, for as long as a `with` lasts.

What a head adds is one term of a sum, so it can be taken out, replaced by its mean or scaled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.call import AttentionCall
from .contexts import evaluation
from .foreign import find_decoder_tokens
from .head_intervention import HeadIntervention
from .instrument import Compute, ModuleHook, PassInputs, Tap, instrument, suspend
from .introspect import padding_mask, require_model, select_valid
from .site import Site, find_sites, select_heads

Gates = Mapping[str, Tensor] | Tensor
MODES = ("zero", "mean")


@contextmanager
def ablate_heads(
    model: nn.Module,
    heads: str | Iterable[str] = (),
    *,
    mode: str = "zero",
    over: Iterable[Mapping[str, Any]] | None = None,
    gates: Gates | None = None,
) -> Iterator[None]:
    """Remove heads of a model, or multiply head outputs by gates, for as long as the `with` lasts.

    Args:
        model: a model with sites (see `multihead.read`).
        heads: labels of the heads to ablate, such as "L12.H3".
        mode: what an ablated head adds instead: "zero", or "mean", its mean update over `over`.
        over: batches of model inputs; "mean" needs them, since a mean over the running sequence
            would give each position information about later ones.
        gates: a number for each head, differentiable: what transformers called `head_mask`. A
            tensor `[sites, heads]`, or a dict from a site's label ("L12") to `[heads]`; other sites
            stay as they are.

    Raises:
        MultiheadError: a head or site that doesn't exist (with the nearest name), gates of another
            shape, "mean" without `over`.

    >>> import torch, multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> inputs = tokenizer("it was the best of times", return_tensors="pt")
    >>> with torch.no_grad(), multihead.ablate_heads(model, ["L0.H0", "L1.H3"]):
    ...     logits = model(**inputs).logits
    """
    labels = [heads] if not isinstance(heads, Iterable) or isinstance(heads, str) else list(heads)
    if isinstance(heads, Mapping):
        raise TypeError(f"heads={heads!r}: expected labels of heads; numbers for them are gates=")
    if not all(isinstance(label, str) for label in labels):
        raise TypeError(f"heads={heads!r}: expected labels of heads such as 'L2.H3'")
    model = require_model(model)
    sites = find_sites(model)
    chosen = select_heads(sites, labels)
    if mode not in MODES:
        raise MultiheadError(f"mode={mode!r}: expected 'zero' or 'mean'")
    if mode == "mean" and over is None:
        raise MultiheadError(
            "mode='mean' needs over=[...]: batches of model inputs over which a head's mean is"
            " taken"
        )
    removed: dict[str, list[int]] = {}
    for site, head in chosen:
        removed.setdefault(site.name, []).append(head)
    constant = {}
    if mode == "mean" and over is not None:
        ablated = [site for site in sites if site.name in removed]
        means = collect_head_means(model, ablated, over)
        constant = {name: means[name][removed[name]] for name in removed}
    gate = _gates_by_site(sites, gates)
    touched = [site for site in sites if site.name in removed or site.name in gate]
    with instrument(model, HeadIntervention(removed, constant=constant, gate=gate), sites=touched):
        yield


def collect_head_means(
    model: nn.Module, sites: Sequence[Site], over: Iterable[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Mean head outputs `[H, Ev]` (float64) by site name, over the real tokens of some batches."""
    means = _HeadMeans(sites)
    with (
        suspend(model, keep_changes=True),
        evaluation(model),
        torch.no_grad(),
        instrument(model, means, sites=sites),
    ):
        for batch in over:
            model(**batch)
    if not all(means.rows.values()):
        raise MultiheadError(
            "over is empty: expected at least one batch of model inputs to take a mean over"
        )
    return {name: total / means.rows[name] for name, total in means.sums.items()}


class _HeadMeans(Tap):
    """Sums what enters each W_O over real tokens."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sums = {
            site.name: torch.zeros(site.num_heads, site.head_dim, dtype=torch.float64, device="cpu")
            for site in sites
        }
        self.rows = dict.fromkeys(self.sums, 0)

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> list[ModuleHook]:
        """The padding is what the innermost modules with a mask are given: a wrapper may name it
        otherwise, or add rows."""
        around = [
            module
            for name, module in model.named_modules()
            if any(not name or f"{site.name}.".startswith(f"{name}.") for site in sites)
            and "attention_mask" in inspect.signature(module.forward).parameters
            and "hidden_states" not in inspect.signature(module.forward).parameters
        ]
        return [ModuleHook(m, before=functools.partial(self._called, m)) for m in around]

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.batch |= PassInputs(module, args, kwargs).named()

    def begin_pass(self, inputs: PassInputs) -> None:
        self.batch = inputs.named()
        self.valid: dict[str, Tensor | None] = {}  # as the attention call itself has it

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        self.valid[site.name] = (
            find_decoder_tokens(self.batch) if call.context.cross else call.context.key_valid
        )
        return compute(call)

    def heads_out(self, site: Site, x: Tensor) -> None:
        x = x.detach()
        valid = padding_mask(self.batch, site.stack)
        if valid is None:
            valid = self.valid.get(site.name)
        rows = select_valid(x, None if valid is None else valid.bool())
        by_head = rows.unflatten(-1, (site.num_heads, site.head_dim))
        self.sums[site.name] += by_head.double().sum(0).cpu()
        self.rows[site.name] += len(rows)


def _gates_by_site(sites: list[Site], gates: Gates | None) -> dict[str, Tensor]:
    """The gates `[H]` by site name."""
    if gates is None:
        return {}
    if isinstance(gates, Tensor):
        counts = {site.num_heads for site in sites}
        if len(counts) > 1 or gates.shape != (len(sites), min(counts)):
            raise MultiheadError(
                f"gates{list(gates.shape)}: expected [{len(sites)} sites, {sorted(counts)} heads]; "
                "give a dict from site label to [heads] where sites differ"
            )
        return {site.name: gate for site, gate in zip(sites, gates, strict=True)}
    known = {site.label: site for site in sites}
    for label, gate in gates.items():
        if label not in known:
            raise MultiheadError(
                f"gates names the site {label!r}, which doesn't exist; this model's sites are"
                f" {', '.join(known)}"
            )
        if gate.shape != (known[label].num_heads,):
            raise MultiheadError(
                f"gates[{label!r}]{list(gate.shape)}: expected one number for each of its "
                f"{known[label].num_heads} heads"
            )
    return {known[label].name: gate for label, gate in gates.items()}
