"""Forward pass with statistics of each query, computed from the tile's scores and powers.

All statistics are sums over keys of the powers of the online softmax, so they are rescaled with it
when a query's maximum rises. Only the sum that each key receives depends on the final softmax: for
that a tile's powers are kept until it is complete, S x 32 numbers a thread.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, njit

from .intrinsics import LANES, atomic_fetch_add, exp_nonpositive, pointer, product, product_more
from .tile import (
    EVERYTHING,
    KEYS,
    change_scores,
    finish_tile,
    load_intervals,
    load_rows,
    numbers_at,
)

# Numbers of a row, in this order; then the weight on each of its places, PAIRED numbers for earlier
# keys of its token
# (duplicate) and for keys after such (induction), and the weighted sum of each column.
WEIGHT, LARGEST, LARGEST_AT, ENTROPY, DISTANCE, SINGLE = range(6)
TOKENS = 1024
PAIRED = 4  # weight, contribution, norms, number of keys


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def observe_kernel(call, like, wide, one):
    ROWS = LANES * len(wide)
    q, k, v, stats = (
        numbers_at(call.q, like),
        numbers_at(call.k, like),
        numbers_at(call.v, like),
        numbers_at(call.stats, like),
    )
    columns = numbers_at(call.columns, like)
    counters, places = (
        carray(pointer(call.counter), EVERYTHING, np.int64),
        carray(pointer(call.places), EVERYTHING, np.int64),
    )
    received, real = numbers_at(call.partial, like), numbers_at(call.reach, like)
    share, tiles = call.heads // call.groups, (call.length + ROWS - 1) // ROWS
    E, W, C, P = call.width, call.value_width, call.columns_n, call.places_n
    number = like.dtype.type
    nothing, zero = number(-np.inf), number(0)

    qt, o = np.empty(E * ROWS, like.dtype), np.empty(W * ROWS, like.dtype)
    kept, shifts = (
        np.empty((call.keys + KEYS) * ROWS, like.dtype),
        np.empty((call.keys // KEYS + 2) * ROWS, like.dtype),
    )
    sums, picked = np.empty(C * ROWS, like.dtype), np.empty(P * ROWS, like.dtype)
    pairs = np.empty(2 * PAIRED * ROWS, like.dtype)
    top, total = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    shift, shrink = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    peak, spread = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    apart, at = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    sunk, ends = np.empty(ROWS, like.dtype), np.empty(ROWS, like.dtype)
    seen = np.zeros(
        TOKENS, np.uint8
    )  # whether some row's token is one of these, but for whole multiples of TOKENS
    low, high = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32)
    peak_at, token = np.empty(ROWS, np.int32), np.empty(ROWS, np.int32)
    none = np.empty(0, like.dtype)
    more = np.zeros(KEYS * ROWS, like.dtype)
    while True:
        task = atomic_fetch_add(counters, 0)
        if task >= call.batch * call.heads * call.chunks:
            break
        b, h = task // call.chunks // call.heads, task // call.chunks % call.heads
        to = task * call.keys
        received[to : to + call.keys] = 0
        for tile in range(task % call.chunks, tiles, call.chunks):
            first_row = tile * ROWS
            here = min(ROWS, call.length - first_row)
            where = (b, h, first_row, here)
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
            first, last, inner, outer = load_intervals(call, low, high, where, one)
            top[:], total[:], o[:], sums[:], picked[:], pairs[:] = (
                nothing,
                zero,
                zero,
                zero,
                zero,
                zero,
            )
            peak[:], peak_at[:], spread[:], apart[:], token[:], sunk[:] = (
                nothing,
                0,
                zero,
                zero,
                -1,
                nothing,
            )
            for r in range(ROWS):
                at[r] = number(first_row + r + call.offset)
            if call.ids:
                ids = carray(pointer(call.ids), EVERYTHING, np.int32)
                seen[:] = 0
                for r in range(here):
                    token[r] = ids[b * call.length + first_row + r]
                    seen[token[r] % TOKENS] = 1
            if call.sinks:
                sunk[:here] = numbers_at(call.sinks, like)[h]
            at_k, at_v = b * call.k_b + h // share * call.k_h, b * call.v_b + h // share * call.v_h
            at_c = (b * call.heads + h) * call.keys * C
            for j0 in range(first, last, KEYS):
                n = min(KEYS, last - j0)
                s = kept[(j0 - first) * ROWS : (j0 - first + KEYS) * ROWS]
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
                _softmax_told(
                    s, n, j0, top, total, shift, shrink, peak, peak_at, spread, apart, at, wide
                )
                product_more(
                    wide,
                    one,
                    v,
                    at_v + j0 * call.v_j,
                    1,
                    call.v_j,
                    s,
                    0,
                    ROWS,
                    o,
                    0,
                    ROWS,
                    W,
                    n,
                    shrink,
                )
                product_more(
                    wide, one, columns, at_c + j0 * C, 1, C, s, 0, ROWS, sums, 0, ROWS, C, n, shrink
                )
                shifts[(j0 - first) // KEYS * ROWS : ((j0 - first) // KEYS + 1) * ROWS] = shift
                for p in range(P):
                    for r in range(ROWS):
                        picked[p * ROWS + r] *= shrink[r]
                    for r in range(here):
                        place = places[(b * P + p) * call.length + first_row + r]
                        if j0 <= place < j0 + n:
                            picked[p * ROWS + r] = s[(place - j0) * ROWS + r]
                if call.ids:
                    for kind in range(2):
                        _shrunk(pairs, kind * PAIRED, shrink, wide)
                        _paired(
                            call,
                            call.before_ids if kind else call.key_ids,
                            pairs,
                            kind * PAIRED,
                            s,
                            n,
                            j0,
                            b,
                            h,
                            columns,
                            at_c,
                            C,
                            token,
                            seen,
                            at,
                            low,
                            high,
                            first_row,
                            here,
                            wide,
                        )
            ends[:] = top
            # a sink joins at the end, so that sums over the keys are of the keys alone
            for r in range(ROWS):
                old = top[r]
                top[r] = sunk[r] if sunk[r] > old else old
                by = exp_nonpositive(old - top[r]) if old > nothing else zero
                spread[r] = by * (spread[r] + (old - top[r] if old > nothing else zero) * total[r])
                shift[r], shrink[r] = by * total[r], by  # the keys' own sum
                total[r] = shift[r] + (
                    exp_nonpositive(sunk[r] - top[r]) if sunk[r] > nothing else zero
                )
            for c in range(0, W * ROWS, ROWS):
                for r in range(ROWS):
                    o[c + r] *= shrink[r]
            # -sum A log A = log(total) sum A - sum A (s - top)
            size = call.batch * call.heads * call.length
            for r in range(here):
                whole = zero if total[r] == 0 else number(1) / total[r]
                part, line = whole * shrink[r], (b * call.heads + h) * call.length + first_row + r
                stats[WEIGHT * size + line] = shift[r] * whole
                stats[LARGEST * size + line] = (
                    exp_nonpositive(peak[r] - top[r]) * whole if shift[r] > 0 else zero
                )
                stats[LARGEST_AT * size + line] = peak_at[r]
                stats[ENTROPY * size + line] = (
                    (np.log(total[r]) * shift[r] - spread[r]) * whole if whole > 0 else zero
                )
                stats[DISTANCE * size + line] = apart[r] * part
                for p in range(P):
                    stats[(SINGLE + p) * size + line] = picked[p * ROWS + r] * part
                for p in range(2 * PAIRED):
                    stats[(SINGLE + P + p) * size + line] = pairs[p * ROWS + r] * (
                        part if p % PAIRED < 2 else number(1)
                    )
                for c in range(C):
                    stats[(SINGLE + P + 2 * PAIRED + c) * size + line] = sums[c * ROWS + r] * part
            for r in range(ROWS):
                counted = real[b * call.length + first_row + r] if r < here else zero
                shrink[r] = shrink[r] / total[r] * counted if ends[r] > nothing else zero
            for j0 in range(first, last, KEYS):
                line = (j0 - first) // KEYS * ROWS
                for r in range(ROWS):
                    x = (
                        shifts[line + r] - ends[r]
                    )  # above 0 where the row couldn't read the block: all its powers are 0
                    shift[r] = (
                        exp_nonpositive(x) * shrink[r] if (ends[r] > nothing) & (x <= 0) else zero
                    )
                _add_rows(
                    kept, (j0 - first) * ROWS, min(KEYS, last - j0), shift, received, to + j0, wide
                )
            finish_tile(call, like, where, o, top, total, shrink, W, wide, one)


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _softmax_told(s, n, j0, top, total, shift, shrink, peak, peak_at, spread, apart, at, wide):
    """`update_softmax`, with each query's largest score and its key, sum p (s - top), and
    sum p |i - j|.
    """
    ROWS = LANES * len(wide)
    number = s.dtype.type
    nothing, zero, least = number(-np.inf), number(0), number(-87)
    fours = n // 4 * 4
    for j in range(0, fours, 4):
        for r in range(ROWS):
            x, y = s[j * ROWS + r], s[(j + 1) * ROWS + r]
            z, w = s[(j + 2) * ROWS + r], s[(j + 3) * ROWS + r]
            at_x, at_z = np.int32(j0 + j + (y > x)), np.int32(j0 + j + 2 + (w > z))
            x, z = y if y > x else x, w if w > z else z
            at_x, x = at_z if z > x else at_x, z if z > x else x
            peak_at[r] = at_x if x > peak[r] else peak_at[r]
            peak[r] = x if x > peak[r] else peak[r]
    for j in range(fours, n):
        for r in range(ROWS):
            x = s[j * ROWS + r]
            peak_at[r] = np.int32(j0 + j) if x > peak[r] else peak_at[r]
            peak[r] = x if x > peak[r] else peak[r]
    for r in range(ROWS):
        old = top[r]
        top[r] = peak[r] if peak[r] > old else old
        new = zero if top[r] == nothing else top[r]
        shrink[r] = exp_nonpositive(old - new)
        # what was summed relative to the old maximum, relative to the new
        spread[r] = shrink[r] * (spread[r] + (old - new if old > nothing else zero) * total[r])
        total[r] *= shrink[r]
        apart[r] *= shrink[r]
        shift[r] = new
    for j in range(0, fours, 4):
        one, two, three, four = (
            number(j0 + j),
            number(j0 + j + 1),
            number(j0 + j + 2),
            number(j0 + j + 3),
        )
        for r in range(ROWS):
            x, y = s[j * ROWS + r] - shift[r], s[(j + 1) * ROWS + r] - shift[r]
            z, w = s[(j + 2) * ROWS + r] - shift[r], s[(j + 3) * ROWS + r] - shift[r]
            p, t, u, v = (
                exp_nonpositive(x),
                exp_nonpositive(y),
                exp_nonpositive(z),
                exp_nonpositive(w),
            )
            s[j * ROWS + r], s[(j + 1) * ROWS + r], s[(j + 2) * ROWS + r], s[(j + 3) * ROWS + r] = (
                p,
                t,
                u,
                v,
            )
            x, y = (
                x if x > least else least,
                y if y > least else least,
            )  # their powers are 0, and 0 * -inf is NaN
            z, w = z if z > least else least, w if w > least else least
            total[r] += (p + t) + (u + v)
            spread[r] += (p * x + t * y) + (u * z + v * w)
            apart[r] += (p * abs(one - at[r]) + t * abs(two - at[r])) + (
                u * abs(three - at[r]) + v * abs(four - at[r])
            )
    for j in range(fours, n):
        for r in range(ROWS):
            x = s[j * ROWS + r] - shift[r]
            p = exp_nonpositive(x)
            s[j * ROWS + r] = p
            total[r] += p
            spread[r] += p * (x if x > least else least)
            apart[r] += p * abs(number(j0 + j) - at[r])


@njit(forceinline=True)
def _shrunk(pairs, first, shrink, wide):
    ROWS = LANES * len(wide)
    for p in range(first * ROWS, (first + 2) * ROWS, ROWS):
        for r in range(ROWS):
            pairs[p + r] *= shrink[r]


@njit(forceinline=True)
def _paired(
    call,
    address,
    pairs,
    first,
    s,
    n,
    j0,
    b,
    h,
    columns,
    at_c,
    C,
    token,
    seen,
    at,
    low,
    high,
    first_row,
    here,
    wide,
):
    """Add the earlier keys whose `sought` token is the query's: such pairs are few, so most keys
    are skipped by a look at `seen`.
    """
    ROWS = LANES * len(wide)
    sought = carray(pointer(address), EVERYTHING, np.int32)
    mask = carray(pointer(call.mask), EVERYTHING, np.uint8)
    for j in range(n):
        key = j0 + j
        wanted = sought[b * call.keys + key]
        if wanted < 0 or not seen[wanted % TOKENS]:
            continue
        norm = columns[at_c + key * C]
        for r in range(here):
            if token[r] == wanted and key < at[r] and low[r] <= key < high[r]:
                if (
                    call.mask
                    and not mask[
                        b * call.mask_b
                        + h * call.mask_h
                        + (first_row + r) * call.mask_i
                        + key * call.mask_j
                    ]
                ):
                    continue
                p = s[j * ROWS + r]
                pairs[first * ROWS + r] += p
                pairs[(first + 1) * ROWS + r] += p * norm
                pairs[(first + 2) * ROWS + r] += norm
                pairs[(first + 3) * ROWS + r] += 1


@njit(forceinline=True, fastmath={"contract", "reassoc"})
def _add_rows(s, at, n, by, out, to, wide):
    """Add each key's powers, summed over the queries."""
    ROWS = LANES * len(wide)
    for j in range(n):
        x = s.dtype.type(0)
        for r in range(ROWS):
            x += s[at + j * ROWS + r] * by[r]
        out[to + j] += x


def observe_float32(call):
    observe_kernel(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))


def observe_float64(call):
    observe_kernel(carray(call, 1)[0], np.empty(0, np.float64), (0, 0), (0,))
