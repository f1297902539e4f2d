"""Formulas of one module: pairs, caches, quantised numbers, latents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihead import cost
from multihead.costs.shape import DTYPES, Shape, count_pairs, num_bytes


@given(st.integers(1, 40), st.integers(1, 45), st.booleans(), st.booleans())
def test_pairs_that_masks_allow(rows: int, window: int, causal: bool, chunked: bool) -> None:
    i, j = np.arange(rows)[:, None], np.arange(rows)
    if causal:
        may = (j <= i) & ((i // window == j // window) if chunked else (i - j < window))
    else:
        may = abs(i - j) <= window
    assert count_pairs(rows, window, causal=causal, chunked=causal and chunked) == may.sum()
    assert count_pairs(rows, causal=causal) == ((j <= i) if causal else (i >= 0) | (j >= 0)).sum()


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_a_cache_holds_what_the_next_token_may_read(
    groups: int, share: int, head: int, value: int, context: int, window: int
) -> None:
    shape = Shape(8, groups * share, groups, head, value, window=window)
    row = groups * (head + value) * 2
    assert shape.cache("float16", context) == row * min(context, window)
    assert shape.cache("float16", context, storage="transformers") == row * min(context, window - 1)
    full = replace(shape, window=None)
    assert full.cache("float16", context, storage="paged") == row * (context + -context % 16)
    touched = {t // 16 for t in range(max(0, context - window + 1), context)} or {
        0
    }  # pages of the window but the next token
    paged = shape.cache("float16", context, storage="paged")
    assert len(touched) * 16 * row <= paged <= full.cache("float16", context, storage="paged")
    assert shape.decode(context, 0).scores == 2 * groups * share * head * min(context + 1, window)


def test_bytes_of_quantised_numbers() -> None:
    sizes = pytest.importorskip("gguf").GGML_QUANT_SIZES
    for kind, (held, stored) in sizes.items():
        if (name := kind.name.lower()) in DTYPES:
            assert DTYPES[name] == (stored, held), name
    assert {name: num_bytes(name, 256) for name in DTYPES if not name.startswith("q")} == {
        "float64": 2048,
        "float32": 1024,
        "bfloat16": 512,
        "float16": 512,
        "float8": 256,
        "int8": 272,
        "int4": 144,
        "int2": 80,
    }
    assert num_bytes("q4_0", 33) == 36  # a block more
    found = cost(embed_dim=256, num_heads=4, context_length=10, dtype="q8_0")
    assert found.cache() == 10 * 2 * 8 * 34
    assert (
        found.memory == cost(embed_dim=256, num_heads=4, context_length=10).memory
    )  # only the cache is quantised


def test_decoding_from_a_latent() -> None:
    """Absorbed, a score is a product over latent and position; made anew, every cached token is
    projected again.
    """
    shape = Shape(48, 6, 6, 12, 8, latent_dim=32, rope_dim=4)
    up, keys = 32 * 6 * (8 + 8), 21
    absorbed, anew = shape.decode(20, 0), shape.decode(20, 0, expanded=True)
    assert (absorbed.scores, absorbed.mixing) == (2 * 6 * 36 * keys, 2 * 6 * 32 * keys)
    assert (
        anew.projections - absorbed.projections == 2 * up * 20 and anew.scores == 2 * 6 * 12 * keys
    )
    kept = replace(shape, expands=True)  # transformers before it kept latents
    assert kept.decode(20, 0, expanded=True).projections == absorbed.projections
    assert (
        kept.cache("float16", 20, storage="transformers")
        == 20 * 6 * 20 * 2
        != kept.cache("float16", 20)
    )
