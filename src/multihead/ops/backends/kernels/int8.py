"""Forward pass for the few queries of a decoding step over int8 keys and values, as a quantised KV
cache holds them, and over bfloat16.

A task is some keys of one key/value head, with all queries that share it. Unlike in the other
kernels a lane is a component of a head, or a key, so that a single query fills the vectors too. A
block of keys is converted to float32 where the first cache holds it, once for all queries: the
narrow memory alone goes through the memory bus. A key's scale multiplies its scores and a value's
scale its weight; no product is made for each number.

The online softmax, and the chunks of a long cache, are those of forward.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .intrinsics import (
    I32,
    LANES,
    atomic_fetch_add,
    dot_rows,
    exp_nonpositive,
    largest,
    pointer,
    prefetch,
    product_add,
    sum_of,
    tanh,
    unpack_bf16,
)
from .tile import EVERYTHING, KEYS, numbers_at


@njit(error_model="numpy", fastmath={"contract"}, nogil=True)
def narrow_kernel(call, like, stored, wide, one):
    """Forward pass: q is float32, k and v are `stored`, an array of int8, or of bfloat16 as int16;
    k_scale and v_scale are float32, or not there. `wide`: the number of vectors of 16 columns whose
    sums are held at once.
    """
    q, k, v = numbers_at(call.q, like), numbers_at(call.k, stored), numbers_at(call.v, stored)
    counters = carray(pointer(call.counter), EVERYTHING, np.int64)
    share = call.heads // call.groups
    rows, E, W = share * call.length, call.width, call.value_width
    full_e, full_w = (E + LANES - 1) // LANES * LANES, (W + LANES - 1) // LANES * LANES
    nothing, zero, scale = np.float32(-np.inf), np.float32(0), np.float32(call.scale)
    # filled up with zeros to whole vectors
    qr, o = _zeros(rows * full_e, like), _zeros(rows * full_w, like)
    keys, values = _zeros(LANES * full_e, like), _zeros(LANES * full_w, like)
    s = _zeros(rows * KEYS, like)  # scores, then powers, [rows, KEYS]
    top, total = np.empty(rows, like.dtype), np.empty(rows, like.dtype)
    by_k, by_v = _zeros(KEYS, like), _zeros(KEYS, like)
    while True:
        task = atomic_fetch_add(counters, 0)
        if task >= call.batch * call.groups * call.chunks:
            break
        chunk, tile = task % call.chunks, task // call.chunks
        b, g = tile // call.groups, tile % call.groups
        at_k, at_v = b * call.k_b + g * call.k_h, b * call.v_b + g * call.v_h
        where = (b, g * share)
        first, last = _interval(call, b, chunk)
        prefetch(k, at_k + first * call.k_j, call.k_j, min(KEYS, last - first), E)
        prefetch(v, at_v + first * call.v_j, call.v_j, min(KEYS, last - first), W)
        for r in range(rows):
            at = b * call.q_b + (g * share + r // call.length) * call.q_h
            at += r % call.length * call.q_i
            for e in range(E):
                qr[r * full_e + e] = q[at + e] * scale
        top[:], total[:], o[:] = nothing, zero, zero
        if call.sinks and chunk == 0:
            sinks = numbers_at(call.sinks, like)
            for r in range(rows):
                top[r], total[r] = sinks[g * share + r // call.length], np.float32(1)
        for j0 in range(first, last, KEYS):
            n = min(KEYS, last - j0)
            ahead = min(KEYS, last - j0 - n)
            prefetch(k, at_k + (j0 + n) * call.k_j, call.k_j, ahead, E)
            for j in range(0, n, LANES):
                at = at_k + (j0 + j) * call.k_j
                _convert(k, at, call.k_j, keys, min(LANES, n - j), E, full_e)
                for r in range(rows):
                    dot_rows(keys, 0, full_e, qr, r * full_e, full_e, s, r * KEYS + j)
            _load_scales(call, like, b, g, j0, n, by_k, by_v)
            for r in range(rows):
                at = r * KEYS
                for j in range(KEYS):
                    s[at + j] *= by_k[j]
                _change_scores(call, like, s, at, where, r, j0, n)
                shrink = _update_softmax(s, at, top, total, r)
                if shrink != 1:
                    row = o[r * full_w : (r + 1) * full_w]
                    for c in range(full_w):
                        row[c] *= shrink
                for j in range(KEYS):
                    # the scale of a value that isn't finite isn't, and the key may be masked
                    s[at + j] = zero if s[at + j] == 0 else s[at + j] * by_v[j]
            prefetch(v, at_v + (j0 + n) * call.v_j, call.v_j, ahead, W)
            for j in range(0, n, LANES):
                here, at = min(LANES, n - j), at_v + (j0 + j) * call.v_j
                _convert(v, at, call.v_j, values, here, W, full_w)
                c, step = 0, LANES * len(wide)
                while c + step <= full_w:
                    product_add(
                        wide, one, s, j, KEYS, 1, values, c, full_w, o, c, full_w, rows, here, s
                    )  # fmt: skip
                    c += step
                while c < full_w:
                    product_add(
                        one, one, s, j, KEYS, 1, values, c, full_w, o, c, full_w, rows, here, s
                    )  # fmt: skip
                    c += LANES
        if call.chunks > 1:
            partial = numbers_at(call.partial, like)
            size = rows * (full_w + 2)
            at = task * size
            partial[at : at + rows], partial[at + rows : at + 2 * rows] = top, total
            partial[at + 2 * rows : at + size] = o
            if atomic_fetch_add(counters, 1 + tile) < call.chunks - 1:
                continue
            _join(partial, tile * call.chunks * size, call.chunks, size, top, total, o, full_w)
        _store(call, like, where, top, total, o, full_w)


@njit(forceinline=True)
def _zeros(n, like):
    """Zeros that begin where a line of the cache does: a vector that crosses one costs twice."""
    x = np.zeros(n + LANES, like.dtype)
    first = -x.ctypes.data % 64 // x.itemsize
    return x[first : first + n]


@njit(forceinline=True)
def _interval(call, b, chunk):
    """The keys first..last of a chunk that some query may attend to."""
    first, last = call.keys, 0
    if call.start:
        start = carray(pointer(call.start), EVERYTHING, np.int32)
        stop = carray(pointer(call.stop), EVERYTHING, np.int32)
        for i in range(call.length):
            at = b * call.start_b + i
            if start[at] < stop[at]:
                first, last = min(first, start[at]), max(last, stop[at])
    else:
        first, last = 0, call.keys
    return max(first, chunk * call.chunk), min(last, (chunk + 1) * call.chunk)


@intrinsic
def _convert_lanes(typing_context, source, at, target, to):
    """target[to + i] = source[at + i], int8, or bfloat16 as int16, to float32, for i in
    range(LANES).
    """

    def codegen(context, builder, signature, args):
        source, target = (
            context.make_array(signature.args[i])(context, builder, value=args[i]).data
            for i in (0, 2)
        )
        kind = source.type.pointee
        small, whole, real = (ir.VectorType(x, LANES) for x in (kind, I32, ir.FloatType()))
        where = builder.bitcast(builder.gep(source, [args[1]]), small.as_pointer())
        loaded = builder.load(where, align=kind.width // 8)
        if kind.width == 8:
            numbers = builder.sitofp(builder.sext(loaded, whole), real)
        else:  # the upper half of a float32
            sixteen = ir.Constant(whole, [16] * LANES)
            numbers = builder.bitcast(builder.shl(builder.zext(loaded, whole), sixteen), real)
        where = builder.bitcast(builder.gep(target, [args[3]]), real.as_pointer())
        builder.store(numbers, where, align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(source, i, target, i), codegen


@njit(forceinline=True)
def _convert(x, at, row, block, n, width, full):
    """Convert n rows to float32."""
    whole = width // LANES * LANES
    for j in range(n):
        for e in range(0, whole, LANES):
            _convert_lanes(x, at + j * row + e, block, j * full + e)
        for e in range(whole, width):
            one = x[at + j * row + e]
            block[j * full + e] = unpack_bf16(one) if x.itemsize == 2 else np.float32(one)


@njit(forceinline=True)
def _load_scales(call, like, b, g, j0, n, by_k, by_v):
    if not call.k_scale:
        by_k[:n], by_v[:n] = np.float32(1), np.float32(1)
        return
    k_scale, v_scale = numbers_at(call.k_scale, like), numbers_at(call.v_scale, like)
    of_k = b * call.k_scale_b + g * call.k_scale_h + j0 * call.k_scale_j
    of_v = b * call.v_scale_b + g * call.v_scale_h + j0 * call.v_scale_j
    for j in range(n):
        by_k[j], by_v[j] = k_scale[of_k + j * call.k_scale_j], v_scale[of_v + j * call.v_scale_j]


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _change_scores(call, like, s, at, where, r, j0, n):
    """Apply soft cap, bias and mask to the scores of one query, in the order of the definition."""
    b, h0 = where
    h, i = h0 + r // call.length, r % call.length
    nothing = np.float32(-np.inf)
    if call.softcap > 0:
        cap = np.float32(call.softcap)
        part = np.float32(1) / cap
        for j in range(KEYS):
            s[at + j] = tanh(s[at + j] * part) * cap
    if call.bias:
        bias, step = numbers_at(call.bias, like), call.bias_j
        of = b * call.bias_b + h * call.bias_h + i * call.bias_i + j0 * step
        for j in range(n):
            s[at + j] += bias[of + j * step]
    if call.slopes:
        slope = numbers_at(call.slopes, like)[h]
        own = carray(pointer(call.query_pos), EVERYTHING, np.int64)[b * call.query_pos_b + i]
        key_at, of = carray(pointer(call.key_pos), EVERYTHING, np.int64), b * call.key_pos_b + j0
        for j in range(n):
            s[at + j] -= slope * np.float32(abs(key_at[of + j] - own))
    if call.mask:
        mask, step = carray(pointer(call.mask), EVERYTHING, np.uint8), call.mask_j
        of = b * call.mask_b + h * call.mask_h + i * call.mask_i + j0 * step
        for j in range(n):
            s[at + j] = s[at + j] if mask[of + j * step] else nothing
    low, high = 0, n
    if call.start:
        of = b * call.start_b + i
        low = carray(pointer(call.start), EVERYTHING, np.int32)[of] - j0
        high = min(n, carray(pointer(call.stop), EVERYTHING, np.int32)[of] - j0)
    if low > 0 or high < KEYS:
        for j in range(KEYS):
            s[at + j] = s[at + j] if (low <= j) & (j < high) else nothing


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _update_softmax(s, at, top, total, r):
    """Update the online softmax of one query: scores become powers relative to its new maximum.
    Returns the factor that rescales earlier sums.
    """
    nothing, zero = np.float32(-np.inf), np.float32(0)
    found = largest(s, at)
    found = found if found > top[r] else top[r]
    shift = zero if found == nothing else found  # of a row that may read nothing yet
    shrink = exp_nonpositive(top[r] - shift)
    top[r] = found
    for j in range(KEYS):
        s[at + j] = exp_nonpositive(s[at + j] - shift)
    total[r] = total[r] * shrink + sum_of(s, at)
    return shrink


@njit(forceinline=True, error_model="numpy")
def _join(partial, at, chunks, size, top, total, o, full_w):
    """Combine the results of the chunks, in order."""
    rows = len(top)
    nothing, zero = np.float32(-np.inf), np.float32(0)
    top[:], total[:], o[:] = nothing, zero, zero
    for chunk in range(chunks):
        for r in range(rows):
            x = partial[at + chunk * size + r]
            top[r] = x if x > top[r] else top[r]
    for chunk in range(chunks):
        here = at + chunk * size
        for r in range(rows):
            x = partial[here + r]
            shrink = zero if x == nothing else exp_nonpositive(x - top[r])
            total[r] += partial[here + rows + r] * shrink
            of = here + 2 * rows + r * full_w
            for c in range(full_w):
                o[r * full_w + c] += partial[of + c] * shrink


@njit(forceinline=True, error_model="numpy")
def _store(call, like, where, top, total, o, full_w):
    """Store the rows of the output, their log-sum-exps, and whether some number isn't finite."""
    b, h0 = where
    out, wrong = numbers_at(call.out, like), np.float32(0)
    for r in range(len(top)):
        h, i = h0 + r // call.length, r % call.length
        part = np.float32(0) if total[r] == 0 else np.float32(1) / total[r]
        at = b * call.out_b + h * call.out_h + i * call.out_i
        for c in range(call.value_width):
            out[at + c] = o[r * full_w + c] * part
            wrong += out[at + c] * np.float32(0)
        if call.lse:
            lse, at = numbers_at(call.lse, like), (b * call.heads + h) * call.length + i
            lse[at] = top[r] + np.log(total[r]) if total[r] != 0 else np.float32(-np.inf)
    if wrong != 0:  # NaN
        carray(pointer(call.nan), 1, np.int64)[0] = 1


def decode_int8(call):
    like, stored = np.empty(0, np.float32), np.empty(0, np.int8)
    narrow_kernel(carray(call, 1)[0], like, stored, (0, 0, 0, 0), (0,))


def decode_bfloat16(call):
    like, stored = np.empty(0, np.float32), np.empty(0, np.int16)
    narrow_kernel(carray(call, 1)[0], like, stored, (0, 0, 0, 0), (0,))
