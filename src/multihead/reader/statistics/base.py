"""The protocol `Statistic`, which built-in and user-defined statistics implement."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ...errors import MultiheadError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...models.site import Site
    from ..context import QueryBlock, TokenContext
    from ..head_pairs import Pairs
    from ..text_facts import TextFacts

EVERY_QUERY = "every query"
FORWARD_PASS = "none"  # beyond the forward pass
CROSS = "cross-attention: the keys belong to another sequence"
ELEMENTWISE = "an elementwise gate or norm lies between the head outputs and the output projection"
FAINT = "its updates are below rounding error of the residual stream, so their path is unknown"
NO_CONTRIBUTION = "the contributions of all keys are 0, or the heads are replaced"
NO_QUERY = "no query counts here: all are padding, or may read nothing"
NAME = re.compile(r"[A-Za-z_]\w{0,59}")
# other keys of a row of a table
RESERVED = frozenset({"head", "site", "layer", "index", "group", "kind", "roles", "resting"})


class Defined(NamedTuple):
    """Values a query `[B, H, L]`, and the queries (bool, broadcastable) on which they exist."""

    values: Tensor
    exists: Tensor


class Totals(NamedTuple):
    """A ratio of sums: numerators, denominators and numbers of counted queries, `[B, H]` each.

    >>> import multihead
    >>> class Shrinkage(multihead.Statistic):
    ...     name, formula, meaning = "shrinkage", "sum ||u_i|| / sum c_ij", "pooled cancellation"
    ...
    ...     def update(self, site, heads):
    ...         x, y = heads.norms * heads.counts, heads.contributions * heads.counts
    ...         return multihead.reader.Totals(x.sum(-1), y.sum(-1), heads.counts.sum(-1))
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "one two", tokenizer=tokenizer, statistics=Shrinkage())
    >>> bool((table.value("shrinkage") <= 1).all())
    True
    """

    x: Tensor
    y: Tensor
    rows: Tensor


class SiteState(Protocol):
    """Facts about a site that explain an empty column."""

    kind: str  # "self" or "cross"
    ids_reason: str  # why token ids are missing, "" where they are known
    knows_special: bool  # the ids of special tokens are known

    @property
    def text(self) -> TextFacts: ...  # the tokens that it was given

    @property
    def causal(self) -> bool | None: ...  # no query may read a later key

    @property
    def elementwise(self) -> bool: ...  # an elementwise gate or norm lies before W_O

    @property
    def logit_reason(self) -> str: ...  # why `logit` isn't defined


class SiteSums(Protocol):
    """The sums of one site in a reading."""

    site: Site
    kind: str  # "self" or "cross"
    reached: bool  # by a pass so far
    elementwise: bool  # an elementwise gate or norm lies before W_O

    @property
    def out_weights(self) -> Any: ...  # .weight [H*Ev, D], .bias [D]

    @property
    def table(self) -> Any: ...  # sums of the documents that have ended

    def add(self, column: str, x: Tensor, y: Tensor, rows: Tensor) -> None: ...

    def close_documents(self) -> None: ...


class Run(Protocol):
    """A reading, as statistics see it."""

    model: nn.Module
    sites: list[Site]
    notes: list[str]  # shown with the table
    meta: dict[str, Any]  # becomes the table's `meta`
    reasons: dict[str, str]  # why a column is empty, by its name
    why: dict[str, str]  # why a column is empty at one site, by "site column"
    pairs: Pairs | None  # divergences of pairs of heads
    settings: Any  # what passes count for: `counting`, `prefix`, `select`, `on_site`, ...
    stream: Any  # the path of the residual stream to the logits
    tokens: Any  # which token is at which position

    @property
    def causal(self) -> bool | None: ...  # no query may read a later key; None: not known yet

    @property
    def inside(self) -> bool: ...  # a pass of the whole model is under way

    @property
    def documents(self) -> int: ...  # number of documents that have ended

    @property
    def records(self) -> Sequence[SiteSums]: ...

    @property
    def watchers(self) -> list[Any]: ...  # see every block of weights

    def record(self, site: Site) -> SiteSums: ...

    def logit_reason(self, site: Site) -> str: ...  # why `logit` is empty there, or ""

    def add(self, site: Site, name: str, values: Tensor) -> None:
        """Add a value for each head of a site, `[H]`, to a column."""

    def aside(self) -> AbstractContextManager[None]:
        """Passes inside of it are not recorded."""

    def passes(self, **settings: Any) -> AbstractContextManager[None]:
        """Passes inside of it have other `settings`."""


@dataclass(eq=False)
class HeadUpdates:
    """One attention call after its output projection W_O has run; float32 or better.

    >>> import multihead
    >>> class Largest(multihead.Statistic):
    ...     name, formula, meaning = "largest", "max_d |u_id|", "largest channel of the update"
    ...
    ...     def update(self, site, heads):  # [B, H, L]
    ...         by_head = heads.weight.unflatten(0, (site.num_heads, -1))  # [H, Ev, D]
    ...         return (heads.outputs @ by_head).abs().amax(-1)
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "one two", tokenizer=tokenizer, statistics=Largest())
    >>> bool((table.value("largest") < table.value("norm")).all())
    True
    """

    outputs: Tensor  # [B, H, L, Ev]: the head outputs that entered W_O
    weight: Tensor  # [H*Ev, D]: W_O
    site_update: Tensor  # [B, L, D]: what W_O returned, less its bias
    factors: Tensor  # [H, Ev, r], with ||v W_O^(h)|| = ||v factors_h||
    contributions: Tensor  # [B, H, L]: sum_j c_ij
    uniform: Tensor  # [B, H, L]: the same for uniform weights on the allowed keys
    received: Tensor  # [B, H, S]: the sum of the weights that each key receives
    readers: Tensor  # [B, 1 or H, S]: the number of queries that may read each key
    counts: Tensor  # bool [B, H, L]: queries that count
    own: Tensor  # bool [H, 1]: False for heads whose outputs are replaced
    context: TokenContext
    elementwise: bool

    @cached_property
    def norms(self) -> Tensor:
        """||u_i||, `[B, H, L]`."""
        from ...models.head_updates import update_norms  # not at the top: it loads torch

        return update_norms(self.outputs, self.factors)


class Statistic:
    """One number a head, measured while a model is read.

    Subclass it, describe it by its attributes, and implement exactly one of `key_values`, `rows`,
    `update` and `finish`. Built-in statistics are such classes too.

    Attributes:
        name: column of the table: letters, digits and `_`.
        formula, meaning, source, unit: shown by `list_statistics()` and on the page.
        range: lowest and highest possible value, None where it is unbounded.
        queries: the queries over which it is averaged.
        cost: what it costs beyond a forward pass.

    >>> import multihead
    >>> class Squares(multihead.Statistic):
    ...     name, formula, meaning = "squares", "sum_j A_ij^2", "how concentrated the weights are"
    ...     range = (0.0, 1.0)
    ...
    ...     def rows(self, block):
    ...         return block.weights.square().sum(-1)
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "one two", tokenizer=tokenizer, statistics=[Squares()])
    >>> bool((table.value("squares") > 0).all())
    True
    """

    is_protocol: ClassVar[bool] = True  # its own methods are placeholders

    name: str = ""
    formula: str = ""
    meaning: str = ""
    source: str = ""
    unit: str = ""
    range: tuple[float | None, float | None] = (None, None)
    queries: str = EVERY_QUERY
    cost: str = FORWARD_PASS
    is_mass: bool = False  # given by weight, by contribution and for uniform weights
    # measured only where it is asked for: read(..., statistics=[name])
    on_request: ClassVar[bool] = False
    has_column: ClassVar[bool] = True  # a column of its name
    needs_one_sequence: ClassVar[bool] = False  # undefined in cross-attention
    needs_tokens: ClassVar[bool] = False  # undefined where token ids are unknown
    needs_logits: ClassVar[bool] = False  # its passes return the logits of every position
    passes_per_head: ClassVar[int] = 0  # extra passes of each batch, for the progress
    # `finish` runs after the last document; otherwise as soon as one document has been read
    needs_all_texts: ClassVar[bool] = False
    methods: ClassVar[tuple[str, ...]] = ("key_values", "rows", "update", "finish")

    # ---- exactly one of these

    def key_values(self, context: TokenContext) -> Tensor | None:
        """A value for each key, `[B, S]`, from the positions of one attention call.

        Booleans are a class of keys: the mass on it is given by weight, by contribution and for
        uniform weights. Floating-point values are averaged with the weights: sum_j A_ij x_j. None
        where the statistic doesn't exist.
        """
        raise NotImplementedError

    def rows(self, block: QueryBlock) -> Tensor:
        """A value for each query, `[B, H, rows]`, from its weights `[B, H, rows, keys]`; NaN for
        queries on which it doesn't exist.
        """
        raise NotImplementedError

    def update(self, site: Site, heads: HeadUpdates) -> Tensor | Defined | Totals | None:
        """A value for each query, `[B, H, L]`, from the head updates; NaN where it doesn't exist.
        Or `Totals`, `[B, H]`, where it isn't a mean over queries. None where it doesn't exist.
        """
        raise NotImplementedError

    def finish(self, run: Run) -> None:
        """Measure what needs extra passes, or the weights of the model alone.

        `run.model` and `run.sites` are there to be measured, inside `with run.aside():` passes are
        not recorded, and `run.add(site, name, values)` adds a value for each head, `[H]`.
        """
        raise NotImplementedError

    # ---- optional

    def begin(self, run: Run) -> None:
        """Called once, before the first pass."""

    def run_pass(
        self, run: Run, batch: Mapping[str, Any], forward: Callable[[Mapping[str, Any]], Any]
    ) -> Any:
        """Called instead of each pass: call `forward(batch)` once and return its output."""
        return forward(batch)

    def why_missing(self, site: SiteState) -> str:
        """Why the column is empty at a site; "" where no query of the text qualifies.

        Where token ids are known, and the statistic is defined, `why_absent` explains it.
        """
        if self.needs_one_sequence and site.kind == "cross":
            return CROSS
        why = site.ids_reason if self.needs_tokens else ""
        return why or self.why_absent(site)

    def why_absent(self, site: SiteState) -> str:
        """Why no query of the text has the statistic; "" for a sentence about its `queries`."""
        return ""

    # ----

    def settings(self) -> Any:
        """Parameters that the values depend on: a reading resumes only with the same ones."""
        return self.name

    def implements(self, method: str) -> bool:
        """Whether a subclass defines this method of the protocol."""
        defined = (c for c in type(self).__mro__ if method in vars(c))
        return not next(defined).__dict__.get("is_protocol", False)

    @property
    def range_text(self) -> str:
        """The range as text, such as "0..1", "any number", "0 or more"."""
        low, high = self.range
        if low is None:
            return "any number" if high is None else f"{high:g} or less"
        return f"{low:g} or more" if high is None else f"{low:g}..{high:g}"

    def to_dict(self) -> dict[str, Any]:
        """The description, as the page shows it."""
        names = ("name", "formula", "meaning", "unit", "source", "cost")
        low, top = self.range
        return {name: getattr(self, name) for name in names} | {
            "rows": self.queries,
            "mass": self.is_mass,
            "low": low,
            "top": top,
        }

    def __repr__(self) -> str:
        return f"<statistic {self.name}: {self.formula}>"


def why_no_key(site: SiteState, hidden: str) -> str:
    """Why no query may read another key than its own: one token a text, or the mask, which is
    described as `hidden`.
    """
    if site.text.longest < 2:
        return "each text is one token long"
    return f"the mask forbids it: {hidden}"


def require_statistic(statistic: Statistic, taken: Collection[str]) -> None:
    """Raise `MultiheadError` for a user-defined statistic that can't be measured."""
    named = f"statistics: {type(statistic).__name__}"
    if not isinstance(statistic.name, str) or not NAME.fullmatch(statistic.name):
        raise MultiheadError(
            f"{named}.name is {statistic.name!r}; expected a word of up to 60 letters, digits and"
            " _, which names the column"
        )
    if statistic.name in taken or statistic.name in RESERVED:
        raise MultiheadError(f"{named}.name={statistic.name!r} is taken; choose another")
    methods = [method for method in statistic.methods if statistic.implements(method)]
    if len(methods) != 1:
        raise MultiheadError(
            f"{named} implements {' and '.join(methods) or 'no method that measures'}; expected"
            f" exactly one of {', '.join(statistic.methods)}"
        )
