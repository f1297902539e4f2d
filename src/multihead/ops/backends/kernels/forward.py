"""Attention on a CPU, in loops that Numba compiles: one task is a tile of query rows of one
key/value head.

A tile's rows lie in the lanes of a vector (tiles.py). It goes over its keys in blocks, with the
softmax kept online (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1): scores of a block,
their new maximum, powers, and the mix of values, all scaled to the maximum so far. Blocks that no
row of the tile may read are never touched, and only blocks on the border of some row's interval
look at elements of the mask.

Rows of all heads that share a key/value head follow each other, so a decoding step's few rows fill
a tile. A long cache is
cut into chunks of a fixed number of keys, whose results the last of them joins in order: the number
    of threads changes nothing.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, from_dtype, njit, types

from .intrinsics import BYTES, LANES, fetch, pointer, power, product, product_more, take, tanh, turn

KEYS = 64  # to a block: its scores and the tile's queries stay in the first cache
AHEAD = 16  # keys asked for at once
INTS = (
    "counter",
    "batch",
    "heads",
    "groups",
    "length",
    "keys",
    "width",
    "value_width",
    "lot",
    "chunk",
    "chunks",
    "q",
    "q_b",
    "q_h",
    "q_i",
    "k",
    "k_b",
    "k_h",
    "k_j",
    "v",
    "v_b",
    "v_h",
    "v_j",
    "out",
    "out_b",
    "out_h",
    "out_i",
    "lse",
    "partial",
    "start",
    "start_b",
    "stop",
    "mask",
    "mask_b",
    "mask_h",
    "mask_i",
    "mask_j",
    "bias",
    "bias_b",
    "bias_h",
    "bias_i",
    "bias_j",
    "sinks",
    "sinks_b",
    "slopes",
    "slopes_b",
    "at",
    "at_b",
    "key_at",
    "key_at_b",
    "careful",
    "nan",
    "grad",
    "grad_b",
    "grad_h",
    "grad_i",
    "reach",
    "partial_v",
    "change",
    "change_s",
    "change_b",
    "change_h",
    "change_i",
    "change_j",
    "stats",
    "columns",
    "columns_n",
    "places",
    "places_n",
    "offset",
    "ids",
    "key_ids",
    "before_ids",
)
# All that a kernel is told: sizes, addresses (0: not there) and strides, in elements.
CALL = np.dtype(
    [(name, np.int64) for name in INTS] + [("scale", np.float64), ("softcap", np.float64)],
    align=True,
)
EVERYTHING = 1 << 58


@njit(forceinline=True)
def _numbers(address, like):
    return carray(pointer(address), EVERYTHING, like.dtype)


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def forward(call, like, wide, parts):
    """`like`: an array of the numbers' dtype. A tile is as many times 16 lanes wide as `wide` is
    long, and each of its rows takes as many neighbouring lanes as `parts` is long: a part of the
    head's width each, so that few rows fill a tile too.
    """
    ROWS, PARTS = LANES * len(wide), len(parts)  # lanes, and lanes to a row
    q, k, v = _numbers(call.q, like), _numbers(call.k, like), _numbers(call.v, like)
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
            take(counters, 0) * call.lot
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
            first, last, inner, outer = _intervals(call, low, high, b, first_row, here, wide, parts)
            first, last = max(first, chunk * call.chunk), min(last, (chunk + 1) * call.chunk)
            fetch(k, at_k + first * call.k_j, call.k_j, min(KEYS, last - first), E)
            fetch(v, at_v + first * call.v_j, call.v_j, min(KEYS, last - first), W)
            _queries(
                q,
                call.q_b,
                call.q_h,
                call.q_i,
                call.length,
                E,
                number(call.scale),
                qt,
                b,
                g * share,
                first_row,
                here,
                wide,
                parts,
            )
            top[:], total[:], o[:] = nothing, zero, zero
            if call.sinks and chunk == 0:
                sinks = _numbers(call.sinks, like)
                for r in range(here * PARTS):
                    top[r] = sinks[
                        b * call.sinks_b + g * share + (first_row + r // PARTS) // call.length
                    ]
                    total[r] = number(1)
            for j0 in range(first, last, KEYS):
                n = min(KEYS, last - j0)
                if (
                    len(wide) == 1
                    # few rows: the time goes into reading keys and values, so they are asked for ahead
                ):
                    ahead = min(KEYS, last - j0 - n)
                    for j in range(0, n, AHEAD):
                        fetch(k, at_k + (j0 + n + j) * call.k_j, call.k_j, min(AHEAD, ahead - j), E)
                        product(
                            wide,
                            parts,
                            k,
                            at_k + (j0 + j) * call.k_j,
                            call.k_j,
                            PARTS,
                            qt,
                            0,
                            ROWS,
                            s,
                            j * ROWS,
                            ROWS,
                            min(AHEAD, n - j),
                            E // PARTS,
                            qt,
                        )
                    fetch(v, at_v + (j0 + n) * call.v_j, call.v_j, ahead, W)
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
                _change(
                    call,
                    s,
                    none,
                    more,
                    b,
                    g * share,
                    first_row,
                    here,
                    j0,
                    n,
                    low,
                    high,
                    j0 < inner or j0 + n > outer,
                    wide,
                    parts,
                )
                _softmax(s, n, top, total, shift, shrink, wide)
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
                partial = _numbers(call.partial, like)
                size = (W // PARTS + 2) * ROWS
                at = task * size
                (
                    partial[at : at + ROWS],
                    partial[at + ROWS : at + 2 * ROWS],
                    partial[at + 2 * ROWS : at + size],
                ) = (top, total, o)
                if take(counters, 1 + tile) < call.chunks - 1:
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
            _finish(
                call, like, b, g * share, first_row, here, o, top, total, shrink, W, wide, parts
            )


@njit(forceinline=True)
def _queries(q, q_b, q_h, q_i, length, width, scale, qt, b, h0, first_row, here, wide, parts):
    """The tile's rows of q `[B, H, L, width]`, turned so that a lane is a row, and scaled."""
    ROWS, PARTS = LANES * len(wide), len(parts)
    square = BYTES // qt.itemsize
    qt[:] = 0
    r = 0
    while r < here:
        row = first_row + r
        at = b * q_b + (h0 + row // length) * q_h + row % length * q_i
        if (
            PARTS == 1
            and r + square <= here
            and row % length + square <= length
            and width % square == 0
        ):
            for e in range(0, width, square):
                turn(q, at + e, q_i, qt, e * ROWS + r, ROWS)
            r += square
        else:
            for e in range(width):
                qt[e // PARTS * ROWS + r * PARTS + e % PARTS] = q[at + e]
            r += 1
    for x in range(width // PARTS * ROWS):
        qt[x] *= scale


@njit(forceinline=True)
def _rows_back(o, out, out_b, out_h, out_i, length, b, h0, first_row, here, width, wide, parts):
    """The other way round: rows of out `[B, H, L, width]` from lanes."""
    ROWS, PARTS = LANES * len(wide), len(parts)
    square = BYTES // o.itemsize
    r = 0
    while r < here:
        row = first_row + r
        at = b * out_b + (h0 + row // length) * out_h + row % length * out_i
        if (
            PARTS == 1
            and r + square <= here
            and row % length + square <= length
            and width % square == 0
        ):
            for c in range(0, width, square):
                turn(o, c * ROWS + r, ROWS, out, at + c, out_i)
            r += square
        else:
            for c in range(width):
                out[at + c] = o[c // PARTS * ROWS + r * PARTS + c % PARTS]
            r += 1


@njit(forceinline=True)
def _intervals(call, low, high, b, first_row, here, wide, parts):
    """Each row's interval; the keys first..last that any row may read, and inner..outer that every
    row may.
    """
    PARTS = len(parts)
    keys = np.int32(call.keys)
    first, last, inner, outer = keys, np.int32(0), np.int32(0), keys
    low[:], high[:] = 0, keys
    high[here * PARTS :] = 0
    if call.start:
        start, stop = (
            carray(pointer(call.start), EVERYTHING, np.int32),
            carray(pointer(call.stop), EVERYTHING, np.int32),
        )
        for r in range(here * PARTS):
            at = b * call.start_b + (first_row + r // PARTS) % call.length
            low[r], high[r] = start[at], stop[at]
    for r in range(here * PARTS):
        if low[r] < high[r]:
            first, last = min(first, low[r]), max(last, high[r])
        inner, outer = max(inner, low[r]), min(outer, high[r])
    return first, last, inner, outer


@njit(forceinline=True, error_model="numpy")
def _join_parts(s, n, wide, parts):
    """Each of a row's lanes holds the product over its part of the width: all get their sum."""
    ROWS, PARTS = LANES * len(wide), len(parts)
    for j in range(0, n * ROWS, PARTS):
        x = s[j]
        for i in range(1, PARTS):
            x += s[j + i]
        for i in range(PARTS):
            s[j + i] = x


@njit(forceinline=True)
def _piece(x, x_b, x_h, x_i, x_j, length, piece, b, h0, first_row, here, j0, n, wide, parts):
    """piece[n, ROWS] = what a dense bias or mask, that broadcasts to [B, H, L, S], says of n keys
    and the tile's rows.
    """
    ROWS, PARTS = LANES * len(wide), len(parts)
    square = BYTES // x.itemsize
    if x_h == 0 and x_i == 0:
        for j in range(n):
            same = piece.dtype.type(x[b * x_b + (j0 + j) * x_j])
            for r in range(ROWS):
                piece[j * ROWS + r] = same
        return
    r = 0
    while r < here * PARTS:
        row = first_row + r // PARTS
        at = b * x_b + (h0 + row // length) * x_h + row % length * x_i + j0 * x_j
        fits = PARTS == 1 and r + square <= here and row % length + square <= length and x_j == 1
        if x.itemsize >= 4 and fits and n % square == 0:
            for j in range(0, n, square):
                turn(x, at + j, x_i, piece, j * ROWS + r, ROWS)
            r += square
        else:
            for j in range(n):
                piece[j * ROWS + r] = x[at + j * x_j]
            r += 1


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _change(
    call, s, slope_of_cap, more, b, h0, first_row, here, j0, n, low, high, border, wide, parts
):
    """Soft cap, bias and mask, in the order of the definition; and what the soft cap makes of a
    small change, if asked for.
    """
    ROWS, PARTS = LANES * len(wide), len(parts)
    number = s.dtype.type
    nothing = number(-np.inf)
    if call.softcap > 0:
        cap = number(call.softcap)
        part = number(1) / cap
        for x in range(n * ROWS):
            s[x] = tanh(s[x] * part)
        if len(slope_of_cap):
            for x in range(n * ROWS):
                slope_of_cap[x] = number(1) - s[x] * s[x]
        for x in range(n * ROWS):
            s[x] *= cap
    if call.bias:
        bias = _numbers(call.bias, s)
        _piece(
            bias,
            call.bias_b,
            call.bias_h,
            call.bias_i,
            call.bias_j,
            call.length,
            more,
            b,
            h0,
            first_row,
            here,
            j0,
            n,
            wide,
            parts,
        )
        for x in range(n * ROWS):
            s[x] += more[x]
    if call.slopes:
        slopes, key_at = (
            _numbers(call.slopes, s),
            carray(pointer(call.key_at), EVERYTHING, np.int64),
        )
        at, origin = carray(pointer(call.at), EVERYTHING, np.int64), key_at[b * call.key_at_b + j0]
        more[: 2 * ROWS] = 0
        for r in range(here * PARTS):
            row = first_row + r // PARTS
            more[r] = slopes[b * call.slopes_b + h0 + row // call.length]
            more[ROWS + r] = at[b * call.at_b + row % call.length] - origin
        for j in range(n):
            place = number(key_at[b * call.key_at_b + j0 + j] - origin)
            for r in range(ROWS):
                s[j * ROWS + r] -= more[r] * abs(place - more[ROWS + r])
    if call.mask:
        i, square = first_row % call.length, BYTES // 4
        if (
            s.itemsize == 4
            and PARTS == 1
            and n == KEYS
            and here == ROWS
            and i + ROWS <= call.length
            and call.mask_j == 1
            and call.mask_i % 4 == 0
            and call.mask_i > 0
        ):
            # four keys to a word, so that rows can be turned as numbers are
            at = (
                b * call.mask_b
                + (h0 + first_row // call.length) * call.mask_h
                + i * call.mask_i
                + j0
            )
            words, step, bits = (
                carray(pointer(call.mask + at), EVERYTHING, np.int32),
                call.mask_i // 4,
                more.view(np.int32),
            )
            for r in range(0, ROWS, square):
                for w in range(0, KEYS // 4, square):
                    turn(words, r * step + w, step, bits, w * ROWS + r, ROWS)
            for w in range(KEYS // 4):
                for byte in range(4):
                    for r in range(ROWS):
                        x = (4 * w + byte) * ROWS + r
                        s[x] = (
                            s[x]
                            if (bits[w * ROWS + r] >> np.int32(8 * byte)) & np.int32(255)
                            else nothing
                        )
        else:
            mask = carray(pointer(call.mask), EVERYTHING, np.uint8)
            _piece(
                mask,
                call.mask_b,
                call.mask_h,
                call.mask_i,
                call.mask_j,
                call.length,
                more,
                b,
                h0,
                first_row,
                here,
                j0,
                n,
                wide,
                parts,
            )
            for x in range(n * ROWS):
                s[x] = s[x] if more[x] != 0 else nothing
    if border:
        for j in range(n):
            at = np.int32(j0 + j)
            for r in range(ROWS):
                s[j * ROWS + r] = s[j * ROWS + r] if (low[r] <= at) & (at < high[r]) else nothing


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _softmax(s, n, top, total, shift, shrink, wide):
    """Scores become powers of what they are above the row's new maximum, and `shrink` what makes of
    old sums new ones.
    """
    ROWS = LANES * len(wide)
    number = s.dtype.type
    nothing, zero = number(-np.inf), number(0)
    shift[:] = top
    fours = n // 4 * 4
    for j in range(0, fours * ROWS, 4 * ROWS):
        for r in range(ROWS):
            x, y, z, w = s[j + r], s[j + ROWS + r], s[j + 2 * ROWS + r], s[j + 3 * ROWS + r]
            x, z = x if x > y else y, z if z > w else w
            x = x if x > z else z
            shift[r] = x if x > shift[r] else shift[r]
    for j in range(fours * ROWS, n * ROWS, ROWS):
        for r in range(ROWS):
            shift[r] = s[j + r] if s[j + r] > shift[r] else shift[r]
    for r in range(ROWS):
        new = (
            zero if shift[r] == nothing else shift[r]
        )  # a row that may read nothing yet: powers of -inf are 0
        shrink[r] = power(top[r] - new)
        top[r], shift[r] = shift[r], new
        total[r] *= shrink[r]
    for j in range(0, fours * ROWS, 4 * ROWS):
        for r in range(ROWS):
            x, y = power(s[j + r] - shift[r]), power(s[j + ROWS + r] - shift[r])
            z, w = power(s[j + 2 * ROWS + r] - shift[r]), power(s[j + 3 * ROWS + r] - shift[r])
            s[j + r], s[j + ROWS + r], s[j + 2 * ROWS + r], s[j + 3 * ROWS + r] = x, y, z, w
            total[r] += (x + y) + (z + w)
    for j in range(fours * ROWS, n * ROWS, ROWS):
        for r in range(ROWS):
            s[j + r] = power(s[j + r] - shift[r])
            total[r] += s[j + r]


@njit(forceinline=True, error_model="numpy")
def _mix_careful(v, at, step, p, o, shrink, j0, n, W, low, high, wide, parts):
    """Where values aren't finite, 0 times such a value would reach rows that may not read it."""
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
    """The chunks' results, in order, as one."""
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
            shrink[r] = zero if partial[here + r] == nothing else power(partial[here + r] - top[r])
            total[r] += partial[here + ROWS + r] * shrink[r]
        for c in range(W):
            for r in range(ROWS):
                o[c * ROWS + r] += partial[here + (2 + c) * ROWS + r] * shrink[r]


@njit(forceinline=True, error_model="numpy")
def _finish(call, like, b, h0, first_row, here, o, top, total, shrink, W, wide, parts):
    ROWS, PARTS = LANES * len(wide), len(parts)
    number = like.dtype.type
    for r in range(ROWS):
        total[r] = number(0) if total[r] == 0 else number(1) / total[r]
    for c in range(0, W // PARTS * ROWS, ROWS):
        for r in range(ROWS):
            o[c + r] *= total[r]
    shrink[:] = 0
    for c in range(0, W // PARTS * ROWS, ROWS):
        for r in range(ROWS):
            shrink[r] += o[c + r] * 0  # NaN of whatever isn't finite
    bad = False
    for r in range(ROWS):
        bad |= shrink[r] != shrink[r]
    _rows_back(
        o,
        _numbers(call.out, like),
        call.out_b,
        call.out_h,
        call.out_i,
        call.length,
        b,
        h0,
        first_row,
        here,
        W,
        wide,
        parts,
    )
    if call.lse:
        lse = _numbers(call.lse, like)
        for r in range(here):
            row, x = first_row + r, r * PARTS
            at = (b * call.heads + h0 + row // call.length) * call.length + row % call.length
            lse[at] = top[x] - np.log(total[x]) if total[x] != 0 else number(-np.inf)
    if bad:
        carray(pointer(call.nan), 1, np.int64)[0] = 1


def forward_float32(call):
    forward(carray(call, 1)[0], np.empty(0, np.float32), (0, 0), (0,))


def forward_float64(call):
    forward(carray(call, 1)[0], np.empty(0, np.float64), (0, 0), (0,))


def decode_float32(call):
    forward(carray(call, 1)[0], np.empty(0, np.float32), (0,), (0,))


def decode_float64(call):
    forward(carray(call, 1)[0], np.empty(0, np.float64), (0,), (0,))


def decode4_float32(call):
    forward(carray(call, 1)[0], np.empty(0, np.float32), (0,), (0, 0, 0, 0))


SIGNATURE = types.void(types.CPointer(from_dtype(CALL)))
