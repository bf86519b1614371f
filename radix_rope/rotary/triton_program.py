"""The Triton program of the correction: one launch moves K and V of all layers of one shape.

Owns the device code only. Buffers come as a table of addresses, so layers need no launch of
their own. Keys are decoded from and encoded to their stored bits by integer arithmetic, which
gives the same bits on every GPU and in Triton's interpreter; nothing is fused into
multiply-adds (the launch forbids it), so they equal the CPU kernel's bits too.
"""

# Triton evaluates the annotations of its functions, so only constexpr ones may stand there.
# mypy: disable-error-code="no-untyped-def,no-redef,untyped-decorator"

import triton
import triton.language as tl

# Dtype codes of the CODE argument.
FLOAT32 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT8_E4M3 = tl.constexpr(3)
FLOAT8_E5M2 = tl.constexpr(4)


@triton.jit
def _decode(raw, lookup, CODE: tl.constexpr):
    """Stored bits to float32; `lookup` holds the 256 values of an fp8 dtype."""
    if CODE == FLOAT32:
        return raw.to(tl.float32, bitcast=True)
    elif CODE == FLOAT16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == BFLOAT16:
        return (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(lookup + raw.to(tl.int32))


@triton.jit
def _encode_fp8(
    value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """Rounds to nearest even and saturates, as `dtypes.round_to`."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    clamped = tl.minimum(magnitude.to(tl.float32, bitcast=True), LARGEST)
    shift: tl.constexpr = 23 - MANTISSA
    # Subnormal codes: adding this power of two leaves the code in the lowest bits, rounded.
    magic: tl.constexpr = (127 - BIAS + shift + 1) << 23
    magic_bits = tl.full(bits.shape, magic, tl.uint32)
    small = (clamped + magic_bits.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - magic
    body = clamped.to(tl.uint32, bitcast=True)
    odd = (body >> shift) & 1
    rebias: tl.constexpr = (127 - BIAS) << 23
    half: tl.constexpr = (1 << (shift - 1)) - 1
    normal = (body - rebias + half + odd) >> shift
    lowest: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(body < lowest, small, normal)
    return (sign | tl.where(is_nan, NAN, code)).to(tl.uint8)


@triton.jit
def _encode(value, CODE: tl.constexpr):
    """float32 to stored bits, rounded once to nearest even."""
    if CODE == FLOAT32:
        return value.to(tl.uint32, bitcast=True)
    elif CODE == FLOAT16:
        return value.to(tl.float16).to(tl.uint16, bitcast=True)
    elif CODE == BFLOAT16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)
    elif CODE == FLOAT8_E4M3:
        return _encode_fp8(value, 3, 7, 448.0, 0x7F)
    else:
        return _encode_fp8(value, 2, 15, 57344.0, 0x7E)


@triton.jit
def _row(slot, PAGE: tl.constexpr, page_stride, token_stride):
    """Offset of a slot's row."""
    if PAGE == 1:
        return slot * page_stride
    else:
        return (slot // PAGE) * page_stride + (slot % PAGE) * token_stride


@triton.jit
def _move_key(
    base_address,
    first_row,
    tables,
    lookup,
    source,
    target,
    row,
    unmoved,
    head,
    inside,
    CODE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NEOX: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of a block of key rows."""
    if CODE == FLOAT32:
        pointer = tl.pointer_type(tl.uint32)
        item: tl.constexpr = 4
    elif CODE == FLOAT16 or CODE == BFLOAT16:  # noqa: SIM109 (Triton has no `in`)
        pointer = tl.pointer_type(tl.uint16)
        item: tl.constexpr = 2
    else:
        pointer = tl.pointer_type(tl.uint8)
        item: tl.constexpr = 1
    unit: tl.constexpr = ALIGN // item if item < ALIGN else 1
    base = tl.multiple_of(base_address.to(pointer), ALIGN)
    read = _row(source, PAGE, PAGE_STRIDE, TOKEN_STRIDE) + head * HEAD_STRIDE
    write = _row(target, PAGE, PAGE_STRIDE, TOKEN_STRIDE) + head * HEAD_STRIDE
    read = tl.multiple_of(read, unit)[:, None]
    write = tl.multiple_of(write, unit)[:, None]
    here = inside[:, None]
    if HALF == 0 or DIM > 2 * HALF:
        # What no rotation touches is copied as it is.
        whole = tl.arange(0, DIM_PAD)
        kept = (whole < DIM) & ((whole < OFFSET) | (whole >= OFFSET + 2 * HALF))
        kept_here = here & kept[None, :]
        rest = tl.load(base + read + whole[None, :], mask=kept_here)
        tl.store(base + write + whole[None, :], rest, mask=kept_here)
    if HALF > 0:
        pair = tl.arange(0, HALF_PAD)
        angle = tables + (first_row + row)[:, None] * (2 * HALF) + pair[None, :]
        mask = here & (pair < HALF)[None, :]
        cos = tl.load(angle, mask=mask, other=0.0)
        sin = tl.load(angle + HALF, mask=mask, other=0.0)
        lower = OFFSET + pair[None, :]
        column = tl.arange(0, 2 * HALF_PAD)
        both_mask = here & (column < 2 * HALF)[None, :]
        if NEOX:
            first_raw = tl.load(base + read + lower, mask=mask)
            second_raw = tl.load(base + read + lower + HALF, mask=mask)
        else:
            both = tl.load(base + read + OFFSET + column[None, :], mask=both_mask)
            first_raw, second_raw = tl.split(tl.reshape(both, (BLOCK, HALF_PAD, 2)))
        first = _decode(first_raw, lookup, CODE)
        second = _decode(second_raw, lookup, CODE)
        first_out = _encode(first * cos - second * sin, CODE)
        second_out = _encode(second * cos + first * sin, CODE)
        first_out = tl.where(unmoved[:, None], first_raw, first_out)
        second_out = tl.where(unmoved[:, None], second_raw, second_out)
        if NEOX:
            tl.store(base + write + lower, first_out, mask=mask)
            tl.store(base + write + lower + HALF, second_out, mask=mask)
        else:
            joined = tl.reshape(tl.join(first_out, second_out), (BLOCK, 2 * HALF_PAD))
            tl.store(base + write + OFFSET + column[None, :], joined, mask=both_mask)


@triton.jit
def _copy_value(
    base_address,
    source,
    target,
    piece,
    inside,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One head of a block of value rows."""
    if WORD_BYTES == 4:
        pointer = tl.pointer_type(tl.uint32)
    elif WORD_BYTES == 2:
        pointer = tl.pointer_type(tl.uint16)
    else:
        pointer = tl.pointer_type(tl.uint8)
    unit: tl.constexpr = ALIGN // WORD_BYTES if ALIGN > WORD_BYTES else 1
    base = tl.multiple_of(base_address.to(pointer), ALIGN)
    read = _row(source, PAGE, PAGE_STRIDE, TOKEN_STRIDE) + piece * HEAD_STRIDE
    write = _row(target, PAGE, PAGE_STRIDE, TOKEN_STRIDE) + piece * HEAD_STRIDE
    column = tl.arange(0, WORDS_PAD)[None, :]
    mask = inside[:, None] & (column < WORDS)
    value = tl.load(base + tl.multiple_of(read, unit)[:, None] + column, mask=mask)
    tl.store(base + tl.multiple_of(write, unit)[:, None] + column, value, mask=mask)


@triton.jit
def move_program(
    addresses,  # int64 [layers, 3]: K and V base addresses, first row of its angle table
    tables,  # float32 [rows, 2 * HALF]: cosines, then sines, of one distance
    lookup,  # float32 [256]: fp8 values (else unused)
    src,  # int64 [tokens]
    dst,  # int64 [tokens]
    row,  # int64 [tokens]: row of the token's distance in its table
    still,  # int8 [tokens]: 1 where the distance is 0
    tokens,
    CODE: tl.constexpr,
    K_PAGE: tl.constexpr,
    K_PAGE_STRIDE: tl.constexpr,
    K_TOKEN_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NEOX: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_PAGE_STRIDE: tl.constexpr,
    V_TOKEN_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    V_WORDS: tl.constexpr,
    V_WORDS_PAD: tl.constexpr,
    V_WORD_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of tokens, head, layer); heads from K_HEADS on are V's.

    Strides are in elements of the key dtype for K and in words for V. ALIGN is how many
    bytes every row is known to be aligned to, so that accesses become 16 bytes wide.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    layer = tl.program_id(2)
    inside = token < tokens
    source = tl.load(src + token, mask=inside, other=0)
    target = tl.load(dst + token, mask=inside, other=0)
    if head < K_HEADS:
        _move_key(
            tl.load(addresses + layer * 3),
            tl.load(addresses + layer * 3 + 2),
            tables,
            lookup,
            source,
            target,
            tl.load(row + token, mask=inside, other=0),
            tl.load(still + token, mask=inside, other=0) != 0,
            head,
            inside,
            CODE,
            K_PAGE,
            K_PAGE_STRIDE,
            K_TOKEN_STRIDE,
            K_HEAD_STRIDE,
            DIM,
            DIM_PAD,
            OFFSET,
            HALF,
            HALF_PAD,
            NEOX,
            ALIGN,
            BLOCK,
        )
    else:
        _copy_value(
            tl.load(addresses + layer * 3 + 1),
            source,
            target,
            head - K_HEADS,
            inside,
            V_PAGE,
            V_PAGE_STRIDE,
            V_TOKEN_STRIDE,
            V_HEAD_STRIDE,
            V_WORDS,
            V_WORDS_PAD,
            V_WORD_BYTES,
            ALIGN,
        )
