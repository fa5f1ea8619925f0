"""What Numba has no words for: sixty-four values at once, the bits of a float, a counter that threads share.

These are written in LLVM's own words and fit any processor: LLVM cuts them to its registers. A mask of 64 is a uint64
whose bit j speaks of value j, which is also how bits lie in a message.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WIDE = 64

_BIT, _INT, _WORD = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_MASK = ir.VectorType(_BIT, WIDE)


def _address(context, builder, kind, array, at):
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.gep(data, [at])


def _vector(context, builder, kind, array, at):
    """The address of 64 elements, which need not be aligned."""
    item = context.get_data_type(kind.dtype)
    return builder.bitcast(_address(context, builder, kind, array, at), ir.VectorType(item, WIDE).as_pointer())


def _filled(builder, number):
    """A number, 64 times."""
    one = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, WIDE), ir.Undefined), number, ir.Constant(_INT, 0)
    )
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, WIDE), None))


@intrinsic
def not_negative(typing, x, at):
    """Which of the 64 floats ``x[at:]`` are >= 0."""

    def code(context, builder, signature, args):
        values = builder.load(_vector(context, builder, signature.args[0], *args), align=4)
        passed = builder.fcmp_ordered(">=", values, ir.Constant(values.type, [0.0] * WIDE))
        return builder.bitcast(passed, _WORD)

    return types.uint64(x, types.int64), code


@intrinsic
def from_edge(typing, bits, at, edge):
    """Which of the 64 floats whose bits are ``bits[at:]`` have a magnitude of at least ``edge``, also as bits."""

    def code(context, builder, signature, args):
        array, where, least = args
        values = builder.load(_vector(context, builder, signature.args[0], array, where), align=4)
        sizes = builder.and_(values, ir.Constant(values.type, [0x7FFFFFFF] * WIDE))
        return builder.bitcast(builder.icmp_signed(">=", sizes, _filled(builder, least)), _WORD)

    return types.uint64(bits, types.int64, types.int32), code


@intrinsic
def choose(typing, mask, above, below, out, at):
    """Write ``above`` where the mask is set and ``below`` elsewhere into the 64 floats ``out[at:]``."""

    def code(context, builder, signature, args):
        word, up, down, array, where = args
        chosen = builder.select(builder.bitcast(word, _MASK), _filled(builder, up), _filled(builder, down))
        builder.store(chosen, _vector(context, builder, signature.args[3], array, where), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32, types.float32, out, types.int64), code


@intrinsic
def first_set(typing, mask):
    """The place of the lowest set bit; there must be one."""

    def code(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(_BIT, 1))

    return types.int64(types.uint64), code


@intrinsic
def put(typing, data, at, word):
    """Write a word into the eight bytes ``data[at:]``."""

    def code(context, builder, signature, args):
        array, where, value = args
        to = builder.bitcast(_address(context, builder, signature.args[0], array, where), _WORD.as_pointer())
        builder.store(value, to, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), code


@intrinsic
def get(typing, data, at):
    """The eight bytes ``data[at:]`` as a word."""

    def code(context, builder, signature, args):
        source = builder.bitcast(_address(context, builder, signature.args[0], *args), _WORD.as_pointer())
        return builder.load(source, align=1)

    return types.uint64(data, types.int64), code


@intrinsic
def reserve(typing, taken, count):
    """Take ``count`` places of what threads share; returns the first. ``taken[0]`` counts those that are gone."""

    def code(context, builder, signature, args):
        counter = _address(context, builder, signature.args[0], args[0], ir.Constant(_WORD, 0))
        return builder.atomic_rmw("add", counter, args[1], "monotonic")

    return types.int64(taken, types.int64), code


@intrinsic
def number_set(typing, mask):
    """How many bits are set."""

    def code(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), code


@intrinsic
def as_bits(typing, x):
    """The bits of a float32."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], _INT)

    return types.uint32(types.float32), code


@intrinsic
def as_float(typing, bits):
    """The float32 that has these bits."""

    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), code
