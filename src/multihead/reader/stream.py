"""The residual stream of a causal model, up to the logits: what a head's update adds to the logit of the next token.

With the final norm frozen the logits are linear in the stream, so each head adds its own part (direct logit attribution,
Elhage et al. 2021). That holds only where what an output projection returns is added to the stream as it is, and
only a norm and a Linear stand behind the stream. Both are looked at in the first pass; where they don't hold, `logit` is
empty and says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..models.sites import Site
from .check import rows_to_compare, tolerance
from .rows import Text

if TYPE_CHECKING:
    from .observer import Observer
    from .session import Reading

ROWS = 16  # of the stream that are looked at in the first pass
CHUNK = 4096  # rows whose next tokens' columns of W_U are held at once


def _rounding(dtype: torch.dtype) -> float:
    return max(1e-5, 10 * tolerance(dtype))  # norms work in float32 inside, whatever the model's dtype


class Norm:
    """A norm as a linear map once its scale is frozen: y = scale * (x - mean, or x) * gain + shift."""

    @torch.no_grad()
    def __init__(self, module: nn.Module, width: int, like: Tensor) -> None:
        some = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).to(like)
        forward = type(module).forward  # not __call__: somebody's hooks would take this for the stream
        up, down = forward(module, some).double(), forward(module, -some).double()
        self.shift = ((up + down) / 2)[0]
        self.right = False
        for self.centred in (False, True):
            x = self._in(some.double())
            self.gain = (up - self.shift)[0] / (x[0] / x[0].square().mean().sqrt())
            again = x[1] / x[1].square().mean().sqrt() * self.gain + self.shift
            if (again - up[1]).abs().max() <= _rounding(like.dtype) * up.abs().max():
                self.right = True
                return

    def _in(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    @torch.no_grad()
    def scale(self, x: Tensor, y: Tensor) -> Tensor | None:
        """What the norm multiplied each row of x `[B, L, D]` by to give y: `[B, L]`; None where it did something else."""
        parts = []
        for a, b in zip(x.split(CHUNK, -2), y.split(CHUNK, -2)):
            work = torch.promote_types(a.dtype, torch.float32)
            a, b = self._in(a.to(work)) * self.gain.to(work), b.to(work) - self.shift.to(work)
            square = a.square().sum(-1)
            factor = (a * b).sum(-1) / torch.where(square > 0, square, 1)
            if (a * factor[..., None] - b).abs().max() > _rounding(x.dtype) * b.abs().max():
                return None
            parts.append(factor)
        return torch.cat(parts, -1)

    def pull(self, w: Tensor) -> Tensor:
        """Columns behind the norm `[..., D]`, seen from before it."""
        w = w * self.gain.to(w.dtype)
        return w - w.mean(-1, keepdim=True) if self.centred else w


class Stream:
    """Follows the stream through each pass; what heads add to logits is kept, a number a row, until the scale is known."""

    def __init__(self, session: Reading) -> None:
        self.session = session
        self.why: dict[str, str] = {}  # site -> why it has no logit
        self.reason = ""  # why no site has
        self.looked = False
        self.rounding = 1e-5
        self.pending: list[tuple[Observer, Tensor, Tensor]] = []
        self.scale: Tensor | None = None
        self.norm: Norm | None = None
        self.seen: dict[str, list[Tensor]] = defaultdict(list)  # rows of the stream, by where, in the first pass
        model: Any = session.model
        self.head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self.layers = {site.name: layer for site in session.sites if (layer := _layer_of(site.name)) is not None}
        if type(self.head) is not nn.Linear or not self.head.weight.is_floating_point():
            self.reason = "the model has no linear unembedding"
            return
        width = self.head.in_features
        norms = [(name, m) for name, m in model.named_modules() if re.search("norm|ln_", name.rpartition(".")[2], re.IGNORECASE)
                 and not re.search(r"\.\d+\.", name) and getattr(getattr(m, "weight", None), "shape", None) == (width,)]
        if not norms:
            self.reason = "no norm was found in front of the unembedding"
            return
        self.norm_module = norms[-1][1]
        self.norm = Norm(self.norm_module, width, self.head.weight.detach())
        if not self.norm.right:
            self.reason = f"the norm in front of the unembedding ({type(self.norm_module).__name__}) isn't linear once frozen"

    def attach(self, stack: ExitStack) -> None:
        if self.reason:
            return
        stack.callback(self.norm_module.register_forward_hook(self._normed).remove)
        stack.callback(self.head.register_forward_hook(self._headed).remove)
        for name in dict.fromkeys(self.layers.values()):
            layer = self.session.model.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(self._look(f"in {name}"), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self._look(f"out {name}")).remove)
            for child_name, child in layer.named_children():
                stack.callback(child.register_forward_hook(self._look(f"child {name} {child_name}")).remove)

    def begin(self) -> None:
        self.pending, self.scale = [], None
        self.seen.clear()

    @property
    def idle(self) -> bool:
        session = self.session
        return bool(self.reason or session.check.passing or session.prefix or not session.counting)

    @torch.no_grad()
    def at_site(self, observer: Observer, given: Tensor, left: Tensor, text: Text, causal: bool) -> None:
        """A site's projection ran: `given` `[B, H, L, Ev]` entered it. Keep <u_i, W_U[next token]>, not yet scaled."""
        site = observer.site
        if self.idle or site.name in self.why:
            return
        if not self.looked:
            self.seen[f"left {site.name}"].append(self._some(left))
        if site.kind == "cross" or not causal or text.key_ids is None or text.before_ids is None or text.offset is None:
            return
        _, heads, length, width = given.shape
        keys = text.key_ids.shape[1]
        following = text.offset + 1 + torch.arange(length, device=given.device)
        inside = (following < keys) & (following > 0)
        at = following.clamp(0, keys - 1)
        ids, before = text.key_ids[:, at], text.before_ids[:, at]
        exists = inside & text.real & (ids >= 0) & (before >= 0)
        if not bool(exists.any()):
            return
        weight = observer.weights[0]
        parts = []
        assert self.norm is not None
        for i in range(0, length, CHUNK):
            columns = self.norm.pull(self.head.weight.detach()[ids[:, i : i + CHUNK].clamp(min=0)].to(given.dtype))
            back = (columns @ weight.to(given.dtype).T).unflatten(-1, (heads, width)).transpose(1, 2)
            parts.append((back * given[:, :, i : i + CHUNK]).sum(-1))
        self.pending.append((observer, torch.cat(parts, -1), exists))

    def finish(self, output: Any) -> None:
        """The pass is over: what was kept is scaled and counted."""
        pending, self.pending = self.pending, []
        if self.idle:
            return
        if not self.looked and pending:
            self._judge(output)
        if self.reason or self.scale is None:
            return
        for observer, direct, exists in pending:
            if observer.site.name in self.why or self.scale.shape != exists.shape:
                continue
            values = torch.where(exists[:, None], direct * self.scale[:, None], 0).double().sum(-1)
            rows = exists.sum(-1, keepdim=True).double().expand_as(values)
            observer.add("logit", values, rows, rows)

    # ---- hooks

    def _normed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.idle or self.norm is None:
            return
        self.scale = self.norm.scale(args[0].detach(), output.detach())
        if self.scale is None:
            self.reason = f"the norm in front of the unembedding ({type(module).__name__}) did more than scale"
        elif not self.looked:
            self.seen["norm"] += [self._some(args[0]), output.detach()[:, -1]]

    def _headed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not self.idle and not self.looked:
            self.seen["head"] += [args[0].detach()[:, -1], output.detach()[:, -1]]

    def _look(self, where: str) -> Any:
        def hook(module: nn.Module, args: Any, *more: Any) -> None:
            if self.idle or self.looked:
                return
            if where.startswith("in "):
                found = args[0] if args else more[0].get("hidden_states")
            else:
                found = more[0][0] if isinstance(more[0], tuple) and more[0] else more[0]
            if isinstance(found, Tensor) and found.ndim == 3:
                self.seen[where].append(self._some(found))

        return hook

    # ---- the look at the first pass

    def _judge(self, output: Any) -> None:
        self.looked = True
        seen, logits = self.seen, output.get("logits") if isinstance(output, dict) else None
        if len(seen["norm"]) != 2 or len(seen["head"]) != 2 or not torch.equal(seen["norm"][1], seen["head"][0]):
            self.reason = "what the unembedding reads isn't what the last norm gives"
        elif not isinstance(logits, Tensor) or not torch.equal(logits.detach()[:, -1].to(seen["head"][1]), seen["head"][1]):
            self.reason = "the model does something else to its logits behind the unembedding (a factor or a soft cap)"
        else:
            self._walk()
        self.seen.clear()

    def _walk(self) -> None:
        """From the last norm back: each layer returns its input, its sites' updates and one child's output, no more."""
        behind = self.seen["norm"][0]
        names = list(dict.fromkeys(self.layers.values()))
        broken = False
        for name in reversed(names):
            sites = [site for site, layer in self.layers.items() if layer == name]
            into, out = self.seen[f"in {name}"], self.seen[f"out {name}"]
            lefts = [left for site in sites for left in self.seen[f"left {site}"]]
            if len(into) != 1 or len(out) != 1 or not self._near(out[0], behind, behind):
                broken = True
                why = "it doesn't stand directly on the way to the unembedding"
            else:
                rest = out[0] - into[0] - sum(lefts)
                children = [c for key, found in self.seen.items() if key.startswith(f"child {name} ") for c in found]
                fits = any(self._near(rest, c, out[0]) for c in [torch.zeros_like(rest), *children] if c.shape == rest.shape)
                why = "" if fits else "what its projection returns isn't added to the stream as it is (a norm or a factor)"
                behind = into[0]
            if why or broken:
                self.why.update(dict.fromkeys(sites, why or "a later layer doesn't hand the stream on as it is"))
        for site in self.session.sites:
            if site.name not in self.layers:
                self.why[site.name] = "it stands in no list of layers"

    def _some(self, x: Tensor) -> Tensor:
        self.rounding = max(self.rounding, 4 * torch.finfo(x.dtype).eps)
        flat = x.detach().reshape(-1, x.shape[-1])
        return flat[rows_to_compare(None, 1, flat.shape[0], ROWS).to(x.device)].double()

    def _near(self, a: Tensor, b: Tensor, like: Tensor) -> bool:
        """Equal but for rounding, which goes with the size of the stream."""
        return a.shape == b.shape and bool((a - b).abs().max() <= self.rounding * like.abs().max())

    def reason_at(self, site: Site) -> str:
        return self.reason or self.why.get(site.name, "")


def _layer_of(name: str) -> str | None:
    """The module path up to its last number: "model.layers.12.self_attn" -> "model.layers.12"."""
    found = re.match(r"(.*\.\d+)\.", f"{name}.")
    return found[1] if found else None
