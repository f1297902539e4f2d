"""What must hold of any attention, whatever its weights: one function a property, judged from
outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import PADDED, convention
from .discover import LENGTHS, influence
from .facts import WINDOWS, Facts, Finding, NotApplicable, describe, gap, shape_words, smallest


def finite(facts: Facts) -> list[Finding]:
    """Numbers come out."""
    subject, options = facts.subject, facts.options(facts.subject.length)
    out = subject(subject.x(), **options)
    rows = (~out.isfinite()).any(-1).any(0).nonzero().flatten().tolist()
    if not rows:
        return []
    why = (
        "A row that may read no key gives 0/0. Row 0 has only itself to read, so the causal mask"
        " hides it from itself: use torch.tril(...) with its diagonal,"
        " masked_fill(triu(diagonal=1))."
        if rows == [0] and facts.own[1:].isfinite().all()
        else "A row that may read no key gives 0/0: look at which keys the mask leaves."
    )
    return [
        Finding(
            "can't see itself" if rows == [0] else "masked rows that give NaN",
            f"The output of rows {rows} is NaN or infinite, of finite"
            f" inputs{describe(options, facts)}.",
            smallest(
                facts,
                lambda b, n: (
                    torch.nan
                    if not subject(subject.x(b, n), **facts.options(n)).isfinite().all()
                    else None
                ),
            ),
            why,
        )
    ]


def causality(facts: Facts) -> list[Finding]:
    """A row reads earlier tokens and its own, never later ones."""
    subject, n = facts.subject, facts.subject.length
    found = _unreached(facts)
    if facts.declared is False or (facts.future_hidden is None and not facts.declared):
        if found or facts.own.isnan().any():
            return found
        if not _inverted(facts.own, facts.zero):
            raise NotApplicable(
                "it isn't causal (rows read later tokens), and has no mask or flag that would make"
                " it so"
            )
    if facts.future_hidden is None:
        return [
            *found,
            Finding(
                "sees the future",
                "It was said to be causal, but rows read later tokens, and it has no mask "
                "and no "
                "flag that would hide them.",
                shape_words(subject, 1, 2),
                "Where the scores are made: nothing hides keys j > i before the softmax.",
            ),
        ]
    options = facts.options(n)
    seen = influence(subject, n, **options) if options else facts.own
    how = describe(options, facts)
    off = seen.nan_to_num(0.0) * (1 - torch.eye(n))
    past, future = off.tril(-1) > facts.zero, off.triu(1) > facts.zero

    def look_ahead(batch: int, length: int) -> float | None:
        part = (
            influence(subject, length, **facts.options(length)).nan_to_num(0.0).triu(1).max().item()
        )
        return part if part > facts.zero else None

    shown = (
        (smallest(facts, look_ahead, least=2) + ": the output of a row, when a later token changes")
        if future.any()
        else ""
    )
    if _inverted(off, facts.zero):
        found.append(
            Finding(
                "inverted mask",
                f"Rows read later tokens and not earlier ones{how}: the mask is the wrong way "
                "round.",
                shown,
                "masked_fill(mask, -inf) hides where True; torch.tril(...) is True at what may be"
                " read, so hide where it is False: masked_fill(mask == 0, -inf).",
            )
        )
    elif future.any():
        ahead = {int(j - i) for i, j in future.nonzero()}
        if not future[1:].any():
            found.append(
                Finding(
                    "can't see itself",
                    f"Row 0 reads later tokens{how}, and no other row does: the mask hides "
                    "row 0 "
                    "from everything, itself too, so that all keys get the same weight.",
                    shown,
                    "The diagonal of the causal mask: keys j <= i may be read, not j < i.",
                )
            )
        elif ahead == {1}:
            found.append(
                Finding(
                    "sees the next token",
                    f"Each row reads one token too many{how}: token i + 1 changes the output "
                    "of row i.",
                    shown,
                    "The diagonal of the causal mask: torch.tril(diagonal=0), "
                    "torch.triu(diagonal=1).",
                )
            )
        else:
            found.append(
                Finding(
                    "sees the future",
                    f"Later tokens change the output of earlier rows{how}, up to {max(ahead)} ahead"
                    f" and by {off.triu(1).max():.2g} of the output's size, where earlier tokens"
                    f" change it by {off.tril(-1).max():.2g}.",
                    shown,
                    "The order of mask and softmax (the mask comes first, as "
                    "-inf), and every reshape of [B, L, H, E]: without a transpose it mixes"
                    " tokens.",
                )
            )
    elif not past[-1].any():
        found.append(
            Finding(
                "sees the future",
                "No row reads an earlier token.",
                shape_words(subject, 1, 2),
                "The mask.",
            )
        )
    if not found and subject.form != "heads" and not options:
        one = subject.x(1, 1)
        try:
            same = gap(subject(one), subject(subject.x(1, 1, seed=5)))
        except Exception:
            return found
        if same <= facts.zero:
            found.append(
                Finding(
                    "can't see itself",
                    "A single token's output doesn't depend on it: it can't see itself.",
                    shape_words(subject, 1, 1),
                    "The diagonal of the causal mask: keys j <= i may be read.",
                )
            )
    return found


def _inverted(seen: Tensor, zero: float) -> bool:
    off = seen.nan_to_num(0.0)
    # The last row of a strictly upper mask has no key, and may read all of them or be NaN.
    return bool(off.triu(1)[:-1].gt(zero).any() and not off.tril(-1)[:-1].gt(zero).any())


def _unreached(facts: Facts) -> list[Finding]:
    own = facts.own.nan_to_num(0.0)
    off = ~torch.eye(len(own), dtype=torch.bool)
    none = (own <= facts.zero) & off
    if (
        facts.by_itself
        or not none.any()
        or none[off].all()
        or facts.mentions(f"{WINDOWS}|mask|tril|triu")
    ):
        return []
    i, j = none.nonzero()[0].tolist()
    return [
        Finding(
            "tokens and heads mixed",
            f"Row {i} never reads token {j}, though nothing hides it: {int(none.sum())} of "
            f"{int(off.sum())} pairs don't reach each other, in no order of a mask.",
            shape_words(facts.subject, 1, len(own)),
            "A reshape of [B, L, H * E] straight to [B, H, L, E] cuts tokens "
            "into "
            "heads: view as [B, L, H, E], then transpose(1, 2); and transpose back before merging.",
        )
    ]


def batch(facts: Facts) -> list[Finding]:
    """What one batch element holds doesn't change another."""
    subject, n = facts.subject, facts.subject.length
    if subject.layout in ("[L, D]", "[L, E]"):
        raise NotApplicable("it takes one sequence, without a batch")

    def wrong(size: int, length: int) -> float | None:
        if size < 2:
            return None
        x = subject.x(size, length)
        other = x.clone()
        other[-1] = subject.x(size, length, seed=9)[-1]
        options = facts.options(length)
        change = gap(subject(other, **options)[:-1], subject(x, **options)[:-1])
        return change if change > facts.zero else None

    if wrong(subject.batch, n) is None:
        return []
    x = subject.x()
    other = x.clone()
    other[:, -1] = subject.x(seed=9)[:, -1]
    second = gap(subject(other)[:, :-1], subject(x)[:, :-1]) <= facts.zero
    more = (
        " Positions, on the other hand, are independent: it attends along the first axis, as a"
        " layer with batch_first=False does."
        if second
        else ""
    )
    return [
        Finding(
            "batch elements influence each other",
            f"Another batch element changes the output.{more}",
            smallest(facts, wrong),
            "The axis of the softmax, normalisations over the batch, a view that merges batch "
            "with "
            "tokens, and batch_first.",
        )
    ]


