"""`payload`: the page's data as JSON, with rounded numbers and maps as bytes, within a budget."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MultiheadError
from ..reader.digest import Digest
from ..reader.roles import ROLES, THRESHOLD
from ..reader.statistics import columns, describe
from ..reader.sums import Head
from ..reader.table import Table
from .frame import as_json

if TYPE_CHECKING:
    from ..reader.maps import HeadMap

DIGITS = 4  # of each number
# of a map's cell, evenly spaced on a square-root scale: off by 0.4 % of the map's largest at most
LEVELS = 255


def payload(
    table: Table, maps: Iterable[HeadMap], budget: int, by: str = "token"
) -> dict[str, Any]:
    """The page's data in at most `budget` bytes of JSON; what is left out is listed in it.

    `by` is how maps are shown at first, between tokens or words.
    Maps of the least informative heads go first, then standard errors, then the values of uniform
    attention.
    """
    digest = Digest(table)
    data = _numbers(table, digest)
    data |= {"by": by, "texts": [], "maps": {}, "dropped": [], "left_out": []}
    for optional in ("errors", "even"):
        if _size(data) > budget:
            data["left_out"].append(optional)
            if optional == "errors":
                data["errors"] = {}
            else:
                for column in [c for c in data["columns"] if c.startswith("even:")]:
                    data["columns"].remove(column)
                    del data["values"][column], data["counts"][column]
    if _size(data) > budget:
        raise MultiheadError(
            f"budget={budget}: the numbers of {len(table.heads)} heads alone take {_size(data)}"
            " bytes; show fewer heads on a page, or save the table with table.save('heads.json')"
        )
    maps = list(maps)
    _add_maps(data, table, digest, maps, budget - _size(data | {"dropped": [m.head for m in maps]}))
    return data


def pack(values: NDArray[np.float32], lengths: list[int]) -> tuple[str, float]:
    """The first `lengths[i]` entries of each row i as one byte each, in base64, and the value of
    byte 255.
    """
    values = np.nan_to_num(np.maximum(values, 0).astype(np.float64))
    largest = float(values.max(initial=0.0))
    levels = np.rint(LEVELS * np.sqrt(values / largest if largest else values)).astype(np.uint8)
    kept = np.arange(values.shape[1]) < np.array(lengths, int)[:, None]
    return base64.b64encode(levels[kept].tobytes()).decode("ascii"), _round(largest) or 0.0


def blocks(heads: list[Head]) -> list[dict[str, Any]]:
    """One grid of heads for each stack: rows are sites, columns head indices; a pruned head is a
    gap (None).
    """
    stacks: dict[tuple[str, str], dict[str, dict[int, int]]] = {}
    for n, head in enumerate(heads):
        stack = " ".join(
            re.sub(r"(^|\.)L\d+(?=\.|$)|(^|\.)H\d+$", " ", head.head).replace(".", " ").split()
        )
        stacks.setdefault((stack, head.kind), {}).setdefault(head.site, {})[head.index] = n
    found = []
    for (stack, kind), sites in stacks.items():
        width = 1 + max(max(row) for row in sites.values())
        rows = []
        for site, row in sites.items():
            layer = heads[next(iter(row.values()))].layer
            rows.append(
                {
                    "label": site if layer is None else f"L{layer}",
                    "site": site,
                    "cells": [row.get(index) for index in range(width)],
                }
            )
        groups = [
            {heads[row[index]].group for row in sites.values() if index in row}
            for index in range(width)
        ]
        shared = all(len(g) == 1 for g in groups) and len(set().union(*groups)) < width
        found.append(
            {
                "title": stack,
                "kind": kind,
                "rows": rows,
                "width": width,
                "groups": [g.pop() for g in groups] if shared else None,
            }
        )
    return found


def _numbers(table: Table, digest: Digest) -> dict[str, Any]:
    present = table.columns
    counts = {c: table.count(c).tolist() for c in present}
    errors = {c: _rounded(table.error(c)) for c in present}
    return {
        "threshold": THRESHOLD,
        "roles": {
            role: {
                "mass": mass,
                "scores": _rounded(digest.scores[role]),
                "meaning": describe(mass).meaning,
            }
            for role, mass in ROLES.items()
        },
        "heads": [
            asdict(head) | {"roles": held, "resting": bool(rests)}
            for head, held, rests in zip(table.heads, digest.roles, digest.resting)
        ],
        "blocks": blocks(table.heads),
        "statistics": {
            s.name: s.to_dict()
            for s in (describe(c, table.meta.get("statistics")) for c in columns(table.sums))
        },
        "columns": present,
        "values": {c: _rounded(table.value(c)) for c in present},
        "counts": {c: n[0] if len(set(n)) == 1 else n for c, n in counts.items()},
        "errors": {c: e for c, e in errors.items() if any(e)},
        "reasons": {str(key): str(why) for key, why in table.reasons.items()},
        "order": digest.order(),
    }


def _add_maps(
    data: dict[str, Any], table: Table, digest: Digest, maps: list[HeadMap], room: int
) -> None:
    number = {head.head: n for n, head in enumerate(table.heads)}
    for given in maps:
        if given.head not in number:
            raise MultiheadError(
                f"maps: no head {given.head!r} in the table of {len(number)} heads; "
                "give maps of the same model as the table"
            )
    rank = {n: place for place, n in enumerate(digest.order())}
    texts: dict[tuple[Any, ...], int] = {}
    for given in sorted(maps, key=lambda m: rank[number[m.head]]):
        key = (tuple(given.tokens), tuple(given.rows), tuple(given.row_tokens))
        text: dict[str, Any] = {
            "tokens": given.tokens,
            "rows": [int(r) for r in given.rows],
            "row_tokens": given.row_tokens,
        }
        if any(word.stop - word.start > 1 for word in (*given.words, *given.row_words)):
            text["words"] = [list(word) for word in given.words if word.start < len(given.tokens)]
            text["row_words"] = [list(word) for word in given.row_words]
        entry, head = _entry(given, table.heads[number[given.head]]), number[given.head]
        entry["text"] = texts.get(key, len(data["texts"]))
        cost = _size({str(head): entry}) + (0 if key in texts else _size(text))
        if cost > room:
            data["dropped"].append(given.head)
            continue
        room -= cost
        if key not in texts:
            texts[key] = len(data["texts"])
            data["texts"].append(text)
        data["maps"][str(head)] = entry


def _entry(given: HeadMap, head: Head) -> dict[str, Any]:
    keys = given.weights.shape[1]
    both = [given.weights] + ([] if given.contributions is None else [given.contributions])
    after = np.arange(keys) > np.array(given.rows)[:, None]
    causal = head.kind == "self" and not any(m[after].any() for m in both)
    lengths = [min(r + 1, keys) if causal else keys for r in given.rows]
    packed: list[tuple[str, float] | None] = [pack(m, lengths) for m in both]
    weights, contributions = (*packed, None)[:2]
    return {"causal": causal, "weights": weights, "contributions": contributions}


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    return [_round(v) for v in values.tolist()]


def _round(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def _size(data: dict[str, Any]) -> int:
    return len(as_json(data).encode()) + 1
