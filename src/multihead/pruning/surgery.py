"""Remove heads from a model, or share key/value heads, with proof: the copy is returned only after
it was compared with the model whose heads are replaced in place.

So a layout that the tables of families describe wrongly is an error with both numbers, and never a
broken model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, SurgeryError
from ..models.contexts import evaluation
from ..models.head_intervention import HeadIntervention
from ..models.head_layout import HeadLayout
from ..models.instrument import Compute, ModuleHook, Tap, instrument, suspend
from ..models.introspect import tolerance
from ..models.names import LAYOUTS
from ..models.resize import head_layout, resize_heads, set_required_attention
from ..models.site import Site, find_sites, uses_interface
from ..ops.call import AttentionCall
from .compensation import merge_compensation
from .shared_heads import SharedHeads, write_shared_heads

__all__ = ["SurgeryError", "remove_heads", "share_heads", "survey_sites"]

LENGTH = 64  # tokens of a text that both models are run on
ROUNDINGS = 4  # of the largest sum of absolute values, which a layer may differ by


def remove_heads(
    model: nn.Module,
    removed: Mapping[str, Sequence[int]],
    batch: Mapping[str, Any],
    *,
    compensation: HeadIntervention | None = None,
) -> nn.Module:
    """Copy a model without some heads.

    Args:
        model: a model with sites (see `multihead.read`).
        removed: head numbers by the name of their site. A key/value head is removed with the last
            query head that reads it.
        batch: model inputs to compare on: a few texts of up to 64 tokens without padding.
        compensation: replaces the removed heads (see `compensation.py`) and is merged into W_O and
            its bias, which is added if the family has none. By default they count as zero.

    Raises:
        SurgeryError: the copy differs from the model whose heads are replaced: in float32 by more
            than 1e-5 of the largest value at some layer, given the same inputs, or 1e-4 at the end.
        MultiheadError: a site whose projections can't be split by heads, or a family that can't
            have these heads removed.

    >>> from multihead import load_builtin
    >>> model, tokenizer = load_builtin()
    >>> batch = dict(tokenizer("Twelve heads.", return_tensors="pt"))
    >>> smaller = remove_heads(model, {"model.layers.1.self_attn": [0]}, batch)
    >>> [m.model.layers[1].self_attn.q_proj.out_features for m in (model, smaller)]
    [192, 168]
    """
    sites = {site.name: site for site in find_sites(model)}
    removed = _check_removed(sites, removed)
    chosen, batch = [sites[name] for name in removed], _shorten(batch)
    with suspend(model):
        seen = _run(model, chosen, batch, HeadIntervention(removed))
        if unseen := [name for name in removed if name not in seen.updates]:
            raise SurgeryError(
                f"{unseen[0]}: these inputs don't reach it, so removing its heads couldn't be"
                " proved; leave its heads, or give a batch that it reads"
            )
        smaller = copy.deepcopy(model)
        copies = {site.name: site for site in find_sites(smaller)}
        for name, heads in removed.items():
            _remove(smaller, copies[name], heads, seen, has_bias=compensation is not None)
        set_required_attention(smaller)
        cut = [_site_in(smaller, sites[name]) for name in removed]
        _prove(seen, smaller, cut, batch, "zero")
        if compensation is not None:
            for site, original in zip(cut, chosen, strict=True):
                merge_compensation(site.out, original, compensation)
            seen = _run(model, chosen, batch, compensation)
            _prove(seen, smaller, cut, batch, "replaced by their compensation")
    return smaller


def share_heads(
    model: nn.Module, shared: Sequence[SharedHeads], batch: Mapping[str, Any]
) -> nn.Module:
    """Copy a model with the shared key/value heads of `shared_heads.fit_shared_heads`.

    It is compared with the model in which each shared head is repeated. Arguments and errors as of
    `remove_heads`.
    """
    batch = _shorten(batch)
    with suspend(model):
        smaller = copy.deepcopy(model)
    by_name = {site.name: site for site in find_sites(smaller)}
    sites = [by_name[one.site] for one in shared]
    for site, one in zip(sites, shared, strict=True):
        write_shared_heads(site, one)
    seen = _run(smaller, sites, batch)
    for site, one in zip(sites, shared, strict=True):
        layout = _layout(one.order, [group[0] for group in one.groups], one.reads)
        resize_heads(smaller, site, replace(layout, fused_layout=seen.layouts.get(site.name)))
    set_required_attention(smaller)
    _prove(seen, smaller, [_site_in(smaller, site) for site in sites], batch, "repeated")
    return smaller


def survey_sites(
    model: nn.Module, sites: Sequence[Site], batch: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """The names of the sites that a batch reaches (text doesn't reach a vision tower), and of those
    whose family can run without any head: modules of transformers that return nothing but their
    output.
    """
    with suspend(model):
        seen = _run(model, sites, batch)
    return set(seen.updates), {
        site.name
        for site in sites
        if seen.returns.get(site.name) is not None and uses_interface(site.module)
    }


def _check_removed(
    sites: Mapping[str, Site], removed: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    for name, heads in removed.items():
        if name not in sites:
            raise MultiheadError(
                f"removed: {name!r} has no heads; this model's attention modules are"
                f" {', '.join(list(sites)[:4])}, ..."
            )
        wrong = [h for h in heads if not 0 <= h < sites[name].num_heads]
        if wrong:
            raise MultiheadError(
                f"removed[{name!r}]: head {wrong[0]} doesn't exist; expected 0 to"
                f" {sites[name].num_heads - 1}"
            )
    return {name: sorted(set(heads)) for name, heads in removed.items() if heads}


def _shorten(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch with its texts cut to 64 tokens: the last one stays, at which some heads look."""
    if "input_ids" not in batch or "pixel_values" in batch:
        return batch
    shape = batch["input_ids"].shape
    if len(shape) < 2 or shape[1] <= LENGTH:
        return batch
    places = [*range(LENGTH - 1), shape[1] - 1]
    return {
        key: value[:, places] if getattr(value, "shape", None) == shape else value
        for key, value in batch.items()
    }


def _remove(
    model: nn.Module, site: Site, removed: Sequence[int], seen: _Seen, *, has_bias: bool
) -> None:
    heads = [h for h in range(site.num_heads) if h not in removed]
    reads = head_layout(site).reads
    kv_heads = sorted({reads[h] for h in heads})
    layout = replace(
        _layout(heads, kv_heads, [kv_heads.index(reads[h]) for h in heads]),
        fused_layout=seen.layouts.get(site.name),
        has_bias=has_bias,
        num_returns=None if heads else seen.returns[site.name],
    )
    resize_heads(model, site, layout)


def _layout(heads: Sequence[int], kv_heads: Sequence[int], reads: Sequence[int]) -> HeadLayout:
    return HeadLayout(tuple(heads), tuple(kv_heads), tuple(reads), tuple(heads), len(heads))


def _site_in(model: nn.Module, site: Site) -> Site:
    """The site of another model with the same paths, whose modules may have been replaced."""
    modules = {name: model.get_submodule(name) for name in (site.name, site.out_name)}
    return replace(site, module=modules[site.name], out=modules[site.out_name])


# ---- one run of a model


@dataclass
class _Seen:
    """One run of a model.

    `updates` are W_O's outputs by site, call by call (layers may share a module), `addends` the
    largest sum of the absolute values that one of their entries is a sum of, `layouts` those of
    fused projections, and `returns` how many values an attention module returns: 0 for a tensor,
    None if it returns several tensors.
    """

    updates: dict[str, list[Tensor]] = field(default_factory=dict)
    addends: dict[str, float] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    returns: dict[str, int | None] = field(default_factory=dict)
    output: Any = None


class _Updates(Tap):
    """Records W_O's outputs, and passes those of another run on in their place."""

    def __init__(self, seen: _Seen, replacements: Mapping[str, Sequence[Tensor]] | None) -> None:
        self.seen, self.replacements = seen, replacements or {}

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> Tensor | None:
        calls = self.seen.updates.setdefault(site.name, [])
        calls.append(y.detach())
        if self.replacements and x is not None and x.numel():
            added = float((x.detach().float().abs() @ site.out_weight()[0].float().abs()).max())
            self.seen.addends[site.name] = max(added, self.seen.addends.get(site.name, 0.0))
        others = self.replacements.get(site.name, ())
        other = others[len(calls) - 1] if len(calls) <= len(others) else y
        return other if other.shape == y.shape else None


class _Returns(Tap):
    """Records how many values each attention module returns."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        for site in sites:

            def after(args: Any, kwargs: Any, output: Any, name: str = site.name) -> None:
                is_tuple = isinstance(output, tuple)
                has_more = is_tuple and any(isinstance(x, Tensor) for x in output[1:])
                self.seen.returns[name] = None if has_more else len(output) if is_tuple else 0

            yield ModuleHook(site.module, after=after)


class _FusedLayouts(Tap):
    """Finds the layout of fused projections: which of their outputs are the values of a call."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen
        self.fused: dict[str, Tensor] = {}

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> Iterable[ModuleHook]:
        for site in sites:

            def after(args: Any, kwargs: Any, output: Tensor, name: str = site.name) -> None:
                self.fused[name] = output.detach().flatten(0, -2)

            yield ModuleHook(site.slices().v.module, after=after)

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        for layout in LAYOUTS:
            try:
                index = site.slices(layout).v.index
            except ValueError:
                continue
            fused = self.fused[site.name].unflatten(0, (call.v.shape[0], -1))
            rows = fused[..., index.to(call.v.device)]
            if rows.numel() == call.v.numel() and torch.equal(rows.transpose(1, 2), call.v):
                self.seen.layouts[site.name] = layout
                break
        return compute(call)


def _has_fused_values(site: Site) -> bool:
    try:
        return site.slices().layout in LAYOUTS and uses_interface(site.module)
    except ValueError:
        return False


def _run(
    model: nn.Module,
    sites: Sequence[Site],
    batch: Mapping[str, Any],
    intervention: HeadIntervention | None = None,
) -> _Seen:
    """Run the whole model once, by `multihead.attention`, with some heads replaced."""
    seen = _Seen()
    fused = [site for site in sites if _has_fused_values(site)]
    with ExitStack() as stack:
        stack.enter_context(instrument(model, _Returns(seen), sites=sites))
        if fused:
            stack.enter_context(instrument(model, _FusedLayouts(seen), sites=fused))
        if intervention is not None:
            changed = [site for site in sites if site.name in intervention.removed]
            stack.enter_context(instrument(model, intervention, sites=changed))
        stack.enter_context(instrument(model, _Updates(seen, None), sites=sites))
        seen.output = _output(model, batch, by_ours=True)
    return seen


def _output(model: nn.Module, batch: Mapping[str, Any], *, by_ours: bool) -> Any:
    has_interface = any(map(uses_interface, model.modules()))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_full_precision())
        stack.enter_context(evaluation(model))
        # some models mask parts of a picture at random, even in evaluation mode
        stack.enter_context(torch.random.fork_rng([]))
        torch.manual_seed(0)
        if by_ours and has_interface:
            stack.enter_context(instrument(model, sites=[], attention=True))
        # a model of sentence-transformers writes its outputs into the dict that it is given
        return model(**{name: dict(x) if isinstance(x, dict) else x for name, x in batch.items()})


