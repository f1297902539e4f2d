"""Which heads go: a plan of one of four kinds, chosen by scores or given, and refused in words
where it can't be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import MultiheadError
from ..models.resize import head_layout
from ..models.site import Site, select_heads

__all__ = ["KINDS", "Plan", "how_many", "plans"]

KINDS = {
    "any": (
        "any heads; how query heads share keys and values is kept in the config (multihead.load)"
    ),
    "even": (
        "the same number from each group of a layer, so that those left are of one size"
        " (multihead.load)"
    ),
    "groups": (
        "whole groups, with their key/value head: what makes the cache smaller (multihead.load)"
    ),
    "uniform": "the same numbers of heads and of groups in every layer (plain transformers)",
}
Removed = dict[str, list[int]]  # numbers of heads by the name of their site


@dataclass(frozen=True)
class Plan:
    """The labels of the heads to take out, such as "L12.H3"; "L12" stands for all heads of that
    layer.
    """

    remove: tuple[str, ...]
    kind: str = "any"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise MultiheadError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")

    def by_site(self, sites: Sequence[Site]) -> Removed:
        """Numbers of heads by site. `ValueError` names a head that doesn't exist, and the nearest
        that does.
        """
        whole = {site.label: [site.head_label(h) for h in range(site.num_heads)] for site in sites}
        labels = [label for given in self.remove for label in whole.get(given, [given])]
        found: Removed = {}
        for site, head in select_heads(list(sites), dict.fromkeys(labels)):
            found.setdefault(site.name, []).append(head)
        return {site.name: sorted(found[site.name]) for site in sites if site.name in found}

    def check(self, sites: Sequence[Site], droppable: Collection[str]) -> Removed:
        """The heads by site; `ValueError` where the kind, or the family, doesn't allow it, with
        what it would allow.
        """
        removed = self.by_site(sites)
        if sum(map(len, removed.values())) == sum(site.num_heads for site in sites):
            raise MultiheadError("the plan takes all heads of the model; keep at least one")
        for site in sites:
            gone = removed.get(site.name, [])
            if len(gone) == site.num_heads and site.name not in droppable:
                raise MultiheadError(
                    f"the plan takes all {site.num_heads} heads of {site.label}, which a "
                    f"{type(site.module).__name__} can't "
                    f"go without; allowed is all but one of them: keep {site.head_label(gone[0])}, say"
                )
            lost = [sorted(set(group) & set(gone)) for group in groups_of(site)]
            if self.kind == "groups":
                for group, part in zip(groups_of(site), lost, strict=True):
                    if 0 < len(part) < len(group):
                        rest = ", ".join(site.head_label(h) for h in group if h not in part)
                        raise MultiheadError(
                            f"kind='groups' takes whole groups, and {site.head_label(part[0])} shares its"
                            f" key/value head with {rest}; allowed is to remove these too, or to"
                            f" keep {', '.join(map(site.head_label, part))}"
                        )
            left = [
                len(group) - len(part) for group, part in zip(groups_of(site), lost, strict=True)
            ]
            if self.kind in ("even", "uniform") and len(set(left) - {0}) > 1:
                fewest, most = min(set(left) - {0}), max(left)
                raise MultiheadError(
                    f"kind={self.kind!r} leaves groups of one size, and {site.label} would keep"
                    f" {', '.join(map(str, left))} heads of its groups of"
                    f" {', '.join(str(len(g)) for g in groups_of(site))}; allowed next to it are"
                    f" {fewest} or {most} of each"
                )
        if self.kind == "uniform":
            self._same(sites, removed)
        return removed

    def _same(self, sites: Sequence[Site], removed: Removed) -> None:
        left = {}
        for site in sites:
            kept = [
                [h for h in group if h not in removed.get(site.name, [])]
                for group in groups_of(site)
            ]
            left[site.label] = (sum(map(len, kept)), sum(1 for group in kept if group))
        (first, want), *rest = left.items()
        for label, have in rest:
            if have != want:
                raise MultiheadError(
                    f"kind='uniform' leaves every layer the same numbers, and {first} would keep"
                    f" {want[0]} heads in {want[1]} groups, {label} {have[0]} in {have[1]}; allowed"
                    f" is {want[0]} in {want[1]} everywhere, or another kind"
                )

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "remove": list(self.remove)}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """From a JSON file `{"kind": "any", "remove": ["L0.H3", "L4"]}`, as it lies in a pruned
        model's folder.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"plan={str(path)!r}: there is no such file; give a JSON file with "
                f'{{"remove": ["L0.H3", ...]}}'
            )
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise MultiheadError(f"plan={str(path)!r} is not valid JSON ({error})") from error
        remove = told.get("remove") if isinstance(told, dict) else None
        if not isinstance(remove, list) or not all(isinstance(label, str) for label in remove):
            raise MultiheadError(
                f"plan={str(path)!r}: expected "
                f'{{"remove": [labels of heads, such as "L0.H3", or of layers, "L0"]}}, got '
                f"{str(told)[:80]}"
            )
        if not remove:
            raise MultiheadError(
                f'plan={str(path)!r}: "remove" is empty, so there is nothing to take out; name'
                " heads or layers"
            )
        return cls(tuple(dict.fromkeys(remove)), told.get("kind", "any"))


