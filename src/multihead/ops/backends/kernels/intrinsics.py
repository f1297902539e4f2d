"""Machine instructions that plain Numba loops can't express: products of tiles held in registers,
an exponential, atomics.

A tile is `ROWS` queries wide, one query a lane of a vector, so that what is done to a query is done
to a lane: a maximum over keys, a sum, a comparison with the query's interval take one vector
instruction for many queries, and nothing is ever summed across lanes. Keys and values are read
where they lie, one number at a time, and multiplied with a whole vector of queries.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

# of the processor that Numba compiles for: this one, unless NUMBA_CPU_NAME and
# NUMBA_CPU_FEATURES name another
FEATURES = {
    name[1:]
    for name in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if name.startswith("+")
}
BYTES = 64 if "avx512f" in FEATURES else 32 if "avx2" in FEATURES else 16  # of a vector
HELD = 16 if BYTES == 64 or BYTES == 16 else 8  # vectors of sums held in registers at once
# queries to a unit of width; the length of the tuple `wide`, one or two, is the number of units
LANES = 16
CACHE_LINE = 64
I64, I32 = ir.IntType(64), ir.IntType(32)


def _at(n):
    return ir.Constant(I64, n)


def _product(kind, ahead=0):
    """c[n, lanes] = a[n, count] b[count, lanes]; kind "more": += after c was multiplied with
    `shrink`; "add": plain +=.

    a is read at a_at + row * a_row + i * a_step; b at b_at + i * b_row, and c at c_at + row *
    c_row, both a vector at a time. Of a, as many numbers as `parts` is long are read at once and
    repeated over the lanes. Where a and b hold int32, each of these is a pair of bfloat16, and
    `count` counts pairs.

    With `ahead`, each step asks for as much of the keys that many further on as it multiplies. Keys
    are the rows of a, or of kind "more" its steps. Spread over the work, requests overlap with it;
    a burst of them waits for the few buffers that a core has.
    """

    @intrinsic
    def product(
        typing_context,
        wide,
        parts,
        a,
        a_at,
        a_row,
        a_step,
        b,
        b_at,
        b_row,
        c,
        c_at,
        c_row,
        n,
        count,
        shrink,
    ):
        def codegen(context, builder, signature, args):
            _, _, a, a_at, a_row, a_step, b, b_at, b_row, c, c_at, c_row, n, count, shrink = args
            a, b, c, shrink = (
                context.make_array(signature.args[i])(context, builder, value=x).data
                for i, x in ((2, a), (6, b), (9, c), (14, shrink))
            )
            number = c.type.pointee
            size = 8 if isinstance(number, ir.DoubleType) else 4
            lanes = BYTES // size
            vectors = len(signature.args[0]) * LANES // lanes
            vector = ir.VectorType(number, lanes)
            from_b = ir.VectorType(b.type.pointee, lanes)
            fma = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(vector, [vector] * 3),
                f"llvm.fma.v{lanes}f{8 * size}",
            )
            dot = None
            if from_b != vector:
                dot = cgutils.get_or_insert_function(
                    builder.module,
                    ir.FunctionType(vector, [vector, from_b, from_b]),
                    "llvm.x86.avx512bf16.dpbf16ps.512",
                )
            nothing = ir.Constant(vector, [0.0] * lanes)
            few = len(signature.args[1])
            piece = ir.VectorType(a.type.pointee, few)
            undefined = ir.Constant(piece, ir.Undefined)
            repeated = ir.Constant(ir.VectorType(I32, lanes), [i % few for i in range(lanes)])

            def place(base, offset, v, kind=vector):
                where = builder.gep(base, [builder.add(offset, _at(v * lanes))])
                return builder.bitcast(where, kind.as_pointer())

            def added(left, right, sum_):
                return (
                    builder.call(fma, [left, right, sum_])
                    if dot is None
                    else builder.call(dot, [sum_, left, right])
                )

            def loop(limit, make, state):
                """`for i in range(limit)` with vectors kept in registers: phi nodes, which no later
                pass can spill by mistake.
                """
                before = builder.block
                head, body, end = (
                    builder.append_basic_block(name) for name in ("head", "body", "end")
                )
                builder.branch(head)
                builder.position_at_end(head)
                i = builder.phi(I64)
                held = [builder.phi(vector) for _ in state]
                for x, first in zip([i, *held], [_at(0), *state]):
                    x.add_incoming(first, before)
                builder.cbranch(builder.icmp_signed("<", i, limit), body, end)
                builder.position_at_end(body)
                new = make(i, held)
                following = builder.add(i, _at(1))
                for x, value in zip([i, *held], [following, *new]):
                    x.add_incoming(value, builder.block)
                builder.branch(head)
                builder.position_at_end(end)
                return held

            def fetch(first, many, i):
                """Prefetch keys `ahead` of those of step i."""
                if kind == "more":
                    key, key_step, column = i, a_step, builder.mul(first, a_row)
                else:  # of one row after another a piece
                    row = builder.and_(i, _at(many - 1))
                    key, key_step = builder.add(first, row), a_row
                    column = builder.mul(builder.sub(i, row), a_step)
                start = builder.mul(builder.add(key, _at(ahead)), key_step)
                start = builder.add(builder.add(a_at, column), start)
                for x in range(max(1, many * few * size // CACHE_LINE)):
                    _prefetch(builder, a, builder.add(start, _at(x * CACHE_LINE // size)))

            def rows(first, many):
                """Rows first .. first + many of the product."""

                def step(i, held):
                    if ahead and many > 1:
                        fetch(first, many, i)
                    line = builder.add(b_at, builder.mul(i, b_row))
                    right = [
                        builder.load(place(b, line, v, from_b), align=size) for v in range(vectors)
                    ]
                    column = builder.add(
                        builder.add(a_at, builder.mul(i, a_step)), builder.mul(first, a_row)
                    )
                    new = []
                    for r in range(many):
                        where = builder.gep(a, [builder.add(column, builder.mul(a_row, _at(r)))])
                        one = builder.load(builder.bitcast(where, piece.as_pointer()), align=size)
                        left = builder.shuffle_vector(one, undefined, repeated)
                        new += [
                            added(left, right[v], held[r * vectors + v]) for v in range(vectors)
                        ]
                    return new

                found = loop(count, step, [nothing] * (many * vectors))
                for r in range(many):
                    line = builder.add(c_at, builder.mul(builder.add(first, _at(r)), c_row))
                    for v in range(vectors):
                        value, where = found[r * vectors + v], place(c, line, v)
                        if kind == "more":
                            by = builder.load(place(shrink, _at(0), v), align=size)
                            value = builder.call(fma, [builder.load(where, align=size), by, value])
                        elif kind == "add":
                            value = builder.fadd(builder.load(where, align=size), value)
                        builder.store(value, where, align=size)

            many = max(1, HELD // vectors)
            whole = builder.sdiv(n, _at(many))
            with cgutils.for_range(builder, whole) as turn:
                rows(builder.mul(turn.index, _at(many)), many)
            done = builder.mul(whole, _at(many))
            with cgutils.for_range(builder, builder.sub(n, done)) as turn:
                rows(builder.add(done, turn.index), 1)
            return context.get_dummy_value()

        i = types.int64
        return types.void(wide, parts, a, i, i, i, b, i, i, c, i, i, i, i, shrink), codegen

    return product


KEYS = 64  # to a block: its scores and the tile's queries stay in the first cache
product, product_more, product_add = _product("first"), _product("more"), _product("add")
product_ahead, product_more_ahead = _product("first", KEYS), _product("more", KEYS)


def _prefetch(builder, base, at):
    """Ask for the line of base[at], to be read, for the second cache."""
    fetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32]),
        "llvm.prefetch.p0",
    )
    where = builder.bitcast(builder.gep(base, [at]), cgutils.voidptr_t)
    builder.call(fetch, [where, *(ir.Constant(I32, x) for x in (0, 2, 1))])


@intrinsic
def _fetch_line(typing_context, a, at):
    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        _prefetch(builder, data, args[1])
        return context.get_dummy_value()

    return types.void(a, types.int64), codegen


@njit(forceinline=True)
def prefetch(a, at, row, rows, width):
    """Prefetch rows: for a KV cache larger than the CPU cache every load would stall."""
    for r in range(rows):
        for x in range(0, width, CACHE_LINE // a.itemsize):
            _fetch_line(a, at + r * row + x)


@intrinsic
def transpose_block(typing_context, source, at, row, target, to, line):
    """target[to + r * line + c] = source[at + c * row + r] for a square as wide as a vector."""

    def codegen(context, builder, signature, args):
        source, at, row, target, to, line = args
        source, target = (
            context.make_array(signature.args[i])(context, builder, value=x).data
            for i, x in ((0, source), (3, target))
        )
        size = 8 if isinstance(source.type.pointee, ir.DoubleType) else 4
        lanes = BYTES // size
        vector = ir.VectorType(source.type.pointee, lanes)

        def place(base, start, step, i):
            where = builder.gep(base, [builder.add(start, builder.mul(step, _at(i)))])
            return builder.bitcast(where, vector.as_pointer())

        held = [builder.load(place(source, at, row, i), align=size) for i in range(lanes)]
        step = 1
        while step < lanes:  # squares of 2 steps change their corners
            low, high = (
                [(l + shift if bool(l & step) == other else l + lanes + back) for l in range(lanes)]
                for other, shift, back in ((False, 0, -step), (False, step, 0))
            )
            low, high = (ir.Constant(ir.VectorType(I32, lanes), x) for x in (low, high))
            for i in range(lanes):
                if not i & step:
                    a, b = held[i], held[i + step]
                    held[i], held[i + step] = (
                        builder.shuffle_vector(a, b, low),
                        builder.shuffle_vector(a, b, high),
                    )
            step *= 2
        for i in range(lanes):
            builder.store(held[i], place(target, to, line, i), align=size)
        return context.get_dummy_value()

    i = types.int64
    return types.void(source, i, i, target, i, i), codegen


@intrinsic
def dot_rows(typing_context, a, a_at, a_row, b, b_at, width, c, c_at):
    """c[c_at + i] = sum_e a[a_at + i * a_row + e] b[b_at + e] for i in range(LANES), in float32;
    `width` is a number of whole vectors of LANES. Sums lie across the lanes, and are added up for
    as many rows at once as a vector has lanes.
    """

    def codegen(context, builder, signature, args):
        a, a_at, a_row, b, b_at, width, c, c_at = args
        a, b, c = (
            context.make_array(signature.args[i])(context, builder, value=x).data
            for i, x in ((0, a), (3, b), (6, c))
        )
        lanes = BYTES // 4
        vector = ir.VectorType(ir.FloatType(), lanes)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )

        def place(base, at):
            return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

        for first in range(0, LANES, lanes):
            before = builder.block
            head, body, end = (builder.append_basic_block(x) for x in ("head", "body", "end"))
            builder.branch(head)
            builder.position_at_end(head)
            e = builder.phi(I64)
            held = [builder.phi(vector) for _ in range(lanes)]
            for x, start in zip(
                [e, *held], [_at(0), *[ir.Constant(vector, [0.0] * lanes)] * lanes]
            ):
                x.add_incoming(start, before)
            builder.cbranch(builder.icmp_signed("<", e, width), body, end)
            builder.position_at_end(body)
            right = builder.load(place(b, builder.add(b_at, e)), align=4)
            for i, x in enumerate(held):
                at = builder.add(a_at, builder.mul(a_row, _at(first + i)))
                left = builder.load(place(a, builder.add(at, e)), align=4)
                x.add_incoming(builder.call(fma, [left, right, x]), body)
            e.add_incoming(builder.add(e, _at(lanes)), body)
            builder.branch(head)
            builder.position_at_end(end)
            half = lanes // 2
            while half:  # rows i and i + half share a vector, in every other run of `half` lanes
                low = [x + (lanes - half if x % (2 * half) >= half else 0) for x in range(lanes)]
                low, high = (
                    ir.Constant(ir.VectorType(I32, lanes), [x + shift for x in low])
                    for shift in (0, half)
                )
                held = [
                    builder.fadd(
                        builder.shuffle_vector(held[i], held[i + half], low),
                        builder.shuffle_vector(held[i], held[i + half], high),
                    )
                    for i in range(half)
                ]
                half //= 2
            builder.store(held[0], place(c, builder.add(c_at, _at(first))), align=4)
        return context.get_dummy_value()

    i = types.int64
    return types.void(a, i, i, b, i, i, c, i), codegen


def _reduction(is_sum):
    """f(x, at): the sum, or the largest, of the 64 float32 from x[at] on, by halves."""

    @intrinsic
    def reduce(typing_context, x, at):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
            where = builder.gep(data, [args[1]])
            where = builder.bitcast(where, ir.VectorType(ir.FloatType(), 64).as_pointer())
            found, n = builder.load(where, align=4), 64
            while n > 1:
                n //= 2
                low, high = (
                    builder.shuffle_vector(
                        found,
                        ir.Constant(found.type, ir.Undefined),
                        ir.Constant(ir.VectorType(I32, n), list(range(first, first + n))),
                    )
                    for first in (0, n)
                )
                if is_sum:
                    found = builder.fadd(low, high)
                else:  # of a row with NaN any number will do: its sum is NaN
                    found = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            return builder.extract_element(found, ir.Constant(I32, 0))

        return types.float32(x, types.int64), codegen

    return reduce


largest, sum_of = _reduction(False), _reduction(True)


@intrinsic
def _as_float32(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _as_int32(typing_context, number):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@njit(forceinline=True)
def unpack_bf16(bits):
    """bfloat16, as int16, as float32."""
    return _as_float32(np.int32(bits) << np.int32(16))


@njit(forceinline=True)
def pack_bf16(x, y):
    """Pack two float32, each rounded to the nearest bfloat16 (halves up), in one int32: x in the
    lower half.
    """
    x, y = _as_int32(x) + np.int32(0x8000), _as_int32(y) + np.int32(0x8000)
    return ((x >> np.int32(16)) & np.int32(0xFFFF)) | (y & np.int32(-65536))


@intrinsic
def pointer(typing_context, address):
    """Convert an address to the pointer that `carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def atomic_fetch_add(typing_context, counter, at):
    """Add one to counter[at] atomically, and return its value before."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), _at(1), "seq_cst")

    return types.int64(counter, types.int64), codegen


LOG2E, SHIFT = (
    np.float32(1.4426950408889634),
    np.float32(12582912.0),
)  # adding 1.5 * 2^23 rounds to a whole number


def _parts(x):
    """exp(x) = 2^whole (1 + rest): `whole` as a float32 power of two, and the rest, to 3e-9 (before
    float32 rounds it).
    """
    moved = x * LOG2E + SHIFT
    f = x * LOG2E - (moved - SHIFT)
    p = np.float32(1.546144469e-04)
    p = p * f + np.float32(1.340042818e-03)
    p = p * f + np.float32(9.618056679e-03)
    p = p * f + np.float32(5.550327227e-02)
    p = p * f + np.float32(2.402265092e-01)
    p = p * f + np.float32(6.931472067e-01)
    return _as_float32((_as_int32(moved) << np.int32(23)) + np.int32(0x3F800000)), p * f


_parts_compiled = njit(forceinline=True, fastmath={"contract"})(_parts)


def _power32(x):
    whole, rest = _parts_compiled(x)
    # written so that NaN stays NaN
    return np.float32(0.0) if x < np.float32(-87.0) else whole * rest + whole


def _tanh32(x):
    x = x + x
    x = np.float32(30.0) if x > np.float32(30.0) else x
    x = np.float32(-30.0) if x < np.float32(-30.0) else x
    whole, rest = _parts_compiled(x)
    less_one = whole * rest + (whole - np.float32(1.0))  # exp(2x) - 1, accurate near 0 too
    return less_one / (less_one + np.float32(2.0))


def exp_nonpositive(x):
    """exp(x) for x <= 0: -inf gives 0, and so does all below -87 in float32; NaN gives NaN."""


def tanh(x):
    """The hyperbolic tangent, in float32 to 2e-7 of its value."""


@overload(exp_nonpositive, jit_options={"fastmath": {"contract"}, "forceinline": True})
def _power(x):
    return _power32 if x == types.float32 else lambda x: np.exp(x)


@overload(tanh, jit_options={"fastmath": {"contract"}, "forceinline": True})
def _tanh(x):
    return _tanh32 if x == types.float32 else lambda x: np.tanh(x)