def order(facts: Facts) -> list[Finding]:
    """Without positions, tokens in another order give the same outputs in that order."""
    subject, n = facts.subject, facts.subject.length

    def wrong(size: int, length: int) -> float | None:
        x = subject.x(size, length)
        if facts.by_itself:  # then only the last row reads the same keys
            swap = torch.tensor([*range(length - 2, -1, -1), length - 1])
            change = gap(subject(x[:, swap])[:, -1], subject(x)[:, -1])
        else:
            swap = torch.arange(length).roll(1)
            change = gap(subject(x[:, swap]), subject(x)[:, swap])
        return change if change > subject.tolerance() else None

    if wrong(subject.batch, n) is None:
        return []
    if facts.positions:
        raise NotApplicable(f"it knows positions ({', '.join(facts.positions[:3])})")
    if facts.window is not None:
        raise NotApplicable("rows read a window, so a token's place counts")
    if subject.library is not None and subject.module is not None and n != LENGTHS[0]:
        raise NotApplicable("it takes windows of one length, so a token's place may count")
    return [
        Finding(
            "tokens and heads mixed",
            "The order of the tokens changes what they give each other, though nothing in "
            "the code "
            "speaks of positions.",
            smallest(facts, wrong, least=2),
            "A reshape without a transpose: [B, L, H * E] viewed as [B, H, L, E], or [B, H, L, E]"
            " merged without transpose(1, 2) first; the axis of the softmax.",
        )
    ]


