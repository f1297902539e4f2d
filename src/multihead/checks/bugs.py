"""The bugs that `check` knows: for each its name, a description, where to look, and its change.

To add one, append a `Bug` to `BUGS`: its `change` replaces steps of the definition
(`definition.Definition`). A user-defined bug needs no entry: `check(..., bugs=[Bug(...)])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .definition import Definition, Masking
from .finding import BugName
from .latent_steps import (
    drop_rotary_key,
    expand_without,
    normalize_keys_alone,
    rotary_key_of_first_head,
    rotate_keys,
    rotate_other_end,
    rotate_whole_heads,
)
from .wrong_steps import (
    allow_next,
    ignore_mask,
    mask_diagonal,
    mask_then_cap,
    merge_by_feature,
    merge_by_view,
    multiply_by_mask,
    rotate_queries,
    rotate_values,
    rotate_wrong_pairs,
    split_by_feature,
    split_by_view,
    split_first,
    split_overlapping,
    transpose_mask,
)


@dataclass(frozen=True)
class Bug:
    """A known bug, as a change of the definition.

    `check` computes the output with this change. If that is the output of the callable, the bug is
    reported, with certainty.

    Attributes:
        name: as the report lists it.
        description: what the code does, and what it should do.
        look: where to look in the code.
        change: steps of `Definition` by name, and what takes their place.
        applies: whether the change is one for this definition (`num_heads > 1`, a soft cap, ...).
        explains: names of findings that follow from this bug and aren't reported next to it.
        crosses_batch: whether batch elements influence each other through it.

    >>> Bug("keys tripled", "Keys are multiplied by 3.", "Where k is made.",
    ...     {"split_k": lambda k, heads: 3 * k.unflatten(-1, (heads, -1)).transpose(1, 2)}).name
    'keys tripled'
    """

    name: str
    description: str
    look: str
    change: Mapping[str, Any]
    applies: Callable[[Definition], bool] = lambda definition: True
    explains: tuple[str, ...] = ()
    crosses_batch: bool = False

    def put_into(self, definition: Definition) -> Definition | None:
        """The definition with this bug; None where it doesn't apply."""
        return replace(definition, **self.change) if self.applies(definition) else None


def put_all(definition: Definition, bugs: Iterable[Bug]) -> Definition | None:
    """The definition with all of these bugs; None where one doesn't apply."""
    changed: Definition | None = definition
    for bug in bugs:
        changed = None if changed is None else bug.put_into(changed)
    return changed


# ---- Conditions


def _has_heads(definition: Definition) -> bool:
    return definition.num_heads > 1


def _is_grouped(definition: Definition) -> bool:
    return 1 < definition.num_kv_heads < definition.num_heads


def _rotates(definition: Definition) -> bool:
    return definition.rotary is not None


def _rotates_part(definition: Definition) -> bool:
    return _rotates(definition) and definition.rotary_dim is not None


# ---- What follows from a bug

FOLLOWS_MASK = (
    BugName.FUTURE,
    BugName.NOT_NORMALISED,
    BugName.PADDING_LEAKS,
    BugName.MASK_LEAKS,
    BugName.NEXT_TOKEN,
    BugName.NOT_ITSELF,
    BugName.EMPTY_ROW_NAN,
    BugName.EMPTY_ROW_LEAKS,
    BugName.MASK_INVERTED,
    BugName.CACHE,
    BugName.GRADIENTS_NAN,
    BugName.WEIGHTS_FLAG,
    BugName.MIXED,
)
FOLLOWS_MIXING = (
    BugName.MIXED,
    BugName.FUTURE,
    BugName.NOT_NORMALISED,
    BugName.PADDING_LEAKS,
    BugName.MASK_LEAKS,
    BugName.AXIS,
    BugName.NEXT_TOKEN,
    BugName.EMPTY_ROW_LEAKS,
    BugName.BATCH,
    BugName.MASK_INVERTED,
    BugName.CACHE,
)

# ---- The table


