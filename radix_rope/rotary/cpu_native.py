"""The compiled inner loops of the CPU kernel (numba), working on raw addresses.

Owns pointer access, the conversions between cache dtypes and float32, and the loop over
layers and tokens. Everything is single-threaded and releases the GIL: `cpu_kernel` divides
the work. Results are bit-identical to torch's conversions and to `torch_kernel`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

# Dtype codes of the kernel's `code` argument.
FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = range(5)

# Columns of the per-layer table of int64.
(
    K_BASE,
    K_PAGE_TOKENS,
    K_PAGE_BYTES,
    K_TOKEN_BYTES,
    K_HEAD_BYTES,
    K_HEADS,
    K_ROW_BYTES,
    V_BASE,
    V_PAGE_TOKENS,
    V_PAGE_BYTES,
    V_TOKEN_BYTES,
    V_HEAD_BYTES,
    V_HEADS,
    V_ROW_BYTES,
    PART_BYTES,
    HALF,
    IS_NEOX,
    TABLE,
    COLUMNS,
) = range(19)


def _pointer(numba_type: Any) -> Any:
    """A function from an address to an indexable pointer.

    NOTE: one pointer per row, indexed in the loop. Converting an address at each access hides
    from LLVM that accesses are consecutive, and nothing is vectorised.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typingctx: Any, address: Any) -> Any:
        result = types.CPointer(numba_type)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), codegen

    return pointer


