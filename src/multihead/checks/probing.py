"""Influence of inputs on outputs, and what follows from it: the layout of heads, and mask forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .arguments import KEY_SHAPES, QUERY_KEY_SHAPES, MaskForm, candidate_forms
from .callee import PLAIN, Callee, CallSpec
from .code_names import names_batch_first
from .signature import NotAttention

# Size of inputs whose influence is measured: no weight is then too small to be seen.
SMALL = 0.5
# Relative change of an output below which it counts as rounding.
ROUNDING = 1e-9


def measure_influence(callee: Callee, length: int, spec: CallSpec = PLAIN) -> Tensor:
    """The change of the output at i when another token is put at j, `[L, S]`, relative to the
    output; NaN where the output is NaN.

    Where a token seems to have none, inputs a tenth as large are tried too: without a scale, scores
    may give weights too small to be seen.
    """
    influence = torch.zeros(length, length, dtype=torch.float64)
    for size in (SMALL, SMALL / 10):
        x = callee.x(1 if spec.is_plain else None, length, size=size)
        base = callee(x, spec=spec)
        for j in range(length):
            other = x.clone()
            other[:, j] = callee.x(x.shape[0], length, seed=100 + j, size=size)[:, j]
            change = (callee(other, spec=spec) - base).abs().amax((0, 2)) / max_abs(base)
            influence[:, j] = influence[:, j].maximum(change)
        if (influence > 1e-5).all():
            break
    return influence


def max_abs(t: Tensor) -> float:
    """The largest finite magnitude in a tensor, above 0."""
    t = t[t.isfinite()]
    return max(t.abs().max().item(), 1e-30) if t.numel() else 1e-30


def complete(callee: Callee) -> Callee:
    """The callee with what can be found by trying: the order of its axes, mask forms and flags.

    Raises:
        CannotCall: it isn't attention: no output depends on another token, or it is linear.
    """
    if callee.layout == "[B, H, L, E]":
        callee = replace(callee, layout=_find_head_axis(callee))
    if _takes_sequence_first(callee):
        callee = replace(callee, layout="[L, B, D]")
    influence = measure_influence(callee, callee.length)
    reads_others = ((influence - torch.diag(influence.diag())) > ROUNDING).any()
    if not reads_others and not influence.isnan().any() and not _attends_along_batch(callee):
        raise NotAttention(
            f"{callee.name} isn't attention as far as can be seen: called with {callee.layout}, no"
            " output depends on another token. If it needs an argument to attend, pass it with"
            " arguments={...}"
        )
    x, y, step = (callee.x(seed=seed, size=SMALL) for seed in (0, 1, 2))
    changes = callee(x + step) - callee(x), callee(y + step) - callee(y)
    if torch.allclose(*changes, rtol=1e-5, atol=ROUNDING):
        raise NotAttention(
            f"{callee.name} isn't attention: its output is linear in its input, so no weights"
            " depend on it"
        )
    for name, role in callee.roles.items():
        if role == "mask" and callee.mask is None:
            callee.mask = _find_mask_form(callee, name, QUERY_KEY_SHAPES, influence)
            if callee.mask is None:
                form = _find_mask_form(callee, name, KEY_SHAPES, influence)
                callee.padding = form or callee.padding
        elif role == "padding" and callee.padding is None:
            shapes = (*KEY_SHAPES, "[B, L, S]", "[B, 1, L, S]")
            callee.padding = _find_mask_form(callee, name, shapes, influence)
        elif role == "causal" and callee.causal_flag is None:
            callee.causal_flag = name if _makes_causal(callee, name) else None
        elif role == "weights":
            callee.weights_flag = name
    return callee


def _attends_along_batch(callee: Callee) -> bool:
    """Whether it attends along the first axis, as a layer that expects the sequence first does."""
    if callee.is_single:
        return False
    x, other = callee.x(size=SMALL), callee.x(size=SMALL)
    other[-1] = callee.x(seed=9, size=SMALL)[-1]
    return bool((callee(other) - callee(x))[0].abs().max() > ROUNDING)


def _takes_sequence_first(callee: Callee) -> bool:
    """Whether it attends along the first axis, and along that alone, though nothing states so:
    called batch first, batch elements would influence each other and tokens wouldn't.

    Not where something states that the batch is first: then it is a bug. Neither where a child is a
    layer that takes the sequence first: it's often forgotten.
    """
    module = callee.module
    if module is None or callee.layout != "[B, L, D]" or callee.library is not None:
        return False
    flags = [getattr(m, "batch_first", None) for m in module.modules()]
    if any(flag is not None for flag in flags) or names_batch_first(module):
        return False
    trial = replace(callee, layout="[L, B, D]")

    def influences(one: Callee) -> tuple[bool, bool]:
        """Of another batch element, and of another token."""
        x = one.x(size=SMALL)
        changed = one.x(seed=9, size=SMALL)
        by_batch, by_token = x.clone(), x.clone()
        by_batch[-1], by_token[:, -1] = changed[-1], changed[:, -1]
        base = one(x)
        batch, token = one(by_batch)[:-1] - base[:-1], one(by_token)[:, :-1] - base[:, :-1]
        return bool(batch.abs().max() > ROUNDING), bool(token.abs().max() > ROUNDING)

    try:
        if influences(callee) != (True, False):
            return False
        return influences(trial) == (False, True)
    except Exception:
        return False


def _find_head_axis(callee: Callee) -> str:
    """The layout of split inputs, "[B, H, L, E]" or "[B, L, H, E]": heads don't influence each
    other.
    """

    def influence_of_first_head(layout: str) -> float:
        trial = replace(callee, layout=layout)
        x, heads = trial.x(size=SMALL), trial.num_heads or 1
        other, head_dim = x.clone(), trial.embed_dim // heads
        other[..., :head_dim] = trial.x(seed=7, size=SMALL)[..., :head_dim]
        try:
            change = (trial(other) - trial(x)).abs()
        except Exception:
            return torch.inf
        return float(change.unflatten(-1, (heads, -1)).amax((0, 1, 3))[1:].max())

    first, second = (influence_of_first_head(x) for x in ("[B, H, L, E]", "[B, L, H, E]"))
    return "[B, L, H, E]" if first > ROUNDING > second else "[B, H, L, E]"


def _find_mask_form(
    callee: Callee, name: str, shapes: tuple[str, ...], influence: Tensor
) -> MaskForm | None:
    """The form of a mask argument under which hidden keys have no influence; else the form under
    which they have the least, with that influence as its `leak`.
    """
    length, positions = callee.length, torch.arange(callee.length)
    hides_pairs = shapes is QUERY_KEY_SHAPES
    if hides_pairs:
        # Every query reads some keys and not others, also when the mask is inverted.
        allowed = (positions[:, None] + positions) % 3 != 1
        columns = [0, 1, length - 2]
    else:
        # Keys at the end, where lengths can express it too.
        allowed = (positions < length - 2).expand(length, -1)
        columns = [0, 1, length - 2, length - 1]
    x, best = callee.x(size=SMALL), None
    plain = None if callee.is_required(name) else callee(x)
    others = {}
    for j in columns:
        others[j] = x.clone()
        others[j][:, j] = callee.x(seed=100 + j, size=SMALL)[:, j]
    for form in candidate_forms(name, shapes):
        trial = replace(callee, mask=form) if hides_pairs else replace(callee, padding=form)
        if hides_pairs:
            spec = CallSpec(allowed=allowed)
        elif form.shape in QUERY_KEY_SHAPES:
            spec = CallSpec(valid=allowed.expand(callee.batch, -1, -1))
        else:
            spec = CallSpec(valid=allowed[0].expand(callee.batch, -1))
        hidden: list[float] = []
        read: list[float] = []
        try:
            base = trial(x, spec=spec)
            if plain is not None and base.equal(plain):
                continue  # it changes nothing
            for j, other in others.items():
                change = (trial(other, spec=spec) - base).abs().amax((0, 2)) / max_abs(base)
                for i in range(length):
                    if i != j and not influence[i, j] < ROUNDING:
                        (read if allowed[i, j] else hidden).append(change[i].item())
        except Exception:
            continue
        if not hidden or not read or not np.isfinite(hidden + read).all():
            continue
        leak = max(hidden) / max(max(read), 1e-30)
        if leak < 1e-5 and min(read) > ROUNDING:
            return form
        if leak < 0.9 and (best is None or leak < best.leak):
            best = replace(form, leak=leak)
    return best


def _makes_causal(callee: Callee, flag: str) -> bool:
    try:
        influence = measure_influence(callee, callee.length, CallSpec(arguments={flag: True}))
    except Exception:
        return False
    hides = influence.triu(1).max() < 0.9 * influence.tril(-1).max()
    return bool(hides) or bool(influence.isnan().any())
