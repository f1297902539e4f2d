"""`ResidualStream`: follows the residual stream of a causal model up to the logits, for what each
head's update adds to the logit of the next token.

With the final norm frozen the logits are linear in the stream, so each head adds its own part
(direct logit attribution, Elhage et al. 2021). That holds only where what an output projection
returns is added to the stream as it is, and only a norm and a Linear follow the stream. Both are
checked in the first pass; where they don't hold, `logit` is empty and the reason is reported.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.instrument import ModuleHook, PassInputs, Tap
from ..models.introspect import inner_model, list_inner_models
from ..models.site import Site
from ..models.slices import has_plain_weight, in_features
from ..models.weights import INEXACT, describe_state, read_projection
from .accumulate import PassSettings, SiteCall, SiteRecord
from .context import TokenContext
from .frozen_norm import CHUNK, FrozenNorm
from .statistics.base import FAINT
from .verify import rows_to_compare

LARGEST = 1 << 28  # numbers of an unembedding that is measured
ROWS = 16  # of the stream that are compared in the first pass


class _Direct(NamedTuple):
    """Contributions of a site's heads to the logits of the next tokens, before the final norm's
    scale.
    """

    record: SiteRecord
    values: Tensor  # [B, H, L]
    exists: Tensor  # bool [B, L]


class ResidualStream(Tap):
    """Adds `logit` at the end of each pass, once the scale of the final norm is known.

    Attributes:
        reason: why no site of the model has a `logit`, "" where some may.
        checked: whether a pass has shown on which way updates reach the logits.
        head, norm: the unembedding and the norm before it.
    """

    def __init__(self, model: Any, sites: Sequence[Site], settings: PassSettings) -> None:
        self.sites, self.settings = sites, settings
        self.inner = inner_model(model)
        self.reasons: dict[str, str] = {}  # site -> why it has no logit
        self.checked = self.faint = self.inside = self.was_called = False
        self.rounding = 1e-5
        self.scale: Tensor | None = None  # [B, L]
        self.norm: FrozenNorm | None = None
        self._pending: list[_Direct] = []
        self._buffers: list[Tensor] = []
        # of the last query of the last pass, whose next token is known once a pass continues from
        # its cache: site -> what entered W_O [B, H, 1, Ev], and whether it counts [B, 1]
        self._last: dict[str, tuple[Tensor, Tensor]] = {}
        self._last_scale: Tensor | None = None  # [B, 1]
        # rows of the stream by place, in the first pass
        self._seen: dict[str, list[Tensor]] = defaultdict(list)
        get_head = getattr(self.inner, "get_output_embeddings", lambda: None)
        self.head: Any = get_head()
        self.unembedding: Tensor | None = None  # its matrix [V, D], where that isn't a parameter
        self._head_state: list[Any] = []  # of the module that it was read from
        # a site's layer, and all layers of the lists that hold sites
        self._layer_of = {s.name: layer for s in sites if (layer := _layer_of(s.name)) is not None}
        lists = dict.fromkeys(layer.rpartition(".")[0] for layer in self._layer_of.values())
        self._layers = [
            f"{name}.{number}"
            for name in lists
            for number, _ in model.get_submodule(name).named_children()
        ]
        self.reason = self._find_norm()

    def _find_norm(self) -> str:
        """Find the norm before the unembedding; a reason where there is none."""
        if self.head is None and len(list_inner_models(self.inner)) > 1:
            return "there are several models in it; a reading of one of them alone may have it"
        if not hasattr(self.head, "in_features"):
            missing = "no language-modelling head"
            what = missing if self.head is None else f"it is a {type(self.head).__name__}"
            return f"the model has no linear unembedding: {what}"
        width = in_features(self.head)
        norms = [
            module
            for name, module in self.inner.named_modules()
            if re.search("norm|ln_", name.rpartition(".")[2], re.IGNORECASE)
            and not re.search(r"\.\d+\.", name)
            and getattr(getattr(module, "weight", None), "shape", (width,)) == (width,)
        ]
        if not norms:
            return "no norm was found before the unembedding"
        self._norm_module = norms[-1]
        if not has_plain_weight(self.head) or hasattr(self.head, "_hf_hook"):
            outputs = int(getattr(self.head, "out_features", 0))
            if width * outputs > LARGEST:
                return (
                    f"the unembedding ({type(self.head).__name__}) isn't a Linear with weights in"
                    " memory, and its matrix is too large to be measured"
                )
            found = read_projection(self.head)
            if found.error > INEXACT:
                return f"the unembedding ({type(self.head).__name__}) isn't linear"
            self.unembedding = found.weight.T.contiguous()
            self._head_state = describe_state(self.head)
        like = self.head.weight if self.unembedding is None else self.unembedding
        self.norm = FrozenNorm(self._norm_module, width, like.detach())
        if self.norm.is_linear:
            return ""
        return (
            f"the norm before the unembedding ({type(self._norm_module).__name__}) isn't linear"
            " with its scale frozen"
        )

    # ---- the tap

    def hooks(self, model: nn.Module, sites: Sequence[Site]) -> list[ModuleHook]:
        if self.reason:
            return []
        hooks = [
            ModuleHook(self.inner, before=self._called, after=self._returned, first=True),
            ModuleHook(self._norm_module, after=self._norm_ran),
            ModuleHook(self.head, after=self._head_ran),
        ]
        if self.checked:
            return hooks
        for name in self._layers:
            layer = model.get_submodule(name)
            hooks.append(
                ModuleHook(
                    layer,
                    before=functools.partial(self._layer_called, name),
                    after=self._see_output(f"out {name}"),
                )
            )
            within = [f"{site}." for site, at in self._layer_of.items() if at == name]
            for child_name, child in layer.named_children():
                # what a child with a site returns is the site's update already
                if not any(site.startswith(f"{name}.{child_name}.") for site in within):
                    after = self._see_output(f"child {name} {child_name}")
                    hooks.append(ModuleHook(child, after=after))
        return hooks

    def begin_pass(self, inputs: PassInputs) -> None:
        self.clear()
        if self.unembedding is not None and self._head_state != describe_state(self.head):
            self._head_state = describe_state(self.head)  # an adapter of it was switched
            self.unembedding = read_projection(self.head).weight.T.contiguous()
        self.inside = False

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model inside all wrappers is called, perhaps several times a pass."""
        self.clear()
        self.inside = self.was_called = True

    def _returned(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        self.inside = False
        pending, self._pending, self._buffers = self._pending, [], []
        if self._is_idle:
            return
        if not self.checked and pending:
            self._check(outputs)
        if self.reason or self.scale is None:
            return
        before, self._last_scale = self._last_scale, self.scale[:, -1:]
        if not self.checked:  # no query has a next token yet, as in a pass of one token
            return
        for record, values, exists in pending:
            scale = self.scale
            longer = exists.shape[1] == scale.shape[1] + 1
            if before is not None and len(before) == len(scale) and longer:
                scale = torch.cat([before, scale], 1)
            if record.site.name in self.reasons or scale.shape != exists.shape:
                continue
            total = torch.where(exists[:, None], values * scale[:, None], 0).double().sum(-1)
            rows = exists.sum(-1, keepdim=True).double().expand_as(total)
            record.add("logit", total, rows, rows)

    def clear(self) -> None:
        """Forget the pass under way."""
        self._pending, self._buffers, self.scale = [], [], None
        self._seen.clear()

    def close(self) -> None:
        """Forget the last pass, too."""
        self.clear()
        self._last.clear()

    @property
    def unembed(self) -> Tensor:
        """W_U `[V, D]`."""
        if self.unembedding is not None:
            return self.unembedding
        weight: Tensor = self.head.weight
        return weight.detach()

    @property
    def _is_idle(self) -> bool:
        return bool(self.reason or self.settings.prefix or not self.settings.counting)

    @property
    def _is_blind(self) -> bool:
        """Whether there is nothing to see: idle, or only a part of the model was called."""
        return self._is_idle or not self.inside

    # ---- sites

    @torch.no_grad()
    def site_was_read(self, record: SiteRecord, call: SiteCall) -> None:
        """A site's projection ran: keep <u_i, W_U[next token]>, not scaled yet."""
        site, context, entered = record.site, call.context, call.entered
        if self._is_blind or site.name in self.reasons:
            return
        if not self.checked:
            self._seen[f"update {site.name}"].append(self._some(call.y))
        ids_known = context.key_ids is not None and context.previous_ids is not None
        if site.kind == "cross" or not call.rows.causal or not ids_known or context.offset is None:
            return
        start, real, last = context.offset, context.query_valid, self._last.get(site.name)
        self._last[site.name] = entered[:, :, -1:].clone(), real[:, -1:]
        if context.repeats and last is not None:  # the next token of the last query is known now
            real = torch.cat(
                [real[:, : context.repeats - 1], last[1], real[:, context.repeats :]], 1
            )
        elif context.continues and last is not None and last[0].shape == entered[:, :, -1:].shape:
            start -= 1
            entered = torch.cat([last[0], entered], 2)
            real = torch.cat([last[1], real], 1)
        ids, exists = _next_tokens(context, real, start)
        if not bool(exists.any()):
            return
        values = self._direct(record, entered, ids)
        if self._pending and torch.equal(self._pending[-1].exists, exists):
            exists = self._pending[-1].exists
        self._pending.append(_Direct(record, values, exists))

    def _direct(self, record: SiteRecord, entered: Tensor, ids: Tensor) -> Tensor:
        """<u_i, W_U[ids_i]> through the frozen norm, `[B, H, L]`."""
        assert self.norm is not None
        _, heads, length, width = entered.shape
        work = torch.promote_types(entered.dtype, torch.float32)
        weight, values = record.out_weights.weight.to(work), self._buffer(entered[..., 0].to(work))
        step = max(1, CHUNK // len(ids))
        for i in range(0, length, step):
            rows = self.unembed[ids[:, i : i + step].clamp(min=0)]
            back = self.norm.pull_back(rows.to(work)) @ weight.T
            back = back.unflatten(-1, (heads, width)).transpose(1, 2)
            torch.sum(back * entered[:, :, i : i + step], -1, out=values[:, :, i : i + step])
        return values

    def _buffer(self, like: Tensor) -> Tensor:
        """Room for a site's values `[B, H, L]` until the end of the pass.

        All sites' are allocated as one tensor: small tensors kept between large temporary ones
        would fragment the memory.
        """
        if not self._buffers or self._buffers[-1].shape != like.shape:
            self._buffers = list(like.new_empty(max(1, len(self._layer_of)), *like.shape))
        return self._buffers.pop()

    # ---- hooks

    def _norm_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if self._is_blind or self.norm is None:
            return
        self.scale = self.norm.scale(args[0].detach(), output.detach())
        if self.scale is None:
            name = type(self._norm_module).__name__
            self.reason = f"the norm before the unembedding ({name}) does more than scale"
        elif not self.checked:
            self._seen["norm"] += [self._some(args[0]), output.detach()[:, -1]]

    def _head_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if not self._is_blind and not self.checked:
            self._seen["head"] += [args[0].detach()[:, -1], output.detach()[:, -1]]

    def _layer_called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._see(f"in {name}", args[0] if args else kwargs.get("hidden_states"))

    def _see_output(self, place: str) -> Callable[..., None]:
        def after(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._see(place, output[0] if isinstance(output, tuple) and output else output)

        return after

    def _see(self, place: str, x: Any) -> None:
        # some models flatten sequences into one axis
        if not self.checked and not self._is_blind and isinstance(x, Tensor) and x.ndim in (2, 3):
            self._seen[place].append(self._some(x))

    def _some(self, x: Tensor) -> Tensor:
        """Some rows of x, float64."""
        self.rounding = max(self.rounding, 2 * torch.finfo(x.dtype).eps)
        flat = x.detach().reshape(-1, x.shape[-1])
        return flat[rows_to_compare(None, 1, flat.shape[0], ROWS).to(x.device)].double()

    # ---- the check in the first pass

    def _check(self, outputs: Any) -> None:
        """Find the sites whose updates reach the logits unchanged but for the norm."""
        faint = self._find_faint()
        self.faint = bool(faint) and all(faint.values())
        if self.faint:  # a training that begins with zeros: check a later pass
            return
        self.checked = True
        seen, logits = self._seen, self._find_logits(outputs)
        plain = len(seen["norm"]) == 2 and len(seen["head"]) == 2
        if not plain or not torch.equal(seen["norm"][1], seen["head"][0]):
            self.reason = "the input of the unembedding isn't the output of the last norm"
        elif not isinstance(logits, Tensor) or not torch.equal(
            logits.detach()[:, -1].to(seen["head"][1]), seen["head"][1]
        ):
            self.reason = (
                "the model changes its logits after the unembedding (a factor or soft cap)"
            )
        else:
            self._walk_back()
            self.reasons |= {
                site: FAINT for site, small in faint.items() if small and site not in self.reasons
            }
        self._seen.clear()

    def _find_logits(self, outputs: Any) -> Any:
        if isinstance(outputs, dict):
            return outputs.get("logits")
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors = (part for part in parts if isinstance(part, Tensor) and part.ndim == 3)
        return next((x for x in tensors if x.shape[-1] == self.head.out_features), None)

    def _walk_back(self) -> None:
        """From the last norm back: each layer must return the sum of its input, its sites' updates
        and outputs of its other children.
        """
        after, broken = self._seen["norm"][0], False
        for name in reversed(self._layers):
            sites = [site for site, layer in self._layer_of.items() if layer == name]
            into, out = self._seen[f"in {name}"], self._seen[f"out {name}"]
            updates = [update for site in sites for update in self._seen[f"update {site}"]]
            children = [
                child
                for place, outputs in self._seen.items()
                if place.startswith(f"child {name} ")
                for child in outputs
            ]
            if len(into) != 1 or len(out) != 1 or not self._adds_up(out[0], [after]):
                why = "its layer isn't directly on the way to the unembedding"
            else:
                after = into[0]
                chosen = (c for n in range(3) for c in itertools.combinations(children, n))
                fits = any(self._adds_up(out[0], [into[0], *updates, *more]) for more in chosen)
                why = (
                    ""
                    if fits
                    else (
                        "its update isn't added to the residual stream as it is (a norm or a"
                        " factor)"
                    )
                )
            broken |= bool(why)  # then what becomes of earlier updates is unknown
            if broken:
                why = why or "a later layer doesn't pass the residual stream on as it is"
                self.reasons.update(dict.fromkeys(sites, why))
        for site in self.sites:
            if site.name not in self._layer_of:
                self.reasons[site.name] = "it is in no list of layers"

    def _find_faint(self) -> dict[str, bool]:
        """Sites seen, and whether their updates are too small for a factor on them to be seen."""
        faint = {}
        for site, layer in self._layer_of.items():
            for update, out in zip(self._seen[f"update {site}"], self._seen[f"out {layer}"]):
                if update.shape == out.shape:
                    size = update.abs() + out.abs()
                    faint[site] = not bool((update.abs() > 8 * self.rounding * size).any())
                else:
                    faint[site] = False
        return faint

    def _adds_up(self, total: Tensor, parts: list[Tensor]) -> bool:
        """Compare value by value: relative to a stream with huge values any factor would pass."""
        if any(part.shape != total.shape for part in parts):
            return False
        size = total.abs() + sum(part.abs() for part in parts)
        return bool(((total - sum(parts)).abs() <= self.rounding * size).all())

    def reason_at(self, site: Site, *, causal: bool | None) -> str:
        """Why the site has no `logit`; "" where no token followed a query."""
        if self.checked or self.reason or site.name in self.reasons:
            return self.reason or self.reasons.get(site.name, "")
        if causal is False:
            return "it isn't causal: no token comes next"
        if not self.was_called:
            return "only a part of the model was called"
        return FAINT if self.faint else ""


def _next_tokens(context: TokenContext, real: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Ids of the tokens that follow the queries `start`, ..., and whether they are tokens that are
    read, too; `[B, L]` both.
    """
    assert context.key_ids is not None and context.previous_ids is not None
    length, keys = real.shape[1], context.key_ids.shape[1]
    following = start + 1 + torch.arange(length, device=real.device)
    inside = (following < keys) & (following > 0)
    index = following.clamp(0, keys - 1)
    ids, before = context.key_ids[:, index], context.previous_ids[:, index]
    counted = real & torch.nn.functional.pad(real[:, 1:], (0, 1))
    return ids, inside & counted & (ids >= 0) & (before >= 0)


def _layer_of(name: str) -> str | None:
    """The module path up to its last number: "model.layers.12.self_attn" -> "model.layers.12"."""
    match = re.match(r"(.*\.\d+)\.", f"{name}.")
    return match[1] if match else None
