"""What is measured of a head: each statistic's name, formula, source and unit, in one list.

`A_ij` are the weights of one head, `c_ij = A_ij * ||v_j W_O^(h)||` the norm of what key j adds to
the update of row i (Kobayashi et al. 2020), `u_i = O_i W_O^(h)` the head's update. v includes the
value bias, u leaves the output bias out, and both are measured before any later norm or layer
scale.

A **mass** is the part of the weights on a class of keys. It is given by weight (`previous`: the
mean over rows of the sum of A_ij on the class) and by contribution (`contribution:previous`: the
sum over rows of c_ij on the class, over the sum over the same rows of all c_ij). `even:previous` is
what `contribution:previous` would be if the head read its allowed keys evenly. All of them rest on
the same rows: the real ones on which the statistic exists.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MultiheadError

if TYPE_CHECKING:
    from torch import Tensor

    from .row_stats import Text, Weights

PAST = "on the way past"


@dataclass(frozen=True)
class Statistic:
    name: str
    formula: str
    meaning: str  # one line for the page
    unit: str
    rows: str  # the rows it rests on, besides being real
    source: str = ""
    mass: bool = False  # given by weight, by contribution and for an even reading
    low: float | None = 0.0  # lower end of its range; None: unbounded
    top: float | None = 1.0  # upper end; None: unbounded
    cost: str = PAST
    also: bool = False  # only on request: read(..., also=[name])

    @property
    def range(self) -> str:
        """Such as "0..1", "any number", "0 or more"."""
        if self.low is None:
            return "any number"
        return f"{self.low:g} or more" if self.top is None else f"{self.low:g}..{self.top:g}"


EVERY = "every row"
_KEY = "rows that may read such a key"

_LIST = [
    Statistic(
        "entropy",
        "-sum_j A_ij log A_ij",
        "how evenly the weights are spread",
        "nats",
        EVERY,
        top=None,
    ),
    Statistic(
        "entropy_ratio",
        "entropy / log(keys allowed)",
        "entropy as a part of the most it could be",
        "",
        "rows that may read two keys or more",
    ),
    Statistic(
        "confidence", "max_j A_ij", "the largest weight of a row", "", EVERY, "Voita et al. 2019"
    ),
    Statistic(
        "distance",
        "sum_j A_ij |i - j|",
        "how far away the keys read are",
        "tokens",
        EVERY,
        top=None,
    ),
    Statistic("previous", "mass at i - 1", "reads the token before", "", _KEY, mass=True),
    Statistic("self", "mass at i", "reads the token itself", "", _KEY, mass=True),
    Statistic("next", "mass at i + 1", "reads the token after", "", _KEY, mass=True),
    Statistic(
        "first",
        "mass on the first key",
        "reads the first token",
        "",
        _KEY,
        "Xiao et al. 2023",
        mass=True,
    ),
    Statistic(
        "special",
        "mass on special tokens",
        "reads special tokens",
        "",
        _KEY,
        "Clark et al. 2019",
        mass=True,
    ),
    Statistic(
        "duplicate",
        "mass on j < i with token_j = token_i",
        "reads earlier copies of the token",
        "",
        _KEY,
        "Olsson et al. 2022",
        mass=True,
    ),
    Statistic(
        "induction",
        "mass on j < i with token_(j-1) = token_i",
        "reads what followed the token before",
        "",
        _KEY,
        "Olsson et al. 2022",
        mass=True,
    ),
    Statistic(
        "norm",
        "||u_i||",
        "length of the head's update",
        "",
        EVERY,
        "Kobayashi et al. 2020",
        top=None,
    ),
    Statistic(
        "share",
        "<u_i, sum_g u_g,i> / ||sum_g u_g,i||^2",
        "part of its site's update; a site's add up to 1",
        "",
        "rows whose site updates at all",
        low=None,
        top=None,
    ),
    Statistic(
        "cancellation",
        "||u_i|| / sum_j c_ij",
        "low where what it reads cancels out",
        "",
        "rows in which it reads a value that isn't zero",
    ),
    Statistic(
        "reach",
        "sum_ij c_ij / the same for an even reading",
        "below 1: it reads values shorter than average",
        "",
        EVERY,
        top=None,
    ),
    Statistic(
        "received",
        "max_j sum_i A_ij / (queries that may read j)",
        "the most that one key gets of those who may read it",
        "",
        "keys with 64 readers or more, in one pass",
        "Gu et al. 2024",
    ),
    Statistic(
        "received_at",
        "the key with that maximum",
        "where that key stands, counted from the first",
        "tokens",
        "keys with 64 readers or more, in one pass",
        "Gu et al. 2024",
        top=None,
    ),
    Statistic(
        "logit",
        "<u_i, W_U[token_(i+1)]>, final norm frozen",
        "what it adds to the logit of the token that comes next",
        "",
        "rows that a token follows",
        "Elhage et al. 2021",
        low=None,
        top=None,
    ),
    Statistic(
        "probe:induction",
        "induction, on random tokens said twice",
        "finds what came next the first time",
        "",
        "the second saying",
        "Olsson et al. 2022",
        mass=True,
        cost="a short second run",
    ),
    Statistic(
        "probe:duplicate",
        "duplicate, on random tokens said twice",
        "finds the token's first saying",
        "",
        "the second saying",
        "Olsson et al. 2022",
        mass=True,
        cost="a short second run",
    ),
    Statistic(
        "probe:previous",
        "previous, on random tokens said twice",
        "reads the token before, whatever it is",
        "",
        "the second saying",
        "Olsson et al. 2022",
        mass=True,
        cost="a short second run",
    ),
    Statistic(
        "copying",
        "sum(lambda) / sum(|lambda|), eigenvalues of W_E W_V W_O W_U",
        "from its weights: raises the tokens that it reads",
        "",
        "none: weights alone",
        "Elhage et al. 2021",
        low=-1.0,
        cost="one short pass and D x D products",
        also=True,
    ),
    Statistic(
        "importance",
        "|O_i . dL/dO_i|",
        "how much the loss hangs on it, to first order",
        "nats a token",
        EVERY,
        "Michel et al. 2019",
        top=None,
        cost="one backward pass",
        also=True,
    ),
    Statistic(
        "effect",
        "loss without the head - loss",
        "what it is worth: the loss when its update is zero",
        "nats a token",
        "tokens with a loss",
        "Michel et al. 2019",
        low=None,
        top=None,
        cost="one forward pass a head",
        also=True,
    ),
    Statistic(
        "effect_mean",
        "loss with the head's mean - loss",
        "the loss when its update is its mean over the text",
        "nats a token",
        "tokens with a loss",
        "",
        low=None,
        top=None,
        cost="one forward pass a head, and one for the means",
        also=True,
    ),
    Statistic(
        "nearest",
        "min over heads of JS(A_i, A'_i)",
        "how far the most similar head is",
        "nats",
        "up to 32 rows a text",
        "Clark et al. 2019",
        top=0.6931471805599453,
        cost="every pair of heads on sampled rows",
        also=True,
    ),
]
STATISTICS = {s.name: s for s in _LIST}
MASSES = tuple(s.name for s in _LIST if s.mass and not s.name.startswith("probe:"))
PROBED = tuple(s.name.removeprefix("probe:") for s in _LIST if s.name.startswith("probe:"))
ALSO = tuple(s.name for s in _LIST if s.also)

Keys = Callable[["Text"], "Tensor | None"]
Row = Callable[["Weights"], "Tensor"]


@dataclass(frozen=True)
class Added:
    """What was added to the list from outside: a number a key, or a number a row."""

    name: str
    keys: Keys | None = None
    row: Row | None = None


ADDED: dict[str, Added] = {}
OTHERS = frozenset(
    {"head", "site", "layer", "index", "group", "kind", "roles", "resting"}
)  # what a row of a table has besides


def list_statistics() -> list[Statistic]:
    """Every statistic that a reading can measure, in the order of its columns: name, formula,
    source, cost, range.

    >>> import multihead
    >>> [s.range for s in multihead.reader.list_statistics() if s.name in ("entropy", "previous", "logit")]
    ['0 or more', '0..1', 'any number']
    """
    return list(STATISTICS.values())


def statistics_table() -> str:
    """Every statistic with its formula, source, range, cost and the column's meaning, as text."""
    lines = []
    for s in list_statistics():
        lines.append(f"{s.name}  {s.formula}")
        facts = [
            s.meaning,
            f"{s.range}{' ' + s.unit if s.unit else ''}",
            f"rows: {s.rows}",
            f"cost: {s.cost}",
            *([f"source: {s.source}"] if s.source else []),
            *(["by weight, and as contribution:NAME and even:NAME"] if s.mass else []),
            *([f"on request: also=[{s.name!r}], --also {s.name}"] if s.also else []),
        ]
        lines += textwrap.wrap(
            "; ".join(facts), 100, initial_indent="    ", subsequent_indent="    "
        )
    lines += [
        "",
        (
            "Besides: class:NAME (classes=, --class NAME=REGEX), relation:NAME and relation:^NAME"
            " (relations=, --relations FILE),"
        ),
        "and what multihead.reader.add_statistic adds. docs/reading.md says more.",
    ]
    return "\n".join(lines)


