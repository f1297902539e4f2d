"""Sharing keys and values from beginning to end: grouped or multi-query attention out of
multi-head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import MultiheadError
from ..io import Progress
from ..models.introspect import require_model
from ..models.pruned import finalize_config
from ..models.site import find_sites
from . import gqa as sharing
from .checkpoint import save
from .prune import sites_in
from .surgery import share_heads

__all__ = ["Merged", "share"]

LEAST = 64  # tokens of a calibration text


@dataclass(frozen=True)
class Merged:
    """A model with fewer key/value heads, and how far each layer's output is from what it was."""

    model: nn.Module
    tokenizer: Any
    plain: bool  # whether plain transformers loads it
    method: str
    choice: str
    heads: tuple[int, int]  # key/value heads before and after
    parameters: tuple[int, int]
    errors: dict[
        str, float
    ]  # by label: squared difference of the output, in proportion, on the calibration text

    def save(self, out: str | Path, report: Mapping[str, Any] | None = None) -> None:
        """Writes model, tokenizer and sharing.json to a new folder, all or nothing, and loads it in
        a fresh process.
        """
        save(
            self.model,
            self.tokenizer,
            out,
            plain=self.plain,
            extra={"sharing.json": dict(report or self.to_json())},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "choice": self.choice,
            "loads in plain transformers": self.plain,
            "key/value heads": list(self.heads),
            "parameters": list(self.parameters),
            "errors": self.errors,
        }


def share(
    model: nn.Module,
    tokenizer: Any,
    calibrate: str | Iterable[str],
    kv_heads: int,
    *,
    method: str = sharing.METHODS[0],
    choice: str = sharing.CHOICES[0],
    layers: Iterable[str] | None = None,
    refit: bool = True,
    tokens: int | None = sharing.TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Merged:
    """A copy of the model whose layers have `kv_heads` key/value heads; the model itself stays as
    it is.

    Args:
        model: a model with sites (see `multihead.read`).
        tokenizer: the model's own.
        calibrate: texts to calibrate on, another than the one to judge on.
        kv_heads: key/value heads of each layer afterwards; must divide those that it has.
        method: "svd" (the principal keys and values of those that share), "aligned" (brought near
            to one another by changes of basis that leave the layer as it is, then pooled), "mean"
            (Ainslie et al. 2023), "first" or "random".
        choice: which heads share: "similar" or "neighbours".
        layers: labels, numbers or ranges of layers, such as ["3-10"]; all unless given.
        refit: fit W_O anew by least squares.
        tokens: how many of the calibration text to use.
        seed: of the method "random".
        progress: called with sites done, sites in all, and the stage.

    Raises:
        ValueError: numbers that don't divide, unknown names, projections that aren't known.
        SurgeryError: the smaller model isn't the one in which each shared head stands as often as
            it is shared.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> merged = share(model, tokenizer, "One head reads the word before, and another one itself. " * 9, kv_heads=4)
    >>> merged.heads, merged.plain, merged.model.config.num_key_value_heads
    ((32, 16), True, 4)
    """
    require_model(model)
    sites = find_sites(model)
    chosen = None if layers is None else [site.label for site in sites_in(sites, layers)]
    texts = [calibrate] if isinstance(calibrate, str) else list(calibrate)
    held = sum(len(ids) for ids in tokenizer(texts)["input_ids"])
    if held < LEAST:
        raise MultiheadError(
            f"calibrate holds {held} tokens, on which nothing can be fitted; give at least {LEAST},"
            " better thousands"
        )
    found = sharing.share(
        model,
        kv_heads,
        texts=texts,
        tokenizer=tokenizer,
        method=method,
        choice=choice,
        layers=chosen,
        refit=refit,
        seed=seed,
        tokens=tokens,
        progress=progress,
    )
    if not found:
        raise MultiheadError(
            f"kv_heads={kv_heads}: every layer asked for has that many key/value heads already;"
            " give fewer"
        )
    ids = tokenizer(texts[0][:400], return_tensors="pt")["input_ids"]
    smaller = share_heads(model, found, {"input_ids": ids.to(next(model.parameters()).device)})
    kv = [sum(site.slices().num_kv_heads for site in find_sites(one)) for one in (model, smaller)]
    sizes = [sum(p.numel() for p in one.parameters()) for one in (model, smaller)]
    return Merged(
        smaller,
        tokenizer,
        finalize_config(smaller),
        method,
        choice,
        (kv[0], kv[1]),
        (sizes[0], sizes[1]),
        {one.label: one.error for one in found},
    )