def whole(facts: Facts) -> list[Finding]:
    """The weights of a row sum to one: of identical tokens the output is one token's, however many
    there are.
    """
    found = _whole(facts)
    if found and (extra := facts.mentions(r"sink|bias_k$|add_zero|null_k|mem_k|s_aux|gate")):
        raise NotApplicable(f"rows may sum to something else ({', '.join(extra[:2])})")
    if found and (added := facts.mentions(r"^wpe$|^pos_emb\w*$|position_embedding$")):
        raise NotApplicable(f"positions may be part of the values ({added[0]})")
    return found


def _whole(facts: Facts) -> list[Finding]:
    subject = facts.subject
    x = subject.x(1, 1, size=SMALLER)
    lengths = [n for n in (1, 2, 3, subject.length) if _runs(facts, n)]

    def wrong(size: int, length: int) -> float | None:
        out = subject(x.expand(1, length, -1).contiguous(), **facts.options(length))
        change = gap(out, first.expand(1, length, -1))
        return change if not change <= 1e2 * facts.zero else None

    first = subject(x.expand(1, lengths[0], -1).contiguous(), **facts.options(lengths[0]))[:, -1:]
    look = (
        "The axis of the softmax (-1 of [.., L, S], the keys), a mask multiplied in after it, a"
        " second softmax, and positions turned into the values."
    )
    for n in lengths:
        if wrong(1, n) is not None and first.isfinite().all():
            return [
                Finding(
                    "weights don't sum to one",
                    "Identical tokens should read the same whatever their number; here the "
                    "output "
                    "changes with it, so a row's weights don't sum to one.",
                    smallest(facts, wrong),
                    look,
                )
            ]
    return _among_many(facts, look)


