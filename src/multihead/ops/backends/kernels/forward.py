"""Attention on a CPU, in loops compiled by Numba: one task is a tile of queries of one key/value
head.

A tile's queries lie in the lanes of a vector (intrinsics.py). The tile goes over its keys in
blocks with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1): scores of
a block, their new maximum, powers, and the product with the values, all scaled to the maximum so
far. Blocks outside the tile's intervals are skipped, and only blocks at the border of some query's
interval look at single elements of the mask.

Queries of all heads that share a key/value head follow each other, so that the few queries of a
decoding step fill a tile. A long KV cache is cut into chunks of a fixed number of keys, whose
results the last of them combines in order: the number of threads changes no bit.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    LANES,
    atomic_fetch_add,
    exp_nonpositive,
    pointer,
    prefetch,
    product,
    product_ahead,
    product_more,
    product_more_ahead,
)
from .tile import (
    EVERYTHING,
    KEYS,
    change_scores,
    finish_tile,
    load_intervals,
    load_rows,
    numbers_at,
    update_softmax,
)


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def forward_kernel(call, like, wide, parts):
    """Forward pass. `like`: an array of the numbers' dtype. A tile is as many times 16 lanes wide
    as `wide` is long, and each of its queries takes as many neighbouring lanes as `parts` is long,
    one for each part of the head's width, so that few queries fill a tile.
    """
    ROWS, PARTS = LANES * len(wide), len(parts)  # lanes, and lanes to a row
    q, k, v = numbers_at(call.q, like), numbers_at(call.k, like), numbers_at(call.v, like)
    counters = carray(pointer(call.counter), EVERYTHING, np.int64)
    share = call.heads // call.groups
    rows = share * call.length
    in_tile = ROWS // PARTS  # rows
    tiles = (rows + in_tile - 1) // in_tile
    E, W = call.width, call.value_width
    number = like.dtype.type
    nothing, zero = number(-np.inf), number(0)

    qt = np.empty(E * ROWS, like.dtype)  # the tile's queries, scaled: [E, ROWS]
    s = np.empty(KEYS * ROWS, like.dtype)  # scores, then powers: [KEYS, ROWS]
    o = np.empty(W // PARTS * ROWS, like.dtype)  # [Ev, ROWS]
    top, total = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    shift, shrink = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    low, high, none = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32), np.empty(0, like.dtype)
    more = np.zeros(KEYS * ROWS, like.dtype)
    tasks = call.batch * call.groups * tiles * call.chunks
    while True:
        lot = (
            atomic_fetch_add(counters, 0) * call.lot
        )  # neighbours, so that short heads find their keys and values in the cache
        if lot >= tasks:
            break
        for task in range(lot, min(lot + call.lot, tasks)):
            chunk, tile = task % call.chunks, task // call.chunks
            b, g = tile // tiles // call.groups, tile // tiles % call.groups
            at_k, at_v = b * call.k_b + g * call.k_h, b * call.v_b + g * call.v_h
            first_row = (
                tiles - 1 - tile % tiles
            ) * in_tile  # long rows of a causal mask first, to end on short tasks
            here = min(in_tile, rows - first_row)
            where = (b, g * share, first_row, here)
            first, last, inner, outer = load_intervals(call, low, high, where, parts)
            first, last = max(first, chunk * call.chunk), min(last, (chunk + 1) * call.chunk)
            prefetch(k, at_k + first * call.k_j, call.k_j, min(KEYS, last - first), E)
            prefetch(v, at_v + first * call.v_j, call.v_j, min(KEYS, last - first), W)
            load_rows(
                q,
                (call.q_b, call.q_h, call.q_i),
                call.length,
                E,
                number(call.scale),
                qt,
                where,
                wide,
                parts,
            )
            top[:], total[:], o[:] = nothing, zero, zero
            if call.sinks and chunk == 0:
                sinks = numbers_at(call.sinks, like)
                for r in range(here * PARTS):
                    top[r] = sinks[g * share + (first_row + r // PARTS) // call.length]
                    total[r] = number(1)
            for j0 in range(first, last, KEYS):
                n = min(KEYS, last - j0)
                if len(wide) == 1:  # few rows: the time goes into reading keys and values
                    product_ahead(
                        wide,
                        parts,
                        k,
                        at_k + j0 * call.k_j,
                        call.k_j,
                        PARTS,
                        qt,
                        0,
                        ROWS,
                        s,
                        0,
                        ROWS,
                        n,
                        E // PARTS,
                        qt,
                    )
                else:
                    product(
                        wide,
                        parts,
                        k,
                        at_k + j0 * call.k_j,
                        call.k_j,
                        PARTS,
                        qt,
                        0,
                        ROWS,
                        s,
                        0,
                        ROWS,
                        n,
                        E // PARTS,
                        qt,
                    )
                if PARTS > 1:
                    _join_parts(s, n, wide, parts)
                change_scores(
                    call,
                    s,
                    none,
                    more,
                    where,
                    j0,
                    n,
                    low,
                    high,
                    j0 < inner or j0 + n > outer,
                    wide,
                    parts,
                )
                update_softmax(s, n, top, total, shift, shrink, wide)
                if call.careful:
                    _mix_careful(
                        v,
                        at_v + j0 * call.v_j,
                        call.v_j,
                        s,
                        o,
                        shrink,
                        j0,
                        n,
                        W,
                        low,
                        high,
                        wide,
                        parts,
                    )
                elif len(wide) == 1:
                    product_more_ahead(
                        wide,
                        parts,
                        v,
                        at_v + j0 * call.v_j,
                        PARTS,
                        call.v_j,
                        s,
                        0,
                        ROWS,
                        o,
                        0,
                        ROWS,
                        W // PARTS,
                        n,
                        shrink,
                    )
                else:
                    product_more(
                        wide,
                        parts,
                        v,
                        at_v + j0 * call.v_j,
                        PARTS,
                        call.v_j,
                        s,
                        0,
                        ROWS,
                        o,
                        0,
                        ROWS,
                        W // PARTS,
                        n,
                        shrink,
                    )
            if call.chunks > 1:
                partial = numbers_at(call.partial, like)
                size = (W // PARTS + 2) * ROWS
                at = task * size
                (
                    partial[at : at + ROWS],
                    partial[at + ROWS : at + 2 * ROWS],
                    partial[at + 2 * ROWS : at + size],
                ) = (top, total, o)
                if atomic_fetch_add(counters, 1 + tile) < call.chunks - 1:
                    continue
                _join(
                    partial,
                    tile * call.chunks * size,
                    call.chunks,
                    size,
                    top,
                    total,
                    o,
                    shrink,
                    W // PARTS,
                    wide,
                )
            finish_tile(call, like, where, o, top, total, shrink, W, wide, parts)


@njit(forceinline=True, error_model="numpy")
def _join_parts(s, n, wide, parts):
    """Sum the products over the parts of the width, for all lanes of a query."""
    ROWS, PARTS = LANES * len(wide), len(parts)
    for j in range(0, n * ROWS, PARTS):
        x = s[j]
        for i in range(1, PARTS):
            x += s[j + i]
        for i in range(PARTS):
            s[j + i] = x


@njit(forceinline=True, error_model="numpy")
def _mix_careful(v, at, step, p, o, shrink, j0, n, W, low, high, wide, parts):
    """Multiply with values that aren't finite, of allowed keys alone: 0 * inf is NaN."""
    ROWS, PARTS = LANES * len(wide), len(parts)
    for x in range(W // PARTS * ROWS):
        o[x] *= shrink[x % ROWS]
    for j in range(n):
        for c in range(W // PARTS):
            for r in range(ROWS):
                if (low[r] <= j0 + j) & (j0 + j < high[r]) & (p[j * ROWS + r] != 0):
                    o[c * ROWS + r] += p[j * ROWS + r] * v[at + j * step + c * PARTS + r % PARTS]


@njit(forceinline=True, error_model="numpy")
def _join(partial, at, chunks, size, top, total, o, shrink, W, wide):
    """Combine the results of the chunks, in order."""
    ROWS = LANES * len(wide)
    number = partial.dtype.type
    nothing, zero = number(-np.inf), number(0)
    top[:], total[:], o[:] = nothing, zero, zero
    for chunk in range(chunks):
        for r in range(ROWS):
            x = partial[at + chunk * size + r]
            top[r] = x if x > top[r] else top[r]
    for chunk in range(chunks):
        here = at + chunk * size
        for r in range(ROWS):
            shrink[r] = (
                zero
                if partial[here + r] == nothing
                else exp_nonpositive(partial[here + r] - top[r])
            )
            total[r] += partial[here + ROWS + r] * shrink[r]
        for c in range(W):
            for r in range(ROWS):
                o[c * ROWS + r] += partial[here + (2 + c) * ROWS + r] * shrink[r]


def forward_float32(call):
    forward_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))


def forward_float64(call):
    forward_kernel(carray(call, 1)[0], np.empty(0, np.float64), (0, 0), (0,))


def decode_float32(call):
    forward_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0,), (0,))


def decode_float64(call):
    forward_kernel(carray(call, 1)[0], np.empty(0, np.float64), (0,), (0,))


def decode4_float32(call):
    forward_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0,), (0, 0, 0, 0))