_f32_at = _pointer(types.float32)
_u16_at = _pointer(types.uint16)
_u8_at = _pointer(types.uint8)


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy of `count` bytes between addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder,
            builder.inttoptr(args[0], pointer),
            builder.inttoptr(args[1], pointer),
            args[2],
            1,
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _float_of_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of_float(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _float_of_half(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _half_of_float(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@njit(inline="always")  # type: ignore[untyped-decorator]
def _float_of_bf16(stored: Any) -> Any:
    return _float_of_bits(np.uint32(np.uint32(stored) << np.uint32(16)))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _bf16_of_float(value: Any) -> Any:
    bits = _bits_of_float(value)
    # Adding just under half a step, plus the last kept bit, rounds to nearest even.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if nan else np.uint16(rounded >> np.uint32(16))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fp8_of_float(value: Any, mantissa_bits: int, bias: int, largest: Any, nan_code: int) -> Any:
    """Rounds to nearest even and saturates; `largest` is the largest finite value.

    Both cases are computed and one is chosen, so that the loop around it vectorises.
    """
    bits = _bits_of_float(value)
    sign = np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    exact = _float_of_bits(size)
    magnitude = largest if exact > largest else exact
    body = _bits_of_float(magnitude)
    shift = np.uint32(23 - mantissa_bits)
    # Subnormal: adding this power of two leaves the code in the lowest bits, rounded to
    # nearest even by the float32 addition itself.
    magic = np.uint32((127 - bias + 23 - mantissa_bits + 1) << 23)
    small = np.uint32(_bits_of_float(magnitude + _float_of_bits(magic)) - magic)
    odd = np.uint32(np.uint32(body >> shift) & np.uint32(1))
    rebias = np.uint32((127 - bias) << 23)
    below_half = np.uint32((1 << (22 - mantissa_bits)) - 1)
    normal = np.uint32(np.uint32(np.uint32(body - rebias) + np.uint32(below_half + odd)) >> shift)
    code = small if body < np.uint32((128 - bias) << 23) else normal
    if size > np.uint32(0x7F800000):
        code = np.uint32(nan_code)
    return np.uint8(sign | code)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _e4m3_of_float(value: Any) -> Any:
    return _fp8_of_float(value, 3, 7, np.float32(448.0), 0x7F)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _e5m2_of_float(value: Any) -> Any:
    return _fp8_of_float(value, 2, 15, np.float32(57344.0), 0x7E)


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_f32(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    c, s = _f32_at(cos), _f32_at(sin)
    if neox != 0:
        gap = 4 * half
        a, b = _f32_at(src), _f32_at(src + gap)
        low, high = _f32_at(dst), _f32_at(dst + gap)
        for i in range(half):
            x, y = a[i], b[i]
            low[i] = x * c[i] - y * s[i]
            high[i] = y * c[i] + x * s[i]
    else:
        pairs, out = _f32_at(src), _f32_at(dst)
        for i in range(half):
            x, y = pairs[2 * i], pairs[2 * i + 1]
            out[2 * i] = x * c[i] - y * s[i]
            out[2 * i + 1] = y * c[i] + x * s[i]


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_f16(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    c, s = _f32_at(cos), _f32_at(sin)
    if neox != 0:
        gap = 2 * half
        a, b = _u16_at(src), _u16_at(src + gap)
        low, high = _u16_at(dst), _u16_at(dst + gap)
        for i in range(half):
            x, y = _float_of_half(a[i]), _float_of_half(b[i])
            low[i] = _half_of_float(x * c[i] - y * s[i])
            high[i] = _half_of_float(y * c[i] + x * s[i])
    else:
        pairs, out = _u16_at(src), _u16_at(dst)
        for i in range(half):
            x, y = _float_of_half(pairs[2 * i]), _float_of_half(pairs[2 * i + 1])
            out[2 * i] = _half_of_float(x * c[i] - y * s[i])
            out[2 * i + 1] = _half_of_float(y * c[i] + x * s[i])


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_bf16(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    c, s = _f32_at(cos), _f32_at(sin)
    if neox != 0:
        gap = 2 * half
        a, b = _u16_at(src), _u16_at(src + gap)
        low, high = _u16_at(dst), _u16_at(dst + gap)
        for i in range(half):
            x, y = _float_of_bf16(a[i]), _float_of_bf16(b[i])
            low[i] = _bf16_of_float(x * c[i] - y * s[i])
            high[i] = _bf16_of_float(y * c[i] + x * s[i])
    else:
        pairs, out = _u16_at(src), _u16_at(dst)
        for i in range(half):
            x, y = _float_of_bf16(pairs[2 * i]), _float_of_bf16(pairs[2 * i + 1])
            out[2 * i] = _bf16_of_float(x * c[i] - y * s[i])
            out[2 * i + 1] = _bf16_of_float(y * c[i] + x * s[i])


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_e4m3(src: int, dst: int, cos: int, sin: int, half: int, neox: int, decode: int) -> None:
    c, s, value = _f32_at(cos), _f32_at(sin), _f32_at(decode)
    if neox != 0:
        a, b, low, high = _u8_at(src), _u8_at(src + half), _u8_at(dst), _u8_at(dst + half)
        for i in range(half):
            x, y = value[a[i]], value[b[i]]
            low[i] = _e4m3_of_float(x * c[i] - y * s[i])
            high[i] = _e4m3_of_float(y * c[i] + x * s[i])
    else:
        pairs, out = _u8_at(src), _u8_at(dst)
        for i in range(half):
            x, y = value[pairs[2 * i]], value[pairs[2 * i + 1]]
            out[2 * i] = _e4m3_of_float(x * c[i] - y * s[i])
            out[2 * i + 1] = _e4m3_of_float(y * c[i] + x * s[i])


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_e5m2(src: int, dst: int, cos: int, sin: int, half: int, neox: int, decode: int) -> None:
    c, s, value = _f32_at(cos), _f32_at(sin), _f32_at(decode)
    if neox != 0:
        a, b, low, high = _u8_at(src), _u8_at(src + half), _u8_at(dst), _u8_at(dst + half)
        for i in range(half):
            x, y = value[a[i]], value[b[i]]
            low[i] = _e5m2_of_float(x * c[i] - y * s[i])
            high[i] = _e5m2_of_float(y * c[i] + x * s[i])
    else:
        pairs, out = _u8_at(src), _u8_at(dst)
        for i in range(half):
            x, y = value[pairs[2 * i]], value[pairs[2 * i + 1]]
            out[2 * i] = _e5m2_of_float(x * c[i] - y * s[i])
            out[2 * i + 1] = _e5m2_of_float(y * c[i] + x * s[i])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def move_range(
    layers: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
    decode: int,
    code: int,
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    row: npt.NDArray[np.int64],
    still: npt.NDArray[np.uint8],
    start: int,
    stop: int,
) -> None:
    """Moves the (layer, token) pairs numbered ``[start, stop)``, layer-major.

    Args:
        layers: ``[layers, COLUMNS]``, see the column constants; addresses and byte strides.
        tables: ``[tables, 2]`` addresses of float32 cosine and sine rows.
        decode: address of the 256 float32 values of an fp8 dtype, else 0.
        code: dtype code of the keys.
        src, dst: slots ``[tokens]``.
        row: table row of each token.
        still: 1 where the token's distance is 0, ``[tokens]``.
        start, stop: range of ``layer * tokens + token``.
    """
    tokens = src.shape[0]
    for index in range(start, stop):
        layer = index // tokens
        token = index - layer * tokens
        g = layers[layer]
        source, target = src[token], dst[token]
        if g[V_BASE] != 0:
            page = g[V_PAGE_TOKENS]
            a, b = source // page, target // page
            read = g[V_BASE] + a * g[V_PAGE_BYTES] + (source - a * page) * g[V_TOKEN_BYTES]
            write = g[V_BASE] + b * g[V_PAGE_BYTES] + (target - b * page) * g[V_TOKEN_BYTES]
            for head in range(g[V_HEADS]):
                skip = head * g[V_HEAD_BYTES]
                _copy(write + skip, read + skip, g[V_ROW_BYTES])
        page = g[K_PAGE_TOKENS]
        a, b = source // page, target // page
        read = g[K_BASE] + a * g[K_PAGE_BYTES] + (source - a * page) * g[K_TOKEN_BYTES]
        write = g[K_BASE] + b * g[K_PAGE_BYTES] + (target - b * page) * g[K_TOKEN_BYTES]
        half = g[HALF]
        rotated = half != 0 and still[token] == 0
        cos = sin = np.int64(0)
        if rotated:
            cos = tables[g[TABLE], 0] + row[token] * half * 4
            sin = tables[g[TABLE], 1] + row[token] * half * 4
        neox = g[IS_NEOX]
        for head in range(g[K_HEADS]):
            skip = head * g[K_HEAD_BYTES]
            if not rotated:
                _copy(write + skip, read + skip, g[K_ROW_BYTES])
                continue
            begin = skip + g[PART_BYTES]
            if code == FLOAT32:
                part = 8 * half
            elif code in (FLOAT16, BFLOAT16):
                part = 4 * half
            else:
                part = 2 * half
            # What lies before and after the rotated part is copied as it is.
            if g[PART_BYTES] > 0:
                _copy(write + skip, read + skip, g[PART_BYTES])
            rest = g[K_ROW_BYTES] - g[PART_BYTES] - part
            if rest > 0:
                _copy(write + begin + part, read + begin + part, rest)
            if code == FLOAT32:
                _rotate_f32(read + begin, write + begin, cos, sin, half, neox)
            elif code == FLOAT16:
                _rotate_f16(read + begin, write + begin, cos, sin, half, neox)
            elif code == BFLOAT16:
                _rotate_bf16(read + begin, write + begin, cos, sin, half, neox)
            elif code == FLOAT8_E4M3:
                _rotate_e4m3(read + begin, write + begin, cos, sin, half, neox, decode)
            else:
                _rotate_e5m2(read + begin, write + begin, cos, sin, half, neox, decode)
