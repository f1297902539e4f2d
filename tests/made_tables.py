"""Tables and maps made up for the report: numbers varied, some missing, several stacks, a hostile
token.
"""

from __future__ import annotations

import numpy as np

from multihead.reader.maps import HeadMap
from multihead.reader.statistics import columns, describe
from multihead.reader.statistics.columns import STATISTICS
from multihead.reader.sums import Head
from multihead.reader.table import Table

HOSTILE = "</script><script>alert(1)</script>"
TEXT = """The cat sat on the mat while the other cat , named Tom , slept in the sun ;
Tom woke when the door shut and the first cat ran into the garden ."""
WORDS = TEXT.split()


def make_heads(layers, heads, groups=None, stacks=("",)):
    """`stacks` are prefixes of labels such as "" or "decoder.", kinds from their last word:
    "decoder.+cross".
    """
    found = []
    for stack in stacks:
        prefix, _, kind = stack.partition("+")
        for layer in range(layers):
            for index in range(heads):
                label = f"{prefix}L{layer}." + (f"{kind}." if kind else "") + f"H{index}"
                found.append(
                    Head(
                        label,
                        f"model.{prefix}layers.{layer}.{kind or 'self'}_attn",
                        layer,
                        index,
                        index * (groups or heads) // heads,
                        kind or "self",
                    )
                )
    return found


def make_table(
    layers=4,
    heads=8,
    groups=None,
    stacks=("",),
    documents=3,
    seed=0,
    empty=("probe:", "special"),
    strength=1.0,
    **meta,
):
    """A table whose heads each favour one class of keys; columns that start with one of `empty`
    have no value.
    """
    rng = np.random.default_rng(seed)
    labels = make_heads(layers, heads, groups, stacks)
    table, count = Table(labels), len(labels)
    masses = [s for s in STATISTICS.values() if s.is_mass]
    favourite = rng.integers(0, len(masses) + 6, count)
    number = np.arange(len(masses))[:, None]
    strength = strength * rng.uniform(0.1, 0.95, (len(masses), count))
    strength = strength * ((number == favourite) + 0.6 * (number + 4 == favourite))
    cross = np.array([h.kind == "cross" for h in labels])
    for column in columns():
        statistic = describe(column)
        if statistic.name.startswith(tuple(empty)):
            continue
        for _ in range(documents):
            rows = np.full(count, 63.0)
            if column.startswith("even:"):
                value = np.full(count, 0.03)
            elif statistic.is_mass:
                value = strength[masses.index(statistic)] + rng.uniform(0, 0.05, count)
                value = value * 0.8 if column.startswith("contribution:") else value
            elif column == "share":
                value = rng.normal(1 / heads, 0.1, count)
            elif column == "reach":
                value = rng.uniform(0, 1.5, count)
            else:
                value = rng.uniform(0, statistic.range[1] or 6, count)
            if statistic.is_mass and statistic.name not in ("first", "special"):
                rows[cross] = 0  # offsets and tokens have no meaning across
            table.add(column, 0, x=value * rows, y=rows, rows=rows)
    table.reasons |= {
        c: "the text has no special tokens" for c in columns() if c.startswith("special")
    }
    for site in {h.site for h in labels if h.kind == "cross"}:
        table.reasons[f"{site} previous"] = (
            "queries and keys of cross-attention are not the same tokens"
        )
    table.meta |= {
        "model": "made-up-30M",
        "text": "a cat and a door",
        "tokens": 64 * documents,
        "documents": documents,
        "notes": ["the text was cut at 64 tokens"],
    } | meta
    return table


def make_maps(table, tokens=64, hostile=True, seed=1, causal=True, only=None):
    """A map a head, each of a different look; self-attention is causal unless told otherwise, or in
    an encoder.
    """
    rng = np.random.default_rng(seed)
    text = [" " * (n > 0) + WORDS[n % len(WORDS)] for n in range(tokens)]
    if hostile:
        text[5] = HOSTILE
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    maps = []
    for n, head in enumerate(table.heads):
        if only is not None and head.head not in only:
            continue
        looks = [
            -abs(i - j - 1),
            -abs(i - j) / 4.0,
            np.where(j == 0, 4.0, 0.0),
            np.sin(j * (n + 2)) * 3,
            np.where([[a == b for b in text] for a in text], 4.0, 0.0),
        ]
        scores = looks[n % len(looks)] + rng.normal(0, 0.6, (tokens, tokens))
        triangle = causal and head.kind == "self" and "encoder" not in head.head
        allowed = j <= i if triangle else np.full((tokens, tokens), True)
        weights = np.where(allowed, np.exp(scores), 0)
        weights /= weights.sum(1, keepdims=True)
        lengths = rng.uniform(0.2, 3, tokens)
        lengths[0] = 0.05
        contributions = None if n % 11 == 10 else (weights * lengths).astype(np.float32)
        maps.append(
            HeadMap(
                head.head,
                text,
                list(range(tokens)),
                text,
                weights.astype(np.float32),
                contributions,
            )
        )
    return maps
