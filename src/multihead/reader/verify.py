"""A reading checks itself: the model as it came against the model under reading, site by site and
at the end.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ReadingError
from ..layers.cache import Cache
from ..models.calls import flat
from ..models.introspect import is_encoder_decoder, text_config, tolerance
from ..models.site import elementwise
from ..models.transformers import evaluation

if TYPE_CHECKING:
    from ..models.site import Site
    from .session import Reading

ROWS = 64  # of a site's output that are compared
NUMBERS = (
    1 << 22
    # of one output of the model that are kept and compared: all, or as many evenly spread rows as fit
)
NAN = (
    "the model itself gives NaN here, so there is nothing to read; look at its weights and inputs,"
    " or load it in float32"
)

Kept = tuple[str, Tensor, Tensor]  # an output's name, the numbers of its kept rows, their values


def rows_to_compare(mask: Tensor | None, batch: int, length: int, limit: int = ROWS) -> Tensor:
    """At most `limit` numbers of real rows among batch * length, evenly spread, with the first and
    the last.
    """
    flat = torch.arange(batch * length)
    if mask is not None and mask.shape[0] == batch and mask.shape[1] >= length:
        flat = flat[mask[:, -length:].bool().reshape(-1).cpu()]
    if len(flat) > limit:
        flat = flat[torch.linspace(0, len(flat) - 1, limit).long()]
    return flat


class Check:
    """Runs the model as it came once for each new kind of input, and remembers a few rows of every
    site.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # "plain", "compare" or "blank" while one of the check's own passes is under way: nothing is
        # counted
        self.passing = ""
        self.seen: set[tuple[Any, ...]] = set()
        self.expected: list[Kept] | None = None
        self.kept: dict[
            str, list[tuple[Tensor, Tensor]]
        ] = {}  # site -> rows and values of each of its calls
        self.masks: dict[str, Tensor] = {}
        self.past = 0  # tokens in the cache
        self.proved: set[str] = set()  # sites with a gate or norm of each number

    def before(self, session: Reading, args: Any, kwargs: Any) -> None:
        """Ahead of a pass under reading: run the model as it came where this kind of input is
        new.
        """
        given = _bound(self.model, args, kwargs)
        kind = _kind(self.model, given)
        self.expected, self.kept = None, {}
        if kind in self.seen:
            return
        self.seen.add(kind)
        self.masks = {
            k: v for k, v in given.items() if isinstance(v, Tensor) and v.ndim == 2 and "mask" in k
        }
        self.past = next(
            (int(v.get_seq_length()) for v in given.values() if hasattr(v, "get_seq_length")), 0
        )
        training = any(module.training for module in self.model.modules())
        devices = {p.device for p in self.model.parameters() if p.device.type == "cuda"}
        try:  # the run's own random numbers stay what they would have been
            with (
                torch.random.fork_rng(sorted(d.index for d in devices)),
                torch.no_grad(),
                evaluation(self.model),
            ):
                self.passing = "plain"
                with session.as_it_came():
                    output = self.model(*own_caches(args), **own_caches(kwargs))
                if (
                    not self.masks
                ):  # a module of one's own may call it otherwise: a stack inside knows
                    inside = [i.mask for i in session.inputs.values() if i.mask is not None]
                    self.masks = {"attention_mask": inside[-1]} if inside else {}
                self.expected = self._sample(output)
                if (
                    training
                ):  # dropout would hide a difference, so this input is compared in evaluation
                    self.passing = "compare"
                    self.after(self.model(*own_caches(args), **own_caches(kwargs)))
                    self.kept = {}
        finally:
            self.passing = ""

    def zeros_stay(self, session: Reading, again: tuple[Any, Any] | None) -> None:
        """What stands between heads and W_O takes each number by itself: where heads are made to
        give 0, 0 reaches W_O.

        A norm or a gate of each number passes; one head's numbers in another's place, or another
        row's, don't.
        """
        suspects = [
            o
            for o in session.observers
            if o.site.module in elementwise and o.site.name not in self.proved and o.calls
        ]
        if not suspects:
            return
        for observer in suspects:
            observer.zeros_stayed, observer.blanks = None, []
        if again is not None:
            self.passing = "blank"
            try:
                with torch.random.fork_rng([]), torch.no_grad(), evaluation(self.model):
                    self.model(*again[0], **again[1])
            finally:
                self.passing = ""
        for observer in suspects:
            site = observer.site
            if not observer.zeros_stayed:
                elementwise.discard(site.module)
                raise ReadingError(
                    f"{site.name} ({type(site.module).__name__}) can't be read: what reaches"
                    f" {site.out_name} isn't what its heads gave, nor that times one number a head,"
                    " nor a gate or norm of each number by itself"
                )
            self.proved.add(site.name)

    def keep(self, site: Site, left: Tensor, mask: Tensor | None) -> None:
        """The plain pass went through a site's projection: keep some rows of what left it."""
        flat = left.detach().reshape(-1, left.shape[-1])
        rows = rows_to_compare(mask, flat.shape[0] // left.shape[-2], left.shape[-2]).to(
            left.device
        )
        self.kept.setdefault(site.name, []).append((rows, flat[rows].clone()))

    def at_site(self, site: Site, left: Tensor) -> None:
        """Under reading, a site's projection returned `left`: equal to what it returned before?"""
        if not self.kept.get(site.name):
            return
        rows, expected = self.kept[site.name].pop(0)
        got = left.detach().reshape(-1, left.shape[-1])[rows]
        compare(
            expected,
            got,
            f"{site.name} ({type(site.module).__name__})",
            " gives another output under reading than before",
        )

    def after(self, output: Any) -> None:
        """At the end of a pass: equal outputs?"""
        if self.expected is None:
            return
        expected, self.expected = self.expected, None
        found = dict(_tensors(output))
        for name, rows, want in expected:
            if name not in found:
                raise ReadingError(
                    f"{type(self.model).__name__} gives no output {name!r} under reading, but did"
                    " before. Weights aren't stored while reading (output_attentions=True);"
                    " multihead.read_maps gives chosen ones"
                )
            got = found[name].reshape(-1, found[name].shape[-1])[rows.to(want.device)]
            compare(
                want,
                got,
                type(self.model).__name__,
                f" gives another output {name!r} under reading than before",
            )

    def _sample(self, output: Any) -> list[Kept]:
        """Rows of every floating output, as many as NUMBERS allows; padded rows are nobody's
        business.
        """
        kept = []
        for name, value in _tensors(output):
            mask = self._mask_for(name, value)
            flat = value.detach().reshape(-1, value.shape[-1])
            batch, length = value.shape[:2] if mask is not None else (1, flat.shape[0])
            rows = rows_to_compare(
                mask, batch, length, max(ROWS, NUMBERS // max(1, value.shape[-1]))
            )
            kept.append((name, rows, flat[rows.to(value.device)]))
        return kept

    def _mask_for(self, name: str, value: Tensor) -> Tensor | None:
        """The padding mask of an output `[B, L, ...]`, whose padded rows are nobody's business."""
        decodes = "decoder_attention_mask" in self.masks
        encodes = is_encoder_decoder(self.model)
        key = (
            "attention_mask"
            if name.startswith("encoder") or not encodes
            else "decoder_attention_mask"
        )
        mask = self.masks.get(key) if decodes or key == "attention_mask" else None
        if (
            mask is None
            or value.ndim != 3
            or value.shape[0] != mask.shape[0]
            or value.shape[1] > mask.shape[1]
        ):
            return None
        return mask[:, : self.past + value.shape[1]]  # it may be longer than the text so far


def compare(expected: Tensor, got: Tensor, who: str, what: str) -> None:
    """Raise a `ReadingError` where the largest difference is over the dtype's tolerance of the
    largest value.
    """
    if expected.numel() == 0:
        return
    allowed, kind = tolerance(got.dtype), got.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(
        kind
    ):  # then a norm's float32 rests on less
        allowed = max(allowed, tolerance(torch.get_autocast_dtype(kind)))
    work = torch.promote_types(got.dtype, torch.float32)
    expected, got = expected.detach().to(work), got.detach().to(work)
    same = expected.isinf() & (
        expected == got
    )  # a score that says "never" (-inf) says so on both sides
    expected, got = expected.masked_fill(same, 0), got.masked_fill(same, 0)
    largest = float(expected.masked_fill(expected.isinf(), 0).abs().max())
    difference = float((expected - got).abs().max())
    if not difference <= allowed * max(largest, 1e-30):
        if bool(expected.isnan().any()):
            raise ReadingError(f"{who}: {NAN}")
        raise ReadingError(
            f"{who}{what}: off by {difference:.3g}, where the largest value is {largest:.3g}."
            " Reading stops, for its numbers would be of another model; please report this with"
            " the model's class"
        )


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of an output by name; caches and single numbers (losses) are left
    out.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.ndim >= 2:
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if not hasattr(value, "get_seq_length"):
                yield from _tensors(value, f"{name}.{key}" if name else key)
    elif isinstance(output, (tuple, list)):
        for n, value in enumerate(output):
            yield from _tensors(value, f"{name}[{n}]" if name else str(n))


def _bound(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs by name, also those that were given by position."""
    try:
        given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        given = dict(kwargs)
    for name in ("args", "kwargs"):
        more = given.pop(name, {})
        given |= (
            more
            if isinstance(more, dict)
            else {f"{name}[{n}]": value for n, value in enumerate(more)}
        )
    return flat(given)


def own_caches(inputs: Any) -> Any:
    """The same inputs with caches and dicts of their own: a pass writes into those that it is
    given.
    """

    def own(value: Any) -> Any:
        if hasattr(value, "get_seq_length") or isinstance(value, Cache):
            return copy.deepcopy(value)
        if isinstance(value, Mapping) and not hasattr(value, "to_tuple"):
            value = copy.copy(value)
            value.update({k: own(v) for k, v in value.items()})
            return value
        return type(value)(map(own, value)) if type(value) in (list, tuple) else value

    return (
        {k: own(v) for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(map(own, inputs))
    )


def _kind(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """What can change the kind of mask: which inputs are there, padding and its side, a cache,
    lengths beyond a window.
    """
    marks: list[Any] = []
    longest = 0
    for name, value in sorted(inputs.items()):
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
    text = text_config(model)
    windows = [
        getattr(text, n, None)
        for n in ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
    ]
    marks += [longest > w for w in windows if isinstance(w, int)]
    return (*marks, longest > 1, model.training)
