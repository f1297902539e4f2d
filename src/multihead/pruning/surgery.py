"""Taking heads out of a model. What comes out is handed back only after it was compared with the
model whose heads are zero.

A layout that the tables of families got wrong is therefore an error with both numbers, never a
broken model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, SurgeryError
from ..models.head_layout import HeadLayout
from ..models.introspect import tolerance
from ..models.names import LAYOUTS
from ..models.resize import head_layout, resize_heads, set_required_attention
from ..models.site import Site, find_sites, uses_interface
from ..models.transformers import NAME, evaluation, implementation, observers
from ..ops.call import AttentionCall
from ..ops.functional import compute
from .compensation import Fill, fills_of, put, without
from .gqa import Shared
from .gqa import put as put_shared

__all__ = ["SurgeryError", "remove_heads", "share_heads", "survey"]

LENGTH = 64  # tokens of a text that both models are given


@dataclass
class Seen:
    """What one run of the model showed of its sites."""

    left: dict[str, list[Tensor]] = field(
        default_factory=dict
    )  # what left W_O, call by call: layers may share it
    layouts: dict[str, str] = field(default_factory=dict)  # of fused projections
    returns: dict[str, int | None] = field(
        default_factory=dict
    )  # how many values; None: several tensors
    output: Any = None


def remove_heads(
    model: nn.Module,
    removed: Mapping[str, Sequence[int]],
    batch: Mapping[str, Any],
    *,
    fills: Mapping[str, Fill] | None = None,
) -> nn.Module:
    """A copy of the model without some heads.

    Args:
        model: a model with sites (see `multihead.read`).
        removed: numbers of the heads to take out, by the name of their site. A key/value head goes
            with the last head that reads it.
        batch: model inputs to compare on, a few texts of up to 64 tokens without padding.
        fills: by the name of a site, what the removed heads are taken for (see fill.py): it goes
            into W_O and its bias, which is made where the family has none. Without it they count as
            zero.

    Raises:
        SurgeryError: the copy doesn't give what the model gives whose heads are switched off: in
            float32 to 1e-5 of the largest value at each layer, given the same inputs, and to 1e-4
            at the end.
        ValueError: a site whose projections aren't known, or whose family can't have what is asked
            for.

    >>> from multihead import load_builtin
    >>> model, tokenizer = load_builtin()
    >>> smaller = remove_heads(model, {"model.layers.1.self_attn": [0]}, dict(tokenizer("Twelve heads.", return_tensors="pt")))
    >>> smaller.model.layers[1].self_attn.q_proj.out_features, model.model.layers[1].self_attn.q_proj.out_features
    (168, 192)
    """
    sites = {site.name: site for site in find_sites(model)}
    for name, heads in removed.items():
        if name not in sites:
            raise MultiheadError(
                f"removed names {name!r}, which holds no heads; this model's sites are "
                f"{', '.join(list(sites)[:4])}, ..."
            )
        wrong = [h for h in heads if not 0 <= h < sites[name].num_heads]
        if wrong:
            raise MultiheadError(
                f"removed[{name!r}]: head {wrong[0]} doesn't exist; expected 0 to"
                f" {sites[name].num_heads - 1}"
            )
    removed = {name: sorted(set(heads)) for name, heads in removed.items() if heads}
    batch = _short(batch)
    nothing = fills_of(sites.values(), removed, {}, "none")
    seen = _run(model, [sites[name] for name in removed], batch, removed, nothing)
    if unseen := [name for name in removed if name not in seen.left]:
        raise SurgeryError(
            f"{unseen[0]}: these inputs don't reach it, so a cut of it couldn't be proved; leave"
            " its heads, or give a batch that it reads"
        )
    smaller = copy.deepcopy(model)
    copies = {site.name: site for site in find_sites(smaller)}
    for name, heads in removed.items():
        _cut(smaller, copies[name], heads, seen, bias=fills is not None)
    set_required_attention(smaller)
    outs = [(name, smaller.get_submodule(sites[name].out_name)) for name in removed]
    _prove(seen, smaller, outs, batch, "zero")
    if fills is not None:
        for name, out in outs:
            put(out, sites[name], removed[name], fills[name])
        expected = _run(model, [sites[name] for name in removed], batch, removed, fills)
        _prove(expected, smaller, outs, batch, "foretold by the others")
    return smaller


def share_heads(model: nn.Module, found: Sequence[Shared], batch: Mapping[str, Any]) -> nn.Module:
    """A copy of the model with fewer key/value heads, as `sharing.share` found them.

    It is compared with the model in which each shared head stands as often as it is shared. Raises
    as `remove_heads` does.
    """
    batch = _short(batch)
    smaller = copy.deepcopy(model)
    sites = {site.name: site for site in find_sites(smaller)}
    for one in found:
        put_shared(sites[one.site], one)
    outs = [(one.site, sites[one.site].out) for one in found]
    seen = _run(smaller, [sites[one.site] for one in found], batch, {}, {})
    for one in found:
        layout = _layout(one.order, [group[0] for group in one.groups], one.reads)
        resize_heads(
            smaller, sites[one.site], replace(layout, fused_layout=seen.layouts.get(one.site))
        )
    set_required_attention(smaller)
    _prove(seen, smaller, outs, batch, "repeated")
    return smaller


def _prove(
    seen: Seen,
    smaller: nn.Module,
    outs: Sequence[tuple[str, nn.Module]],
    batch: Mapping[str, Any],
    what: str,
) -> None:
    """That the smaller model gives what was seen of the model whose heads are `what`.

    Layer by layer first, each on what reached it there: on its own stream, rounding that grows from
        layer to layer would have
    to be told from an error. Then on its own from end to end.
    """
    try:
        each = _run(smaller, outs, batch, {}, {}, hand_on=seen.left)
        end = _run(smaller, outs, batch, {}, {}).output
    except Exception as error:
        raise SurgeryError(
            f"{type(smaller).__name__}: its own code doesn't run with other numbers of heads"
            f" ({type(error).__name__}: {error}), so it can't be pruned, nor its keys and values"
            " shared"
        ) from error
    for name, right in seen.left.items():
        given = each.left.get(name, [])
        if len(given) != len(right):
            raise SurgeryError(
                f"{name}: runs {len(given)} times in the model without the heads, {len(right)}"
                f" times in the one whose heads are {what}; this family can't be pruned"
            )
        for a, b in zip(right, given, strict=True):
            _compare(name, a, b, what, tolerance(a.dtype, 0.1))
    for a, b in zip(_tensors(seen.output), _tensors(end)):
        _compare("the model's output", a, b, what, tolerance(a.dtype))


def _short(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its texts cut at 64 tokens."""
    if "input_ids" not in batch or "pixel_values" in batch:
        return batch
    long = batch["input_ids"].shape
    return {
        key: value[:, :LENGTH] if getattr(value, "shape", None) == long else value
        for key, value in batch.items()
    }


