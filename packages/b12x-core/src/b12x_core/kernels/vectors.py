"""A few consecutive elements of an activation: loading, their largest magnitude, float32 values, and storing codes.

A *vector* is 8 or 16 elements that a thread handles together.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, cute

from b12x_core.kernels.convert import bits, largest_of, pack_bf16, pack_e2m1, pack_e4m3, ptx

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DTYPE = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}
PAIR = {"bf16": "bf16x2", "fp16": "f16x2"}


def register_words(x: str, width: int, vectors: int):
    """Registers for some vectors: (32-bit words of a vector, vectors)."""
    words = width * BYTES[x] // 4
    return cute.make_rmem_tensor(cute.make_layout((words, vectors), stride=(1, words)), Uint32)


def _global(dtype, address, count: int, align: int):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def load(words: cute.Tensor, address: Int64, valid: Int32, x: cutlass.Constexpr, aligned: cutlass.Constexpr):
    """A vector into registers, and 0 for elements that are not there.

    Args:
        words: (words of a vector,) uint32 in registers.
        address: of the first element; a multiple of 16 if `aligned`.
        valid: how many elements there are from it on, less than 1 for none; a multiple of 8 if `aligned`.
    """
    words.fill(0)
    if cutlass.const_expr(aligned):
        for i in cutlass.range_constexpr(cute.size(words) // 4):
            if i * 16 // BYTES[x] < valid:
                part = cute.make_tensor(words.iterator + 4 * i, cute.make_layout(4))
                cute.autovec_copy(_global(Uint32, address + 16 * i, 4, 16), part)
    else:
        for i in cutlass.range_constexpr(cute.size(words) * 4 // BYTES[x]):
            if i < valid:
                if cutlass.const_expr(BYTES[x] == 4):
                    words[i] = _global(Uint32, address + 4 * i, 1, 4)[0]
                else:
                    half = Uint32(_global(Uint16, address + 2 * i, 1, 2)[0])
                    words[i // 2] = words[i // 2] | (half << Uint32(16 * (i % 2)))


def magnitude(words, x: str):
    """Bits of the largest magnitude, as a float32, of a vector; NaN if one is NaN."""
    if x == "fp32":
        top = words[0] & Uint32(0x7FFFFFFF)
        for i in range(1, cute.size(words)):
            top = largest_of(top, words[i] & Uint32(0x7FFFFFFF))
        return top
    pair = PAIR[x]
    top = ptx(f"abs.{pair} {{$w0}}, {{$r0}};", words[0], result=Uint32)
    for i in range(1, cute.size(words)):
        code = f"{{ .reg .b32 v; abs.{pair} v, {{$r1}}; max.NaN.{pair} {{$w0}}, {{$r0}}, v; }}"
        top = ptx(code, top, words[i], result=Uint32)
    low, high = _pair_values(top, x)
    return largest_of(bits(low), bits(high))


def magnitude_of_all(words, x: str):
    """`magnitude` of every vector of (words of a vector, vectors)."""
    top = magnitude(words[None, 0], x)
    for i in range(1, words.shape[1]):
        top = largest_of(top, magnitude(words[None, i], x))
    return top


def _pair_values(word, x: str):
    if x == "bf16":
        return (
            ptx("{ .reg .b32 v; shl.b32 v, {$r0}, 16; mov.b32 {$w0}, v; }", word),
            ptx("{ .reg .b32 v; and.b32 v, {$r0}, 0xFFFF0000; mov.b32 {$w0}, v; }", word),
        )
    split = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, "
    return ptx(split + "lo; }", word), ptx(split + "hi; }", word)


def values(words, x: str):
    """A vector -> (elements,) float32 in registers."""
    out = cute.make_rmem_tensor((cute.size(words) * 4 // BYTES[x],), Float32)
    for i in range(cute.size(words)):
        if x == "fp32":
            out[i] = ptx("mov.b32 {$w0}, {$r0};", words[i])
        else:
            out[2 * i], out[2 * i + 1] = _pair_values(words[i], x)
    return out


_PACK = {"e4m3": (4, pack_e4m3), "e2m1": (8, pack_e2m1), "bf16": (2, pack_bf16)}
"""Code of an element -> elements of a word, and what makes a word of them."""


@cute.jit
def store(
    q: cute.Tensor,
    row: Int32,
    column: Int32,
    wide: cute.Tensor,
    valid: Int32,
    stored: cutlass.Constexpr,
    aligned: cutlass.Constexpr,
):
    """A vector as codes into its row, and zero from the end of K to the end of the row.

    Args:
        q: (M, elements of a row) uint8 or bf16, contiguous, rows a multiple of 16 bytes.
        column: of the first element, a multiple of the vector's.
        wide: float32, divided by their scale.
        valid: how many of the elements there are.
        stored: "e4m3", "e2m1" or "bf16".
    """
    packed, pack = cutlass.const_expr(_PACK[stored])
    count = cutlass.const_expr(cute.size(wide) // packed)
    words = cute.make_rmem_tensor((count,), Uint32)
    for i in cutlass.range_constexpr(count):
        words[i] = pack([wide[packed * i + j] for j in range(packed)])
        if valid <= packed * i:
            words[i] = Uint32(0)
        if cutlass.const_expr(not aligned and stored != "e2m1"):
            for j in cutlass.range_constexpr(1, packed):
                if valid == packed * i + j:
                    words[i] = words[i] & Uint32((1 << (32 // packed * j)) - 1)
    row_bytes = q.shape[1] * cutlass.const_expr(q.element_type.width // 8)
    start = column * 4 // packed
    piece = cutlass.const_expr(min(count, 4))
    for i in cutlass.range_constexpr(count // piece):
        if start + 16 * i < row_bytes:
            address = q.iterator.toint() + Int64(row) * row_bytes + start + 16 * i
            part = cute.make_tensor(words.iterator + piece * i, cute.make_layout(piece))
            cute.autovec_copy(part, _global(Uint32, address, piece, 4 * piece))


def fake_activation(x: str, aligned: bool):
    """Argument (M, K) with rows of any stride."""
    return cute.runtime.make_fake_tensor(
        DTYPE[x], (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=16 if aligned else BYTES[x]
    )


def fake_codes(stored: str):
    """Argument (M, elements of a row) uint8 or bf16, contiguous, rows a multiple of 16 bytes."""
    dtype, elements = (cutlass.BFloat16, 8) if stored == "bf16" else (Uint8, 16)
    shape = (cute.sym_int(), cute.sym_int(divisibility=elements))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
