"""Forward pass on bfloat16, by the dot product of pairs that some processors have (AVX512-BF16):
float32 sums, four times the work of a float32 lane.

Queries and keys are paired along the head's width, keys as they lie in memory; weights and values
along the keys, so values are paired once a call. Weights are rounded to bfloat16 before their
product with the values, as on every accelerator.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import FEATURES, LANES, atomic_fetch_add, pack_bf16, pointer, product, product_more
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

THERE = {"avx512f", "avx512bf16"} <= FEATURES


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def paired(call, like, wide, one):
    """Forward pass in one chunk; q is float32, k and v are int32 pairs and their strides count
    pairs.
    """
    ROWS = LANES * len(wide)
    q = numbers_at(call.q, like)
    k, v = (
        carray(pointer(call.k), EVERYTHING, np.int32),
        carray(pointer(call.v), EVERYTHING, np.int32),
    )
    counters = carray(pointer(call.counter), EVERYTHING, np.int64)
    share = call.heads // call.groups
    rows = share * call.length
    tiles = (rows + ROWS - 1) // ROWS
    E, W = call.width, call.value_width
    nothing, zero, scale = np.float32(-np.inf), np.float32(0), np.float32(call.scale)
    qt, qp = np.empty(E * ROWS, like.dtype), np.empty(E // 2 * ROWS, np.int32)
    s, p, o = (
        np.zeros((KEYS + 1) * ROWS, like.dtype),
        np.empty(KEYS // 2 * ROWS, np.int32),
        np.empty(W * ROWS, like.dtype),
    )
    top, total = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    shift, shrink = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    low, high, none = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32), np.empty(0, like.dtype)
    more = np.zeros(KEYS * ROWS, like.dtype)
    while True:
        task = atomic_fetch_add(counters, 0)
        if task >= call.batch * call.groups * tiles:
            break
        b, g = task // tiles // call.groups, task // tiles % call.groups
        first_row = (tiles - 1 - task % tiles) * ROWS
        here = min(ROWS, rows - first_row)
        where = (b, g * share, first_row, here)
        # scaled by a power of two alone, as they came: any other scale would cost the queries' last
        # bit
        load_rows(
            q, (call.q_b, call.q_h, call.q_i), call.length, E, np.float32(1), qt, where, wide, one
        )
        for e in range(0, E // 2 * ROWS, ROWS):
            for r in range(ROWS):
                qp[e + r] = pack_bf16(qt[2 * e + r], qt[2 * e + ROWS + r])
        first, last, inner, outer = load_intervals(call, low, high, where, one)
        first = first // 2 * 2
        top[:], total[:], o[:] = nothing, zero, zero
        if call.sinks:
            sinks = numbers_at(call.sinks, like)
            for r in range(here):
                top[r], total[r] = (
                    sinks[g * share + (first_row + r) // call.length],
                    np.float32(1),
                )
        at_k, at_v = b * call.k_b + g * call.k_h, b * call.v_b + g * call.v_h
        for j0 in range(first, last, KEYS):
            n = min(KEYS, last - j0)
            product(
                wide,
                one,
                k,
                at_k + j0 * call.k_j,
                call.k_j,
                1,
                qp,
                0,
                ROWS,
                s,
                0,
                ROWS,
                n,
                E // 2,
                s,
            )
            if scale != 1:
                for x in range(n * ROWS):
                    s[x] *= scale
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
            s[n * ROWS : (n + 1) * ROWS] = 0  # the other half of an odd last key
            for j in range(0, (n + 1) // 2 * ROWS, ROWS):
                for r in range(ROWS):
                    p[j + r] = pack_bf16(s[2 * j + r], s[2 * j + ROWS + r])
            product_more(
                wide,
                one,
                v,
                at_v + j0 // 2 * call.v_j,
                1,
                call.v_j,
                p,
                0,
                ROWS,
                o,
                0,
                ROWS,
                W,
                (n + 1) // 2,
                shrink,
            )
        finish_tile(call, like, where, o, top, total, shrink, W, wide, one)


def paired_float32(call):
    paired(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))