def _cut(model: nn.Module, site: Site, removed: Sequence[int], seen: Seen, *, bias: bool) -> None:
    heads = [h for h in range(site.num_heads) if h not in removed]
    before = head_layout(site)
    kv = sorted({before.reads[h] for h in heads})
    resize_heads(
        model,
        site,
        replace(
            _layout(heads, kv, [kv.index(before.reads[h]) for h in heads]),
            fused_layout=seen.layouts.get(site.name),
            has_bias=bias,
            num_returns=None if heads else seen.returns[site.name],
        ),
    )


def _layout(heads: Sequence[int], kv_heads: Sequence[int], reads: Sequence[int]) -> HeadLayout:
    return HeadLayout(tuple(heads), tuple(kv_heads), tuple(reads), tuple(heads), len(heads))


def _run(
    model: nn.Module,
    sites: Sequence[Any],
    batch: Mapping[str, Any],
    off: Mapping[str, Sequence[int]],
    fills: Mapping[str, Fill],
    hand_on: Mapping[str, Sequence[Tensor]] | None = None,
) -> Seen:
    """One pass with `fills` for the heads `off`; `sites` are Sites, or pairs of a name and a
    projection.

    What leaves a site goes on, or what `hand_on` has of it in its place (layers are compared with
    the same attention then).
    """
    seen = Seen()

    def keep(name: str) -> Any:
        def left(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            calls = seen.left.setdefault(name, [])
            calls.append(out.detach())
            others = (hand_on or {}).get(name, ())
            other = others[len(calls) - 1] if len(calls) <= len(others) else out
            return other if other.shape == out.shape else out

        return left

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(evaluation(model))
        stack.enter_context(torch.random.fork_rng([]))
        torch.manual_seed(0)  # some hide parts of a picture at random, even then
        whole = all(isinstance(site, Site) for site in sites)
        if (whole or hand_on is not None) and any(map(uses_interface, model.modules())):
            stack.enter_context(implementation(model, NAME))
        if whole:
            stack.enter_context(without(sites, off, fills))
        for site in sites:
            name, out = (site.name, site.out) if isinstance(site, Site) else site
            if isinstance(site, Site):
                stack.enter_context(_look(site, seen))
            stack.callback(out.register_forward_hook(keep(name)).remove)
        seen.output = model(**batch)
    return seen


@contextmanager
def _look(site: Site, seen: Seen) -> Iterator[None]:
    """Which layout a fused projection has, by which of its rows are the values that attention got;
    and what the site returns.
    """
    fused: dict[str, Tensor] = {}

    def returned(module: nn.Module, args: Any, out: Any) -> None:
        many = isinstance(out, tuple)
        seen.returns[site.name] = (
            None
            if many and any(isinstance(x, Tensor) for x in out[1:])
            else len(out)
            if many
            else 0
        )

    def called(call: AttentionCall) -> Tensor:
        for layout in LAYOUTS:
            try:
                index = site.slices(layout).v.index
            except ValueError:
                continue
            rows = fused["out"].unflatten(0, (call.v.shape[0], -1))[..., index.to(call.v.device)]
            if rows.numel() == call.v.numel() and torch.equal(rows.transpose(1, 2), call.v):
                seen.layouts[site.name] = layout
                break
        return compute(call)

    try:
        found = site.slices()
    except ValueError:
        found = None
    with ExitStack() as stack:
        stack.callback(site.module.register_forward_hook(returned).remove)
        if found is not None and found.layout in LAYOUTS and uses_interface(site.module):
            module = found.v.module
            stack.callback(
                module.register_forward_hook(
                    lambda module, args, out: fused.__setitem__("out", out.detach().flatten(0, -2))
                ).remove
            )
            observers[site.module] = called
            stack.callback(observers.pop, site.module)
        yield


def _compare(name: str, a: Tensor, b: Tensor, what: str, allowed: float) -> None:
    if a.shape != b.shape:
        raise SurgeryError(
            f"{name}: the model without the heads gives {list(b.shape)}, the one whose heads are"
            f" {what} {list(a.shape)}; this family can't be pruned"
        )
    largest = float(a.abs().max()) if a.numel() else 0.0
    apart = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if not apart <= allowed * max(largest, 1e-30):
        raise SurgeryError(
            f"{name}: the model without the heads differs from the one whose heads are {what} by"
            f" {apart:.3g} of {largest:.3g} (allowed {allowed:g}), so nothing was pruned; the"
            " layout of its projections may not be what multihead/models/slices.py takes it for"
        )


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating tensors of an output that aren't a cache."""
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


def survey(
    model: nn.Module, sites: Sequence[Site], batch: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """The names of the sites that these inputs reach (text doesn't reach the part of a model that
    sees), and of those whose family can go without any head: modules of transformers that hand on
    nothing but their output.
    """
    seen = _run(model, sites, batch, {}, {})
    alone = {name for name, returns in seen.returns.items() if returns is not None}
    return set(seen.left), {
        site.name for site in sites if site.name in alone and uses_interface(site.module)
    }
