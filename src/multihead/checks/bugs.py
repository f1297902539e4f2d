"""The known bugs: what each is, where to look, and what it changes in the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .definition import Spec


@dataclass(frozen=True)
class Bug:
    name: str
    words: str
    look: str
    change: dict[str, Any]
    where: Callable[[Spec], bool] = lambda spec: True
    explains: tuple[str, ...] = ()  # findings from outside that are then no bugs of their own

    def applied(self, spec: Spec) -> Spec | None:
        return replace(spec, **self.change) if self.where(spec) else None


def _several(spec: Spec) -> bool:
    return spec.heads > 1


def _grouped(spec: Spec) -> bool:
    return 1 < spec.groups < spec.heads


def _plain(spec: Spec) -> bool:
    return spec.scale is None


MIXED = (
    "tokens and heads mixed",
    "sees the future",
    "weights don't sum to one",
    "padding changes real tokens",
    "a mask that doesn't hide",
    "softmax over the wrong axis",
    "sees the next token",
    "leak where everything is masked",
    "batch elements influence each other",
    "inverted mask",
    "cache differs from the full pass",
)
MASKED = (
    "sees the future",
    "weights don't sum to one",
    "padding changes real tokens",
    "a mask that doesn't hide",
    "sees the next token",
    "can't see itself",
    "masked rows that give NaN",
    "leak where everything is masked",
    "inverted mask",
    "cache differs from the full pass",
    "gradients become NaN",
    "results depend on whether weights are asked for",
    "tokens and heads mixed",
)
RESHAPE = (
    "[B, L, H * E] goes to heads by view(B, L, H, E).transpose(1, 2), and back by transpose(1,"
    " 2).reshape(B, L, H * E). A view straight to [B, H, L, E] has the same shape and cuts tokens"
    " into heads."
)
SLICES = (
    "Head h takes the numbers h * E to (h + 1) * E, of queries, keys and values alike, and gives"
    " them back there."
)
SCALE = (
    "Scores are multiplied by 1 / sqrt(E), E the width of a head, once. If another scale is meant,"
    " say so: scale=..."
)

BUGS: tuple[Bug, ...] = (
    *(
        Bug("missing or wrong scale", words, SCALE, {"scaling": kind}, _plain)
        for kind, words in (
            ("none", "Scores aren't scaled: q . k as it is."),
            ("1/E", "Scores are scaled by 1/E: as if 1/sqrt(E) were applied twice."),
            (
                "1/sqrt(D)",
                (
                    "Scores are scaled by 1/sqrt(D), the width of the model, in place of the width"
                    " of a head."
                ),
            ),
            ("sqrt(E)", "Scores are multiplied by sqrt(E), not divided by it."),
        )
    ),
    Bug(
        "missing or wrong scale",
        "Scores are scaled by 1/sqrt(E), not by the scale that was said.",
        SCALE,
        {"scaling": "not as said"},
        lambda s: s.scale is not None,
    ),
    *(
        Bug("tokens and heads mixed", words, RESHAPE, change, _several, MIXED)
        for words, change in (
            (
                (
                    "Queries, keys and values are cut into heads by a reshape without transpose,"
                    " and merged by one."
                ),
                dict(q_split="reshape", k_split="reshape", v_split="reshape", merge="reshape"),
            ),
            (
                "Queries, keys and values are cut into heads by a reshape without transpose.",
                dict(q_split="reshape", k_split="reshape", v_split="reshape"),
            ),
            (
                (
                    "The heads' outputs are merged without the transpose back: [B, H, L, E] is read"
                    " as [B, L, H * E]."
                ),
                dict(merge="reshape"),
            ),
            (
                "Keys and values are cut into heads by a reshape without transpose.",
                dict(k_split="reshape", v_split="reshape"),
            ),
            ("Queries are cut into heads by a reshape without transpose.", dict(q_split="reshape")),
            ("Keys are cut into heads by a reshape without transpose.", dict(k_split="reshape")),
            ("Values are cut into heads by a reshape without transpose.", dict(v_split="reshape")),
        )
    ),
    *(
        Bug(
            "heads read each other's slices",
            words,
            SLICES,
            change,
            _several,
            ("gradients don't reach a projection",),
        )
        for words, change in (
            (
                "Heads take overlapping slices: h to h + E, not h * E to (h + 1) * E.",
                dict(q_split="overlap", k_split="overlap", v_split="overlap"),
            ),
            (
                "Keys and values of the heads overlap: h to h + E, not h * E to (h + 1) * E.",
                dict(k_split="overlap", v_split="overlap"),
            ),
            ("Keys of the heads overlap: h to h + E.", dict(k_split="overlap")),
            ("Values of the heads overlap: h to h + E.", dict(v_split="overlap")),
            ("Queries of the heads overlap: h to h + E.", dict(q_split="overlap")),
            (
                "Every head reads the first head's keys and values.",
                dict(k_split="first", v_split="first"),
            ),
            (
                "Every head reads the first head's slice of queries, keys and values.",
                dict(q_split="first", k_split="first", v_split="first"),
            ),
            ("Every head reads the first head's keys.", dict(k_split="first")),
            ("Every head reads the first head's values.", dict(v_split="first")),
            (
                (
                    "Keys are cut as [E, H], queries as [H, E]: a head's query meets keys of all"
                    " heads."
                ),
                dict(k_split="strided"),
            ),
            (
                (
                    "Queries are cut as [E, H], keys as [H, E]: a head's query meets keys of all"
                    " heads."
                ),
                dict(q_split="strided"),
            ),
            ("Values are cut as [E, H], the rest as [H, E].", dict(v_split="strided")),
            ("Heads are merged as [E, H] and cut as [H, E].", dict(merge="strided")),
        )
    ),
    *(
        Bug(
            "softmax over the wrong axis",
            f"The softmax runs over {axis}, not over the keys.",
            "softmax(dim=-1) of scores [B, H, L, S].",
            {"axis": axis},
            lambda s, a=axis: a != "heads" or s.heads > 1,  # type: ignore[misc]
            MIXED,
        )
        for axis in ("queries", "heads", "batch")
    ),
    Bug(
        "a second softmax over heads",
        "The weights go through a second softmax, over the heads.",
        "One softmax, over the keys; what follows it is the product with the values.",
        {"again": True},
        _several,
        MASKED,
    ),
    Bug(
        "mask after softmax, not renormalised",
        "The mask is multiplied in after the softmax: hidden keys still take their "
        "part of "
        "the sum, so a row's weights don't sum to one.",
        "masked_fill(~mask, -inf) on the scores, before the softmax.",
        {"masking": "after"},
        explains=MASKED,
    ),
    Bug(
        "masked scores set to 0",
        "Hidden scores are multiplied by 0, and 0 is a score like any other: exp(0) = 1.",
        "masked_fill(~mask, -inf) on the scores, in place of a product.",
        {"masking": "zero"},
        explains=MASKED,
    ),
    Bug(
        "mask ignored",
        "The mask that is given changes nothing.",
        "Whether the mask reaches the scores.",
        {"masking": "ignored"},
        explains=MASKED,
    ),
    Bug(
        "inverted mask",
        "The mask is the wrong way round: what should be read is hidden.",
        "masked_fill hides where True: "
        "masked_fill(mask == 0, -inf) of a mask that is True where a row may read.",
        {"masking": "inverted"},
        explains=MASKED,
    ),
    Bug(
        "inverted mask",
        "Rows read their own token and later ones, not earlier ones: the causal mask is"
        " transposed.",
        "torch.tril, not torch.triu, of what may be read.",
        {"masking": "upper"},
        explains=MASKED,
    ),
    Bug(
        "can't see itself",
        "The causal mask is off by one: a row doesn't read its own token.",
        "Keys j <= i may be read: "
        "torch.tril(diagonal=0) of what is read, torch.triu(diagonal=1) of what is hidden.",
        {"masking": "strict"},
        explains=MASKED,
    ),
    Bug(
        "sees the next token",
        "The causal mask is off by one: a row reads the next token.",
        "Keys j <= i may be read: "
        "torch.tril(diagonal=0) of what is read, torch.triu(diagonal=1) of what is hidden.",
        {"masking": "ahead"},
        explains=MASKED,
    ),
    Bug(
        "soft cap after the mask",
        "The soft cap comes after the mask, and makes of -inf a finite score.",
        "Cap the scores first, then mask them.",
        {"masking": "before cap"},
        lambda s: s.softcap is not None,
        MASKED,
    ),
    Bug(
        "grouped heads tiled",
        "Key/value heads are repeated as 0 1 0 1, so that query head h reads head h % G.",
        "Query head h reads key/value head h // (H / G): repeat_interleave, in place of repeat or"
        " tile.",
        {"grouping": "tile"},
        _grouped,
    ),
    *(
        Bug(
            "rotary positions are wrong",
            words,
            look,
            {"turned": turned},
            lambda s: s.rotary is not None,
            (
                "weights don't sum to one",
                "cache differs from the full pass",
                "tokens and heads mixed",
            ),
        )
        for turned, words, look in (
            (
                "values too",
                "Rotary positions turn the values too.",
                "Turn queries and keys, never values.",
            ),
            (
                "wrong pairing",
                (
                    "Angles and pairs don't belong together: angles laid out for one pairing"
                    " (halves, or neighbours), numbers paired in the other."
                ),
                (
                    "cat([freqs, freqs]) goes with rotate_half, repeat_interleave(2) with"
                    " neighbouring pairs."
                ),
            ),
            (
                "queries only",
                "Rotary positions turn the queries, and the keys not.",
                "Turn queries and keys.",
            ),
        )
    ),
    Bug(
        "W_O missing",
        "There is an output projection, and it isn't applied.",
        "The last line: return self.out_proj(merged).",
        {"applies_output": False},
        lambda s: s.output,
        ("gradients don't reach a projection",),
    ),
    Bug(
        "values read from W_K",
        "Values are made with the projection of the keys.",
        "v = self.v_proj(x), not k_proj.",
        {"values": "keys"},
        explains=("gradients don't reach a projection",),
    ),
)
