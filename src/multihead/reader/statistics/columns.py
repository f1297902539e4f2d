"""The built-in statistics in the order of a table's columns, and the names of the columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import MultiheadError, did_you_mean
from .base import Statistic, require_statistic
from .masses import (
    Duplicate,
    First,
    Induction,
    Mass,
    Next,
    Previous,
    Probe,
    Self,
    Special,
    TokenClass,
)
from .on_request import Copying, Effect, EffectMean, Importance, Nearest
from .updates import Cancellation, Logit, Reach, Received, ReceivedAt, UpdateNorm, UpdateShare
from .weights import Confidence, Distance, Entropy, EntropyRatio

BUILT_IN: tuple[type[Statistic], ...] = (
    Entropy,
    EntropyRatio,
    Confidence,
    Distance,
    Previous,
    Self,
    Next,
    First,
    Special,
    Duplicate,
    Induction,
    UpdateNorm,
    UpdateShare,
    Cancellation,
    Reach,
    Received,
    ReceivedAt,
    Logit,
)
PROBES = (
    Probe(Induction(), "finds what followed the first occurrence"),
    Probe(Duplicate(), "finds the first occurrence of the token"),
    Probe(Previous(), "reads the previous token, whatever it is"),
)
ON_REQUEST: tuple[type[Statistic], ...] = (Copying, Importance, Effect, EffectMean, Nearest)
STATISTICS: dict[str, Statistic] = {
    s.name: s for s in (*(c() for c in BUILT_IN), *PROBES, *(c() for c in ON_REQUEST))
}
REQUESTABLE = {c.name: c for c in ON_REQUEST}


def list_statistics() -> list[Statistic]:
    """List the built-in statistics in the order of their columns, each with its name, formula,
    meaning, source, unit, range, queries and cost.

    >>> import multihead
    >>> [s.range_text for s in multihead.reader.list_statistics() if s.name in ("entropy", "logit")]
    ['0 or more', 'any number']
    """
    return list(STATISTICS.values())


def statistics_table() -> str:
    """Every built-in statistic with its formula, source, range, cost and meaning, as text."""
    lines = ["Cost is what a statistic needs beyond one forward pass.", ""]
    for s in list_statistics():
        lines.append(f"{s.name}  {s.formula}")
        facts = [
            s.meaning,
            f"{s.range_text}{' ' + s.unit if s.unit else ''}",
            f"averaged over: {s.queries}",
            f"cost: {s.cost}",
            *([f"source: {s.source}"] if s.source else []),
            *(["by weight, and as contribution:NAME and even:NAME"] if s.is_mass else []),
            *(
                [f"on request: statistics=[{s.name!r}], --statistic {s.name}"]
                if s.on_request
                else []
            ),
        ]
        lines += textwrap.wrap(
            "; ".join(facts), 100, initial_indent="    ", subsequent_indent="    "
        )
    lines += [
        "",
        "Further columns: class:NAME (classes=, --class NAME=REGEX), relation:NAME and"
        " relation:^NAME",
        "(relations=, --relations FILE), and user-defined statistics (statistics=)."
        " See docs/reading.md.",
    ]
    return "\n".join(lines)


def resolve_statistics(
    statistics: str | Statistic | Iterable[str | Statistic] = (), extra: Iterable[Statistic] = ()
) -> list[Statistic]:
    """The statistics of one reading: the built-in ones that are always measured, those asked for
    by name, user-defined ones, and `extra`, which the library defines itself.

    An instance of a built-in class replaces the built-in one (other parameters).

    Raises:
        MultiheadError: an unknown name (with the nearest), or a statistic that can't be measured.
        TypeError: neither a name nor a `Statistic`.
    """
    if isinstance(statistics, (str, Statistic)):
        statistics = [statistics]
    elif not isinstance(statistics, Iterable):
        raise TypeError(
            f"statistics={statistics!r}: expected names or Statistic objects; names are"
            f" {', '.join(REQUESTABLE)}"
        )
    chosen: dict[str, Statistic] = {c.name: c() for c in BUILT_IN}
    user_defined: set[str] = set()
    for statistic in statistics:
        if isinstance(statistic, Statistic):
            if is_user_defined(statistic):
                require_statistic(statistic, STATISTICS.keys() | user_defined)
                user_defined.add(statistic.name)
            chosen[statistic.name] = statistic
        else:
            chosen[statistic] = _requested(statistic)
    return [*chosen.values(), *extra]


def is_user_defined(statistic: Statistic) -> bool:
    """Whether it is an instance of a class from outside of this package."""
    return not type(statistic).__module__.startswith(f"{__package__}.")


def _requested(name: object) -> Statistic:
    names = ", ".join(REQUESTABLE)
    if not isinstance(name, str):
        raise TypeError(
            f"statistics: {name!r} is neither a name ({names}) nor an instance of a subclass of"
            " multihead.Statistic"
        )
    if name not in REQUESTABLE:
        hint = did_you_mean(name, REQUESTABLE)
        if name in STATISTICS:
            hint = "is always measured; "
        raise MultiheadError(f"statistics={name!r}: {hint}expected some of {names}")
    return REQUESTABLE[name]()


def columns(held: Iterable[str] = ()) -> list[str]:
    """The column names of a table: each built-in statistic, with `contribution:NAME` and
    `even:NAME` after a mass; then those of `held` that aren't built in (classes, relations,
    user-defined statistics), sorted.
    """
    listed = [
        column
        for s in STATISTICS.values()
        for column in (
            (s.name, f"contribution:{s.name}", f"even:{s.name}") if s.is_mass else (s.name,)
        )
    ]
    known = set(listed)
    more = [column for column in held if column not in known]
    return listed + sorted(more, key=lambda c: (_base(c), c.startswith("even:"), c != _base(c)))


def _base(column: str) -> str:
    return column.removeprefix("contribution:").removeprefix("even:")


def describe(column: str, declared: Mapping[str, Mapping[str, Any]] | None = None) -> Statistic:
    """The statistic that a column belongs to. `declared` are the descriptions of user-defined
    statistics that a table carries (`table.meta["statistics"]`).
    """
    name = _base(column)
    if name in STATISTICS:
        return STATISTICS[name]
    kind, _, which = name.partition(":")
    if kind == "class":
        return TokenClass(which)
    if is_relation(name):
        return _relation(name)
    return _user_defined(name, (declared or {}).get(name, {}))


def is_description(facts: Any) -> bool:
    """Whether something read from a file describes a statistic, as `Statistic.to_dict` does."""
    return isinstance(facts, dict) and all(
        isinstance(value, (int, float)) or value is None
        if key in ("low", "top")
        else isinstance(value, bool if key == "mass" else str)
        for key, value in facts.items()
    )


def _user_defined(name: str, facts: Mapping[str, Any]) -> Statistic:
    statistic = Statistic()
    statistic.name = name
    statistic.formula = facts.get("formula") or "user-defined"
    statistic.meaning = facts.get("meaning") or "user-defined"
    statistic.unit, statistic.source = facts.get("unit", ""), facts.get("source", "")
    statistic.queries = facts.get("rows") or statistic.queries
    statistic.range = facts.get("low"), facts.get("top")
    return statistic


def _relation(name: str) -> Statistic:
    reader, read = ("dependent", "head")
    if name.startswith("relation:^"):
        reader, read = read, reader
    statistic = Statistic()
    statistic.name = name
    statistic.formula = f"how often the word that the {reader} reads most is its {read}"
    statistic.meaning, statistic.source = f"the {reader} reads its {read}", "Clark et al. 2019"
    statistic.range, statistic.queries = (0.0, 1.0), "arcs whose target may be read"
    statistic.cost = "a run over the CoNLL-U file"
    return statistic


def is_relation(column: str) -> bool:
    """Whether a column is one of a dependency relation: "relation:nsubj" (the dependent reads its
    head) or "relation:^nsubj" (the head reads its dependent).
    """
    return re.fullmatch(r"relation:\^?[a-z]+(:[a-z]+)*", column) is not None


MASSES = tuple(c.name for c in BUILT_IN if issubclass(c, Mass))
PROBED = tuple(s.name.removeprefix("probe:") for s in PROBES)