def _scales() -> Iterable[Bug]:
    look = (
        "Scores are multiplied by 1 / sqrt(E), E the width of a head, once. Pass scale=... if"
        " another scale is intended."
    )
    wrong: dict[str, Callable[[int, int, Definition], float]] = {
        "Scores aren't scaled: q . k as it is.": lambda E, D, d: 1.0,
        "Scores are scaled by 1/E: as if 1/sqrt(E) were applied twice.": lambda E, D, d: 1.0 / E,
        "Scores are scaled by 1/sqrt(D), the width of the model, instead of the width of a head.": (
            lambda E, D, d: D**-0.5
        ),
        "Scores are multiplied by sqrt(E) instead of divided by it.": lambda E, D, d: E**0.5,
    }
    for description, scaling in wrong.items():
        yield Bug(BugName.SCALE, description, look, {"scaling": scaling}, lambda d: d.scale is None)
    yield Bug(
        BugName.SCALE,
        "Scores are scaled by 1/sqrt(E), not by the scale that was given.",
        look,
        {"scaling": lambda E, D, d: E**-0.5},
        lambda d: d.scale is not None,
    )


def _mixing() -> Iterable[Bug]:
    look = (
        "[B, L, H * E] goes to heads by view(B, L, H, E).transpose(1, 2), and back by"
        " transpose(1, 2).reshape(B, L, H * E). A view straight to [B, H, L, E] has the same shape"
        " and cuts tokens into heads."
    )
    split = "are split into heads by a reshape without transpose"
    wrong = {
        f"Queries, keys and values {split}, and merged by one.": "qkvo",
        f"Queries, keys and values {split}.": "qkv",
        "The heads' outputs are merged without the transpose back: [B, H, L, E] is reshaped"
        " straight to [B, L, H * E].": "o",
        f"Keys and values {split}.": "kv",
        f"Queries {split}.": "q",
        f"Keys {split}.": "k",
        f"Values {split}.": "v",
    }
    for description, parts in wrong.items():
        change: dict[str, Any] = {f"split_{p}": split_by_view for p in parts if p != "o"}
        if "o" in parts:
            change["merge"] = merge_by_view
        yield Bug(BugName.MIXED, description, look, change, _has_heads, FOLLOWS_MIXING)


def _slices() -> Iterable[Bug]:
    look = (
        "Head h takes the features h * E to (h + 1) * E of queries, keys and values alike, and"
        " writes its output to the same place."
    )
    right = "not h * E to (h + 1) * E"
    wrong: list[tuple[str, str, Callable[..., Tensor]]] = [
        (f"Heads take overlapping slices: h to h + E, {right}.", "qkv", split_overlapping),
        (f"Keys and values of the heads overlap: h to h + E, {right}.", "kv", split_overlapping),
        ("Keys of the heads overlap: h to h + E.", "k", split_overlapping),
        ("Values of the heads overlap: h to h + E.", "v", split_overlapping),
        ("Queries of the heads overlap: h to h + E.", "q", split_overlapping),
        ("Every head reads the first head's keys and values.", "kv", split_first),
        ("Every head reads the first head's queries, keys and values.", "qkv", split_first),
        ("Every head reads the first head's keys.", "k", split_first),
        ("Every head reads the first head's values.", "v", split_first),
        ("Keys are split as [E, H], queries as [H, E].", "k", split_by_feature),
        ("Queries are split as [E, H], keys as [H, E].", "q", split_by_feature),
        ("Values are split as [E, H], the rest as [H, E].", "v", split_by_feature),
        ("Heads are merged as [E, H] and split as [H, E].", "o", merge_by_feature),
    ]
    for description, parts, step in wrong:
        change = {"merge" if p == "o" else f"split_{p}": step for p in parts}
        yield Bug(BugName.SLICES, description, look, change, _has_heads, (BugName.GRADIENTS_CUT,))


def _softmaxes() -> Iterable[Bug]:
    for axis, dim in {"queries": -2, "heads": 1, "batch": 0}.items():
        yield Bug(
            BugName.AXIS,
            f"The softmax runs over the {axis} instead of the keys.",
            "softmax(dim=-1) of scores [B, H, L, S].",
            {"softmax": partial(torch.softmax, dim=dim)},
            _has_heads if axis == "heads" else lambda d: True,
            FOLLOWS_MIXING,
            crosses_batch=axis == "batch",
        )
    shared: dict[str, Callable[[Tensor], Tensor]] = {
        "the weights of batch element 0": lambda w: w[:1].expand_as(w),
        "the weights of the last batch element": lambda w: w[-1:].expand_as(w),
        "the mean of all batch elements' weights": lambda w: w.mean(0, keepdim=True).expand_as(w),
    }
    for which, share in shared.items():
        yield Bug(
            BugName.BATCH_SHARED,
            f"Every batch element reads with {which}.",
            "Scores [B, H, L, S], one matrix for each batch element and head.",
            {"reweight": share},
            explains=(BugName.BATCH, *FOLLOWS_MIXING),
            crosses_batch=True,
        )
    yield Bug(
        BugName.SECOND_SOFTMAX,
        "The weights go through a second softmax, over the heads.",
        "One softmax, over the keys, followed by the product with the values.",
        {"reweight": partial(torch.softmax, dim=1)},
        _has_heads,
        FOLLOWS_MASK,
    )