def require_also(also: str | Iterable[str]) -> frozenset[str]:
    """The names, each of a statistic that is only measured on request; `ValueError` with the
    nearest for another.
    """
    if not isinstance(also, Iterable):
        raise TypeError(f"also={also!r}: expected names, some of {', '.join(ALSO)}")
    names = [also] if isinstance(also, str) else list(also)
    for name in names:
        if name not in ALSO:
            near = difflib.get_close_matches(str(name), ALSO, 1)
            hint = (
                "is measured without asking; "
                if name in STATISTICS
                else f"did you mean {near[0]!r}? "
                if near
                else ""
            )
            raise MultiheadError(f"also={name!r}: {hint}expected some of {', '.join(ALSO)}")
    return frozenset(names)


def add_statistic(
    name: str,
    *,
    formula: str,
    meaning: str,
    keys: Keys | None = None,
    row: Row | None = None,
    unit: str = "",
    rows: str = "",
    source: str = "",
    low: float | None = None,
    top: float | None = None,
) -> None:
    """Add a statistic of your own to every reading from now on. Give exactly one of `keys` and
    `row`.

    Args:
        name: of its column: letters, digits, `_`.
        formula, meaning, unit, rows, source, low, top: what `multihead.reader.list_statistics()` says of it.
        keys: from what is known of a call's positions (`text.key_ids` `[B, S]`, `text.special`,
            `text.key_real`, ...) to a tensor `[B, S]`. Booleans name a class of keys: the mass on
            it is given by weight, by contribution and for an even reading. Floating numbers are
            averaged with the weights: sum_j A_ij x_j. None where it doesn't exist.
        row: from a block of rows (`block.weights` `[B, H, rows, keys]`, `block.rows`, `block.keys`,
            `block.text`) to a number a row, `[B, H, rows]`; NaN on rows where it doesn't exist.

    Raises:
        ValueError: a name that is taken or isn't a word, or not exactly one of `keys` and `row`.

    >>> import multihead
    >>> multihead.reader.add_statistic("squares", formula="sum_j A_ij^2", meaning="how peaked the weights are",
    ...                         row=lambda block: block.weights.square().sum(-1), low=0, top=1)
    >>> table = multihead.read(*multihead.load_builtin()[:1], "one two", tokenizer=multihead.load_builtin()[1])
    >>> bool((table.value("squares") > 0).all())
    True
    >>> multihead.reader.remove_statistic("squares")
    """
    if not re.fullmatch(r"[A-Za-z_]\w{0,59}", name):
        raise MultiheadError(
            f"name={name!r}: expected a word of up to 60 letters, digits and _, which becomes the"
            " column's name"
        )
    if name in STATISTICS or name in OTHERS:
        yours = f", or multihead.reader.remove_statistic({name!r}) first" if name in ADDED else ""
        raise MultiheadError(f"name={name!r} is taken; choose another{yours}")
    if (keys is None) == (row is None):
        raise MultiheadError(f"keys={keys!r} and row={row!r}: give exactly one of them")
    for argument, given in (("keys", keys), ("row", row)):
        if given is not None and not callable(given):
            raise TypeError(f"{argument}={given!r}: expected a function")
    STATISTICS[name] = Statistic(
        name, formula, meaning, unit, rows or EVERY, source, low=low, top=top
    )
    ADDED[name] = Added(name, keys, row)


