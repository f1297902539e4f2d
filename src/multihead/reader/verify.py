"""A reading verifies itself: outputs under reading against those of the model as it came, at every
site and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ReadingError
from ..models.contexts import evaluation, is_in_backward
from ..models.instrument import Compute, PassInputs, Tap, instrument, replaced_heads, suspend
from ..models.introspect import config_of, is_encoder_decoder, text_config, tolerance
from ..models.labels import stack_of
from ..models.model_masks import find_read_rows
from ..models.own_attention import OwnAttention
from ..models.site import Site, find_sites
from ..models.weights import INEXACT, read_projection
from ..ops.call import AttentionCall
from .copied_caches import copy_caches
from .spot_check import RowComparison, can_compare_rows, cut_head
from .tokens import Tokens

ROWS = 64  # of a site's output that are compared
# Of one output of the model so many values are kept and compared: all, or as many evenly spread
# rows
# as fit.
VALUES = 1 << 22
NAMED = "_attn_implementation"  # of a config: the implementation that it names
NAN = (
    "the model's outputs are NaN here, so there is nothing to read; look at its weights and inputs,"
    " or load it in float32"
)


def rows_to_compare(mask: Tensor | None, batch: int, length: int, limit: int = ROWS) -> Tensor:
    """At most `limit` indices among batch * length rows, evenly spread, padding left out, with the
    first and the last.
    """
    rows = torch.arange(batch * length, device="cpu")
    if mask is not None and mask.shape[0] == batch and mask.shape[1] >= length:
        rows = rows[mask[:, -length:].bool().reshape(-1).cpu()]
    if len(rows) > limit:
        rows = rows[torch.linspace(0, len(rows) - 1, limit, device="cpu").long()]
    return rows


class KeptOutput(NamedTuple):
    """Some rows of an output of the model."""

    name: str
    shape: torch.Size
    rows: Tensor
    values: Tensor


@dataclass
class Expected:
    """Results of the model as it came for one kind of input: rows of its outputs, and of what left
    W_O in each call of each site. `hint` explains why others may be got.
    """

    model: nn.Module
    hint: str = ""
    outputs: list[KeptOutput] = field(default_factory=list)
    sites: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    # of the pass that is compared, by stack: queries of its sites that may read nothing, [B, L]
    empty: dict[str, list[Tensor]] = field(default_factory=dict)

    def compare_update(self, site: Site, y: Tensor, empty: Tensor | None = None) -> None:
        """Raise where y `[..., D]`, which left W_O, isn't what the model as it came gave.

        `empty` bool `[B, L]`: queries that may read nothing. What models give for them depends on
        their attention implementation, so they aren't compared.
        """
        if not self.sites.get(site.name):
            return
        rows, values = self.sites[site.name].pop(0)
        if empty is not None:
            self.empty.setdefault(stack_of(site.name), []).append(empty)
            if empty.numel() * y.shape[-1] == y.numel():
                some = ~empty.reshape(-1)[rows]
                rows, values = rows[some], values[some]
        self._require_equal(
            values,
            y.detach().reshape(-1, y.shape[-1])[rows],
            f"{site.name} ({type(site.module).__name__})",
            f"{self.hint} gives another output under reading than before",
        )

    def compare_outputs(self, outputs: Any) -> None:
        named, who = dict(_tensors(outputs)), type(self.model).__name__
        for name, shape, rows, values in self.outputs:
            if name not in named:
                raise ReadingError(
                    f"{who} gives no output {name!r} under reading, but did before. Weights aren't"
                    " stored while reading: leave output_attentions=True out of the call;"
                    " multihead.read_maps gives those of chosen heads"
                )
            for empty in self._empty_of(name, shape):
                some = ~empty.reshape(-1)[rows.to(empty.device)].to(rows.device)
                rows, values = rows[some], values[some.to(values.device)]
            got = named[name].reshape(-1, named[name].shape[-1])[rows.to(values.device)]
            self._require_equal(
                values,
                got,
                who,
                f"{self.hint} gives another output {name!r} under reading than before",
            )

    def _require_equal(self, expected: Tensor, got: Tensor, who: str, what: str) -> None:
        try:
            require_equal(expected, got, who, what)
        except ReadingError:
            # rounding differences become steps where projections quantise what enters them
            errors = (read_projection(s.out).error for s in find_sites(self.model))
            if not any(tolerance(torch.float32) < error <= INEXACT for error in errors):
                raise
            require_equal(expected, got, who, what, INEXACT)

    def _empty_of(self, name: str, shape: torch.Size) -> list[Tensor]:
        """Positions `[B, L]` of an output that may read nothing at some site."""
        encodes = name.startswith("encoder")
        return [
            empty[:, -shape[1] :]
            for stack, calls in self.empty.items()
            for empty in calls
            if encodes == (stack == "encoder" and is_encoder_decoder(self.model))
            and len(shape) > 2
            and (shape[0], shape[1]) == (empty.shape[0], min(shape[1], empty.shape[1]))
        ]


class Verifier(Tap):
    """Compares passes with those of the model as it came, once for each new kind of input.

    A model in training is compared in evaluation mode, since dropout would hide a difference.
    """

    def __init__(self, model: nn.Module, tokens: Tokens) -> None:
        self.model, self.tokens = model, tokens
        self.kinds: set[tuple[Any, ...]] = set()  # of input that were compared
        self._expected: Expected | None = None
        self._rows: RowComparison | None = None
        self._inputs: PassInputs | None = None

    def begin_pass(self, inputs: PassInputs) -> None:
        self._expected = self._rows = self._inputs = None
        kind = (id(inputs.model), *_input_kind(inputs.model, inputs.named()))
        if kind in self.kinds:
            return
        self.kinds.add(kind)
        training = any(module.training for module in self.model.modules())
        head = None
        if not training and can_compare_rows(self.tokens.sites):
            head = cut_head(inputs)
        if head is not None:
            self._rows, self._inputs = RowComparison(self.tokens.sites, require_equal), inputs
        with _side_pass(self.model):
            expected = self.record(head or inputs)
            if head is None and not training:
                self._expected = expected
                return
            with instrument(self.model, _Compare(expected), attention=True):
                _run_again(head or inputs)

    def attended(self, site: Site, own: OwnAttention, out: Tensor) -> None:
        if self._rows is not None and not is_in_backward():
            with torch.no_grad():
                self._rows.attended(site, own, out)

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        if self._expected is not None and not is_in_backward():
            self._expected.compare_update(site, y, self.tokens.empty.at.get(site.name))

    def end_pass(self, outputs: Any) -> None:
        expected, self._expected = self._expected, None
        rows, self._rows = self._rows, None
        if rows is not None and rows.missing and self._inputs is not None:
            with _side_pass(self.model):  # some site computes in another way
                expected = self.record(self._inputs)
        self._inputs = None
        if expected is not None:
            expected.compare_outputs(outputs)

    def record(self, inputs: PassInputs) -> Expected:
        """Run the pass with the model as it is now, and keep rows of its outputs."""
        recorder = _Record(self.model, self.tokens, inputs)
        with instrument(self.model, recorder.tokens, recorder):
            outputs = _run_again(inputs)
        recorder.keep_outputs(inputs, outputs)
        return recorder.expected


class _Record(Tap):
    """Keeps rows of what leaves W_O, and of the model's outputs."""

    passive = True

    def __init__(self, model: nn.Module, tokens: Tokens, inputs: PassInputs) -> None:
        self.tokens = Tokens(model, tokens.sites, stacks=tokens.stacks)
        self.expected = Expected(inputs.model)
        masks = [
            v for v in inputs.named().values() if isinstance(v, Tensor) and v.dtype == torch.bool
        ]
        implementation = getattr(config_of(inputs.model), "_attn_implementation", "")
        if implementation == "eager" and any(mask.ndim == 4 for mask in masks):
            self.expected.hint = (
                " (its eager attention adds a boolean mask to the scores as 0 and 1, which forbids"
                " nothing: pass 0 and torch.finfo(dtype).min, or use attn_implementation='sdpa')"
            )
        self.expected.hint = self.expected.hint or _mixed_hint(model, tokens.sites)
        self.read_rows = [
            rows
            for name, value in inputs.named().items()
            if isinstance(value, Tensor)
            and "mask" in name
            and (rows := find_read_rows(value)) is not None
        ]

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        length = y.shape[-2]
        given = self.tokens.stack_inputs(site, length)
        mask = None if given.mask is None else given.mask[:, : given.past + length]
        if mask is None and (y.ndim == 3 and self.read_rows):
            rows = self.read_rows[0]
            mask = rows.expand(y.shape[0], -1) if rows.shape[-1] == length else None
        flat = y.detach().reshape(-1, y.shape[-1])
        rows = rows_to_compare(mask, flat.shape[0] // length, length).to(y.device)
        self.expected.sites.setdefault(site.name, []).append((rows, flat[rows].clone()))

    def keep_outputs(self, inputs: PassInputs, outputs: Any) -> None:
        """Rows of every floating-point output, as many as VALUES allows, padding left out."""
        named = inputs.named()
        masks = {
            name: value
            for name, value in named.items()
            if isinstance(value, Tensor) and value.ndim == 2 and "mask" in name
        }
        if not masks:  # a user's module may name it otherwise: a stack inside it knows
            inside = [s.mask for s in self.tokens.inputs.values() if s.mask is not None]
            masks = {"attention_mask": inside[-1]} if inside else {}
        caches = (v for v in named.values() if hasattr(v, "get_seq_length"))
        past = next((int(cache.get_seq_length()) for cache in caches), 0)
        for name, value in _tensors(outputs):
            mask = _mask_for(self.expected.model, masks, past, name, value, named)
            flat = value.detach().reshape(-1, value.shape[-1])
            batch, length = value.shape[:2] if mask is not None else (1, flat.shape[0])
            limit = max(ROWS, VALUES // max(1, value.shape[-1]))
            rows = rows_to_compare(mask, batch, length, limit)
            kept = flat[rows.to(value.device)]
            self.expected.outputs.append(KeptOutput(name, value.shape, rows, kept))


def _mixed_hint(model: nn.Module, sites: Sequence[Site]) -> str:
    """A note on a part whose attention implementation isn't that of the model around it, which
    makes its masks.
    """
    modules = dict(model.named_modules())
    for site in sites:
        parts = site.name.split(".")
        own = getattr(site.module.config, NAMED, None) if hasattr(site.module, "config") else None
        around: list[Any] = [modules[".".join(parts[:n])] for n in range(len(parts) - 1, -1, -1)]
        named = (
            getattr(module.config, NAMED, None)
            for module in around
            if hasattr(module, "get_input_embeddings") and hasattr(module, "config")
        )
        makes_masks = next(named, None)
        if own and makes_masks and own != makes_masks:
            return (
                f" (the config of {site.name} names {own!r} attention, and the model around it"
                f" makes masks for {makes_masks!r}, which {own!r} may not apply: set"
                f" _attn_implementation of that config to {makes_masks!r})"
            )
    return ""


class _Compare(Tap):
    """Compares a pass that isn't read."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.empty: dict[str, Tensor] = {}

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        if call.context.empty is not None:
            self.empty[site.name] = call.context.empty.all(1).expand(call.q.shape[0], -1)
        return compute(call)

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        self.expected.compare_update(site, y, self.empty.pop(site.name, None))

    def end_pass(self, outputs: Any) -> None:
        self.expected.compare_outputs(outputs)


class _Blank(Tap):
    """Sets random entries of head outputs to 0, and looks whether they reach W_O as 0."""

    def __init__(self) -> None:
        self.blanks: dict[str, list[Tensor]] = {}
        self.stays_zero: dict[str, bool] = {}

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        out = compute(call)
        blank = (
            torch.rand(out.shape, generator=torch.Generator().manual_seed(0), device="cpu") < 0.5
        )
        if call.context.empty is not None:  # their output isn't what is given here
            blank &= ~call.context.empty[..., None].cpu()
        self.blanks.setdefault(site.name, []).append(blank.to(out.device))
        return out.masked_fill(blank.to(out.device), 0)

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        parts = self.blanks.pop(site.name, [])
        if x is None or not parts:
            return
        blank = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])  # [rows, H, Ev]
        values = x.reshape(blank.shape).clone()
        values[:, replaced_heads(site)] = 0
        stays = bool(values.any()) and not bool(values[blank].any())
        self.stays_zero[site.name] = stays and self.stays_zero.get(site.name, True)


def require_elementwise(model: nn.Module, inputs: PassInputs | None, sites: Sequence[Site]) -> None:
    """Raise unless what lies between the heads and W_O acts on each value separately.

    Where head outputs are set to 0, W_O's input must be 0. A norm or an elementwise gate passes;
    values of another head or position in their place don't.
    """
    blank = _Blank()
    if inputs is not None:
        with (
            torch.random.fork_rng([]),
            torch.no_grad(),
            evaluation(model),
            suspend(model, keep_changes=True),
            instrument(model, blank, sites=sites),
        ):
            inputs.model(*inputs.args, **inputs.kwargs)
    for site in sites:
        if not blank.stays_zero.get(site.name):
            raise ReadingError(
                f"{site.name} ({type(site.module).__name__}) can't be read: what enters"
                f" {site.out_name} is neither the output of its heads, nor that times a number a"
                " head, nor an elementwise gate or norm of it"
            )


def require_equal(expected: Tensor, got: Tensor, who: str, what: str, least: float = 0.0) -> None:
    """Raise a `ReadingError` where the largest difference exceeds the dtype's tolerance of the
    largest value, or `least` of it where that is more.
    """
    if expected.numel() == 0:
        return
    allowed, device = max(tolerance(got.dtype), least), got.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # a float32 norm is then computed from values of lower precision
        allowed = max(allowed, tolerance(torch.get_autocast_dtype(device)))
    got_dtype = got.dtype
    work = torch.promote_types(got_dtype, torch.float32)
    expected, got = expected.detach().to(work), got.detach().to(work)
    same = expected.isinf() & (expected == got)  # a logit of -inf may be on both sides
    expected, got = expected.masked_fill(same, 0), got.masked_fill(same, 0)
    largest = float(expected.masked_fill(expected.isinf(), 0).abs().max())
    difference = float((expected - got).abs().max())
    if not difference <= allowed * max(largest, 1e-30):
        if bool(expected.isnan().any()):
            raise ReadingError(f"{who}: {NAN}")
        raise ReadingError(
            f"{who}{what}: off by {difference:.3g}, where the largest value is {largest:.3g}."
            f" Reading stops, since its numbers would describe another model; {_remedy(got_dtype)}"
        )


def _remedy(dtype: torch.dtype) -> str:
    """Advice where outputs differ."""
    if dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return (
            f"in {name} a model's own attention may round more than this one (eager attention does"
            " most): load the model with dtype=torch.float32, and if it differs then too, please"
            " report this with the model's class"
        )
    return "please report this with the model's class"


@contextmanager
def _side_pass(model: nn.Module) -> Iterator[None]:
    """The model as it came but for what changes it (ablated heads), in evaluation mode; the random
    numbers of the pass to come stay the same.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(sorted(d.index for d in devices)),
        torch.no_grad(),
        evaluation(model),
        suspend(model, keep_changes=True),
    ):
        yield


def _run_again(inputs: PassInputs) -> Any:
    return inputs.model(*copy_caches(inputs.args), **copy_caches(inputs.kwargs))


def _mask_for(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    past: int,
    name: str,
    value: Tensor,
    inputs: Mapping[str, Any],
) -> Tensor | None:
    """The padding mask of an output `[B, L, ...]`, whose columns for it are the last."""
    of_encoder = name.startswith("encoder") or not is_encoder_decoder(model)
    mask = masks.get("attention_mask" if of_encoder else "decoder_attention_mask")
    fits = mask is not None and value.ndim == 3 and value.shape[0] == mask.shape[0]
    if mask is None or not fits or value.shape[1] > mask.shape[1]:
        return None
    length, kept = value.shape[1], inputs.get("logits_to_keep")
    if kept is not None:  # logits of a few positions: the last, or by index
        given = (inputs.get(ids) for ids in ("decoder_input_ids", "input_ids", "inputs_embeds"))
        length = next((x.shape[1] for x in given if x is not None), length)
    mask = mask[:, : past + length]  # it may be longer than the sequence so far
    return mask[:, past:][:, kept.to(mask.device)] if isinstance(kept, Tensor) else mask


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors of an output by name; without caches and scalars (losses)."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.ndim >= 2 and not output.is_nested:
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if not hasattr(value, "get_seq_length"):
                yield from _tensors(value, f"{name}.{key}" if name else key)
    elif isinstance(output, (tuple, list)):
        for n, value in enumerate(output):
            yield from _tensors(value, f"{name}[{n}]" if name else str(n))


def _input_kind(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Everything about the inputs that can change the kind of mask: which ones there are, padding
    and its side, a cache, lengths beyond a window.
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
            if value.ndim == 4 and "mask" in name:
                mark = (*mark, value.shape[1], find_read_rows(value) is None)
            if value.ndim >= 2 and not value.is_nested:
                longest = max(longest, value.shape[1])
        elif hasattr(value, "get_seq_length"):
            past = int(value.get_seq_length())
            mark, longest = (name, past > 0), longest + past
        marks.append(mark)
    text = text_config(model)
    names = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
    windows = [getattr(text, name, None) for name in names]
    marks += [longest > w for w in windows if isinstance(w, int)]
    return (*marks, longest > 1, model.training)
