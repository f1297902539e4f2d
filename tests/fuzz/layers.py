"""Layers and caches: random histories of steps, padding, crops, reorders, copies, failed calls and
modes of torch against one pass without a cache over the tokens that each sequence then has.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

import multihead
from fuzz.draw import TOLERANCE, Draw
from fuzz.operator import close
from multihead import Cache, LatentAttention, MultiHeadAttention, WindowCache
from multihead.layers import ALiBi, RelativeBias, Rotary, T5Bias
from multihead.masks import causal, window


def draw_layer(draw: Draw, dtype: torch.dtype) -> nn.Module:
    layer = draw_latent(draw) if draw.maybe(0.3) else draw_heads(draw)
    layer.to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw.normal(*parameter.shape, dtype=dtype))
            if parameter.ndim == 2:
                parameter.mul_(0.5)
    return layer.eval()


def draw_latent(draw: Draw) -> LatentAttention:
    layer = LatentAttention(
        draw.randint(2, 12),
        draw.randint(1, 4),
        kv_latent_dim=draw.randint(1, 8),
        rotary_dim=2 * draw.randint(1, 3),
        head_dim=draw.randint(1, 8),
        v_head_dim=draw.choice((None, draw.randint(1, 8))),
        q_latent_dim=draw.choice((None, draw.randint(1, 8))),
        bias=draw.maybe(),
        norm=draw.choice(("rms", "layer", None)),
    )
    layer.form = draw.choice(("auto", "auto", "absorbed", "expanded"))
    return layer


def draw_heads(draw: Draw) -> MultiHeadAttention:
    groups, repeats = draw.randint(1, 3), draw.randint(1, 3)
    heads, head_dim = groups * repeats, 2 * draw.randint(1, 8)
    positions: nn.Module | None = None
    kind = draw.choice(("none", "rotary", "rotary", "part", "share", "alibi", "t5", "relative"))
    if kind == "rotary":
        positions = Rotary(head_dim)
    elif kind == "part":
        positions = Rotary(head_dim, rotary_dim=2) if _takes_part() else Rotary(head_dim)
    elif kind == "share":
        share = 2 * draw.randint(1, head_dim // 2) / head_dim
        scaling = {"rope_type": "proportional", "partial_rotary_factor": share}
        positions = Rotary(head_dim, scaling=scaling)
    elif kind == "alibi":
        positions = ALiBi(heads)
    elif kind == "t5":
        positions = T5Bias(heads, bidirectional=False)
    elif kind == "relative":
        positions = RelativeBias(heads, draw.randint(1, 6))
    return MultiHeadAttention(
        draw.randint(2, 12),
        heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        positions=positions,
        bias=draw.maybe(),
        qk_norm=draw.choice((None, None, "rms", "layer")),
        softcap=draw.choice((None, None, 2.0)),
        sinks=draw.maybe(0.3),
        gate=draw.choice((None, None, "head", "elementwise")),
        bias_kv=draw.maybe(0.2),
    )


def _takes_part() -> bool:
    return "rotary_dim" in Rotary.__init__.__annotations__


class History:
    """A layer, its cache, and the tokens `[n, D]` that each sequence has so far."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.dtype = draw.choice((torch.float32, torch.float32, torch.float64))
        self.layer = draw_layer(draw, self.dtype)
        self.left = draw.randint(0, 6)
        self.kind = draw.choice(("grows", "reserved", "window", "sinks"))
        self.near = draw.choice((None, None, draw.randint(0, 8)))  # a window that the mask has
        first = draw.randint(1, 3) if self.kind == "sinks" else 0
        self.sinks = first
        self.cache: Cache = {
            "grows": Cache,
            "reserved": lambda: Cache(400),
            "window": lambda: WindowCache(self.left),
            "sinks": lambda: WindowCache(self.left, sinks=first),
        }[self.kind]()
        self.texts = [self.tokens(0) for _ in range(draw.randint(1, 3))]
        self.done: list[str] = []

    def tokens(self, n: int) -> Tensor:
        return self.draw.normal(n, self.layer.embed_dim, dtype=self.dtype)

    def mask(self) -> Any:
        return causal() if self.near is None else causal() & window(left=self.near)

    def whole(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Output and weights of one sequence in one pass without a cache."""
        n = len(text)
        mask: Any = self.mask()
        if isinstance(self.cache, WindowCache):
            near = (mask & window(left=self.left)).dense(n, n)
            mask = near | mask.dense(n, n) & (torch.arange(n) < self.sinks)
        out, weights = self.layer(text[None], mask=mask, return_weights=True)
        return out[0], weights[0]

    # ---- what may happen

    def step(self) -> None:
        draw = self.draw
        length = draw.choice((1, 1, 1, 2, draw.randint(0, 9)))
        new = [self.tokens(length) for _ in self.texts]
        valid: Tensor | None = None
        kept = [slice(0, length)] * len(new)
        if draw.maybe(0.3):
            valid = torch.zeros(len(new), length, dtype=torch.bool)
            kept = []
            for row in valid:
                start = draw.randint(0, length)
                stop = draw.randint(start, length)
                row[start:stop] = True
                kept.append(slice(start, stop))
        x = torch.stack(new)
        weighted = draw.maybe()
        mode = draw.choice(("no grad", "no grad", "inference", "grad"))
        self.done.append(f"step of {length}, {mode}{'' if valid is None else f', {kept}'}")
        manager: Any = {
            "no grad": torch.no_grad,
            "inference": torch.inference_mode,
            "grad": torch.enable_grad,
        }[mode]
        with manager():
            result = self.layer(
                x, mask=self.mask(), cache=self.cache, valid=valid, return_weights=weighted
            )
        out, weights = result if weighted else (result, None)
        with torch.no_grad():
            self.texts = [
                torch.cat([text, piece[span]])
                for text, piece, span in zip(self.texts, new, kept, strict=True)
            ]
            for row, (text, span) in enumerate(zip(self.texts, kept, strict=True)):
                count = span.stop - span.start
                if not count:
                    continue
                want, want_weights = self.whole(text)
                close("out", out[row, span].clone(), want[-count:], self.dtype)
                if weights is not None:
                    got = weights[row, :, span].clone()
                    close("weights' sum", got.sum(-1), want_weights[:, -count:].sum(-1), self.dtype)
                    if length == 1:
                        self.compare_columns(row, got[:, 0], want_weights[:, -1])

    def compare_columns(self, row: int, got: Tensor, want: Tensor) -> None:
        """Each column of the weights is the key at the position that `key_positions` gives."""
        positions = self.cache.key_positions
        positions = positions[row if positions.shape[0] > 1 else 0].cpu()
        assert got.shape[-1] == len(positions), f"{got.shape[-1]} columns, {len(positions)} keys"
        found = torch.zeros_like(want)
        for column, position in enumerate(positions.tolist()):
            if position < 0:
                assert not got[:, column].any(), f"weight on an empty slot, column {column}"
            else:
                found[:, position] += got[:, column]
        close("weights by position", found, want, self.dtype)

    def crop(self) -> None:
        lengths = [self.draw.randint(0, len(text)) for text in self.texts]
        if self.draw.maybe():
            lengths = [min(lengths)] * len(lengths)
        if isinstance(self.cache, WindowCache):
            # what was evicted can't come back
            full = self.sinks + self.left
            lengths = [
                n if len(text) <= full else self.draw.choice((0, len(text)))
                for n, text in zip(lengths, self.texts, strict=True)
            ]
        self.done.append(f"crop to {lengths}")
        same = len(set(lengths)) == 1 and self.draw.maybe()
        self.cache.crop(lengths[0] if same else torch.tensor(lengths))
        self.texts = [text[:n] for n, text in zip(lengths, self.texts, strict=True)]

    def reorder(self) -> None:
        rows = [self.draw.randrange(len(self.texts)) for _ in range(self.draw.randint(1, 3))]
        if not self.cache.length:
            rows = list(range(len(self.texts)))
        self.done.append(f"reorder {rows}")
        self.cache.reorder(torch.tensor(rows))
        self.texts = [self.texts[row] for row in rows]

    def copy(self) -> None:
        how = self.draw.choice(("deepcopy", "pickle"))
        self.done.append(how)
        before = self.cache
        if how == "deepcopy":
            self.cache = copy.deepcopy(self.cache)
        else:
            self.cache = pickle.loads(pickle.dumps(self.cache))  # noqa: S301
        if self.draw.maybe():  # what the original is used for doesn't reach the copy
            with torch.no_grad():
                x = torch.stack([self.tokens(1) for _ in self.texts])
                self.layer(x, mask=self.mask(), cache=before)

    def failed_call(self) -> None:
        self.done.append("failed call")
        x = torch.stack([self.tokens(2) for _ in self.texts])
        wrong = torch.zeros(1, 1, 2, 999, dtype=torch.bool)
        try:
            with torch.no_grad():
                self.layer(x, mask=wrong, cache=self.cache)
        except multihead.MultiheadError:
            return
        raise AssertionError("a mask for 999 keys was taken")


def run(seed: int) -> str:
    """Run one history; return the kind of its cache."""
    draw = Draw(seed)
    history = History(draw)
    happens = [history.step] * 5
    happens += [history.crop, history.reorder, history.copy, history.failed_call]
    try:
        history.step()
        for _ in range(draw.randint(1, 10)):
            draw.choice(happens)()
    except Exception as error:
        error.add_note(
            f"seed {seed}, {history.layer}, {history.kind} left {history.left} sinks"
            f" {history.sinks}, mask's window {history.near}, {history.dtype}: {history.done}"
        )
        raise
    return history.kind


__all__ = ["TOLERANCE", "run"]
