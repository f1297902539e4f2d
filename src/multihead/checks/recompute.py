"""Recomputing the output by the definition; and where they differ, finding the known bug that
reproduces it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import FULL
from .bugs import BUGS, Bug
from .definition import Projected, Spec, compute
from .facts import Facts, Finding, gap, shape_words
from .projections import Map, Reading, divisors, norms, read_maps, readings

SEARCH = (
    6000,
    800,
)  # computations in looking for one bug, and then for two: a time would make two runs differ
SECONDS = 15.0  # whatever the numbers, of very wide modules
CAPS = (
    "softcap",
    "soft_cap",
    "logit_cap",
    "attn_logit_softcapping",
    "logits_soft_cap",
    "cap",
    "attn_softcap",
)
SCALES = (
    "scaling",
    "scale",
    "softmax_scale",
    "norm_factor",
    "scale_factor",
    "inv_norm_factor",
    "attention_multiplier",
    "_scale",
    "sm_scale",
)
FILLS = ("-inf", "-1e9", "add -1e9")
THETAS = ("theta", "rope_theta", "base", "rope_base", "rotary_base")


@dataclass
class Scene:
    """One call: what went in, which keys the rows should read, and what came out."""

    what: str
    x: Tensor
    k: Tensor | None
    v: Tensor | None
    may: Tensor
    out: Tensor
    shown: str
    seed: int = 0


@dataclass
class Recomputed:
    """What came of it: how the output is made, and what is wrong with it."""

    reading: Reading | None = None
    spec: Spec | None = None
    findings: list[Finding] = field(default_factory=list)
    scenes: list[str] = field(default_factory=list)  # of calls that were reproduced
    note: str = ""


def recompute(facts: Facts, scale: float | None, bugs: Sequence[Bug] = BUGS) -> Recomputed:
    """Reads the projections and reproduces calls: with inputs alone, with masks, from one text to
    another.
    """
    subject, until = facts.subject, time.monotonic() + SECONDS
    maps = [] if subject.split else read_maps(subject)
    counts = divisors(subject, subject.heads, maps)
    bare = subject.split or (
        subject.form == "cross" and not maps
    )  # inputs are queries, keys and values already
    options = [None] if bare else list(readings(subject, counts))
    if not options:
        return Recomputed(
            note=(
                "its projections can't be read: no matrices that could be W_Q, W_K and W_V were"
                " found. So scale, heads and W_O were not judged"
            )
        )
    scenes = list(_scenes(facts))
    first, rest = scenes[0], scenes[1:]
    mays = [first.may]
    length = subject.length
    triangle = torch.ones(length, length, dtype=torch.bool).tril()
    if facts.window is not None:
        mays.insert(0, facts.window)
        first.may = facts.window
    elif facts.declared is None:
        mays.append(torch.ones_like(triangle) if torch.equal(first.may, triangle) else triangle)
    hidden = bool(
        facts.own.isnan().any()
        or (facts.own <= facts.zero).any()
        or facts.mentions("tril|triu|caus|mask|bias$|future")
    )
    children = [] if subject.module is None else list(subject.module.named_children())
    inner = [n for n, m in children if "ttention" in type(m).__name__]
    result = Recomputed()
    tries = [
        (reading, spec) for reading in options for spec in _specs(facts, reading, counts, scale)
    ]
    found = _match(facts, first, tries, mays, until, both=hidden, bugs=() if inner else bugs)
    if found is None:
        if bugs is not BUGS:
            result.note = (
                "its output depends on more than its inputs, so the definition can't give it"
            )
            return result
        if inner:
            result.note = (
                f"it holds more than an attention: for scale, heads and W_O check {inner[0]} by"
                " itself"
            )
            return result
        names = "" if options[0] is None else f" ({options[0].words})"
        result.note = (
            f"its projections were read{names}, but neither the definition nor a known bug"
            " reproduces its output: positions, gates, norms or biases of its own, or a bug that"
            " isn't known here. So scale, heads and W_O were not judged"
        )
        return result
    result.reading, result.spec, wrong, _ = found
    base = result.spec
    result.scenes.append(first.what)
    if wrong:
        result.findings += [_finding(b, first, facts, found) for b in wrong]
        base = _all(base, wrong) or base
    for scene in rest:
        again = _match(facts, scene, [(result.reading, base)], [scene.may], until)
        if again is None and scene.v is not None and subject.split:
            groups = scene.v.shape[-1] * base.heads // subject.width
            again = _match(facts, scene, [(None, replace(base, groups=groups))], [scene.may], until)
        if again is None:
            if not result.findings:
                result.note = (
                    f"called {scene.what}, its output is reproduced neither by the definition nor"
                    " with a known bug"
                )
            continue
        result.scenes.append(scene.what)
        result.findings += [
            _finding(b, scene, facts, again)
            for b in again[2]
            if b.name not in {f.bug for f in result.findings}
            and not any("sees the future" in a.explains for a in wrong)
        ]
    return result


def _scenes(facts: Facts) -> Iterator[Scene]:
    subject, n = facts.subject, facts.subject.length
    square = torch.ones(n, n, dtype=torch.bool)
    own = (
        square.tril()
        if facts.by_itself or (facts.declared and facts.future_hidden == {})
        else square
    )
    x = subject.x()
    yield Scene(
        "with its inputs alone",
        x,
        None,
        None,
        own,
        subject(x),
        shape_words(subject, subject.batch, n),
    )
    at = torch.arange(n)
    extra: list[tuple[str, Tensor, dict[str, Any]]] = []
    if subject.causal_flag and not facts.by_itself:
        extra.append(
            (
                f"with {subject.causal_flag}=True",
                square.tril(),
                {"more": {subject.causal_flag: True}},
            )
        )
    if subject.mask is not None:
        may = ((at[:, None] * 2 + at) % 3 != 1) | torch.eye(n, dtype=torch.bool)
        if not facts.by_itself:
            extra.append(
                (
                    f"with a causal mask as {subject.mask.words}",
                    square.tril(),
                    {"may": square.tril()},
                )
            )
        extra.append((f"with a mask as {subject.mask.words}", may & own, {"may": may & own}))
    if subject.padding is not None:
        valid = (at < n - 2).expand(subject.batch, -1)
        form = subject.padding
        given = valid[:, None].expand(-1, n, -1) if form.shape in FULL else valid
        extra.append((f"with padding as {form.words}", valid[:, None] & own, {"valid": given}))
    for what, may, options in extra:
        try:
            yield Scene(
                what,
                x,
                None,
                None,
                may,
                subject(x, **options),
                shape_words(subject, subject.batch, n),
            )
        except Exception:
            continue
    if subject.form in ("cross", "heads", "memory") and not facts.by_itself:
        q, (k, v) = subject.x(None, 4, seed=5), subject.keys(subject.x(None, 7, seed=6))
        with suppress(Exception):
            out = subject(q, k, v)
            yield Scene(
                "from 4 tokens to 7",
                q,
                k,
                v,
                torch.ones(4, 7, dtype=torch.bool),
                out,
                "q of 4 tokens, k and v of 7",
            )
    if subject.split and subject.heads and subject.heads % 2 == 0 and "H" in subject.layout:
        half = subject.width // 2
        k = subject.x(None, n, seed=6)[..., :half]
        v = subject.x(None, n, seed=7)[..., :half]
        try:
            out = subject(x, k, v)
        except Exception:
            return
        yield Scene(
            f"with {subject.heads} heads over {subject.heads // 2}",
            x,
            k,
            v,
            own,
            out,
            f"q of {subject.heads} heads, k and v of {subject.heads // 2}",
        )


def _specs(
    facts: Facts, reading: Reading | None, counts: Iterable[int], scale: float | None
) -> Iterator[Spec]:
    """What the definition leaves open, as far as the module says what it chose."""
    subject = facts.subject
    module = (
        subject.module
        if subject.module is not None
        else getattr(subject.function, "__self__", subject.function)
    )
    numbers = {
        name: float(v)
        for holder in (module, getattr(module, "config", None))
        for name in (*CAPS, *SCALES)
        if isinstance(v := getattr(holder, name, None), int | float)
        and not isinstance(v, bool)
        and v > 0
    }
    caps: list[float | None] = list(dict.fromkeys(v for n, v in numbers.items() if n in CAPS)) or [
        None
    ]
    scales: list[float | None] = [scale]
    if (
        scale is None and subject.library is not None
    ):  # a library means what it says; others may have it wrong
        for v in (v for n, v in numbers.items() if n in SCALES):
            scales += [v, 1 / v]
        scales += [1.0] if subject.library == "transformers" else []
    turns: list[tuple[str | None, float, int]] = [(None, 1.0, 0)]
    if [
        w
        for w in facts.positions
        if re.search("rot|rope|freq|cos|tables|position_embeddings", w, re.IGNORECASE)
    ]:
        thetas = [
            v for n in THETAS if isinstance(v := getattr(module, n, None), int | float) and v > 1
        ]
        for theta in dict.fromkeys([10000.0, *map(float, thetas)]):
            turns += [(kind, theta, 0) for kind in ("half", "interleaved")]
    for heads in counts:
        inner = subject.width if reading is None else reading.q.weight.shape[1]
        kv = inner if reading is None else reading.k.weight.shape[1]
        if inner % heads or (reading is not None and not _fits(reading)):
            continue
        each = inner // heads
        groups = kv // each if kv % each == 0 else 0
        if reading is None:
            groups = subject.groups or heads
        if not groups or heads % groups:
            continue
        for cap, size, (kind, theta, first) in itertools.product(
            caps, dict.fromkeys(scales), turns
        ):
            if kind is None or each % 2 == 0:
                yield Spec(
                    heads,
                    groups,
                    scale=size,
                    softcap=cap,
                    rotary=kind,
                    theta=theta,
                    first=first,
                    output=reading is not None and reading.o is not None,
                )


def _fits(reading: Reading) -> bool:
    return reading.o is None or reading.o.weight.shape[0] % (reading.v.weight.shape[1] or 1) == 0


Found = tuple[Reading | None, Spec, tuple[Bug, ...], Tensor]


def _match(
    facts: Facts,
    scene: Scene,
    tries: list[tuple[Reading | None, Spec]],
    mays: list[Tensor],
    until: float,
    *,
    both: bool = True,
    bugs: Sequence[Bug] = BUGS,
) -> Found | None:
    """What reproduces the call: the definition, else one known bug, else two; with the second mask
    too where that's likely.
    """
    tolerance = max(facts.subject.tolerance(), 1e-5)
    projected: dict[int, Projected] = {}
    loose = 10 * tolerance * float(scene.out.nan_to_num(0.0).abs().max())

    def same(reading: Reading | None, spec: Spec, may: Tensor) -> bool:
        key = id(reading)
        if key not in projected:
            projected[key] = project(facts, reading, scene)
        try:
            out = compute(projected[key], may, spec)
        except RuntimeError:
            return False
        if (
            out.shape != scene.out.shape
            or not abs(float(out[-1, -1, -1] - scene.out[-1, -1, -1])) > loose
        ):
            return gap(out, scene.out) < tolerance
        return False  # most differ in the last number already

    for may in mays:
        for reading, spec in tries:
            if same(reading, spec, may):
                return reading, spec, (), may
    pairs = [
        p for p in itertools.combinations(bugs, 2) if not p[0].change.keys() & p[1].change.keys()
    ]
    singles: list[tuple[Bug, ...]] = [(b,) for b in bugs]
    for group, among, left in ((singles, tries, SEARCH[0]), (pairs, tries[:2], SEARCH[1])):
        for some in group:
            masked = any("masking" in b.change for b in some)
            # Rows that hide all keys show what stands for -inf; others don't.
            fills = (
                FILLS
                if any(b.change.get("masking") in ("inverted", "strict", "upper") for b in some)
                else FILLS[:1]
            )
            for may, (reading, spec), fill in itertools.product(
                mays if both or masked else mays[:1], among, fills
            ):
                if left <= 0 or time.monotonic() > until:
                    break
                left -= 1
                right = replace(spec, fill=fill)
                wrong = _all(right, some)
                if wrong is None or not same(reading, wrong, may):
                    continue
                if len(some) == 1 or not any(
                    (one := _all(right, (b,))) and same(reading, one, may) for b in some
                ):
                    return reading, spec, some, may
    return None


def _all(spec: Spec, bugs: Iterable[Bug]) -> Spec | None:
    for bug in bugs:
        changed = bug.applied(spec)
        if changed is None:
            return None
        spec = changed
    return spec


def project(facts: Facts, reading: Reading | None, scene: Scene) -> Projected:
    """Queries, keys and values of a call, by the matrices that were read."""
    subject = facts.subject
    k, v = (scene.k, scene.v) if scene.k is not None else subject.keys(scene.x)
    v = k if v is None else v
    if reading is None:
        return Projected(scene.x, k, v, None, width=subject.width)
    maps = {"q": reading.q, "k": reading.k, "v": reading.v, "o": reading.o}
    double = {who: _double(m) for who, m in maps.items() if m is not None}
    q_norm, k_norm = (None if n is None else _double_norm(n) for n in norms(subject.module))
    out = double.get("o")
    return Projected(
        double["q"](scene.x),
        double["k"](k),
        double["v"](v),
        None if out is None else (out.weight, out.bias),
        q_norm,
        k_norm,
        subject.width,
    )


def _double(m: Map) -> Map:
    return replace(
        m,
        weight=m.weight.detach().double(),
        bias=None if m.bias is None else m.bias.detach().double(),
    )


def _double_norm(norm: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(norm).double()


def _finding(bug: Bug, scene: Scene, facts: Facts, found: Found) -> Finding:
    if (
        bug.name == "mask ignored" and "alone" in scene.what
    ):  # no mask was given: it was said to be causal by itself
        bug = replace(
            bug,
            name="sees the future",
            words="It was said to be causal, and nothing hides later tokens.",
            look="Where the scores are made: keys j > i must be hidden before the softmax.",
        )
    reading, spec, _, may = found
    out = compute(project(facts, reading, scene), may, spec)
    rows = (out - scene.out).abs().nan_to_num(torch.inf).amax((0, 2))
    row = int((rows > 1e-6 * out.nan_to_num(0.0).abs().max()).int().argmax())
    size = gap(scene.out, out)
    by = "NaN" if size == torch.inf else f"{size:.2g} of its size"
    named = (
        ""
        if reading is None
        else f" The projections are read as: {reading.words}; {spec.heads} heads."
    )
    where = (
        f" Called {scene.what}, the definition with this one change reproduces the output to"
        f" rounding.{named}"
    )
    return Finding(
        bug.name,
        bug.words + where,
        _smallest(bug, facts, found, scene) + f"; at {scene.shown}, row {row} is the "
        "first that "
        f"differs from the definition, and the output is off by {by}",
        bug.look,
        by=["the definition"],
    )


def _smallest(bug: Bug, facts: Facts, found: Found, scene: Scene) -> str:
    """The fewest tokens at which the bug changes the definition's output."""
    reading, spec, _, _ = found
    wrong = bug.applied(spec)
    for length, batch in itertools.product(range(1, facts.subject.length + 1), (1, 2)):
        x = facts.subject.x(batch, length)
        part = replace(scene, x=x, k=None, v=None)
        if scene.may.shape[-2:] != (facts.subject.length, facts.subject.length) or wrong is None:
            break
        may = scene.may[..., :length, :length]
        may = may[:batch] if may.ndim == 3 else may
        try:
            p = project(facts, reading, part)
            if gap(compute(p, may, wrong), compute(p, may, spec)) > 1e-6:
                return shape_words(facts.subject, batch, length)
        except RuntimeError:
            continue
    return scene.shown
