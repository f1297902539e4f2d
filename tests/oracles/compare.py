"""A table of heads beside the oracle's statistics: every difference as a line that says which and
by how much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .statistics import NAMES, Statistics

RELATIVE, ABSOLUTE = 1e-5, 1e-6


def differences(
    table: Any,
    twins: dict[str, Statistics],
    names: Iterable[str] = NAMES,
    prefix: str = "",
    limits: tuple[float, float] = (RELATIVE, ABSOLUTE),
) -> list[str]:
    """Statistics beyond the tolerance, counts that differ, heads that one side lacks. `prefix` is
    "probe:" or empty.
    """
    names = tuple(names)
    rows = {(row["site"], row["index"]): number for number, row in enumerate(table.rows())}
    heads = {
        (site, index)
        for site, twin in twins.items()
        for index in range(len(twin.counts["entropy"]))
    }
    found = [
        f"{site} head {index}: only on one side" for site, index in sorted(rows.keys() ^ heads)
    ]
    values = table.rows()
    for site, index in sorted(rows.keys() & heads):
        row, twin = values[rows[site, index]], twins[site]
        for name in names:
            kind, _, mass = name.rpartition(":")
            column = f"{kind}:{prefix}{mass}" if kind else f"{prefix}{mass}"
            expected = None if twin.values[name] is None else float(twin.values[name][index])
            got = row.get(column)
            if (got is None) != (expected is None) or (
                got is not None
                and expected is not None
                and abs(got - expected) > tolerance(expected, *limits)
            ):
                found.append(
                    f"{site} head {index} {column}: {got}, but the stored probabilities give"
                    f" {expected}"
                )
        for name in (name for name in names if name in twin.counts):
            got_rows, expected_rows = (
                table.count(prefix + name)[rows[site, index]],
                twin.counts[name][index],
            )
            if got_rows != expected_rows:
                found.append(
                    f"{site} head {index} {prefix}{name}: {got_rows} rows, expected {expected_rows}"
                )
    return found


def tolerance(expected: float, relative: float = RELATIVE, absolute: float = ABSOLUTE) -> float:
    return max(relative * abs(expected), absolute)