def _masks() -> Iterable[Bug]:
    diagonal = (
        "Keys j <= i may be read: torch.tril(diagonal=0) of what may be read,"
        " torch.triu(diagonal=1) of what is hidden."
    )
    wrong = [
        (
            BugName.MASK_AFTER_SOFTMAX,
            "The mask is multiplied in after the softmax: hidden keys still have a share of the"
            " sum, so the weights of a query don't sum to one.",
            "masked_fill(~mask, -inf) on the scores, before the softmax.",
            Masking(hide=ignore_mask, reweight=lambda weights, allowed: weights * allowed),
        ),
        (
            BugName.MASK_AS_ZERO,
            "Hidden scores are multiplied by 0, and 0 is a score like any other: exp(0) = 1.",
            "masked_fill(~mask, -inf) on the scores instead of a product.",
            Masking(hide=multiply_by_mask),
        ),
        (
            BugName.MASK_IGNORED,
            "The mask that is passed changes nothing.",
            "Whether the mask reaches the scores.",
            Masking(hide=ignore_mask),
        ),
        (
            BugName.MASK_INVERTED,
            "The mask is inverted: keys that should be read are hidden.",
            "masked_fill hides where True: masked_fill(mask == 0, -inf) of a mask that is True"
            " where a key may be read.",
            Masking(rule=torch.logical_not, empties_rows=True),
        ),
        (
            BugName.MASK_INVERTED,
            "Queries read their own token and later ones, not earlier ones: the causal mask is"
            " transposed.",
            "torch.tril, not torch.triu, of what may be read.",
            Masking(rule=transpose_mask, empties_rows=True),
        ),
        (
            BugName.NOT_ITSELF,
            "The causal mask is off by one: a query doesn't read its own token.",
            diagonal,
            Masking(rule=mask_diagonal, empties_rows=True),
        ),
        (
            BugName.NEXT_TOKEN,
            "The causal mask is off by one: a query reads the next token.",
            diagonal,
            Masking(rule=allow_next),
        ),
    ]
    for name, description, look, masking in wrong:
        yield Bug(name, description, look, {"masking": masking}, explains=FOLLOWS_MASK)
    yield Bug(
        BugName.CAP_AFTER_MASK,
        "The soft cap comes after the mask and turns -inf into a finite score.",
        "Cap the scores first, then mask them.",
        {"masking": Masking(hide=mask_then_cap)},
        lambda d: d.softcap is not None,
        FOLLOWS_MASK,
    )


def _rotaries() -> Iterable[Bug]:
    wrong = [
        (
            "Rotary positions rotate the values too.",
            "Rotate queries and keys, never values.",
            rotate_values,
        ),
        (
            "Angles and pairs don't match: the angles are laid out for one pairing (halves, or"
            " neighbours), the components are paired in the other.",
            "cat([freqs, freqs]) goes with rotate_half, repeat_interleave(2) with neighbours.",
            rotate_wrong_pairs,
        ),
        (
            "Rotary positions rotate the queries and not the keys.",
            "Rotate queries and keys.",
            rotate_queries,
        ),
    ]
    part = "Rotate the rotary part of queries, and the rotary key, alone."
    of_parts = [
        ("Rotary positions rotate all of a head, not its rotary part.", part, rotate_whole_heads),
        ("Rotary positions rotate the other end of a head.", part, rotate_other_end),
        (
            "The rotary key is rotated and the rotary part of the queries isn't.",
            "Rotate both.",
            rotate_keys,
        ),
    ]
    for applies, bugs in ((_rotates, wrong), (_rotates_part, of_parts)):
        for description, look, rotate in bugs:
            yield Bug(
                BugName.ROTARY,
                description,
                look,
                {"rotate": rotate},
                applies,
                (BugName.NOT_NORMALISED, BugName.CACHE, BugName.MIXED, BugName.NO_POSITIONS),
            )


