"""`Shape`: the sizes of one attention module, and the formulas for its parameters, arithmetic,
memory and KV cache.

In the formulas D is the width of the model, H the number of query heads over G key/value heads, E
and V the widths of a head's keys and values. With a latent (MLA, DeepSeek-AI 2024, arXiv
2405.04434) keys and values are projected from C numbers a token, and R more carry the position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import MultiheadError

PAGE = 16  # tokens in a page of a paged KV cache (vLLM's default)
# Bytes of a block, and the numbers in it: a block of quantised numbers shares its scales, so
# nothing
# smaller than a block is stored.
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
    """Floating-point operations, a multiply-add as two: of the projections, of the scores Q K^T,
    and of the weighted sums of values P V.

    >>> Arithmetic(projections=6, scores=2, mixing=2).total
    10
    """

    projections: int
    scores: int
    mixing: int

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: Arithmetic) -> Arithmetic:
        return Arithmetic(*map(sum, zip(self, other, strict=True)))


class Kept(NamedTuple):
    """Numbers in a cache, and the bytes of each where they don't have the cache's dtype.

    >>> Kept(64).bytes("bfloat16"), Kept(64, 4).bytes("bfloat16")
    (128, 256)
    """

    numbers: int
    width: int | None = None

    def bytes(self, dtype: str) -> int:
        """Bytes in a cache of a dtype, one of `DTYPES`."""
        return num_bytes(dtype, self.numbers) if self.width is None else self.numbers * self.width


class Extra(NamedTuple):
    """Parameters of a module next to its projections: a norm, a gate, sinks."""

    name: str
    parameters: int
    products: int = 0  # weights that each query position is multiplied with
    # Multiply-adds for each pair of query and key, where an indexer scores keys to choose some.
    pairs: int = 0

    def on_device(self, devices: int) -> Extra:
        """The part of one device: of matrices its share, of vectors all."""
        if not self.products:
            return self
        return self._replace(
            parameters=-(-self.parameters // devices), products=-(-self.products // devices)
        )


def num_bytes(dtype: str, numbers: int) -> int:
    """Bytes that so many numbers take in a dtype, one of `DTYPES`.

    >>> num_bytes("bfloat16", 128), num_bytes("q8_0", 128), num_bytes("int4", 128)
    (256, 136, 72)
    """
    block, count = DTYPES[dtype]
    return -(-numbers // count) * block


def count_pairs(
    length: int, window: int | None = None, *, causal: bool = True, chunked: bool = False
) -> int:
    """Pairs of a query and a key that a mask over `length` tokens allows.

    A causal window of W allows W keys a query, itself the last; a bidirectional one W keys before
    and W after it; chunks of W begin anew every W tokens.

    >>> count_pairs(5), count_pairs(5, 2), count_pairs(5, 2, causal=False)
    (15, 9, 19)
    >>> count_pairs(5, 2, chunked=True)
    7
    """
    if window is None or (causal and window >= length):
        return length * (length + 1) // 2 if causal else length * length
    if chunked:
        chunks, rest = divmod(length, window)
        return chunks * window * (window + 1) // 2 + rest * (rest + 1) // 2
    if causal:
        return length * window - window * (window - 1) // 2
    reach = min(window, length - 1)
    return length * (2 * reach + 1) - reach * (reach + 1)


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention module.

    >>> mha = Shape(embed_dim=768, num_heads=12, num_kv_heads=12, head_dim=64, value_dim=64)
    >>> sum(mha.parameters.values()) == 4 * 768**2, mha.cache("bfloat16", 1000)
    (True, 3072000)
    """

    embed_dim: int  # D, of what queries are projected from
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # E
    value_dim: int  # V
    label: str = "L0"
    name: str = ""  # module path
    source_dim: int | None = None  # of what keys and values are projected from; None: embed_dim
    value_source_dim: int | None = None  # of what values are projected from; None: as keys
    out_dim: int | None = None  # None: embed_dim
    biases: str = ""  # letters of the projections that have one, among "qkvo"
    latent_dim: int | None = None  # C
    rope_dim: int = 0  # R
    query_latent_dim: int | None = None
    norms: int | None = None  # parameters of the latents' norms; None: one each
    extras: tuple[Extra, ...] = ()
    has_keys: bool = True  # False: it reads another layer's keys and values, and caches none
    keys_are_values: bool = False  # one projection gives both
    # Cached for each token next to keys and values: the keys of an indexer, which chooses the
    # `topk` keys that a query reads.
    index: tuple[Kept, ...] = ()
    topk: int | None = None
    causal: bool = True
    window: int | None = None
    chunked: bool = False  # the window is a chunk that begins anew
    cross: bool = False  # keys and values are of the source
    encoder: bool = False  # queries are of the source too
    cached: bool = True
    expands: bool = False  # transformers caches keys and values, not their latent
    # Numbers of a token's keys and of its values in transformers' cache, where they were counted.
    stored: tuple[int, ...] | None = None
    # of a LatentAttention: "absorbed", "expanded", or "auto"; None: one token is decoded in the
    # cheaper one
    form: str | None = None
    calls: int = 1  # of one module in one pass, where layers share it

    def __post_init__(self) -> None:
        where = f"{self.label}: " if self.name else ""
        for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise MultiheadError(f"{where}{name}={getattr(self, name)}: expected at least 1")

    # ---- parameters

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by projection, biases included; then those next to the projections."""
        counts = self._weights()
        for part, width in (
            ("query", self.num_heads * self.head_dim),
            ("key", self.num_kv_heads * self.head_dim),
            ("value", self.num_kv_heads * self.value_dim),
            ("output", self._outputs),
            ("query down", self.query_latent_dim or 0),
            ("key down", (self.latent_dim or 0) + self.rope_dim),
        ):
            letter = "o" if part == "output" else part[0]
            if letter in self.biases and counts.get(part):
                counts[part] += width
        if self.latent_dim and self.has_keys:
            norms = self.latent_dim + (self.query_latent_dim or 0)
            norms = norms if self.norms is None else self.norms
            counts |= {"norms": norms} if norms else {}
        for extra in self.extras:
            counts[extra.name] = counts.get(extra.name, 0) + extra.parameters
        return counts

    @property
    def _outputs(self) -> int:
        return self.embed_dim if self.out_dim is None else self.out_dim

    def _weights(self) -> dict[str, int]:
        """Sizes of the matrices."""
        queries, source = self.num_heads * self.head_dim, self.source_dim or self.embed_dim
        if self.query_latent_dim:
            sizes = {
                "query down": self.embed_dim * self.query_latent_dim,
                "query up": self.query_latent_dim * queries,
            }
        else:
            sizes = {"query": self.embed_dim * queries}
        if self.latent_dim:
            up = self.num_heads * (self.head_dim - self.rope_dim + self.value_dim)
            keys = {
                "key down": source * (self.latent_dim + self.rope_dim),
                "key up": self.latent_dim * up,
            }
        else:
            keys = {
                "key": source * self.num_kv_heads * self.head_dim,
                "value": (self.value_source_dim or source) * self.num_kv_heads * self.value_dim,
            }
            if self.keys_are_values:
                keys["value"] = 0
        sizes |= keys if self.has_keys else dict.fromkeys(keys, 0)
        return sizes | {"output": self.num_heads * self.value_dim * self._outputs}

    @property
    def products(self) -> tuple[int, int]:
        """Weights that the token of a query is multiplied with, and the token of a key."""
        sizes = self._weights()
        keys = sum(sizes.get(part, 0) for part in ("key", "value", "key down", "key up"))
        return sum(sizes.values()) - keys + sum(extra.products for extra in self.extras), keys

    # ---- arithmetic, of one sequence

    def lengths(self, context: int, source: int) -> tuple[int, int]:
        """Numbers of queries and keys in a pass."""
        return (
            source if self.encoder else context,
            source if self.encoder or self.cross else context,
        )

    def pairs(self, context: int, source: int, *, full: bool = False) -> int:
        """Pairs of a query and a key: those that the mask allows and an indexer chooses, or all in
        a full pass.
        """
        if self.topk is None or full or not self.causal:
            return self._scored_pairs(context, source, full)
        return count_pairs(context, self.topk)

    def _scored_pairs(self, context: int, source: int, full: bool) -> int:
        """Pairs that the mask allows, whether an indexer chooses them or not."""
        queries, keys = self.lengths(context, source)
        if full or self.cross or (not self.causal and self.window is None):
            return queries * keys
        return count_pairs(queries, self.window, causal=self.causal, chunked=self.chunked)

    def prefill(self, context: int, source: int, *, full: bool = False) -> Arithmetic:
        """Operations of a pass over the whole sequence."""
        queries, keys = self.lengths(context, source)
        of_query, of_key = self.products
        pairs = self.pairs(context, source, full=full)
        scored = self._scored_pairs(context, source, full)
        absorbed = self.form == "absorbed"
        products = queries * of_query + keys * of_key
        return self._arithmetic(products, pairs, scored, absorbed=absorbed)

    def decode(self, context: int, source: int, *, expanded: bool = False) -> Arithmetic:
        """Operations of one token after `context` cached ones.

        With a latent there are two ways: queries and outputs are projected into the latent's space
        (absorbed), or all keys and values are projected from it again (`expanded`), which
        transformers does. Without `expanded`, the one that the layer uses, else the cheaper.
        """
        if not self.cached:
            return Arithmetic(0, 0, 0)
        scored = source if self.cross else self.num_readable(context + 1)
        # transformers computes all scores and masks those that weren't chosen
        keys = scored if self.topk is None or expanded else min(scored, self.topk)
        of_query, of_key = self.products
        direct = self._arithmetic(of_query + (0 if self.cross else of_key), keys, scored)
        if not self.latent_dim or (expanded and self.expands):
            return direct
        up = self._weights()["key up"]
        again = direct._replace(projections=direct.projections + 2 * self.calls * up * (keys - 1))
        if expanded:
            return again
        absorbed = self._arithmetic(of_query + of_key, keys, scored, absorbed=True)
        if self.form is None:
            return min(again, absorbed, key=lambda way: way.total)
        return absorbed if self._absorbs(keys) else again

    def _absorbs(self, keys: int) -> bool:
        """Whether a `LatentAttention` decodes one token in the absorbed form."""
        if self.form != "auto" or not self.latent_dim:
            return self.form == "absorbed"
        from ..layers.latent import absorbed_is_faster  # which loads torch

        up_dim = self.head_dim - self.rope_dim + self.value_dim
        return absorbed_is_faster(1, keys, self.latent_dim, up_dim)

    def _arithmetic(
        self, products: int, pairs: int, scored: int, *, absorbed: bool = False
    ) -> Arithmetic:
        by_pair = 2 * self.calls * self.num_heads * pairs
        indexer = 2 * self.calls * scored * sum(extra.pairs for extra in self.extras)
        width, value_dim = self.head_dim, self.value_dim
        if absorbed and self.latent_dim:
            width, value_dim = self.latent_dim + self.rope_dim, self.latent_dim
        return Arithmetic(2 * self.calls * products, by_pair * width + indexer, by_pair * value_dim)

    # ---- memory, of one sequence

    def activations(self, context: int, source: int) -> int:
        """Numbers that the layer computes: its input, projections, latents, head outputs,
        output.
        """
        queries, keys = self.lengths(context, source)
        of_query = (
            self.embed_dim
            + self.num_heads * (self.head_dim + self.value_dim)
            + (self.query_latent_dim or 0)
            + self._outputs
        )
        of_key = self.num_kv_heads * (self.head_dim + self.value_dim)
        if self.latent_dim:
            of_key += self.latent_dim + self.rope_dim
        return queries * of_query + keys * (of_key if self.has_keys else 0)

    def num_readable(self, context: int) -> int:
        """Tokens of the cache that the next one may read."""
        return context if self.window is None else min(context, self.window)

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Numbers of a token's keys and of its values in the cache, which are quantised separately;
        with a latent, of it and of the position.
        """
        if not self.cached or not self.has_keys:
            return 0, 0
        if self.latent_dim:
            return self.latent_dim, self.rope_dim
        return self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim

    def cache(self, dtype: str, context: int, source: int = 0, *, storage: str = "theory") -> int:
        """Bytes of the cache after `context` tokens.

        Args:
            dtype: one of `DTYPES`.
            context: tokens of the sequence.
            source: tokens of the source, for cross-attention.
            storage: "theory", what the next token may read; "transformers", which in a windowed
                layer stores one token less, as the next brings its own; "paged", whole pages, one
                more in a windowed layer, whose window lies across their borders.
        """
        tokens = source if self.cross else self.num_readable(context)
        widths, windowed = self.cache_widths, self.window is not None and not self.cross
        if storage == "transformers":
            if self.window is not None and windowed:
                tokens = min(context, self.window - 1)
            if self.stored is not None and any(widths):
                widths = self.stored
            elif self.latent_dim and self.expands and any(widths):
                widths = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        elif storage == "paged":
            pages = -(-tokens // PAGE)
            if self.window is not None and windowed and context > self.window:
                pages = min(-(-context // PAGE), -(-(self.window - 1) // PAGE) + 1)
            tokens = pages * PAGE
        of_token = sum(num_bytes(dtype, width) for width in widths)
        return self.calls * tokens * (of_token + sum(kept.bytes(dtype) for kept in self.index))

    # ---- the same layer with other heads

    def with_group_size(self, size: int) -> Shape:
        """One key/value head for `size` query heads."""
        return replace(
            self,
            num_kv_heads=self.num_heads // size,
            head_dim=self.value_dim if self.latent_dim else self.head_dim,
            latent_dim=None,
            query_latent_dim=None,
            rope_dim=0,
            expands=False,
            stored=None,
            form=None,
        )

    def with_latent(self) -> Shape:
        """A latent in DeepSeek-V2's proportions (C = 4 V, R = V / 2), and none for queries, as in
        DeepSeek-V2-Lite.
        """
        width = self.value_dim
        return replace(
            self,
            num_kv_heads=self.num_heads,
            head_dim=width + width // 2,
            latent_dim=4 * width,
            rope_dim=width // 2,
            query_latent_dim=None,
            norms=None,
            biases="".join(letter for letter in self.biases if letter == "o"),
            expands=False,
            stored=None,
            form=None,
        )

    def with_num_heads(self, num_heads: int) -> Shape:
        """Another number of heads, each with its own key and value, as wide together."""
        width = self.num_heads * self.value_dim // num_heads
        return replace(
            self.with_group_size(1),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=width,
            value_dim=width,
        )

    def on_device(self, devices: int) -> Shape:
        """The part of the module that one of several tensor-parallel devices holds: its share of
        the query heads with their key/value heads, one at least. A latent isn't divided.
        """
        groups = self.num_heads if self.latent_dim else self.num_kv_heads
        whole = groups % devices == 0 or (devices % groups == 0 and not self.latent_dim)
        if self.num_heads % devices or not whole:
            over = f" over {groups} key/value heads" if groups != self.num_heads else ""
            even = [n for n in divisors(self.num_heads) if groups % n == 0 or n % groups == 0]
            raise MultiheadError(
                f"tensor_parallel={devices}: {self.label} has {self.num_heads} query heads{over},"
                f" which {devices} devices can't share evenly; give one of"
                f" {', '.join(map(str, even))}"
            )
        return replace(
            self,
            num_heads=self.num_heads // devices,
            num_kv_heads=max(1, groups // devices),
            extras=tuple(extra.on_device(devices) for extra in self.extras),
        )


def format_heads(*shapes: Shape) -> str:
    """Query heads, key/value heads where fewer, and width: "32/8 x 128"; up to two kinds."""
    kinds: dict[str, None] = {}
    for shape in shapes:
        groups = f"/{shape.num_kv_heads}" if shape.num_kv_heads != shape.num_heads else ""
        width = f"{shape.head_dim}"
        if shape.head_dim != shape.value_dim:
            width += f"+{shape.value_dim}"
        kinds[f"{shape.num_heads}{groups} x {width}"] = None
    texts = list(kinds)
    return ", ".join(texts) if len(texts) < 3 else f"{texts[0]} and {len(texts) - 1} more"


def require_even(num_heads: int, num_kv_heads: int, where: str = "") -> None:
    """Raise where query heads don't share key/value heads evenly, as they do in all but pruned
    modules.
    """
    if num_heads % num_kv_heads:
        raise MultiheadError(
            f"{where}{num_heads} query heads can't share {num_kv_heads} key/value heads evenly;"
            f" give a number that divides {num_heads}: {', '.join(map(str, divisors(num_heads)))}"
        )


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]
