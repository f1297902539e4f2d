"""What is measured of a head: each statistic's name, formula, source and unit, in one list.

`A_ij` are the weights of one head, `c_ij = A_ij * ||v_j W_O^(h)||` the norm of what key j adds to the update of row i
(Kobayashi et al. 2020), `u_i = O_i W_O^(h)` the head's update. v includes the value bias, u leaves the output bias out,
and both are measured before any later norm or layer scale.

A **mass** is the part of the weights on a class of keys. It is given by weight (`previous`: the mean over rows of the
sum of A_ij on the class) and by contribution (`contribution:previous`: the sum over rows of c_ij on the class, over the
sum over the same rows of all c_ij). `even:previous` is what `contribution:previous` would be if the head read its
allowed keys evenly. All of them rest on the same rows: the real ones on which the statistic exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Statistic:
    name: str
    formula: str
    meaning: str  # one line for the page
    unit: str
    rows: str  # the rows it rests on, besides being real
    source: str = ""
    mass: bool = False  # given by weight, by contribution and for an even reading
    top: float | None = 1.0  # upper end of its range; None: unbounded


EVERY = "every row"
_KEY = "rows that may read such a key"

_LIST = [
    Statistic("entropy", "-sum_j A_ij log A_ij", "how evenly the weights are spread", "nats", EVERY, top=None),
    Statistic("entropy_ratio", "entropy / log(keys allowed)", "entropy as a part of the most it could be", "",
              "rows that may read two keys or more"),
    Statistic("confidence", "max_j A_ij", "the largest weight of a row", "", EVERY, "Voita et al. 2019"),
    Statistic("distance", "sum_j A_ij |i - j|", "how far away the keys read are", "tokens", EVERY, top=None),
    Statistic("previous", "mass at i - 1", "reads the token before", "", _KEY, mass=True),
    Statistic("self", "mass at i", "reads the token itself", "", _KEY, mass=True),
    Statistic("next", "mass at i + 1", "reads the token after", "", _KEY, mass=True),
    Statistic("first", "mass on the first key", "reads the first token", "", _KEY, "Xiao et al. 2023", mass=True),
    Statistic("special", "mass on special tokens", "reads special tokens", "", _KEY, "Clark et al. 2019", mass=True),
    Statistic("duplicate", "mass on j < i with token_j = token_i", "reads earlier copies of the token", "", _KEY,
              "Olsson et al. 2022", mass=True),
    Statistic("induction", "mass on j < i with token_(j-1) = token_i", "reads what followed the token before", "", _KEY,
              "Olsson et al. 2022", mass=True),
    Statistic("norm", "||u_i||", "length of the head's update", "", EVERY, "Kobayashi et al. 2020", top=None),
    Statistic("share", "<u_i, sum_g u_g,i> / ||sum_g u_g,i||^2", "part of its site's update; a site's add up to 1", "",
              "rows whose site updates at all", top=None),
    Statistic("cancellation", "||u_i|| / sum_j c_ij", "low where what it reads cancels out", "",
              "rows in which it reads a value that isn't zero"),
    Statistic("reach", "sum_ij c_ij / the same for an even reading", "below 1: it reads values shorter than average", "",
              EVERY, top=None),
    Statistic("probe:induction", "induction, on random tokens said twice", "finds what came next the first time", "",
              "the second saying", "Olsson et al. 2022", mass=True),
    Statistic("probe:duplicate", "duplicate, on random tokens said twice", "finds the token's first saying", "",
              "the second saying", "Olsson et al. 2022", mass=True),
    Statistic("probe:previous", "previous, on random tokens said twice", "reads the token before, whatever it is", "",
              "the second saying", "Olsson et al. 2022", mass=True),
]
STATISTICS = {s.name: s for s in _LIST}
MASSES = tuple(s.name for s in _LIST if s.mass and not s.name.startswith("probe:"))
PROBED = tuple(s.name.removeprefix("probe:") for s in _LIST if s.name.startswith("probe:"))


def is_relation(column: str) -> bool:
    """Whether a column is of a relation that some file named: "relation:nsubj", or "relation:^nsubj" turned round."""
    return re.fullmatch(r"relation:\^?[a-z]+(:[a-z]+)*", column) is not None


def columns(names: tuple[str, ...] | None = None) -> list[str]:
    """The column names of a table: each statistic, and for masses `contribution:NAME` and `even:NAME` beside it."""
    chosen = [STATISTICS[name] for name in names] if names else _LIST
    return [column for s in chosen
            for column in ((s.name, f"contribution:{s.name}", f"even:{s.name}") if s.mass else (s.name,))]


def describe(column: str) -> Statistic:
    """The statistic that a column belongs to."""
    if is_relation(column):
        turned, of = ("head", "dependent") if column.startswith("relation:^") else ("dependent", "head")
        return Statistic(column, f"how often the word that the {turned} reads most is its {of}", f"the {turned} reads its {of}",
                         "", "arcs whose target may be read", "Clark et al. 2019")
    return STATISTICS[column.removeprefix("contribution:").removeprefix("even:")]
