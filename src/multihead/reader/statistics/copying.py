"""`copying`: whether a head, by its weights alone, raises the logits of the tokens that it reads
(Elhage et al. 2021).

A token t at a key, read by head h, moves the logits by row t of the V x V matrix W_E W_V^(h)
W_O^(h) W_U, with the gains of the norms between folded in. Its nonzero eigenvalues are those of the
Ev x Ev matrix W_O^(h) W_U W_E W_V^(h), so nothing of size V x V is needed:
sum(lambda) / sum(|lambda|) is 1 where all of them are positive, and the head copies.

W_V is found in a few short passes in which every attention module gets unit vectors as its input:
that covers fused, transposed and adapted projections alike. Positions, biases and the means that a
LayerNorm subtracts are constants and left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ...data.tokenizing import max_positions
from ...models.instrument import Compute, ModuleHook, Tap, instrument
from ...models.introspect import config_of, forward_kwargs, inner_model
from ...models.site import Site
from ...models.weights import read_embedding
from ...ops.call import AttentionCall
from ..frozen_norm import FrozenNorm, rounding
from .base import ELEMENTWISE, FAINT, Run

CHUNK = 8192  # tokens of the vocabulary at once
CHECKS = 2  # random inputs besides the unit vectors, which show values that aren't linear


def measure_copying(run: Run) -> None:
    """Add the column `copying` to a reading that has read a text.

    Memory: D x D, and once more for each site. Time: D / max_positions short passes, and an
    eigenvalue problem of size Ev for each head.
    """
    model: Any = inner_model(run.model)
    stream = run.stream
    if not (run.causal and stream.checked and not stream.reason and stream.norm is not None):
        run.reasons["copying"] = stream.reason or _why_unchecked(run)
        return
    embed = read_embedding(model.get_input_embeddings())  # [V, D]
    unembed = stream.unembed  # [V, D]
    width = unembed.shape[1]
    if embed.shape[1] != width:
        run.reasons["copying"] = (
            f"its embeddings have {embed.shape[1]} channels, the residual stream {width}"
        )
        return
    values = _ValueProjections(run, width)
    values.measure()
    tokens = min(len(embed), len(unembed))  # placeholders of images have no logits
    # from a direction of the stream to logits, and back through the embeddings: [D, D]
    logits_to_stream = sum(
        stream.norm.pull_back(u.double()).T @ e.double()
        for u, e in zip(unembed[:tokens].split(CHUNK), embed[:tokens].split(CHUNK))
    )
    for record in run.records:
        site = record.site
        why = run.logit_reason(site) or values.why(site)
        if record.elementwise:
            why = ELEMENTWISE
        if why:
            run.why[f"{site.name} copying"] = why
            continue
        w_v = values.weights(site)  # [D, G, Ev]
        w_v = w_v.repeat_interleave(site.num_heads // w_v.shape[1], 1).transpose(0, 1)  # [H, D, Ev]
        w_o = record.out_weights.weight.double().unflatten(0, (site.num_heads, site.head_dim))
        eigenvalues = torch.linalg.eigvals(w_o @ logits_to_stream @ w_v)  # [H, Ev]
        size = eigenvalues.abs().sum(-1)
        run.add(site, "copying", eigenvalues.real.sum(-1) / torch.where(size > 0, size, 1))


def _why_unchecked(run: Run) -> str:
    """Why the way to the logits isn't known where nothing in the model forbids it."""
    if run.causal is False:
        return "copying is of causal models, and this one isn't: no token comes next"
    if run.causal is None:
        return "no text of two tokens or more has shown whether the model is causal"
    if run.stream.faint:
        return FAINT
    return "the way from the heads to the logits wasn't seen: no token followed a query"


class _ValueProjections(Tap):
    """W_V of every site, with the gain of the norm before it, from the values of unit vectors."""

    def __init__(self, run: Run, width: int) -> None:
        self.run, self.width = run, width
        # values of [1 + CHECKS + units] inputs, [inputs, G, Ev], of each pass, by site
        self.parts: dict[str, list[Tensor]] = {}
        self.norms: dict[str, FrozenNorm | None] = {}
        # the norm that a tensor came from, by id, while the tensor lives
        self.origin: dict[int, tuple[ReferenceType[Tensor], nn.Module]] = {}
        self.rounding = 0.0
        self.checks = torch.randn(
            CHECKS, width, generator=torch.Generator().manual_seed(1), device="cpu"
        )

    def measure(self) -> None:
        model: Any = inner_model(self.run.model)
        limit = max_positions(config_of(model)) or 1 << 20
        chunk = min(self.width, limit - 1 - CHECKS)
        device = self.run.stream.unembed.device
        with self.run.aside(), instrument(self.run.model, self, sites=self.run.sites):
            for start in range(0, self.width, chunk):
                stop = min(start + chunk, self.width)
                # zero, the checks, and unit vectors
                self.inputs = torch.zeros(1 + CHECKS + chunk, self.width, device="cpu")
                self.inputs[1 : 1 + CHECKS] = self.checks
                self.inputs[1 + CHECKS :][: stop - start, start:stop] = torch.eye(
                    stop - start, device="cpu"
                )
                ids = torch.zeros(1, len(self.inputs), dtype=torch.int64, device=device)
                model(**forward_kwargs(model, {"input_ids": ids}))

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
            self.origin[id(output)] = ref(output), norm

    def _replace(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unit vectors in place of the input of an attention module."""
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(x, Tensor) or x.shape != (1, *self.inputs.shape):
            return None
        if site.name not in self.norms:
            # an id may be used again, so the tensor itself is compared too
            output, norm = self.origin.get(id(x), (None, None))
            found = norm is not None and output is not None and output() is x
            self.norms[site.name] = FrozenNorm(norm, self.width, x) if found and norm else None
        inputs = self.inputs[None].to(x)
        return ((inputs, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": inputs})

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        self.rounding = max(self.rounding, rounding(call.v.dtype))
        self.parts.setdefault(site.name, []).append(call.v[0].transpose(0, 1).double())
        return call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])

    def why(self, site: Site) -> str:
        """Why its W_V isn't known; "" where it is."""
        norm = self.norms.get(site.name)
        if norm is None or not norm.is_linear:
            return "no plain norm lies directly before its attention"
        parts = self.parts.get(site.name, [])
        if len(parts) != -(-self.width // (len(self.inputs) - 1 - CHECKS)):
            return "its values are computed several times a pass"
        units = self._of_units(site)
        expected = torch.einsum("nd,dgv->ngv", self.checks.to(units), units) + parts[0][0]
        values = parts[0][1 : 1 + CHECKS]
        if (expected - values).abs().max() > self.rounding * values.abs().max():
            return "its values aren't linear in its input"
        return ""

    def _of_units(self, site: Site) -> Tensor:
        parts = self.parts[site.name]
        return torch.cat([part[1 + CHECKS :] for part in parts])[: self.width] - parts[0][0]

    def weights(self, site: Site) -> Tensor:
        """W_V `[D, G, Ev]`, from the stream before the norm, whose scale is frozen."""
        norm = self.norms[site.name]
        assert norm is not None
        return norm.pull_back(self._of_units(site).movedim(0, -1)).movedim(-1, 0)
