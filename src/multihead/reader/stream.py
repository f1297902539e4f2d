"""The residual stream of a causal model, up to the logits: what a head's update adds to the logit
of the next token.

With the final norm frozen the logits are linear in the stream, so each head adds its own part
(direct logit attribution, Elhage et al. 2021). That holds only where what an output projection
returns is added to the stream as it is, and only a norm and a Linear stand behind the stream. Both
are looked at in the first pass; where they don't hold, `logit` is empty and says why.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..models.site import Site
from .context import Text
from .frozen_norm import CHUNK, FrozenNorm
from .verify import rows_to_compare

if TYPE_CHECKING:
    from .observer import Observer
    from .session import Reading

ROWS = 16  # of the stream that are looked at in the first pass
FAINT = "its updates are too small beside the stream to see where they go"


class Stream:
    """Follows the stream through each pass; what heads add to logits is kept, a number a row, until
    the scale is known.
    """

    def __init__(self, session: Reading) -> None:
        self.session = session
        self.why: dict[str, str] = {}  # site -> why it has no logit
        self.reason = ""  # why no site has
        self.looked = self.faint = False
        self.rounding = 1e-5
        self.pending: list[tuple[Observer, Tensor, Tensor]] = []
        self.rooms: list[Tensor] = []
        # of the last pass's last row, whose next token is known once a pass goes on from its cache
        self.last: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # site -> what entered W_O [B, H, 1, Ev], whether it counts [B, 1]
        self.last_scale: Tensor | None = None  # [B, 1]
        self.scale: Tensor | None = None
        self.norm: FrozenNorm | None = None
        self.seen: dict[str, list[Tensor]] = defaultdict(
            list
        )  # rows of the stream, by where, in the first pass
        model: Any = session.model
        self.head: Any = (
            model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        )
        # a site's layer, and all layers of the lists in which sites stand
        self.layers = {
            site.name: layer
            for site in session.sites
            if (layer := _layer_of(site.name)) is not None
        }
        lists = dict.fromkeys(layer.rpartition(".")[0] for layer in self.layers.values())
        self.order = [
            f"{name}.{number}"
            for name in lists
            for number, _ in session.model.get_submodule(name).named_children()
        ]
        if type(self.head) is not nn.Linear or not self.head.weight.is_floating_point():
            self.reason = "the model has no linear unembedding"
            return
        width = self.head.in_features
        norms = [
            (name, m)
            for name, m in model.named_modules()
            if re.search("norm|ln_", name.rpartition(".")[2], re.IGNORECASE)
            and not re.search(r"\.\d+\.", name)
            and getattr(getattr(m, "weight", None), "shape", (width,)) == (width,)
        ]
        if not norms:
            self.reason = "no norm was found in front of the unembedding"
            return
        self.norm_module = norms[-1][1]
        self.norm = FrozenNorm(self.norm_module, width, self.head.weight.detach())
        if not self.norm.right:
            self.reason = (
                f"the norm in front of the unembedding ({type(self.norm_module).__name__}) isn't"
                " linear once frozen"
            )

    def attach(self, stack: ExitStack) -> None:
        if self.reason:
            return
        stack.callback(self.norm_module.register_forward_hook(self._normed).remove)
        stack.callback(self.head.register_forward_hook(self._headed).remove)
        for name in self.order:
            layer = self.session.model.get_submodule(name)
            stack.callback(
                layer.register_forward_pre_hook(self._look(f"in {name}"), with_kwargs=True).remove
            )
            stack.callback(layer.register_forward_hook(self._look(f"out {name}")).remove)
            within = [f"{site}." for site, at in self.layers.items() if at == name]
            for child_name, child in layer.named_children():
                if any(site.startswith(f"{name}.{child_name}.") for site in within):
                    continue  # what it gives is its site's update already
                stack.callback(
                    child.register_forward_hook(self._look(f"child {name} {child_name}")).remove
                )

    def begin(self) -> None:
        self.pending, self.rooms, self.scale = [], [], None
        self.seen.clear()

    @property
    def idle(self) -> bool:
        session = self.session
        return bool(self.reason or session.check.passing or session.prefix or not session.counting)

    @property
    def blind(self) -> bool:
        """Nothing to be seen: idle, or only a part of the model was called."""
        return self.idle or not self.session.inside

    @torch.no_grad()
    def at_site(
        self, observer: Observer, given: Tensor, left: Tensor, text: Text, causal: bool
    ) -> None:
        """A site's projection ran: `given` `[B, H, L, Ev]` entered it. Keep <u_i, W_U[next token]>,
        not yet scaled.
        """
        site = observer.site
        if self.blind or site.name in self.why:
            return
        if not self.looked:
            self.seen[f"left {site.name}"].append(self._some(left))
        if (
            site.kind == "cross"
            or not causal
            or text.key_ids is None
            or text.before_ids is None
            or text.offset is None
        ):
            return
        start, real, before_this = text.offset, text.real, self.last.get(site.name)
        self.last[site.name] = given[:, :, -1:].clone(), real[:, -1:]
        if (
            text.continues
            and before_this is not None
            and before_this[0].shape == given[:, :, -1:].shape
        ):
            start, given, real = (
                start - 1,
                torch.cat([before_this[0], given], 2),
                torch.cat([before_this[1], real], 1),
            )
        _, heads, length, width = given.shape
        keys = text.key_ids.shape[1]
        following = start + 1 + torch.arange(length, device=given.device)
        inside = (following < keys) & (following > 0)
        at = following.clamp(0, keys - 1)
        ids, before = text.key_ids[:, at], text.before_ids[:, at]
        counted = real & torch.nn.functional.pad(
            real[:, 1:], (0, 1)
        )  # what comes next is text that is read, too
        exists = inside & counted & (ids >= 0) & (before >= 0)
        if not bool(exists.any()):
            return
        work = torch.promote_types(given.dtype, torch.float32)
        weight, kept = observer.weights[0].to(work), self._room(given[..., 0].to(work))
        assert self.norm is not None
        step = max(1, CHUNK // len(ids))
        for i in range(0, length, step):
            columns = self.norm.pull(
                self.head.weight.detach()[ids[:, i : i + step].clamp(min=0)].to(work)
            )
            back = (columns @ weight.T).unflatten(-1, (heads, width)).transpose(1, 2)
            torch.sum(back * given[:, :, i : i + step], -1, out=kept[:, :, i : i + step])
        if self.pending and torch.equal(self.pending[-1][2], exists):
            exists = self.pending[-1][2]
        self.pending.append((observer, kept, exists))

    def _room(self, like: Tensor) -> Tensor:
        """Where a site's numbers, `[B, H, L]`, are kept until the pass is over: side by side with
        those of the other sites, for small tensors kept between large ones that come and go leave
        holes in the memory.
        """
        if not self.rooms or self.rooms[-1].shape != like.shape:
            self.rooms = list(like.new_empty(max(1, len(self.layers)), *like.shape))
        return self.rooms.pop()

    def finish(self, output: Any) -> None:
        """The pass is over: what was kept is scaled and counted."""
        pending, self.pending, self.rooms = self.pending, [], []
        if self.idle:
            return
        if not self.looked and pending:
            self._judge(output)
        if self.reason or self.scale is None or not self.looked:
            return
        before, self.last_scale = self.last_scale, self.scale[:, -1:]
        for observer, direct, exists in pending:
            scale = self.scale
            if (
                before is not None
                and len(before) == len(scale)
                and exists.shape[1] == scale.shape[1] + 1
            ):
                scale = torch.cat([before, scale], 1)
            if observer.site.name in self.why or scale.shape != exists.shape:
                continue
            values = torch.where(exists[:, None], direct * scale[:, None], 0).double().sum(-1)
            rows = exists.sum(-1, keepdim=True).double().expand_as(values)
            observer.add("logit", values, rows, rows)

    # ---- hooks

    def _normed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.blind or self.norm is None:
            return
        self.scale = self.norm.scale(args[0].detach(), output.detach())
        if self.scale is None:
            self.reason = (
                f"the norm in front of the unembedding ({type(module).__name__}) did more than"
                " scale"
            )
        elif not self.looked:
            self.seen["norm"] += [self._some(args[0]), output.detach()[:, -1]]

    def _headed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not self.blind and not self.looked:
            self.seen["head"] += [args[0].detach()[:, -1], output.detach()[:, -1]]

    def _look(self, where: str) -> Any:
        def hook(module: nn.Module, args: Any, *more: Any) -> None:
            if self.blind or self.looked:
                return
            if where.startswith("in "):
                found = args[0] if args else more[0].get("hidden_states")
            else:
                found = more[0][0] if isinstance(more[0], tuple) and more[0] else more[0]
            if isinstance(found, Tensor) and found.ndim in (
                2,
                3,
            ):  # some flatten texts and rows into one
                self.seen[where].append(self._some(found))

        return hook

    # ---- the look at the first pass

    def _judge(self, output: Any) -> None:
        faint = self._faint()
        self.faint = bool(faint) and all(faint.values())
        if self.faint:  # a training that begins with zeros: to be looked at again
            return
        self.looked = True
        seen, logits = self.seen, output.get("logits") if isinstance(output, dict) else None
        if (
            len(seen["norm"]) != 2
            or len(seen["head"]) != 2
            or not torch.equal(seen["norm"][1], seen["head"][0])
        ):
            self.reason = "what the unembedding reads isn't what the last norm gives"
        elif not isinstance(logits, Tensor) or not torch.equal(
            logits.detach()[:, -1].to(seen["head"][1]), seen["head"][1]
        ):
            self.reason = (
                "the model does something else to its logits behind the unembedding (a factor or a"
                " soft cap)"
            )
        else:
            self._walk()
            self.why |= {
                site: FAINT for site, small in faint.items() if small and site not in self.why
            }
        self.seen.clear()

    def _walk(self) -> None:
        """From the last norm back: each layer returns its input, its sites' updates and what its
        other children gave, no more.
        """
        behind, broken = self.seen["norm"][0], False
        for name in reversed(self.order):
            sites = [site for site, layer in self.layers.items() if layer == name]
            into, out = self.seen[f"in {name}"], self.seen[f"out {name}"]
            lefts = [left for site in sites for left in self.seen[f"left {site}"]]
            children = [
                child
                for key, found in self.seen.items()
                if key.startswith(f"child {name} ")
                for child in found
            ]
            if len(into) != 1 or len(out) != 1 or not self._adds_up(out[0], [behind]):
                why = "it doesn't stand directly on the way to the unembedding"
            else:
                behind = into[0]
                some = (more for n in range(3) for more in itertools.combinations(children, n))
                fits = any(self._adds_up(out[0], [into[0], *lefts, *more]) for more in some)
                why = (
                    ""
                    if fits
                    else (
                        "what its projection returns isn't added to the stream as it is (a norm or"
                        " a factor)"
                    )
                )
            broken |= bool(why)  # then nobody knows what becomes of what earlier layers added
            if broken:
                self.why.update(
                    dict.fromkeys(sites, why or "a later layer doesn't hand the stream on as it is")
                )
        for site in self.session.sites:
            if site.name not in self.layers:
                self.why[site.name] = "it stands in no list of layers"

    def _faint(self) -> dict[str, bool]:
        """Sites seen: whether their updates are too small beside the stream for a factor on them to
        be seen.
        """
        found = {}
        for site, layer in self.layers.items():
            for left, out in zip(self.seen[f"left {site}"], self.seen[f"out {layer}"]):
                visible = left.shape != out.shape or bool(
                    (left.abs() > 8 * self.rounding * (left.abs() + out.abs())).any()
                )
                found[site] = not visible
        return found

    def _some(self, x: Tensor) -> Tensor:
        self.rounding = max(self.rounding, 2 * torch.finfo(x.dtype).eps)
        flat = x.detach().reshape(-1, x.shape[-1])
        return flat[rows_to_compare(None, 1, flat.shape[0], ROWS).to(x.device)].double()

    def _adds_up(self, total: Tensor, parts: list[Tensor]) -> bool:
        """Each number by itself, but for rounding: beside a stream of huge numbers any factor on a
        small one would pass.
        """
        if any(part.shape != total.shape for part in parts):
            return False
        size = total.abs() + sum(part.abs() for part in parts)
        return bool(((total - sum(parts)).abs() <= self.rounding * size).all())

    def reason_at(self, site: Site) -> str:
        if self.looked or self.reason or site.name in self.why:
            return self.reason or self.why.get(site.name, "")
        if self.session.causal is False:
            return "it isn't causal: no token comes next"
        if not self.session.documents:
            return "only a part of the model was called"
        return FAINT if self.faint else ""


def _layer_of(name: str) -> str | None:
    """The module path up to its last number: "model.layers.12.self_attn" -> "model.layers.12"."""
    found = re.match(r"(.*\.\d+)\.", f"{name}.")
    return found[1] if found else None
