"""Properties of masks: hidden keys have no influence, padding changes nothing, empty rows are 0."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .arguments import KEY_SHAPES, QUERY_KEY_SHAPES, MaskForm, candidate_forms
from .callee import CallSpec
from .facts import Facts, find_smallest, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable, NotJudged

MAX_LEAK = 1e-5


def find_leaking_masks(facts: Facts) -> list[Finding]:
    """Masks whose hidden keys influence the output, or in which True means the unusual."""
    callee, findings = facts.callee, []
    example = format_shape(callee, 1, 2)
    leaks = any(form is not None and form.leak > MAX_LEAK for form in (callee.mask, callee.padding))
    if leaks and (mixers := facts.token_mixers):
        raise NotApplicable(f"hidden tokens may reach their neighbours' values ({mixers[0]})")
    for form in (callee.mask, callee.padding):
        if form is None:
            continue
        if form.leak > MAX_LEAK:
            findings.append(
                Finding(
                    BugName.PADDING_LEAKS if form is callee.padding else BugName.MASK_LEAKS,
                    f"{form.description}: hidden keys still change the output,"
                    f" {form.leak:.2g} times as much as keys that are read.",
                    example,
                    "The mask must come before the softmax, as -inf (masked_fill). It mustn't be"
                    " multiplied in: not before the softmax, where 0 is a score like others, and"
                    " not after it, where the weights are normalised already.",
                )
            )
        if form.contradicts and form.leak <= 0.5:
            # In Megatron-LM and what follows it True is hidden.
            is_policy = form.name.lower() == "attention_mask"
            inverse = "" if form.contradicts.endswith("hidden") else " == 0"
            findings.append(
                Finding(
                    BugName.MASK_INVERTED,
                    f"{form.name} is inverted: here {form.encoding}; under this name"
                    f" {form.contradicts} in {'most libraries' if is_policy else 'every library'}.",
                    example,
                    f"masked_fill hides where True: masked_fill(mask{inverse}, -inf).",
                    is_policy=is_policy,
                )
            )
    names = [name for name, role in callee.roles.items() if role in ("mask", "padding")]
    if not names:
        raise NotApplicable("it takes no mask")
    known = {form.name for form in (callee.mask, callee.padding) if form is not None}
    if known:  # a further one may be a bias
        names = [name for name in names if "mask" in name and callee.library is None]
    for name in names:
        if name not in known and not findings:
            findings += _find_useless_mask(facts, name)
    return findings


def _find_useless_mask(facts: Facts, name: str) -> list[Finding]:
    """A mask argument that no form of mask makes hide a key: ignored, or infinite outputs.

    Raises:
        NotJudged: no form can be passed.
    """
    callee, x, length = facts.callee, facts.callee.x(size=0.5), facts.length
    plain, ignored, broken, errors = callee(x), [], [], []
    positions = torch.arange(length)
    for form in (f for s in (QUERY_KEY_SHAPES, KEY_SHAPES) for f in candidate_forms(name, s)):
        some = (positions[:, None] + positions) % 3 != 1
        spec = CallSpec(allowed=some)
        trial = replace(callee, mask=form)
        if form.shape not in QUERY_KEY_SHAPES:
            spec = CallSpec(valid=(positions < length - 2).expand(callee.batch, -1))
            trial = replace(callee, padding=form)
        try:
            out = trial(x, spec=spec)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
            continue
        ignored.append(bool(torch.allclose(out, plain, rtol=1e-9, atol=1e-12)))
        broken += [form] if not out.isfinite().all() and plain.isfinite().all() else []
    if not ignored:
        raise NotJudged(f"no form of mask could be passed as {name} ({errors[0]})")
    look = "Whether it reaches the scores before the softmax: masked_fill(..., -inf)."
    if all(ignored):
        message = (
            f"{name} is taken and changes nothing: {len(ignored)} forms of mask (shapes, booleans"
            " and numbers, True meaning either) give the output without a mask."
        )
        return [Finding(BugName.MASK_IGNORED, message, format_shape(callee, 1, 2), look)]
    message = f"No form of mask passed as {name} hides a key: hidden ones still have influence."
    if broken:
        message = (
            f"No form of mask passed as {name} hides a key. As {broken[0].description} the output"
            " isn't finite, although every query has a key: -inf must be put into the scores, not"
            " into the weights."
        )
    return [Finding(BugName.MASK_LEAKS, message, format_shape(callee, 1, 2), look)]


def find_leaking_padding(facts: Facts) -> list[Finding]:
    """Padding that changes the outputs of real tokens."""
    findings = _find_leaking_padding(facts)
    if findings and (mixers := facts.token_mixers):
        raise NotApplicable(f"padding may reach its neighbours' values ({mixers[0]})")
    return findings


def _find_leaking_padding(facts: Facts) -> list[Finding]:
    callee = facts.callee
    form = callee.padding or callee.mask
    if form is None or form.shape == "[L, S]":
        raise NotApplicable("it takes no separate mask for each sequence")

    def outputs(batch: int, length: int, real: int) -> tuple[Tensor, ...]:
        """Of real tokens next to padding, and next to padding of other values; 0 for padding."""
        x = callee.x(batch, length)
        # Each sequence has another length, so that one's mask isn't right for another.
        sizes = torch.tensor([max(1, real - b % 2) for b in range(batch)])
        valid = torch.arange(length) < sizes[:, None]
        other = torch.where(valid[..., None], x, 3 * callee.x(batch, length, seed=4))
        spec = _hide_padding(facts, valid)
        return tuple(
            torch.where(valid[..., None], callee(t, spec=spec), 0.0)[:, :real] for t in (x, other)
        )

    def difference(batch: int, length: int) -> float | None:
        if length < 2:
            return None
        padded, other = outputs(batch, length, max(1, length - 2))
        change = relative_difference(other, padded)
        return change if not change <= facts.threshold else None

    real = facts.length - 2
    try:
        padded, other = outputs(callee.batch, facts.length, real)
        alone = torch.zeros_like(padded)
        for b in range(callee.batch):
            size = max(1, real - b % 2)
            alone[b, :size] = callee(callee.x()[:, :size])[b]
    except Exception as error:
        raise NotApplicable(f"padding can't be tried ({type(error).__name__})") from None
    if not relative_difference(other, padded) <= facts.threshold:
        message = (
            f"Values at padded positions change the output of real tokens ({form.description})."
        )
        example = find_smallest(facts, difference)
    else:
        change = relative_difference(padded, alone)
        by_position = facts.find_names("learned_pos|relative_position_bias_table")
        if change <= callee.tolerance() or by_position:
            return []
        message = (
            "Hidden padding still changes the output of real tokens: it isn't that of the sequence"
            f" alone (by {change:.2g} of its size)."
        )
        example = format_shape(callee, callee.batch, callee.length)
    return [
        Finding(
            BugName.PADDING_LEAKS,
            message,
            example,
            "The padding mask must hide keys, as [B, 1, 1, S] for scores [B, H, L, S], before the"
            " softmax, as -inf.",
        )
    ]


def _hide_padding(facts: Facts, valid: Tensor) -> CallSpec:
    """A call that hides padding (`valid` `[B, L]`), by its padding mask or by its mask."""
    form, length = facts.callee.padding, valid.shape[1]
    by_query = valid[:, None].expand(-1, length, -1)
    if form is not None:
        return CallSpec(valid=valid if form.shape in (*KEY_SHAPES, "[B]") else by_query)
    if facts.is_causal:
        by_query = by_query & torch.ones(length, length, dtype=torch.bool).tril()
    return CallSpec(allowed=by_query)


def find_bad_empty_rows(facts: Facts) -> list[Finding]:
    """Queries without a key that give NaN, or read what is hidden."""
    callee = facts.callee
    form: MaskForm | None = callee.padding or callee.mask
    if form is None:
        raise NotApplicable("it takes no mask, so every query reads something")
    if form.leak > MAX_LEAK:
        raise NotApplicable("its mask doesn't hide keys in the first place")
    is_batched = form.shape != "[L, S]" and not callee.is_single
    valid = torch.ones(callee.batch, facts.length, dtype=torch.bool)
    valid[0 if is_batched else slice(None)] = False
    x, other = callee.x(size=0.5), callee.x(size=0.5)
    other[0] = callee.x(seed=11, size=0.5)[0]
    spec = _hide_padding(facts, valid)

    def run(hidden: Tensor) -> Tensor:
        """With these hidden tokens; queries stay, where they are separate."""
        if callee.form == "self":
            return callee(hidden, spec=spec)
        if callee.form == "memory":
            return callee(x, hidden, spec=spec)
        return callee(x, *callee.keys(hidden), spec=spec)

    try:
        out, out_other = run(x), run(other)
    except Exception as error:
        raise NotApplicable(
            f"a mask that hides all keys can't be tried ({type(error).__name__})"
        ) from None
    finding = Finding(
        BugName.EMPTY_ROW_NAN,
        "A query whose keys are all hidden gives NaN (0/0 in the softmax), which spreads to all"
        " later layers and to every gradient.",
        f"{format_shape(callee, 1, 1)}, its only key hidden by {form.description}",
        "Where a query has no key its weights should be 0: torch.where(mask.any(-1, keepdim=True),"
        " weights, 0), or an operator that does so.",
        is_policy=True,
    )
    if not out.isfinite().all():
        return [finding]
    # Without keys the output of x alone doesn't depend on x either, unless something bypasses the
    # attention.
    bypasses = callee.form == "self" and facts.find_names("residual|mlp|feed_forward|norm")
    if bypasses or relative_difference(out_other[0], out[0]) <= facts.threshold:
        return []
    return [
        replace(
            finding,
            bug=BugName.EMPTY_ROW_LEAKS,
            message="A query whose keys are all hidden reads them after all: a finite number such"
            " as -1e9 instead of -inf gives them all the same weight.",
            look="masked_fill(..., -inf) and weights of 0 where a query has no key, instead of"
            " -1e9 or torch.finfo(dtype).min.",
        )
    ]