def remove_statistic(name: str) -> None:
    """Take back what `add_statistic` added; `ValueError` for any other name."""
    if name not in ADDED:
        raise MultiheadError(
            f"name={name!r} wasn't added: "
            + (f"added are {', '.join(ADDED)}" if ADDED else "none was")
        )
    del STATISTICS[name], ADDED[name]


def columns(held: Iterable[str] = ()) -> list[str]:
    """The column names of a table: each statistic, and for masses `contribution:NAME` and
    `even:NAME` beside it; then those `held` by a table that aren't in the list (classes, relations,
    what somebody added elsewhere).
    """
    listed = [
        column
        for s in STATISTICS.values()
        for column in (
            (s.name, f"contribution:{s.name}", f"even:{s.name}") if s.mass else (s.name,)
        )
    ]
    known = set(listed)
    more = [column for column in held if column not in known]
    return listed + sorted(
        more, key=lambda c: (describe(c).name, c.startswith("even:"), c != describe(c).name)
    )


def describe(column: str) -> Statistic:
    """The statistic that a column belongs to."""
    name = column.removeprefix("contribution:").removeprefix("even:")
    if name in STATISTICS:
        return STATISTICS[name]
    kind, _, which = name.partition(":")
    if kind == "class":
        return Statistic(
            name,
            f"mass on tokens of the class {which}",
            f"reads tokens of the class {which}",
            "",
            _KEY,
            mass=True,
        )
    if is_relation(name):
        turned, of = ("head", "dependent") if which.startswith("^") else ("dependent", "head")
        return Statistic(
            name,
            f"how often the word that the {turned} reads most is its {of}",
            f"the {turned} reads its {of}",
            "",
            "arcs whose target may be read",
            "Clark et al. 2019",
            cost="a run over the CoNLL-U file",
        )
    return Statistic(name, "added by a user", "added by a user", "", EVERY, low=None, top=None)


def is_relation(column: str) -> bool:
    """Whether a column is of a relation that some file named: "relation:nsubj", or
    "relation:^nsubj" turned round.
    """
    return re.fullmatch(r"relation:\^?[a-z]+(:[a-z]+)*", column) is not None