# ---- the proof


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 without bfloat16 or TF32 inside, whatever the user chose: a proof
    compares two ways to compute one thing.
    """
    backends: Any = torch.backends
    products = (backends.mkldnn.matmul, backends.cuda.matmul)
    before = [x.fp32_precision for x in products]
    try:
        for x in products:
            x.fp32_precision = "ieee"
        yield
    finally:
        for x, precision in zip(products, before):
            x.fp32_precision = precision


def _prove(
    expected: _Seen, smaller: nn.Module, sites: Sequence[Site], batch: Mapping[str, Any], how: str
) -> None:
    """Raise `SurgeryError` unless the smaller model gives what was seen of the whole one.

    Layer by layer first, each given what the whole model gave it: on its own outputs, an error
    would have to be distinguished from rounding that grows from layer to layer. Then from end to
    end, with the attention implementation that the smaller model has.
    """
    seen = _Seen()
    try:
        with instrument(smaller, _Updates(seen, expected.updates), sites=sites):
            _output(smaller, batch, by_ours=True)
        output = _output(smaller, batch, by_ours=False)
    except Exception as error:
        raise SurgeryError(
            f"{type(smaller).__name__}: its own code doesn't run with other numbers of heads"
            f" ({type(error).__name__}: {error}), so its heads can't be removed, nor its keys and"
            " values shared"
        ) from error
    for name, right in expected.updates.items():
        updates = seen.updates.get(name, [])
        if len(updates) != len(right):
            raise SurgeryError(
                f"{name}: runs {len(updates)} times in the smaller model and {len(right)} times in"
                f" the one whose heads are {how}; this family can't be pruned"
            )
        for a, b in zip(right, updates, strict=True):
            # A refit over little text may have large entries, whose products cancel out.
            rounding = ROUNDINGS * torch.finfo(a.dtype).eps * seen.addends.get(name, 0.0)
            _compare(name, a, b, how, tolerance(a.dtype, 0.1), rounding)
    for a, b in zip(_tensors(expected.output), _tensors(output)):
        _compare("the model's output", a, b, how, tolerance(a.dtype))


def _compare(
    name: str, whole: Tensor, smaller: Tensor, how: str, allowed: float, rounding: float = 0.0
) -> None:
    if whole.shape != smaller.shape:
        raise SurgeryError(
            f"{name}: the smaller model gives {list(smaller.shape)}, the one whose heads are {how}"
            f" {list(whole.shape)}; this family can't be pruned"
        )
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    difference = float((whole.double() - smaller.double()).abs().max()) if whole.numel() else 0.0
    if not difference <= max(allowed * max(largest, 1e-30), rounding):
        raise SurgeryError(
            f"{name}: the smaller model differs from the one whose heads are {how} by"
            f" {difference:.3g} of {largest:.3g} (allowed {allowed:g}), so nothing was changed; the"
            " layout of its projections may differ from that in multihead/models/slices.py"
        )


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output, without its cache."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in ("past_key_values", "cache", "attentions", "loss"):
                yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
