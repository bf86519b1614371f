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


def _loader(llvm_type: ir.Type, numba_type: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))

        return numba_type(types.int64), codegen

    return load


def _storer(llvm_type: ir.Type, numba_type: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


_load_f32 = _loader(ir.FloatType(), types.float32)
_load_u16 = _loader(ir.IntType(16), types.uint16)
_load_u8 = _loader(ir.IntType(8), types.uint8)
_store_f32 = _storer(ir.FloatType(), types.float32)
_store_u16 = _storer(ir.IntType(16), types.uint16)
_store_u8 = _storer(ir.IntType(8), types.uint8)


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


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_f32(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    if neox != 0:
        gap = 4 * half
        for i in range(half):
            a, b = _load_f32(src + 4 * i), _load_f32(src + gap + 4 * i)
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_f32(dst + 4 * i, a * c - b * s)
            _store_f32(dst + gap + 4 * i, b * c + a * s)
    else:
        for i in range(half):
            a, b = _load_f32(src + 8 * i), _load_f32(src + 8 * i + 4)
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_f32(dst + 8 * i, a * c - b * s)
            _store_f32(dst + 8 * i + 4, b * c + a * s)


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_f16(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    if neox != 0:
        gap = 2 * half
        for i in range(half):
            a = _float_of_half(_load_u16(src + 2 * i))
            b = _float_of_half(_load_u16(src + gap + 2 * i))
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_u16(dst + 2 * i, _half_of_float(a * c - b * s))
            _store_u16(dst + gap + 2 * i, _half_of_float(b * c + a * s))
    else:
        for i in range(half):
            a = _float_of_half(_load_u16(src + 4 * i))
            b = _float_of_half(_load_u16(src + 4 * i + 2))
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_u16(dst + 4 * i, _half_of_float(a * c - b * s))
            _store_u16(dst + 4 * i + 2, _half_of_float(b * c + a * s))


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


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_bf16(src: int, dst: int, cos: int, sin: int, half: int, neox: int) -> None:
    if neox != 0:
        gap = 2 * half
        for i in range(half):
            a = _float_of_bf16(_load_u16(src + 2 * i))
            b = _float_of_bf16(_load_u16(src + gap + 2 * i))
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_u16(dst + 2 * i, _bf16_of_float(a * c - b * s))
            _store_u16(dst + gap + 2 * i, _bf16_of_float(b * c + a * s))
    else:
        for i in range(half):
            a = _float_of_bf16(_load_u16(src + 4 * i))
            b = _float_of_bf16(_load_u16(src + 4 * i + 2))
            c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
            _store_u16(dst + 4 * i, _bf16_of_float(a * c - b * s))
            _store_u16(dst + 4 * i + 2, _bf16_of_float(b * c + a * s))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fp8_of_float(value: Any, mantissa_bits: int, bias: int, largest: Any, nan_code: int) -> Any:
    """Rounds to nearest even and saturates; `largest` is the largest finite value."""
    all_bits = _bits_of_float(value)
    sign = (np.int64(all_bits) >> 24) & 0x80
    magnitude_bits = np.int64(all_bits) & 0x7FFFFFFF
    if magnitude_bits > 0x7F800000:
        return np.uint8(sign | nan_code)
    magnitude = min(_float_of_bits(np.uint32(magnitude_bits)), largest)
    shift = 23 - mantissa_bits
    if magnitude < _float_of_bits(np.uint32((128 - bias) << 23)):
        # Subnormal: adding this power of two leaves the code in the lowest bits, rounded
        # to nearest even by the float32 addition itself.
        magic = np.uint32((127 - bias + shift + 1) << 23)
        code = np.int64(_bits_of_float(magnitude + _float_of_bits(magic))) - np.int64(magic)
    else:
        bits = np.int64(_bits_of_float(magnitude))
        odd = (bits >> shift) & 1
        code = (bits + ((bias - 127) << 23) + (1 << (shift - 1)) - 1 + odd) >> shift
    return np.uint8(sign | code)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _fp8_encode(value: Any, e4m3: int) -> Any:
    if e4m3 != 0:
        return _fp8_of_float(value, 3, 7, np.float32(448.0), 0x7F)
    return _fp8_of_float(value, 2, 15, np.float32(57344.0), 0x7E)


@njit(inline="never", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate_fp8(
    src: int, dst: int, cos: int, sin: int, half: int, neox: int, decode: int, e4m3: int
) -> None:
    gap, step = (half, 1) if neox != 0 else (1, 2)
    for i in range(half):
        a = _load_f32(decode + 4 * np.int64(_load_u8(src + step * i)))
        b = _load_f32(decode + 4 * np.int64(_load_u8(src + gap + step * i)))
        c, s = _load_f32(cos + 4 * i), _load_f32(sin + 4 * i)
        _store_u8(dst + step * i, _fp8_encode(a * c - b * s, e4m3))
        _store_u8(dst + gap + step * i, _fp8_encode(b * c + a * s, e4m3))


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
            else:
                e4m3 = 1 if code == FLOAT8_E4M3 else 0
                _rotate_fp8(read + begin, write + begin, cos, sin, half, neox, decode, e4m3)
