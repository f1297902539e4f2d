"""Shared parts of the CPU kernels: the record of their arguments, and steps of a tile of queries.

A tile's queries lie in the lanes of a vector (intrinsics.py). `where` is a tile's place: batch
element, first head, first row (query `row % length` of head `first head + row // length`), and
number of rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import carray, from_dtype, njit, types

from .intrinsics import BYTES, KEYS, LANES, exp_nonpositive, pointer, tanh, transpose_block

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
    "slopes",
    "query_pos",
    "query_pos_b",
    "key_pos",
    "key_pos_b",
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
    "k_scale",
    "k_scale_b",
    "k_scale_h",
    "k_scale_j",
    "v_scale",
    "v_scale_b",
    "v_scale_h",
    "v_scale_j",
)
# Arguments of a kernel: sizes, addresses (0: not there) and strides, in elements.
CALL = np.dtype(
    [(name, np.int64) for name in INTS] + [("scale", np.float64), ("softcap", np.float64)],
    align=True,
)
EVERYTHING = 1 << 58


@njit(forceinline=True)
def numbers_at(address, like):
    return carray(pointer(address), EVERYTHING, like.dtype)


@njit(forceinline=True)
def load_rows(q, strides, length, width, scale, qt, where, wide, parts):
    """Load the tile's rows of q `[B, H, L, width]`, transposed so that a lane is a row, and
    scaled.
    """
    (b, h0, first_row, here), (q_b, q_h, q_i) = where, strides
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
                transpose_block(q, at + e, q_i, qt, e * ROWS + r, ROWS)
            r += square
        else:
            for e in range(width):
                qt[e // PARTS * ROWS + r * PARTS + e % PARTS] = q[at + e]
            r += 1
    for x in range(width // PARTS * ROWS):
        qt[x] *= scale


@njit(forceinline=True)
def store_rows(o, out, strides, length, where, width, wide, parts):
    """Store rows of out `[B, H, L, width]` from lanes."""
    (b, h0, first_row, here), (out_b, out_h, out_i) = where, strides
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
                transpose_block(o, c * ROWS + r, ROWS, out, at + c, out_i)
            r += square
        else:
            for c in range(width):
                out[at + c] = o[c // PARTS * ROWS + r * PARTS + c % PARTS]
            r += 1


@njit(forceinline=True)
def load_intervals(call, low, high, where, parts):
    """Load each row's interval; returns the keys first..last that any row may attend to, and
    inner..outer that every row may.
    """
    b, _, first_row, here = where
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


@njit(forceinline=True)
def _piece(x, strides, length, piece, where, j0, n, wide, parts):
    """Load piece[n, ROWS] of a dense bias or mask, which broadcasts to [B, H, L, S], for n keys and
    the tile's rows.
    """
    (b, h0, first_row, here), (x_b, x_h, x_i, x_j) = where, strides
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
                transpose_block(x, at + j, x_i, piece, j * ROWS + r, ROWS)
            r += square
        else:
            for j in range(n):
                piece[j * ROWS + r] = x[at + j * x_j]
            r += 1


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def change_scores(call, s, slope_of_cap, more, where, j0, n, low, high, border, wide, parts):
    """Apply soft cap, bias and mask, in the order of the definition; the derivative of the soft cap
    goes to `slope_of_cap`, unless that is empty.
    """
    b, h0, first_row, here = where
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
        bias = numbers_at(call.bias, s)
        _piece(
            bias,
            (call.bias_b, call.bias_h, call.bias_i, call.bias_j),
            call.length,
            more,
            where,
            j0,
            n,
            wide,
            parts,
        )
        for x in range(n * ROWS):
            s[x] += more[x]
    if call.slopes:
        slopes, key_at = (
            numbers_at(call.slopes, s),
            carray(pointer(call.key_pos), EVERYTHING, np.int64),
        )
        at, origin = (
            carray(pointer(call.query_pos), EVERYTHING, np.int64),
            key_at[b * call.key_pos_b + j0],
        )
        more[: 2 * ROWS] = 0
        for r in range(here * PARTS):
            row = first_row + r // PARTS
            more[r] = slopes[h0 + row // call.length]
            more[ROWS + r] = at[b * call.query_pos_b + row % call.length] - origin
        for j in range(n):
            place = number(key_at[b * call.key_pos_b + j0 + j] - origin)
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
                    transpose_block(words, r * step + w, step, bits, w * ROWS + r, ROWS)
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
                (call.mask_b, call.mask_h, call.mask_i, call.mask_j),
                call.length,
                more,
                where,
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
def update_softmax(s, n, top, total, shift, shrink, wide):
    """Update the online softmax: scores become powers relative to the row's new maximum, and
    `shrink` the factor that rescales earlier sums.
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
        shrink[r] = exp_nonpositive(top[r] - new)
        top[r], shift[r] = shift[r], new
        total[r] *= shrink[r]
    for j in range(0, fours * ROWS, 4 * ROWS):
        for r in range(ROWS):
            x, y = exp_nonpositive(s[j + r] - shift[r]), exp_nonpositive(s[j + ROWS + r] - shift[r])
            z, w = (
                exp_nonpositive(s[j + 2 * ROWS + r] - shift[r]),
                exp_nonpositive(s[j + 3 * ROWS + r] - shift[r]),
            )
            s[j + r], s[j + ROWS + r], s[j + 2 * ROWS + r], s[j + 3 * ROWS + r] = x, y, z, w
            total[r] += (x + y) + (z + w)
    for j in range(fours * ROWS, n * ROWS, ROWS):
        for r in range(ROWS):
            s[j + r] = exp_nonpositive(s[j + r] - shift[r])
            total[r] += s[j + r]


@njit(forceinline=True, error_model="numpy")
def finish_tile(call, like, where, o, top, total, shrink, W, wide, parts):
    b, h0, first_row, here = where
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
    store_rows(
        o,
        numbers_at(call.out, like),
        (call.out_b, call.out_h, call.out_i),
        call.length,
        where,
        W,
        wide,
        parts,
    )
    if call.lse:
        lse = numbers_at(call.lse, like)
        for r in range(here):
            row, x = first_row + r, r * PARTS
            at = (b * call.heads + h0 + row // call.length) * call.length + row % call.length
            lse[at] = top[x] - np.log(total[x]) if total[x] != 0 else number(-np.inf)
    if bad:
        carray(pointer(call.nan), 1, np.int64)[0] = 1


SIGNATURE = types.void(types.CPointer(from_dtype(CALL)))
