"""Exact weights of the queries that a statistic or a map needs: a tile's scores are kept until its
softmax is complete.

The log-sum-exp of an earlier pass would do without keeping them, but rounds: with scores near 1e4
float32 weights would be off by 1e-3, and for a query whose biases are all the lowest float it can't
even give the number of keys that share it.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import LANES, atomic_fetch_add, exp_nonpositive, pointer, product
from .tile import (
    EVERYTHING,
    KEYS,
    change_scores,
    load_intervals,
    load_rows,
    numbers_at,
    store_rows,
    update_softmax,
)


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def weights_kernel(call, like, wide, one):
    """Weights, as `forward_kernel` in one chunk; `out` is `[B, H, L, S]`, zeros so far."""
    ROWS = LANES * len(wide)
    q, k, out = numbers_at(call.q, like), numbers_at(call.k, like), numbers_at(call.out, like)
    counters = carray(pointer(call.counter), EVERYTHING, np.int64)
    share = call.heads // call.groups
    rows = share * call.length
    tiles = (rows + ROWS - 1) // ROWS
    number = like.dtype.type
    nothing, zero = number(-np.inf), number(0)
    qt, more = np.empty(call.width * ROWS, like.dtype), np.zeros(KEYS * ROWS, like.dtype)
    kept, shifts = (
        np.empty((call.keys + KEYS) * ROWS, like.dtype),
        np.empty((call.keys // KEYS + 1) * ROWS, like.dtype),
    )
    top, total = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    shift, shrink = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    low, high, none = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32), np.empty(0, like.dtype)
    while True:
        task = atomic_fetch_add(counters, 0)
        if task >= call.batch * call.groups * tiles:
            break
        b, h0 = task // tiles // call.groups, task // tiles % call.groups * share
        first_row = task % tiles * ROWS
        here = min(ROWS, rows - first_row)
        where = (b, h0, first_row, here)
        first, last, inner, outer = load_intervals(call, low, high, where, one)
        load_rows(
            q,
            (call.q_b, call.q_h, call.q_i),
            call.length,
            call.width,
            number(call.scale),
            qt,
            where,
            wide,
            one,
        )
        top[:], total[:] = nothing, zero
        if call.sinks:
            sinks = numbers_at(call.sinks, like)
            for r in range(here):
                top[r], total[r] = (sinks[h0 + (first_row + r) // call.length], number(1))
        at_k = b * call.k_b + h0 // share * call.k_h
        for j0 in range(first, last, KEYS):
            n, at = min(KEYS, last - j0), (j0 - first) * ROWS
            s = kept[at : at + KEYS * ROWS]
            product(
                wide,
                one,
                k,
                at_k + j0 * call.k_j,
                call.k_j,
                1,
                qt,
                0,
                ROWS,
                s,
                0,
                ROWS,
                n,
                call.width,
                qt,
            )
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
                one,
            )
            update_softmax(s, n, top, total, shift, shrink, wide)
            shifts[at // KEYS : at // KEYS + ROWS] = shift
        for j0 in range(first, last, KEYS):
            n, at = min(KEYS, last - j0), (j0 - first) * ROWS
            s = kept[at : at + KEYS * ROWS]
            for r in range(
                ROWS
            ):  # a block that a row couldn't read yet may have a larger shift, and its powers are 0
                x = shifts[at // KEYS + r] - top[r]
                shrink[r] = zero if (x > 0) | (total[r] == 0) else exp_nonpositive(x) / total[r]
            for x in range(n * ROWS):
                s[x] *= shrink[x % ROWS]
            store_rows(
                s, out[j0:], (call.out_b, call.out_h, call.out_i), call.length, where, n, wide, one
            )


def exact_float32(call):
    weights_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))


def exact_float64(call):
    weights_kernel(carray(call, 1)[0], np.empty(0, np.float64), (0, 0), (0,))