def _orders() -> Iterable[Bug]:
    words = {"q": "W_Q", "k": "W_K", "v": "W_V"}
    for order in ("qkk", "kqv", "qvk", "vkq", "kvq", "vqk", "qkq", "vkv", "qvv"):
        queries, keys, values = (words[letter] for letter in order)
        is_swapped = len(set(order)) == 3
        name = BugName.PROJECTIONS if is_swapped else BugName.PROJECTION_TWICE
        yield Bug(
            BugName.VALUES_FROM_KEYS if order == "qkk" else name,
            f"Queries are computed with {queries}, keys with {keys} and values with {values}.",
            "q = self.q_proj(x), k = self.k_proj(x), v = self.v_proj(x), unpacked in this order.",
            {"order": order},
            lambda d, order=order: order == "qkk" or _allows(d, order),  # type: ignore[misc]
            (BugName.GRADIENTS_CUT,),
        )


def _allows(d: Definition, order: str) -> bool:
    """Whether these projections have the same width."""
    is_grouped = d.num_kv_heads != d.num_heads and (order[0] != "q" or "q" in order[1:])
    return d.latents is None and not is_grouped


def _latents() -> Iterable[Bug]:
    norm = "norm(c) before W_UK and W_UV, and norm(c_q) before W_UQ; the rotary key has no norm."
    shared = "One rotary key a token, repeated for all heads: k_rot.expand(-1, H, -1, -1)."
    queries = "Queries are projected from their latent without its norm"
    keys = "Keys and values are projected from their latent without its norm"
    wrong: list[tuple[str, str, str, Callable[..., Any], set[str]]] = [
        (BugName.LATENT_NORM, f"{keys}.", norm, expand_without("kv_norm"), {"kv"}),
        (BugName.LATENT_NORM, f"{queries}.", norm, expand_without("q_norm"), {"q"}),
        (
            BugName.LATENT_NORM,
            "Queries, keys and values are projected from their latents without the norms.",
            norm,
            expand_without("q_norm", "kv_norm"),
            {"q", "kv"},
        ),
        (
            BugName.LATENT_NORM,
            "Values are projected from the latent before its norm, keys after it.",
            norm,
            normalize_keys_alone,
            {"kv"},
        ),
        (
            BugName.ROTARY_KEY,
            "The first head alone reads the rotary key, the others none.",
            shared,
            rotary_key_of_first_head,
            set(),
        ),
        (
            BugName.ROTARY_KEY,
            "The rotary part of the queries meets no key.",
            shared,
            drop_rotary_key,
            set(),
        ),
    ]
    for name, description, look, expand, norms in wrong:
        yield Bug(
            name,
            description,
            look,
            {"expand": expand},
            lambda d, norms=norms: d.latents is not None and norms <= set(d.latents),  # type: ignore[misc]
            (BugName.GRADIENTS_CUT,),
        )
    yield Bug(
        BugName.SCALE,
        "Scores are scaled by 1/sqrt of a head's width without its rotary part.",
        "Scores are multiplied by 1 / sqrt(E + R), the width of queries and keys together with"
        " their rotary part R.",
        {"scaling": lambda E, D, d: (E - (d.rotary_dim or 0)) ** -0.5},
        lambda d: d.latents is not None and d.scale is None,
    )


def _scored() -> Iterable[Bug]:
    both = {"qq": (BugName.NO_KEYS, "queries"), "kk": (BugName.NO_QUERIES, "keys")}
    for scored, (name, which) in both.items():
        yield Bug(
            name,
            f"Scores are products of {which} with {which}.",
            "Scores are q @ k.mT.",
            {"scored": scored},
            lambda d: d.num_heads == d.num_kv_heads and d.latents is None,
            (BugName.GRADIENTS_CUT,),
        )


BUGS: tuple[Bug, ...] = (
    *_latents(),
    *_scales(),
    *_mixing(),
    *_slices(),
    *_softmaxes(),
    *_masks(),
    Bug(
        BugName.TILED,
        "Key/value heads are repeated as 0 1 0 1, so that query head h reads head h % G.",
        "Query head h reads key/value head h // (H / G): repeat_interleave instead of repeat or"
        " tile.",
        {"repeat_kv": lambda x, times: x.repeat(1, times, 1, 1)},
        _is_grouped,
    ),
    *_rotaries(),
    Bug(
        BugName.NO_OUTPUT,
        "There is an output projection that isn't applied.",
        "The last line: return self.out_proj(merged).",
        {"applies_output": False},
        lambda d: d.output,
        (BugName.GRADIENTS_CUT,),
    ),
    *_scored(),
    *_orders(),
)
