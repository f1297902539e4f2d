"""`Plan`: the heads to remove, of one of four kinds, given by labels or made from scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import MultiheadError
from ..io import parse_json, read_regular_file
from ..models.resize import head_layout
from ..models.site import Site, select_heads

__all__ = [
    "KINDS",
    "Plan",
    "count_to_remove",
    "make_plans",
    "query_groups",
    "select_sites",
    "uniform_sizes",
]

KINDS = {
    "any": "any heads; which key/value head each one reads is in the config (multihead.load)",
    "even": (
        "the same number from each group of a layer, so that groups stay of one size"
        " (multihead.load)"
    ),
    "groups": (
        "whole groups with their key/value head, which makes the KV cache smaller (multihead.load)"
    ),
    "uniform": "the same numbers of heads and of groups in every layer (plain transformers)",
}
Removed = dict[str, list[int]]  # numbers of heads by the name of their site


@dataclass(frozen=True)
class Plan:
    """Heads to remove, by labels such as "L12.H3"; "L12" names all heads of that layer.

    Args:
        remove: the labels.
        kind: "any", "even", "groups" or "uniform"; see `KINDS`.

    Raises:
        MultiheadError: an unknown kind.

    >>> Plan(("L0.H3", "L2")).to_json()
    {'kind': 'any', 'remove': ['L0.H3', 'L2']}
    """

    remove: tuple[str, ...]
    kind: str = "any"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise MultiheadError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")

    def by_site(self, sites: Sequence[Site]) -> Removed:
        """Head numbers by the name of their site.

        Raises:
            MultiheadError: a head that doesn't exist, with the nearest that does.
        """
        by_layer = {
            site.label: [site.head_label(h) for h in range(site.num_heads)] for site in sites
        }
        labels = [head for label in self.remove for head in by_layer.get(label, [label])]
        removed: Removed = {}
        for site, head in select_heads(list(sites), dict.fromkeys(labels)):
            removed.setdefault(site.name, []).append(head)
        return {site.name: sorted(removed[site.name]) for site in sites if site.name in removed}

    def check(self, sites: Sequence[Site], droppable: Collection[str]) -> Removed:
        """Head numbers by the name of their site, if the kind and the family allow the plan.

        Args:
            sites: all sites of the model.
            droppable: names of the sites that can lose all their heads.

        Raises:
            MultiheadError: a plan that isn't allowed, with the nearest that is.
        """
        removed = self.by_site(sites)
        if sum(map(len, removed.values())) == sum(site.num_heads for site in sites):
            raise MultiheadError("the plan removes all heads of the model; keep at least one")
        for site in sites:
            self._check_site(site, removed.get(site.name, []), site.name in droppable)
        if self.kind == "uniform":
            self._check_uniform(sites, removed)
        return removed

    def _check_site(self, site: Site, removed: list[int], is_droppable: bool) -> None:
        if len(removed) == site.num_heads and not is_droppable:
            raise MultiheadError(
                f"the plan removes all {site.num_heads} heads of {site.label}, without which a"
                f" {type(site.module).__name__} can't run; keep at least one of them, such as"
                f" {site.head_label(removed[0])}"
            )
        groups = query_groups(site)
        lost = [sorted(set(group) & set(removed)) for group in groups]
        for group, part in zip(groups, lost, strict=True):
            if self.kind == "groups" and 0 < len(part) < len(group):
                others = ", ".join(site.head_label(h) for h in group if h not in part)
                raise MultiheadError(
                    f"kind='groups' removes whole groups, and {site.head_label(part[0])} shares its"
                    f" key/value head with {others}; remove these too, or keep"
                    f" {', '.join(map(site.head_label, part))}"
                )
        left = [len(group) - len(part) for group, part in zip(groups, lost, strict=True)]
        if self.kind in ("even", "uniform") and len(set(left) - {0}) > 1:
            raise MultiheadError(
                f"kind={self.kind!r} leaves groups of one size, and {site.label} would keep"
                f" {', '.join(map(str, left))} heads of its groups of"
                f" {', '.join(str(len(group)) for group in groups)}; keep"
                f" {min(set(left) - {0})} or {max(left)} of each"
            )

    def _check_uniform(self, sites: Sequence[Site], removed: Removed) -> None:
        left = {}
        for site in sites:
            kept = [
                [h for h in group if h not in removed.get(site.name, [])]
                for group in query_groups(site)
            ]
            left[site.label] = (sum(map(len, kept)), sum(1 for group in kept if group))
        (first, want), *others = left.items()
        for label, have in others:
            if have != want:
                raise MultiheadError(
                    f"kind='uniform' leaves every layer the same numbers, and {first} would keep"
                    f" {want[0]} heads in {want[1]} groups, {label} {have[0]} in {have[1]}; keep"
                    f" {want[0]} in {want[1]} everywhere, or choose another kind"
                )

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "remove": list(self.remove)}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file such as the plan.json of a pruned model's folder: `{"kind": "any",
        "remove": ["L0.H3", "L4"]}`.

        Raises:
            FileNotFoundError: no such file.
            MultiheadError: other content.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(
                f"plan={str(path)!r}: there is no such file; give a JSON file with "
                '{"remove": ["L0.H3", ...]}'
            )
        name = f"plan={str(path)!r}"
        content = parse_json(read_regular_file(path, name), name)
        remove = content.get("remove") if isinstance(content, dict) else None
        if not isinstance(remove, list) or not all(isinstance(label, str) for label in remove):
            raise MultiheadError(
                f"plan={str(path)!r}: expected "
                '{"remove": [labels of heads, such as "L0.H3", or of layers, "L0"]}, got '
                f"{str(content)[:80]}"
            )
        if not remove:
            raise MultiheadError(
                f'plan={str(path)!r}: "remove" is empty, so there is nothing to remove; name heads'
                " or layers"
            )
        return cls(tuple(dict.fromkeys(remove)), content.get("kind", "any"))


def query_groups(site: Site) -> list[list[int]]:
    """Its query heads by the key/value head that they read."""
    reads = head_layout(site).reads
    return [[h for h, g in enumerate(reads) if g == group] for group in range(max(reads) + 1)]


def select_sites(sites: Sequence[Site], layers: Iterable[int | str]) -> list[Site]:
    """The sites of some layers: labels ("L3", "decoder.L0.cross"), numbers ("3") or ranges of
    numbers ("3-10").

    Raises:
        MultiheadError: an entry that names no layer.
    """
    names: set[str] = set()
    for entry in [layers] if isinstance(layers, (str, int)) else layers:
        first, dash, last = str(entry).partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            numbers = range(int(first), int(last or first) + 1)
            chosen = [site.name for site in sites if site.layer in numbers]
        else:
            chosen = [site.name for site in sites if site.label == entry]
        if not chosen:
            raise MultiheadError(
                f"layers={entry!r} names no layer; expected labels, numbers or ranges of"
                f" {sites[0].label} to {sites[-1].label}"
            )
        names.update(chosen)
    return [site for site in sites if site.name in names]


def count_to_remove(amount: str | int | float, total: int, *, keep: bool = False) -> int:
    """Heads to remove of `total`, from "20%", 0.2 (a share below 1) or a number; with `keep`, the
    amount is of those to keep.

    Raises:
        MultiheadError: not an amount, or one that removes no head or all.
    """
    text = str(amount).strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if text.endswith("%") or 0 < value < 1:
        value = float(round(value * total)) if math.isfinite(value) else value
    is_whole = math.isfinite(value) and value == int(value)
    number = (total - int(value) if keep else int(value)) if is_whole else -1
    if not 0 < number < total:
        raise MultiheadError(
            f"{'keep' if keep else 'remove'}={amount!r}: expected a share such as 20% or 0.2, or a"
            f" number of heads, that removes at least one of the {total} heads and keeps one"
        )
    return number


def make_plans(
    scores: Mapping[str, Tensor],
    sites: Sequence[Site],
    number: int,
    kind: str,
    droppable: Collection[str] = (),
) -> list[Plan]:
    """Plans that remove about `number` of the heads with the lowest scores.

    One plan, or for "uniform" several of the same size if fewer groups and smaller groups give the
    same number.

    Args:
        scores: `[H]` by the name of the site.
        droppable: names of the sites that can lose all their heads.

    Raises:
        MultiheadError: no plan of this kind removes about so many heads; it names a possible
            number.
    """
    if kind == "uniform":
        return [Plan(tuple(labels), kind) for labels in _uniform(scores, sites, number)]
    units = [
        (value, site, heads)
        for site in sites
        for value, heads in _units(scores[site.name], query_groups(site), kind)
    ]
    removed: dict[str, list[int]] = {site.name: [] for site in sites}
    count, total = 0, sum(site.num_heads for site in sites)
    for _, site, heads in sorted(units, key=lambda unit: unit[0]):
        after = len(removed[site.name]) + len(heads)
        if (after == site.num_heads and site.name not in droppable) or count + len(heads) == total:
            continue
        if count + len(heads) / 2 > number:
            break
        removed[site.name] += heads
        count += len(heads)
    if not count or abs(count - number) > max(len(unit[2]) for unit in units):
        size = min(len(unit[2]) for unit in units)
        raise MultiheadError(
            f"kind={kind!r} can't remove about {number} of {total} heads; it removes {size} at a"
            f" time and keeps some in each layer: {count or size} would be possible"
        )
    labels = [site.head_label(h) for site in sites for h in sorted(removed[site.name])]
    return [Plan(tuple(labels), kind)]


def _units(scores: Tensor, groups: list[list[int]], kind: str) -> Iterable[tuple[float, list[int]]]:
    """Heads that can only be removed together, each with their mean score."""
    if kind == "any":
        return [(float(scores[h]), [h]) for group in groups for h in group]
    if kind == "groups" or all(len(group) == 1 for group in groups):
        return [(float(scores[group].mean()), group) for group in groups]
    if len({len(group) for group in groups}) > 1:
        raise MultiheadError(
            "kind='even' needs groups of one size, and a layer has groups of"
            f" {', '.join(str(len(g)) for g in groups)} heads; choose 'any' or 'groups'"
        )
    ranked = [sorted(group, key=lambda h: float(scores[h])) for group in groups]
    rows = [[group[rank] for group in ranked] for rank in range(len(groups[0]))]
    return [(float(scores[row].mean()), row) for row in rows]


def uniform_sizes(
    sites: Sequence[Site], number: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Numbers of groups and of heads in each group with which kind "uniform" removes about `number`
    heads, and all with which it removes any.

    Raises:
        MultiheadError: layers that differ, or a number that no such plan removes.
    """
    shapes = {
        (len(query_groups(site)), tuple(len(group) for group in query_groups(site)))
        for site in sites
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
            f" of {each}); the nearest are"
            f" {' and '.join(f'{n} (removing {1 - n / heads:.1%})' for n in allowed)}"
        )
    closest = min(abs(g * m - left) for g, m in near)
    return [(g, m) for g, m in near if abs(g * m - left) == closest], options


def _uniform(scores: Mapping[str, Tensor], sites: Sequence[Site], number: int) -> list[list[str]]:
    """Labels to remove, of one or several plans that leave every layer the same numbers."""
    plans = []
    for g, m in uniform_sizes(sites, number)[0]:
        labels = []
        for site in sites:
            value = scores[site.name].tolist()
            best = [sorted(group, key=value.__getitem__)[-m:] for group in query_groups(site)]
            best_groups = sorted((sum(value[h] for h in group), group) for group in best)[-g:]
            kept = {h for _, group in best_groups for h in group}
            labels += [site.head_label(h) for h in range(site.num_heads) if h not in kept]
        plans.append(labels)
    return plans
