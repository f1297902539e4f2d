"""Make a multi-head model a grouped-query or multi-query one: several heads share keys and values.

`share` works layer by layer: each layer is fitted (see `shared_heads.py`) to what reaches it from
the changed layers before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..data.batch import Batch
from ..data.batching import window_batches
from ..data.documents import Document, several
from ..errors import MultiheadError
from ..io import Progress
from ..models.instrument import suspend
from ..models.introspect import unwrap
from ..models.pruned import finalize_config
from ..models.site import Site, find_sites
from .calibration import proof_inputs
from .grouping import CHOICES
from .layerwise import run_layerwise
from .plain import warn_unless_plain_shared
from .plan import select_sites
from .result import SmallerModel, count_parameters
from .shared_heads import (
    METHODS,
    SharedHeads,
    SharingOptions,
    fit_shared_heads,
    require_shareable,
    restored_weights,
    write_shared_heads,
)
from .surgery import share_heads

__all__ = ["CHOICES", "METHODS", "Shared", "share", "share_layers"]

TOKENS = 8192  # of the calibration text
# Tokens of a window. Short ones: an attention sink is fitted on as many rows as there are windows.
CONTEXT = 128
MIN_TOKENS = 64


@dataclass
class Shared(SmallerModel):
    """A model with fewer key/value heads; see `SmallerModel` for what `prune` returns too.

    Attributes:
        num_kv_heads: key/value heads of all layers, before and after.
        method, choice: as given to `share`.
        errors: by label of a layer, the squared error of its output on the calibration text,
            relative to its squares.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "One head attends to the previous word, and another one to itself. " * 9
    >>> options = dict(num_kv_heads=4, method="mean", layers=["L1"])
    >>> shared = multihead.share(model, text, tokenizer=tokenizer, **options)
    >>> list(shared.errors), shared.loads_in_transformers
    (['L1'], False)
    """

    num_kv_heads: tuple[int, int]
    method: str
    choice: str
    errors: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "choice": self.choice,
            **super().to_json(),
            "key/value heads": list(self.num_kv_heads),
            "errors": self.errors,
        }

    @property
    def summary(self) -> str:
        before, after = self.num_kv_heads
        return (
            f"{before} key/value heads became {after}: method {self.method}, choice {self.choice}."
        )

    def _files(self, report: dict[str, Any]) -> dict[str, Any]:
        return {"sharing.json": report}


def share(
    model: nn.Module,
    texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    num_kv_heads: int,
    method: str = METHODS[0],
    choice: str = CHOICES[0],
    layers: Iterable[int | str] | None = None,
    refit: bool = True,
    context: int | None = None,
    tokens: int | None = TOKENS,
    progress: Progress | None = None,
) -> Shared:
    """Copy a model with fewer key/value heads a layer; query heads keep their number.

    The model itself stays as it is. It is taken as it came, without what an instrumentation around
    the call changes in it (`multihead.models.suspend`).

    Args:
        model: a model with sites (see `multihead.read`).
        texts: calibration texts or conversations, rows with a source and a target, or ready-made
            batches of model inputs without padding; not those that the result is judged on.
        tokenizer: the model's tokenizer, for texts.
        num_kv_heads: key/value heads of each layer afterwards; must divide the present number.
        method: "mean" averages the heads of a group (Ainslie et al. 2023, GQA). "aligned" first
            brings them close to each other by changes of basis that leave attention unchanged
            (Gower 1975, generalised Procrustes analysis). "svd" takes the principal keys and values
            of a group, weighted by how they are read.
        choice: which heads share: "similar" or "neighbours".
        layers: labels, numbers or ranges of layers, such as ["3-10"]; all by default.
        refit: refit W_O by least squares to what each site gave before; with "svd" W_V too.
        context: tokens of a window of the texts, 128 by default.
        tokens: calibration tokens to use, None for all.
        progress: called with layers done, layers in all, and the stage.

    Raises:
        MultiheadError: a number that doesn't divide, an unknown method, choice or layer, a model
            whose projections can't be split by heads, too little text.
        SurgeryError: the copy differs from the model in which each shared head is repeated.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "One head attends to the previous word, and another one to itself. " * 9
    >>> shared = share(model, text, tokenizer=tokenizer, num_kv_heads=4)
    >>> shared.num_kv_heads, shared.model.config.num_key_value_heads
    ((32, 16), 4)
    """
    model = unwrap(model)
    options = SharingOptions(method, choice, refit)
    sites = find_sites(model)
    chosen = sites if layers is None else select_sites(sites, layers)
    for site in chosen:
        require_shareable(site, num_kv_heads)
    if len(chosen) == len(sites):
        warn_unless_plain_shared(model, num_kv_heads)
    texts = list(several(texts))
    with suspend(model):
        batches = window_batches(model, texts, tokenizer, context=context or CONTEXT, tokens=tokens)
        count = sum(batch.tokens for batch in batches)
        if count < MIN_TOKENS and "input_ids" in batches[0].inputs:
            raise MultiheadError(
                f"texts hold {count:,} tokens: the keys and values of each group are fitted to"
                f" those of the text, which takes at least {MIN_TOKENS}; give more, better"
                f" {TOKENS:,}"
            )
        shared = share_layers(model, chosen, num_kv_heads, batches, options, progress)
        if not shared:
            raise MultiheadError(
                f"num_kv_heads={num_kv_heads}: every chosen layer has that many key/value heads"
                " already; give fewer"
            )
        proof = proof_inputs(model, batches[0])
        smaller = share_heads(model, shared, proof)
    plain = finalize_config(smaller, proof)
    num_kv = [
        sum(site.slices().num_kv_heads for site in find_sites(one)) for one in (model, smaller)
    ]
    return Shared(
        smaller,
        tokenizer,
        bool(plain),
        (count_parameters(model), count_parameters(smaller)),
        (num_kv[0], num_kv[1]),
        method,
        choice,
        {one.label: one.error for one in shared},
        why_not_plain=plain.reason,
        proof=proof,
    )


def share_layers(
    model: nn.Module,
    sites: Sequence[Site],
    num_kv_heads: int,
    batches: Sequence[Batch],
    options: SharingOptions,
    progress: Progress | None = None,
) -> list[SharedHeads]:
    """Fit each site with fewer key/value heads, layer by layer; the model stays as it is.

    Args:
        batches: calibration inputs, without padding.

    Raises:
        MultiheadError: see `require_shareable`.
    """
    for site in sites:
        require_shareable(site, num_kv_heads)
    sites = [site for site in sites if site.slices().num_kv_heads > num_kv_heads]
    shared: list[SharedHeads] = []
    with run_layerwise(model, batches, sites) as runner, restored_weights(sites):
        for site in sites:

            def capture(site: Site = site) -> Any:
                return runner.capture(site)

            shared.append(fit_shared_heads(site, num_kv_heads, capture, options))
            write_shared_heads(site, shared[-1])
            if progress is not None:
                progress(len(shared), len(sites), "sharing keys and values")
    return shared
