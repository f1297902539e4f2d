"""`copying`: whether a head, by its weights alone, raises the tokens that it reads (Elhage et al.
2021).

Token t at a key, read by head h, moves the logits by row t of the V x V matrix W_E W_V^(h) W_O^(h)
W_U, the gains of the norms on the way folded in. Its eigenvalues that aren't zero are those of the
Ev x Ev matrix W_O^(h) W_U W_E W_V^(h), so nothing
of size V x V is ever made: sum(lambda) / sum(|lambda|) is 1 where all of them are positive, and the
    head copies.

W_V is found by one run in which every attention module is given unit vectors in place of its input:
    that covers fused,
transposed and adapted projections alike. Positions, biases and the means that a LayerNorm takes off
are left out as constants.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ...models.instrument import Compute, ModuleHook, Tap, instrument
from ...models.introspect import forward_kwargs
from ...models.site import Site
from ...ops.call import AttentionCall
from ..frozen_norm import FrozenNorm, rounding
from .base import ELEMENTWISE

ROWS = 8192  # of the vocabulary at once
# random rows beside the unit vectors: a value that isn't linear in the input is found by them
CHECKS = 2


def measure_copying(session: Any) -> None:
    """Adds the column `copying` to a session that has read a text, and is running.

    Memory: a D x D and, a site, a D x D matrix; time: D/limit short passes and an eigenvalue
        problem of size Ev a head.
    """
    model: Any = session.model
    stream = session.stream
    if not (session.causal and stream.checked and not stream.reason and stream.norm is not None):
        session.reasons["copying"] = stream.reason or (
            "copying is of causal models with a linear unembedding, and needs a text "
            "of two tokens or more"
        )
        return
    width = stream.head.in_features
    table, unembed = (
        model.get_input_embeddings().weight.detach(),
        stream.head.weight.detach(),
    )  # [V, D] both
    if table.shape[1] != width:
        session.reasons["copying"] = f"its embeddings are {table.shape[1]} wide, the stream {width}"
        return
    found = _Values(session, width)
    found.run(_limit(session))
    known = min(len(table), len(unembed))  # places for pictures have embeddings and no logits
    table, unembed = table[:known], unembed[:known]
    # what a direction of the stream becomes by being turned to logits and read back as an
    # embedding: D x D
    around = sum(
        stream.norm.pull_back(u.double()).T @ t.double()
        for u, t in zip(unembed.split(ROWS), table.split(ROWS))
    )
    for record in session.records:
        site = record.site
        why = session.logit_reason(site) or found.why(site)
        why = ELEMENTWISE if record.elementwise else why
        if why:
            session.why[f"{site.name} copying"] = why
            continue
        values = found.weights(site)  # [D, G, Ev]
        weight = record.out_weights.weight.double()
        out = weight.unflatten(0, (site.num_heads, site.head_dim))  # [H, Ev, D]
        share = site.num_heads // values.shape[1]
        each = values.repeat_interleave(share, 1).transpose(0, 1)  # [H, D, Ev]
        own = torch.linalg.eigvals(out @ around @ each)  # [H, Ev]
        size = own.abs().sum(-1)
        session.add(site, "copying", own.real.sum(-1) / torch.where(size > 0, size, 1))


class _Values(Tap):
    """W_V of every site, with the gain of the norm in front of it, from what unit vectors
    become.
    """

    def __init__(self, session: Any, width: int) -> None:
        self.session, self.width = session, width
        self.parts: dict[
            str, list[Tensor]
        ] = {}  # site -> values of the rows [1 + CHECKS + units, G, Ev] of each run
        self.gains: dict[str, FrozenNorm | None] = {}
        self.known: dict[
            int, tuple[ReferenceType[Tensor], nn.Module]
        ] = {}  # a norm's output, while it lives -> that norm
        self.rounding = 0.0
        self.checks = torch.randn(CHECKS, width, generator=torch.Generator().manual_seed(1))

    def run(self, limit: int) -> None:
        session = self.session
        chunk = min(self.width, limit - 1 - CHECKS)
        with session.aside(), instrument(session.model, self, sites=session.sites):
            for start in range(0, self.width, chunk):
                self.rows = torch.zeros(1 + CHECKS + chunk, self.width)
                self.rows[1 : 1 + CHECKS] = self.checks
                self.rows[
                    torch.arange(1 + CHECKS, 1 + CHECKS + min(chunk, self.width - start)),
                    torch.arange(start, min(start + chunk, self.width)),
                ] = 1
                device = next(session.model.parameters()).device
                ids = torch.zeros(1, len(self.rows), dtype=torch.int64, device=device)
                session.model(**forward_kwargs(session.model, {"input_ids": ids}))

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> list[ModuleHook]:
        norms = [
            module
            for name, module in model.named_modules()
            if re.search("norm|ln", name.rpartition(".")[2], re.IGNORECASE)
        ]
        return [
            *(ModuleHook(norm, after=functools.partial(self._norm_ran, norm)) for norm in norms),
            *(ModuleHook(s.module, before=functools.partial(self._replace, s)) for s in sites),
        ]

    def _norm_ran(self, norm: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.known[id(output)] = ref(output), norm

    def _replace(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unit vectors in place of the input of an attention module."""
        given = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(given, Tensor) or given.shape != (1, *self.rows.shape):
            return None
        if site.name not in self.gains:
            # not by its address alone: memory is used again
            output, norm = self.known.get(id(given), (None, None))
            plain = norm is not None and output is not None and output() is given
            self.gains[site.name] = (
                FrozenNorm(norm, self.width, given) if plain and norm is not None else None
            )
        rows = self.rows[None].to(given)
        return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        self.rounding = max(self.rounding, rounding(call.v.dtype))
        self.parts.setdefault(site.name, []).append(call.v[0].transpose(0, 1).double())
        return call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])

    def why(self, site: Site) -> str:
        """Why its W_V isn't known; "" where it is."""
        norm = self.gains.get(site.name)
        if norm is None or not norm.is_linear:
            return "no plain norm stands directly in front of its attention"
        chunk = len(self.rows) - 1 - CHECKS
        parts = self.parts.get(site.name, [])
        if len(parts) != -(-self.width // chunk):
            return "its values were asked for several times a pass"
        zero, units = parts[0][0], self._units(site)
        told = torch.einsum("rd,dgw->rgw", self.checks.to(units), units) + zero
        found = parts[0][1 : 1 + CHECKS]
        if (told - found).abs().max() > self.rounding * found.abs().max():
            return "its values aren't linear in its input"
        return ""

    def _units(self, site: Site) -> Tensor:
        parts = self.parts[site.name]
        return torch.cat([p[1 + CHECKS :] for p in parts])[: self.width] - parts[0][0]

    def weights(self, site: Site) -> Tensor:
        """`[D, G, Ev]`, from the stream as it enters the norm, its scale frozen."""
        norm = self.gains[site.name]
        assert norm is not None
        units = self._units(site)
        return norm.pull_back(units.movedim(0, -1)).movedim(-1, 0)


def _limit(session: Any) -> int:
    from ...data.tokenizing import max_positions

    return max_positions(session.model.config) or 1 << 20