def _among_many(facts: Facts, look: str) -> list[Finding]:
    """One token among many copies of another reads nearly only those, whatever the softmax gives
    either of them.
    """
    subject, many = facts.subject, 100
    more = subject.form == "self" and facts.mentions(
        "residual|mlp|feed_forward|ffn|norm"
    )  # a row then holds its own token too
    if more or facts.window is not None or not _runs(facts, many + 1):
        return []

    def last(*tokens: Tensor) -> Tensor:
        x = torch.cat(tokens, 1)
        return subject(x, **facts.options(x.shape[1]))[:, -1]

    def off(seed: int) -> float:
        size = 0.5
        for _ in range(
            24
        ):  # until scores are moderate: then an even share is near half way between the two
            a, b = subject.x(1, 1, seed=seed, size=size), subject.x(1, 1, size=size)
            alone, want = last(a), last(b, b)
            if (last(b, a) - (alone + want) / 2).norm() < 0.4 * (alone - want).norm() / 2:
                few, all_ = (gap(last(b.expand(1, n, -1), a), want) for n in (many // 4, many))
                return (
                    all_ if few < 1.3 * all_ else 0.0
                )  # it doesn't fall as the copies grow in number
            size *= 0.8
        return 0.0

    change = min(off(3), off(4))
    if change < 0.15:
        return []
    return [
        Finding(
            "weights don't sum to one",
            f"One token among {many} copies of another should read nearly what a copy "
            "reads; it "
            f"differs by {change:.2g} of its size, so its weights don't sum to one.",
            shape_words(subject, 1, many + 1),
            look,
        )
    ]


SMALLER = 0.4


def _runs(facts: Facts, length: int) -> bool:
    try:
        return bool(
            facts.subject(facts.subject.x(1, length), **facts.options(length)).isfinite().any()
        )
    except Exception:
        return False


def rows(facts: Facts) -> list[Finding]:
    """A query changes its own row alone; keys may come in any order and number."""
    subject = facts.subject
    if subject.form == "self":
        raise NotApplicable("queries, keys and values come from one input")
    if facts.by_itself:
        raise NotApplicable("it's causal by itself, so queries and keys have one order")
    q, (k, v) = subject.x(1, 4), subject.keys(subject.x(1, 7, seed=2))
    extra: dict[str, Any] = {"k": k} if subject.form == "memory" else {"k": k, "v": v}
    try:
        base = subject(q, **extra)
    except Exception as error:
        raise NotApplicable(
            f"it can't attend from 4 tokens to 7 ({type(error).__name__})"
        ) from None
    found = []
    other = q.clone()
    other[:, 2] = subject.x(1, 4, seed=8)[:, 2]
    if gap(subject(other, **extra)[:, [0, 1, 3]], base[:, [0, 1, 3]]) > facts.zero:
        found.append(
            Finding(
                "softmax over the wrong axis",
                "Another query changes a row's output: rows aren't independent.",
                f"q {list(q.shape)}, k and v {list(k.shape)}",
                "The axis of the softmax: over the keys, the last of "
                "[B, H, L, S]; and every reshape without a transpose.",
            )
        )
    swap = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    if (
        not facts.positions
        and gap(subject(q, **{n: t[:, swap] for n, t in extra.items()}), base) > subject.tolerance()
    ):
        found.append(
            Finding(
                "tokens and heads mixed",
                "Keys and values in another order change the output, though nothing in "
                "the "
                "code speaks of positions.",
                f"q {list(q.shape)}, k and v {list(k.shape)}",
                "A reshape of keys or values without a transpose.",
            )
        )
    return found


def masks(facts: Facts) -> list[Finding]:
    """A hidden key does nothing at all, and True means what the name says."""
    found = []
    for form in (facts.subject.mask, facts.subject.padding):
        if form is None:
            continue
        if form.leak > 1e-5:
            bug = (
                "padding changes real tokens"
                if form is facts.subject.padding
                else "a mask that doesn't hide"
            )
            found.append(
                Finding(
                    bug,
                    f"{form.words}: keys that are hidden still change the output, by "
                    f"{form.leak:.2g} of what a key does that is read.",
                    shape_words(facts.subject, 1, 2),
                    "The mask must come before the softmax, as -inf (masked_fill), not be"
                    " multiplied in: neither before it, where 0 is a score like others, nor after"
                    " it, where the row is normalised already.",
                )
            )
        agreed = convention(form.name)
        if (
            agreed
            and form.leak <= 0.5
            and form.encoding.partition(" ")[0] in ("True", "1")
            and form.encoding.partition(" ")[2] != agreed.partition(" ")[2]
        ):
            found.append(
                Finding(
                    "inverted mask",
                    f"{form.name} hides what is True, or reads what is False; under this name "
                    "it's the "
                    f"other way round everywhere else ({agreed}).",
                    shape_words(facts.subject, 1, 2),
                    (
                        "masked_fill(mask, -inf) hides where True: masked_fill(mask == 0, -inf)."
                        if agreed == "True reads"
                        else "masked_fill(mask, -inf), and not of its inverse."
                    ),
                )
            )
    if not found and facts.subject.mask is None and facts.subject.padding is None:
        names = [n for n, role in facts.subject.roles.items() if role in ("mask", "padding")]
        raise NotApplicable(
            f"what {names[0]} wants wasn't found: no form of mask that was tried hid a key"
            if names
            else "it takes no mask"
        )
    return found


def padding(facts: Facts) -> list[Finding]:
    """Real tokens beside padding give what they give without."""
    subject = facts.subject
    if subject.padding is None and (subject.mask is None or subject.mask.shape == "[L, S]"):
        raise NotApplicable("it takes no mask of its own for each text")

    def both(batch: int, length: int, real: int) -> tuple[Tensor, Tensor, Tensor]:
        x = subject.x(batch, length)
        valid = (torch.arange(length) < real).expand(batch, -1)
        other = torch.where(valid[..., None], x, 3 * subject.x(batch, length, seed=4))
        options = _hide(facts, valid, length)
        return (
            subject(x, **options)[:, :real],
            subject(other, **options)[:, :real],
            subject(x[:, :real], **facts.options(real) if facts.by_itself else {}),
        )

    def wrong(batch: int, length: int) -> float | None:
        if length < 2:
            return None
        a, b, _ = both(batch, length, max(1, length - 2))
        change = gap(b, a)
        return change if not change <= facts.zero else None

    try:
        a, b, short = both(subject.batch, subject.length, subject.length - 2)
    except Exception as error:
        raise NotApplicable(f"padding can't be tried ({type(error).__name__})") from None
    look = (
        "The padding mask must hide keys, [B, 1, 1, S] beside scores [B, H, L, S], before the"
        " softmax, as -inf."
    )
    if not gap(b, a) <= facts.zero:
        return [
            Finding(
                "padding changes real tokens",
                "What stands at padded places changes the output of real tokens"
                f" ({(subject.padding or subject.mask).words}).",
                smallest(facts, wrong),
                look,
            )
        ]  # type: ignore[union-attr]
    if not gap(a, short) <= subject.tolerance() and not facts.mentions(
        "learned_pos|relative_position_bias_table"
    ):
        return [
            Finding(
                "padding changes real tokens",
                "Padded tokens, hidden, still change the output of real ones: it isn't "
                "that of "
                f"the text alone (by {gap(a, short):.2g} of its size).",
                smallest(facts, lambda n, m: None),
                look,
            )
        ]
    return []


def _hide(facts: Facts, valid: Tensor, length: int) -> dict[str, Any]:
    """Options that hide padding, by the argument for it or by the mask."""
    form = facts.subject.padding
    if form is None:
        may = valid[:, None].expand(-1, length, -1)
        return {
            "may": (
                may & torch.ones(length, length, dtype=torch.bool).tril()
                if facts.by_itself
                else may
            )
        }
    return {
        "valid": valid if form.shape in (*PADDED, "[B]") else valid[:, None].expand(-1, length, -1)
    }


def hidden_rows(facts: Facts) -> list[Finding]:
    """A row with no key to read gives numbers, and nothing of what is hidden."""
    subject, n = facts.subject, facts.subject.length
    form = subject.padding or subject.mask
    if form is None:
        raise NotApplicable("it takes no mask, so every row reads something")
    if form.leak > 1e-5:
        raise NotApplicable("its mask doesn't hide keys in the first place")
    batched = form.shape != "[L, S]" and subject.layout not in ("[L, D]", "[L, E]")
    valid = torch.ones(subject.batch, n, dtype=torch.bool)
    valid[0 if batched else slice(None)] = False
    x = subject.x(size=0.5)
    other = x.clone()
    other[0] = subject.x(seed=11, size=0.5)[0]

    def run(t: Tensor) -> Tensor:
        q = x  # queries stay where they can: only what is hidden changes
        if subject.form == "self":
            q, t = t, t
            return subject(t, **_hide(facts, valid, n))
        if subject.form == "memory":
            return subject(q, t, **_hide(facts, valid, n))
        return subject(q, *subject.keys(t), **_hide(facts, valid, n))

    try:
        a, b = run(x), run(other)
    except Exception as error:
        raise NotApplicable(
            f"a mask that hides all can't be tried ({type(error).__name__})"
        ) from None
    shown = f"{shape_words(subject, 1, 1)}, its only key hidden by {form.words}"
    if not a.isfinite().all():
        return [
            Finding(
                "masked rows that give NaN",
                "A row whose keys are all hidden gives NaN (0/0 in the softmax), which "
                "spreads to "
                "everything behind it and to every gradient.",
                shown,
                "Where a row has no key its weights should be 0: "
                "torch.where(mask.any(-1, keepdim=True), weights, 0), or an operator that does so.",
            )
        ]
    # Without other tokens a row of x alone says nothing of itself either, unless something goes
    # around the attention.
    leaks = gap(b[0], a[0]) > facts.zero and not (
        subject.form == "self" and facts.mentions("residual|mlp|feed_forward|norm")
    )
    if leaks:
        return [
            Finding(
                "leak where everything is masked",
                "A row whose keys are all hidden reads them after all: a finite "
                "number such "
                "as -1e9 in place of -inf gives them all the same weight.",
                shown,
                "masked_fill(..., -inf) and weights "
                "of 0 "
                "where a row has no key, in place of -1e9 or torch.finfo(dtype).min.",
            )
        ]
    return []
