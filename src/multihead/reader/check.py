"""A reading checks itself: the model as it came against the model under reading, site by site and at the end."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..models.sites import Site
    from .session import Reading

ROWS = 64  # of a site's output that are compared; a difference in any other row reaches the model's output
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of the largest


class ReadingError(ValueError):
    """A model that can't be read rightly: the first site that differs, with both numbers."""


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 6e-2)


def rows_to_compare(mask: Tensor | None, batch: int, length: int) -> Tensor:
    """At most ROWS numbers of real rows among batch * length, evenly spread, with the last."""
    flat = torch.arange(batch * length)
    if mask is not None and mask.shape[0] == batch and mask.shape[1] >= length:
        flat = flat[mask[:, -length:].bool().reshape(-1).cpu()]
    if len(flat) > ROWS:
        flat = flat[torch.linspace(0, len(flat) - 1, ROWS).long()]
    return flat


class Check:
    """Runs the model as it came once for each new kind of input, and remembers a few rows of every site."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.passing = ""  # "plain" or "compare" while one of the check's own passes is under way: nothing is counted
        self.seen: set[tuple[Any, ...]] = set()
        self.expected: Any = None
        self.kept: dict[str, list[tuple[Tensor, Tensor]]] = {}  # site -> rows and values of each of its calls
        self.masks: dict[str, Tensor] = {}

    def before(self, session: Reading, args: Any, kwargs: Any) -> None:
        """Ahead of a pass under reading: run the model as it came where this kind of input is new."""
        kind = _kind(self.model, args, kwargs)
        self.expected, self.kept = None, {}
        if kind in self.seen:
            return
        self.seen.add(kind)
        self.masks = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and v.ndim == 2 and "mask" in k}
        training = self.model.training
        state = torch.random.get_rng_state()
        try:
            self.model.eval() if training else None
            with torch.no_grad():
                self.passing = "plain"
                with session.as_it_came():
                    self.expected = self.model(*args, **_own_cache(kwargs))
                if training:  # dropout would hide a difference, so this input is compared in evaluation
                    self.passing = "compare"
                    self.after(self.model(*args, **_own_cache(kwargs)))
                    self.kept = {}
        finally:
            self.passing = ""
            self.model.train(training) if training else None
            torch.random.set_rng_state(state)

    def keep(self, site: Site, left: Tensor, mask: Tensor | None) -> None:
        """The plain pass went through a site's projection: keep some rows of what left it."""
        flat = left.detach().reshape(-1, left.shape[-1])
        rows = rows_to_compare(mask, flat.shape[0] // left.shape[-2], left.shape[-2]).to(left.device)
        self.kept.setdefault(site.name, []).append((rows, flat[rows].clone()))

    def at_site(self, site: Site, left: Tensor) -> None:
        """Under reading, a site's projection returned `left`: equal to what it returned before?"""
        if not self.kept.get(site.name):
            return
        rows, expected = self.kept[site.name].pop(0)
        got = left.detach().reshape(-1, left.shape[-1])[rows]
        compare(expected, got, f"{site.name} ({type(site.module).__name__}) gives another output under reading than before")

    def after(self, output: Any) -> None:
        """At the end of a pass: equal outputs?"""
        if self.expected is None:
            return
        expected, self.expected = self.expected, None
        for name, want, got in _pairs(expected, output):
            mask = self._mask_for(name, want)
            if mask is not None:
                keep = mask[:, -want.shape[1] :].bool()
                want, got = want[keep], got[keep]
            compare(want, got, f"{type(self.model).__name__} gives another output {name!r} under reading than before")

    def _mask_for(self, name: str, value: Tensor) -> Tensor | None:
        """The padding mask of an output `[B, L, ...]`, whose padded rows are nobody's business."""
        decodes = "decoder_attention_mask" in self.masks
        encodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        key = "attention_mask" if name.startswith("encoder") or not encodes else "decoder_attention_mask"
        mask = self.masks.get(key) if decodes or key == "attention_mask" else None
        if mask is None or value.ndim < 3 or value.shape[0] != mask.shape[0] or value.shape[1] > mask.shape[1]:
            return None
        return mask


def compare(expected: Tensor, got: Tensor, what: str) -> None:
    """Raise a `ReadingError` where the largest difference is over the dtype's tolerance of the largest value."""
    if expected.numel() == 0:
        return
    allowed = tolerance(got.dtype)
    expected, got = expected.detach().double(), got.detach().double()
    largest = float(expected.abs().max())
    difference = float((expected - got).abs().max())
    if not difference <= allowed * max(largest, 1e-30):
        raise ReadingError(f"{what}: off by {difference:.3g}, where the largest value is {largest:.3g}. Reading stops, for "
                           "its numbers would be of another model; please report this with the model's class")


def _pairs(expected: Any, got: Any, name: str = "") -> list[tuple[str, Tensor, Tensor]]:
    """Matching floating tensors of two outputs; caches and single numbers (losses) are left out."""
    if isinstance(expected, Tensor):
        fits = isinstance(got, Tensor) and expected.is_floating_point() and expected.ndim >= 2
        return [(name, expected, got)] if fits else []
    if isinstance(expected, dict):
        return [pair for k, v in expected.items() if k in got and "key_values" not in k for pair in _pairs(v, got[k], k)]
    if isinstance(expected, (tuple, list)):
        return [pair for n, v in enumerate(expected) for pair in _pairs(v, got[n], name or str(n))]
    return []


def _own_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with a cache of their own: a pass writes into the cache that it is given."""
    return {k: copy.deepcopy(v) if hasattr(v, "get_seq_length") else v for k, v in kwargs.items()}


def _kind(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What can change the kind of mask: which inputs are there, padding and its side, a cache, lengths beyond a window."""
    marks: list[Any] = [len(args)]
    longest = 0
    for name in sorted(kwargs):
        value = kwargs[name]
        if value is None:
            continue
        mark: Any = name
        if isinstance(value, Tensor):
            mark = (name, value.ndim, value.dtype)
            if value.ndim == 2 and "mask" in name:
                zero = value == 0
                mark = (*mark, bool(zero[:, 0].any()), bool(zero[:, -1].any()), bool(zero.any()))
            if value.ndim >= 2:
                longest = max(longest, value.shape[1])
        elif hasattr(value, "get_seq_length"):
            past = int(value.get_seq_length())
            mark, longest = (name, past > 0), longest + past
        marks.append(mark)
    for value in args:
        if isinstance(value, Tensor) and value.ndim >= 2:
            longest = max(longest, value.shape[1])
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    windows = [getattr(text, n, None) for n in ("sliding_window", "attention_chunk_size", "local_attention", "window_size")]
    marks += [longest > w for w in windows if isinstance(w, int)]
    return (*marks, model.training)
