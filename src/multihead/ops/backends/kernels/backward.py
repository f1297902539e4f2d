"""Backward pass of the CPU kernels: blocks computed again from the log-sum-exp (Dao et al. 2022,
algorithm 4).

With A the weights and dA their gradient, ds = A * (dA - rowsum(A * dA)); nothing of size L x S is
kept. A task goes over some tiles of one key/value head and has separate sums for the gradients of
keys and values; torch adds up those of a head's tasks.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import (
    BYTES,
    LANES,
    atomic_fetch_add,
    exp_nonpositive,
    pointer,
    product,
    product_add,
    transpose_block,
)
from .tile import EVERYTHING, KEYS, change_scores, load_intervals, load_rows, numbers_at, store_rows


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def backward_kernel(call, like, wide, one):
    """Backward pass, with the arguments of `forward_kernel`; `partial` holds dk `[tasks, S,
    widths]` and `partial_v` dv, rows filled up to whole vectors, and `chunks` tasks share the tiles
    of a key/value head. The gradient of the bias is added to `change`, where no two tasks may write
    to one number.
    """
    ROWS = LANES * len(wide)
    q, k, v, grad = (
        numbers_at(call.q, like),
        numbers_at(call.k, like),
        numbers_at(call.v, like),
        numbers_at(call.grad, like),
    )
    lse, reach = numbers_at(call.lse, like), numbers_at(call.reach, like)
    dq, dk, dv = (
        numbers_at(call.out, like),
        numbers_at(call.partial, like),
        numbers_at(call.partial_v, like),
    )
    counters = carray(pointer(call.counter), EVERYTHING, np.int64)
    share = call.heads // call.groups
    rows = share * call.length
    tiles = (rows + ROWS - 1) // ROWS
    E, W = call.width, call.value_width
    full_e, full_w = (E + LANES - 1) // LANES * LANES, (W + LANES - 1) // LANES * LANES
    number = like.dtype.type
    qt, gt = (
        np.empty(E * ROWS, like.dtype),
        np.empty(W * ROWS, like.dtype),
    )  # [E, ROWS]: a lane is a row
    qr, gr = np.zeros(ROWS * full_e, like.dtype), np.zeros(ROWS * full_w, like.dtype)  # [ROWS, E]
    s, ds, slope = (
        np.empty(KEYS * ROWS, like.dtype),
        np.empty(KEYS * ROWS, like.dtype),
        np.empty(KEYS * ROWS, like.dtype),
    )
    dqt = np.empty(E * ROWS, like.dtype)
    least, reached = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    low, high = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32)
    more, turned = np.zeros(KEYS * ROWS, like.dtype), np.empty(KEYS * ROWS, like.dtype)
    while True:
        task = atomic_fetch_add(counters, 0)
        if task >= call.batch * call.groups * call.chunks:
            break
        b, g = task // call.chunks // call.groups, task // call.chunks % call.groups
        to_k, to_v = task * call.keys * full_e, task * call.keys * full_w
        dk[to_k : to_k + call.keys * full_e], dv[to_v : to_v + call.keys * full_w] = 0, 0
        at_k, at_v = b * call.k_b + g * call.k_h, b * call.v_b + g * call.v_h
        for tile in range(
            task % call.chunks, tiles, call.chunks
        ):  # of a causal mask each task gets long rows and short ones
            first_row = tile * ROWS
            here = min(ROWS, rows - first_row)
            where = (b, g * share, first_row, here)
            first, last, inner, outer = load_intervals(call, low, high, where, one)
            load_rows(
                q,
                (call.q_b, call.q_h, call.q_i),
                call.length,
                E,
                number(call.scale),
                qt,
                where,
                wide,
                one,
            )
            load_rows(
                grad,
                (call.grad_b, call.grad_h, call.grad_i),
                call.length,
                W,
                number(1),
                gt,
                where,
                wide,
                one,
            )
            for r in range(here):
                for e in range(E):
                    qr[r * full_e + e] = qt[e * ROWS + r]
                for c in range(W):
                    gr[r * full_w + c] = gt[c * ROWS + r]
                row = first_row + r
                at = (
                    b * call.heads + g * share + row // call.length
                ) * call.length + row % call.length
                least[r] = (
                    lse[at] if lse[at] > -np.inf else np.inf
                )  # of a row with nothing to read all weights are 0
                reached[r] = reach[at]
            least[here:], reached[here:] = np.inf, 0
            dqt[:] = 0
            for j0 in range(first, last, KEYS):
                n = min(KEYS, last - j0)
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
                    E,
                    qt,
                )
                change_scores(
                    call,
                    s,
                    slope,
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
                product(
                    wide,
                    one,
                    v,
                    at_v + j0 * call.v_j,
                    call.v_j,
                    1,
                    gt,
                    0,
                    ROWS,
                    ds,
                    0,
                    ROWS,
                    n,
                    W,
                    qt,
                )
                for j in range(0, n * ROWS, ROWS):
                    for r in range(ROWS):
                        p = exp_nonpositive(s[j + r] - least[r])
                        s[j + r] = p
                        ds[j + r] = p * (ds[j + r] - reached[r])
                if call.change:
                    _changed(call, ds, turned, where, task % call.chunks, j0, n, wide)
                if call.softcap > 0:
                    for x in range(n * ROWS):
                        ds[x] *= slope[x]
                _gathered(s, gr, full_w, dv, to_v + j0 * full_w, n, here, wide, one)
                _gathered(ds, qr, full_e, dk, to_k + j0 * full_e, n, here, wide, one)
                product_add(
                    wide,
                    one,
                    k,
                    at_k + j0 * call.k_j,
                    1,
                    call.k_j,
                    ds,
                    0,
                    ROWS,
                    dqt,
                    0,
                    ROWS,
                    E,
                    n,
                    qt,
                )
            for x in range(E * ROWS):
                dqt[x] *= number(call.scale)
            store_rows(
                dqt, dq, (call.out_b, call.out_h, call.out_i), call.length, where, E, wide, one
            )


@njit(forceinline=True)
def _gathered(p, x, width, total, at, n, here, wide, one):
    """Add what n keys get from the tile's queries: total[n, width] += p[n, rows] x[rows, width]."""
    ROWS = LANES * len(wide)
    done = 0
    while done + ROWS <= width:
        product_add(wide, one, p, 0, ROWS, 1, x, done, width, total, at + done, width, n, here, p)
        done += ROWS
    while done < width:
        product_add(one, one, p, 0, ROWS, 1, x, done, width, total, at + done, width, n, here, p)
        done += LANES


@njit(forceinline=True)
def _changed(call, ds, turned, where, chunk, j0, n, wide):
    """Add the gradient of the bias, which follows the soft cap: that of the scores there, summed
    where the bias is broadcast.
    """
    b, h0, first_row, here = where
    ROWS, square = LANES * len(wide), BYTES // ds.itemsize
    change = numbers_at(call.change, ds)
    for r in range(0, ROWS, square):
        for j in range(0, KEYS, square):
            transpose_block(ds, j * ROWS + r, ROWS, turned, r * KEYS + j, KEYS)
    for r in range(here):
        row = first_row + r
        at = (
            chunk * call.change_s
            + b * call.change_b
            + (h0 + row // call.length) * call.change_h
            + row % call.length * call.change_i
            + j0 * call.change_j
        )
        for j in range(n):
            change[at + j * call.change_j] += turned[r * KEYS + j]


def backward_float32(call):
    backward_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))


def backward_float64(call):
    backward_kernel(carray(call, 1)[0], np.empty(0, np.float64), (0, 0), (0,))
