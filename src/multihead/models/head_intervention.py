"""`HeadIntervention`: heads replaced or scaled where they enter W_O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .instrument import Tap
from .site import Site

__all__ = ["HeadIntervention"]


class HeadIntervention(Tap):
    """Replaces or scales what heads feed into W_O: zero, mean, affine prediction, gate.

    Args:
        removed: numbers of the heads to replace, by the name of their site.
        constant: by site, the value in their place, `[removed*Ev]` or `[removed, Ev]`; 0 without.
        matrix: by site, `[kept*Ev, removed*Ev]`: the kept heads' part of x times it is added to the
            constant (for instance a least-squares prediction).
        gate: by site, `[H]`, multiplies each head's output; differentiable. Applied first.

    >>> import torch, multihead
    >>> from multihead.models import HeadIntervention, find_sites, instrument
    >>> model, tokenizer = multihead.load_builtin()
    >>> site = find_sites(model)[0]
    >>> off = HeadIntervention({site.name: [0, 2]})
    >>> with torch.no_grad(), instrument(model, off):
    ...     loss = model(**tokenizer("the cat sat", return_tensors="pt")).logits.mean()
    """

    changes_model = True

    def __init__(
        self,
        removed: Mapping[str, Sequence[int]] | None = None,
        *,
        constant: Mapping[str, Tensor] | None = None,
        matrix: Mapping[str, Tensor] | None = None,
        gate: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.removed = {name: list(heads) for name, heads in (removed or {}).items() if heads}
        self.constant, self.matrix, self.gate = constant or {}, matrix or {}, gate or {}

    def heads_out(self, site: Site, x: Tensor) -> Tensor | None:
        gate, removed = self.gate.get(site.name), self.removed.get(site.name)
        if gate is not None:
            by_head = x.unflatten(-1, (site.num_heads, site.head_dim))
            x = (by_head * gate.to(x.device, x.dtype)[:, None]).flatten(-2)
        if removed is None:
            return x
        columns = torch.arange(x.shape[-1], device=x.device).view(site.num_heads, -1)
        constant, matrix = self.constant.get(site.name), self.matrix.get(site.name)
        value = x.new_zeros(()) if constant is None else constant.to(x.device, x.dtype).flatten()
        if matrix is not None:
            kept = columns[[h for h in range(site.num_heads) if h not in removed]].flatten()
            value = value + x[..., kept] @ matrix.to(x.device, x.dtype)
        replaced = columns[removed].flatten()
        return x.index_copy(-1, replaced, value.expand(*x.shape[:-1], len(replaced)))

    def replaces(self, site: Site) -> Sequence[int]:
        given = site.name in self.constant or site.name in self.matrix
        return self.removed.get(site.name, ()) if given else ()
