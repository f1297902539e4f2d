"""The attention of one layer in numbers: its parameters, its arithmetic and its cache, each by a
formula that can be read.

Letters: D width of the model, H query heads over G key/value heads, E and V the widths of a head's
    keys and values. With a
latent (DeepSeek-AI 2024, MLA) keys and values are made from C numbers a token, and R more that
carry the position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import MultiheadError

PAGE = 16  # tokens that a paged server hands out at once (vLLM's default)
# Bytes of so many numbers: a block of them shares its scales, so nothing smaller than a block is
# stored.
DTYPES: dict[str, tuple[int, int]] = {
    "float64": (8, 1),
    "float32": (4, 1),
    "bfloat16": (2, 1),
    "float16": (2, 1),
    "float8": (1, 1),
    # transformers' quantised cache: a scale and a zero, two bytes each, for 64 numbers
    "int8": (68, 64),
    "int4": (36, 64),
    "int2": (20, 64),
    # llama.cpp's cache: 32 numbers with a scale, or (_1) a scale and a least value
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
}


class Arithmetic(NamedTuple):
    """Floating-point operations, a multiply-add as two."""

    projections: int
    scores: int
    mixing: int

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: Arithmetic) -> Arithmetic:
        return Arithmetic(*map(sum, zip(self, other, strict=True)))


class Extra(NamedTuple):
    """What stands beside the projections: a norm, a gate, sinks."""

    name: str
    parameters: int
    products: int = 0  # weights that each query row is multiplied with
    pairs: int = (
        0  # multiply-adds for each query and key, where keys are chosen by scores of their own
    )


def size(dtype: str, numbers: int) -> int:
    """Bytes of so many numbers.

    >>> size("bfloat16", 128), size("q8_0", 128), size("int4", 128)
    (256, 136, 72)
    """
    block, held = DTYPES[dtype]
    return -(-numbers // held) * block


def allowed(
    rows: int, window: int | None = None, *, causal: bool = True, chunked: bool = False
) -> int:
    """Pairs of a query and a key that a mask over `rows` tokens lets meet.

    A causal window of W lets a row read W keys, itself the last; one that looks both ways W before
    and W behind; chunks of W begin anew every W tokens.

    >>> allowed(5), allowed(5, 2), allowed(5, 2, causal=False), allowed(5, 2, chunked=True)
    (15, 9, 19, 7)
    """
    if window is None or (causal and window >= rows):
        return rows * (rows + 1) // 2 if causal else rows * rows
    if chunked:
        whole, rest = divmod(rows, window)
        return whole * window * (window + 1) // 2 + rest * (rest + 1) // 2
    if causal:
        return rows * window - window * (window - 1) // 2
    reach = min(window, rows - 1)
    return rows * (2 * reach + 1) - reach * (reach + 1)


@dataclass(frozen=True)
class Shape:
    """One attention module.

    >>> plain = Shape(width=768, heads=12, kv_heads=12, head_dim=64, value_dim=64)
    >>> sum(plain.parameters.values()) == 4 * 768**2, plain.cache("bfloat16", 1000)
    (True, 3072000)
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    label: str = "L0"
    name: str = ""  # of the module
    source_width: int | None = (
        None  # of what keys and values are made of; None: as wide as the queries' input
    )
    out_width: int | None = None  # None: as wide as the input
    biases: str = ""  # letters of the projections that have one, among "qkvo"
    latent: int | None = None  # C
    rope: int = 0  # R
    query_latent: int | None = None
    extras: tuple[Extra, ...] = ()
    own_keys: bool = True  # False: it reads another layer's keys and values, and keeps none
    causal: bool = True
    window: int | None = None
    chunked: bool = False  # the window is a chunk that begins anew
    cross: bool = False  # keys and values are of the source
    encoder: bool = False  # queries are of the source too
    cached: bool = True
    expands: bool = False  # transformers keeps keys and values, not the latent they are made of
    calls: int = 1  # of one module in one pass, where layers share it

    def __post_init__(self) -> None:
        where = f"{self.label}: " if self.name else ""
        for name in ("width", "heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise MultiheadError(
                    f"{where}{name}={getattr(self, name)}: expected a number from 1 on"
                )

    @property
    def parameters(self) -> dict[str, int]:
        """By projection, biases counted with theirs; then what stands beside them."""
        found = self._weights()
        latent = (self.latent or 0) + self.rope
        for part, wide in (
            ("query", self.heads * self.head_dim),
            ("key", self.kv_heads * self.head_dim),
            ("value", self.kv_heads * self.value_dim),
            ("output", self.out),
            ("query down", self.query_latent or 0),
            ("key down", latent),
        ):
            letter = "o" if part == "output" else part[0]
            if letter in self.biases and found.get(part):
                found[part] += wide
        if self.latent and self.own_keys:
            found["norms"] = self.latent + (self.query_latent or 0)
        for extra in self.extras:
            found[extra.name] = found.get(extra.name, 0) + extra.parameters
        return found

    @property
    def out(self) -> int:
        return self.width if self.out_width is None else self.out_width

    def _weights(self) -> dict[str, int]:
        """The matrices, which are also what a token is multiplied with."""
        queries = self.heads * self.head_dim
        found = {"query": self.width * queries}
        if self.query_latent:
            found = {
                "query down": self.width * self.query_latent,
                "query up": self.query_latent * queries,
            }
        source = self.source_width or self.width
        if self.latent:
            up = self.heads * (self.head_dim - self.rope + self.value_dim)
            found |= {"key down": source * (self.latent + self.rope), "key up": self.latent * up}
        else:
            found |= {
                "key": source * self.kv_heads * self.head_dim,
                "value": source * self.kv_heads * self.value_dim,
            }
        if not self.own_keys:
            found |= dict.fromkeys(found.keys() & {"key", "value", "key down", "key up"}, 0)
        return found | {"output": self.heads * self.value_dim * self.out}

    @property
    def products(self) -> tuple[int, int]:
        """Weights that a query's token is multiplied with, and those of a key's."""
        weights = self._weights()
        keys = sum(weights.get(part, 0) for part in ("key", "value", "key down", "key up"))
        return sum(weights.values()) - keys + sum(extra.products for extra in self.extras), keys

    # ---- arithmetic, of one text

    def lengths(self, context: int, source: int) -> tuple[int, int]:
        """Rows and keys of a pass."""
        return (
            source if self.encoder else context,
            source if self.encoder or self.cross else context,
        )

    def pairs(self, context: int, source: int, *, full: bool = False) -> int:
        """Queries and keys that meet; all of them in a full pass, or what the mask allows."""
        rows, keys = self.lengths(context, source)
        if full or self.cross or (not self.causal and self.window is None):
            return rows * keys
        return allowed(rows, self.window, causal=self.causal, chunked=self.chunked)

    def prefill(self, context: int, source: int, *, full: bool = False) -> Arithmetic:
        """A pass over the whole text."""
        rows, keys = self.lengths(context, source)
        of_query, of_key = self.products
        return self._arithmetic(
            rows * of_query + keys * of_key, self.pairs(context, source, full=full)
        )

    def decode(self, context: int, source: int, *, expanded: bool = False) -> Arithmetic:
        """One token behind `context` that are in the cache.

        With a latent the cheaper of two ways: queries and outputs turned into the latent's space
            (absorbed), or all keys and
        values made anew from it. `expanded` is the second, which is what transformers does.
        """
        if not self.cached:
            return Arithmetic(0, 0, 0)
        keys = source if self.cross else self.reach(context + 1)
        of_query, of_key = self.products
        plain = self._arithmetic(of_query + (0 if self.cross else of_key), keys)
        if not self.latent or (expanded and self.expands):
            return plain
        up = self._weights()["key up"]
        again = plain._replace(projections=plain.projections + 2 * self.calls * up * (keys - 1))
        absorbed = Arithmetic(
            plain.projections,
            2 * self.calls * self.heads * (self.latent + self.rope) * keys,
            2 * self.calls * self.heads * self.latent * keys,
        )
        return again if expanded else min(again, absorbed, key=lambda way: way.total)

    def _arithmetic(self, products: int, pairs: int) -> Arithmetic:
        by_pair = 2 * self.calls * self.heads * pairs
        chosen = 2 * self.calls * pairs * sum(extra.pairs for extra in self.extras)
        return Arithmetic(
            2 * self.calls * products, by_pair * self.head_dim + chosen, by_pair * self.value_dim
        )

    # ---- memory, of one text

    def activations(self, context: int, source: int) -> int:
        """Numbers that the layer makes on the way: its input, projections, what the heads gave, its
        output.
        """
        rows, keys = self.lengths(context, source)
        of_row = (
            self.width
            + self.heads * (self.head_dim + self.value_dim)
            + (self.query_latent or 0)
            + self.out
        )
        kept = self.kv_heads * (self.head_dim + self.value_dim) + (
            (self.latent or 0) + self.rope if self.latent else 0
        )
        return rows * of_row + keys * (kept if self.own_keys else 0)

    def reach(self, context: int) -> int:
        """Tokens of the cache that the next one may read."""
        return context if self.window is None else min(context, self.window)

    @property
    def row(self) -> int:
        """Numbers that a token leaves in the cache."""
        if not self.cached or not self.own_keys:
            return 0
        return (
            self.latent + self.rope
            if self.latent
            else self.kv_heads * (self.head_dim + self.value_dim)
        )

    @property
    def parts(self) -> tuple[int, int]:
        """Numbers of a token's keys and of its values, which are quantised apart."""
        if not self.row:
            return 0, 0
        return (
            (self.latent, self.rope)
            if self.latent
            else (self.kv_heads * self.head_dim, self.kv_heads * self.value_dim)
        )

    def cache(self, dtype: str, context: int, source: int = 0, *, kept: str = "theory") -> int:
        """Bytes behind `context` tokens.

        `kept`: "theory", what the next token may read; "transformers", which in a windowed layer
        keeps one token less, as the next brings its own; "paged", whole pages, one more in a
        windowed layer, whose window lies across their borders.
        """
        tokens = source if self.cross else self.reach(context)
        parts = self.parts
        if kept == "transformers":
            if self.window is not None and not self.cross:
                tokens = min(context, self.window - 1)
            if self.latent and self.expands and self.row:
                parts = (self.heads * self.head_dim, self.heads * self.value_dim)
        elif kept == "paged":
            pages = -(-tokens // PAGE)
            if self.window is not None and not self.cross and context > self.window:
                pages = min(-(-context // PAGE), -(-(self.window - 1) // PAGE) + 1)
            tokens = pages * PAGE
        return self.calls * tokens * sum(size(dtype, part) for part in parts)

    # ---- the same layer otherwise

    def grouped(self, share: int) -> Shape:
        """With one key/value head for `share` query heads."""
        head = self.value_dim if self.latent else self.head_dim
        return replace(
            self,
            kv_heads=self.heads // share,
            head_dim=head,
            latent=None,
            query_latent=None,
            rope=0,
            expands=False,
        )

    def latents(self) -> Shape:
        """With a latent in DeepSeek-V2's proportions (C = 4 V, R = V / 2), queries without one as
        in its Lite.
        """
        wide = self.value_dim
        return replace(
            self,
            kv_heads=self.heads,
            head_dim=wide + wide // 2,
            latent=4 * wide,
            rope=wide // 2,
            query_latent=None,
            biases="".join(letter for letter in self.biases if letter == "o"),
            expands=False,
        )

    def split(self, heads: int) -> Shape:
        """Plain heads, as wide together, but another number of them."""
        wide = self.heads * self.value_dim // heads
        return replace(self.grouped(1), heads=heads, kv_heads=heads, head_dim=wide, value_dim=wide)


def require_even(heads: int, kv_heads: int, where: str = "") -> None:
    """`ValueError` where query heads don't share key/value heads evenly, as they do in all but
    pruned modules.
    """
    if heads % kv_heads:
        raise MultiheadError(
            f"{where}{heads} query heads can't share {kv_heads} key/value heads evenly; give a"
            f" number that divides {heads}: {', '.join(map(str, divisors(heads)))}"
        )


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]