def groups_of(site: Site) -> list[list[int]]:
    """Its query heads by the key/value head that they read."""
    reads = head_layout(site).reads
    return [[h for h, g in enumerate(reads) if g == group] for group in range(max(reads) + 1)]


def how_many(heads: str | int | float, total: int, *, keep: bool = False) -> int:
    """Heads to take out of `total`: from "20%", 0.2 (a share below 1) or a number; with `keep`, of
    those to keep.
    """
    name = "keep" if keep else "heads"
    text = str(heads).strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if text.endswith("%") or 0 < value < 1:
        value = float(round(value * total)) if math.isfinite(value) else value
    number = (
        (total - int(value) if keep else int(value))
        if math.isfinite(value) and value == int(value)
        else -1
    )
    if not 0 < number < total:
        raise MultiheadError(
            f"{name}={heads!r}: expected a share such as 20% or 0.2, or a number of heads, that"
            f" takes at least one of the {total} heads and leaves one"
        )
    return number


def plans(
    scores: Mapping[str, Tensor],
    sites: Sequence[Site],
    number: int,
    kind: str,
    droppable: Collection[str] = (),
) -> list[Plan]:
    """Plans that take about `number` of the heads with the lowest scores `[H]`, by the name of
    their site.

    One plan, or several of the same size for 'uniform', where fewer groups and smaller groups come
    to the same.

    Raises:
        ValueError: no plan of this kind takes about so many heads; it says how many one would.
    """
    if kind == "uniform":
        return [Plan(tuple(labels), kind) for labels in _uniform(scores, sites, number)]
    units = [
        (value, site, heads)
        for site in sites
        for value, heads in _units(scores[site.name], groups_of(site), kind)
    ]
    removed: dict[str, list[int]] = {site.name: [] for site in sites}
    gone, total = 0, sum(site.num_heads for site in sites)
    for _, site, heads in sorted(units, key=lambda unit: unit[0]):
        after = len(removed[site.name]) + len(heads)
        if (after == site.num_heads and site.name not in droppable) or gone + len(heads) == total:
            continue
        if gone + len(heads) / 2 > number:
            break
        removed[site.name] += heads
        gone += len(heads)
    if not gone or abs(gone - number) > max(len(unit[2]) for unit in units):
        size = min(len(unit[2]) for unit in units)
        raise MultiheadError(
            f"kind={kind!r} can't take about {number} of {total} heads; it takes {size} at a time,"
            f" and leaves each layer some: {gone or size} would be possible"
        )
    return [
        Plan(tuple(site.head_label(h) for site in sites for h in sorted(removed[site.name])), kind)
    ]


def _units(scores: Tensor, groups: list[list[int]], kind: str) -> Iterable[tuple[float, list[int]]]:
    """What can be taken together, each with its mean score."""
    if kind == "any":
        return [(float(scores[h]), [h]) for group in groups for h in group]
    if kind == "groups" or all(len(group) == 1 for group in groups):
        return [(float(scores[group].mean()), group) for group in groups]
    if len({len(group) for group in groups}) > 1:
        raise MultiheadError(
            "kind='even' needs groups of one size, and a layer's are of"
            f" {', '.join(str(len(g)) for g in groups)} heads; choose 'any' or 'groups'"
        )
    ranked = [sorted(group, key=lambda h: float(scores[h])) for group in groups]
    rows = [[group[rank] for group in ranked] for rank in range(len(groups[0]))]
    return [(float(scores[row].mean()), row) for row in rows]


def _uniform(scores: Mapping[str, Tensor], sites: Sequence[Site], number: int) -> list[list[str]]:
    shapes = {
        (len(groups_of(site)), tuple(len(group) for group in groups_of(site))) for site in sites
    }
    if len(shapes) > 1 or len(set(next(iter(shapes))[1])) > 1:
        raise MultiheadError(
            "kind='uniform' needs a model whose layers all have the same heads in groups of one"
            " size; choose 'any' or 'groups'"
        )
    groups, (each, *_) = next(iter(shapes))
    heads = groups * each
    left = heads - number / len(sites)
    options = [(g, m) for g in range(1, groups + 1) for m in range(1, each + 1) if g * m < heads]
    near = [(g, m) for g, m in options if abs(g * m - left) <= 0.5]
    if not near:
        sizes = sorted({g * m for g, m in options})
        allowed = [n for n in sizes if n < left][-1:] + [n for n in sizes if n > left][:1]
        raise MultiheadError(
            f"kind='uniform' can't leave {left:.3g} of {heads} heads in each layer ({groups} groups"
            f" of {each}); next to it are"
            f" {' and '.join(f'{n} (taking {1 - n / heads:.1%})' for n in allowed)}"
        )
    closest = min(abs(g * m - left) for g, m in near)
    found = []
    for g, m in [(g, m) for g, m in near if abs(g * m - left) == closest]:
        labels = []
        for site in sites:
            value = scores[site.name].tolist()
            best = [sorted(group, key=value.__getitem__)[-m:] for group in groups_of(site)]
            kept = sorted((sum(value[h] for h in group), group) for group in best)[-g:]
            stay = {h for _, group in kept for h in group}
            labels += [site.head_label(h) for h in range(site.num_heads) if h not in stay]
        found.append(labels)
    return found
