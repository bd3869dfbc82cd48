// Stand-ins for instructions of sm_120a, compiled for sm_90a: `emulation/replace.py` writes one wrapper for each
// instruction that a kernel has, and `nvcc -ptx` turns those into PTX functions.
//
// Every function takes and gives 32-bit registers. Fragments are those of the PTX ISA: lane = 4 g + t.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace b12x {

template <int N>
struct Registers {
  uint32_t r[N];
};

__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 half2_of(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }
__device__ __forceinline__ float bf16(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float fp16(uint32_t x) { return __half2float(__ushort_as_half(x & 0xffff)); }

// ---- Element formats ------------------------------------------------------------------------------------------------
//
// SHIFT: where an element starts inside the byte that .kind::f8f6f4 and .kind::mxf8f6f4 give it. 6-bit elements lie in
// bits 0 to 5, 4-bit elements in bits 2 to 5. The bits around them are not looked at.

struct E4M3 {
  static constexpr int SHIFT = 0, BITS = 8, MANTISSA = 3, BIAS = 7;
};
struct E5M2 {
  static constexpr int SHIFT = 0, BITS = 8, MANTISSA = 2, BIAS = 15;
};
struct E3M2 {
  static constexpr int SHIFT = 0, BITS = 6, MANTISSA = 2, BIAS = 3;
};
struct E2M3 {
  static constexpr int SHIFT = 0, BITS = 6, MANTISSA = 3, BIAS = 1;
};
struct E2M1 {
  static constexpr int SHIFT = 2, BITS = 4, MANTISSA = 1, BIAS = 1;
};

// Two elements to fp16, exactly: every element of every format is an fp16 number. `pair` holds one element in the low
// bits of each 16-bit half.
template <class F>
__device__ __forceinline__ __half2 decode(uint32_t pair) {
  constexpr uint32_t sign = 1u << (F::BITS - 1), rest = sign - 1;
  // Exponent and mantissa put below the sign of an fp16 number are the value times 2^(BIAS - 15), subnormal numbers
  // included; the multiplication by a power of two is exact.
  uint32_t h = ((pair & (rest * 0x10001u)) << (10 - F::MANTISSA)) | ((pair & (sign * 0x10001u)) << (16 - F::BITS));
  return __hmul2(half2_of(h), __half2half2(__float2half_rn(float(1 << (15 - F::BIAS)))));
}
template <>
__device__ __forceinline__ __half2 decode<E5M2>(uint32_t pair) {
  return half2_of(pair << 8);  // the upper half of an fp16 number
}
template <>
__device__ __forceinline__ __half2 decode<E4M3>(uint32_t pair) {  // has a NaN, so it is left to the hardware
  uint16_t bytes = uint16_t((pair & 0xff) | ((pair >> 8) & 0xff00));
  uint32_t h;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(bytes));
  return half2_of(h);
}

// Bytes 2 j and 2 j + 1 of a register of four 8-bit containers.
template <class F>
__device__ __forceinline__ __half2 container_pair(uint32_t word, int j) {
  return decode<F>(__byte_perm(word >> F::SHIFT, 0, j ? 0x4342 : 0x4140));
}

// Nibbles i and i + 1 of a register of eight e2m1.
__device__ __forceinline__ __half2 nibble_pair(uint32_t word, int i) {
  uint32_t two = word >> (4 * i);
  return decode<E2M1>((two & 0xf) | ((two & 0xf0) << 12));
}

// ---- Matrix instructions --------------------------------------------------------------------------------------------
//
// All of them multiply fp16 numbers by m16n8k16 MMAs that accumulate in fp32. A product of two fp16 numbers is exact
// (11 + 11 significant bits); the MMA adds 16 of them and the accumulator in one step whose inner order the hardware
// does not tell, and with no less than 23 bits after the largest addend's first.

__device__ __forceinline__ void mma_fp16(float (&d)[4], __half2 a0, __half2 a1, __half2 a2, __half2 a3, __half2 b0,
                                         __half2 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(bits(a0)), "r"(bits(a1)), "r"(bits(a2)), "r"(bits(a3)), "r"(bits(b0)), "r"(bits(b1)));
}

__device__ __forceinline__ Registers<4> registers_of(const float (&d)[4]) {
  Registers<4> out;
  for (int i = 0; i < 4; i++) out.r[i] = __float_as_uint(d[i]);
  return out;
}

// d += A B of 32 elements of K in 8-bit containers: register r of A is row g + 8 (r & 1), k = 4 t + 16 (r >> 1) + 0..3;
// register r of B is column g, the same k. Two MMAs: first bytes 0 and 1 of each register, then bytes 2 and 3. Which k
// a lane puts where inside an MMA is free, as long as A and B agree.
template <class A, class B>
__device__ __forceinline__ void mma_containers(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  for (int j = 0; j < 2; j++)
    mma_fp16(d, container_pair<A>(a[0], j), container_pair<A>(a[1], j), container_pair<A>(a[2], j),
             container_pair<A>(a[3], j), container_pair<B>(b[0], j), container_pair<B>(b[1], j));
}

// mma .kind::f8f6f4, fp32 accumulators. Products are exact; the sum is that of two MMAs onto C, one after the other.
template <class A, class B>
__device__ __forceinline__ Registers<4> f8f6f4(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                               uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float d[4] = {__uint_as_float(c0), __uint_as_float(c1), __uint_as_float(c2), __uint_as_float(c3)};
  mma_containers<A, B>(d, a, b);
  return registers_of(d);
}

// The same with fp16 accumulators: C is widened, the fp32 sum is rounded to fp16 once.
template <class A, class B>
__device__ __forceinline__ Registers<2> f8f6f4_fp16(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                    uint32_t b1, uint32_t c0, uint32_t c1) {
  uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float d[4] = {fp16(c0), fp16(c0 >> 16), fp16(c1), fp16(c1 >> 16)};
  mma_containers<A, B>(d, a, b);
  Registers<2> out;
  out.r[0] = bits(__floats2half2_rn(d[0], d[1]));
  out.r[1] = bits(__floats2half2_rn(d[2], d[3]));
  return out;
}

// The scales of rows g and g + 8 of A (lanes 2 `thread` and 2 `thread` + 1 of the quad hold them) and of column g of B
// (lane `thread` of the quad). Bytes from `byte` on are the scales along K.
struct Scales {
  uint32_t row, row8, column;
};
__device__ __forceinline__ Scales gather_scales(uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb,
                                                uint32_t byte_b, uint32_t thread_b) {
  uint32_t quad = lane_id() & ~3u;
  return {__shfl_sync(~0u, sfa, quad + 2 * (thread_a & 1)) >> (8 * (byte_a & 3)),
          __shfl_sync(~0u, sfa, quad + 2 * (thread_a & 1) + 1) >> (8 * (byte_a & 3)),
          __shfl_sync(~0u, sfb, quad + (thread_b & 3)) >> (8 * (byte_b & 3))};
}

// d + p 2^(a + b - 254) for ue8m0 codes a and b, rounded to fp32 once. The power reaches from 2^-254 to 2^254, so it
// comes in two factors of one sign: the first product is exact unless the whole is 0 or infinite in fp32 anyway
// (|p| lies in [2^-32, 2^37]); the second product and the sum are one FMA. Code 255 is NaN.
__device__ __forceinline__ float add_scaled(float d, float p, uint32_t a, uint32_t b) {
  a &= 0xff;
  b &= 0xff;
  if (a == 255 || b == 255) return __int_as_float(0x7fffffff);
  int power = int(a + b) - 254, first = power / 2, second = power - first;
  return fmaf(ldexpf(p, first), ldexpf(1.0f, second), d);
}

// d += p scaled, `block`: the number of the block along K. Accumulators d0, d1 are row g, d2, d3 row g + 8; columns
// 2 t and 2 t + 1, whose scales lanes 8 t and 8 t + 4 have as theirs (column g).
__device__ __forceinline__ void add_block(float (&d)[4], const float (&p)[4], const Scales& s, int block) {
  uint32_t t = lane_id() & 3, shift = 8 * block;
  uint32_t even = __shfl_sync(~0u, s.column, 8 * t) >> shift, odd = __shfl_sync(~0u, s.column, 8 * t + 4) >> shift;
  d[0] = add_scaled(d[0], p[0], s.row >> shift, even);
  d[1] = add_scaled(d[1], p[1], s.row >> shift, odd);
  d[2] = add_scaled(d[2], p[2], s.row8 >> shift, even);
  d[3] = add_scaled(d[3], p[3], s.row8 >> shift, odd);
}

// mma .kind::mxf8f6f4 .scale_vec::1X: one ue8m0 scale for the 32 elements of K. The scales can be far outside fp16, so
// elements are multiplied without them; the sum of 32 exact products, from two MMAs onto 0, is then scaled and added to
// C with one rounding.
template <class A, class B>
__device__ __forceinline__ Registers<4> mxf8f6f4(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                 uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                 uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb,
                                                 uint32_t byte_b, uint32_t thread_b) {
  uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float d[4] = {__uint_as_float(c0), __uint_as_float(c1), __uint_as_float(c2), __uint_as_float(c3)}, p[4] = {};
  mma_containers<A, B>(p, a, b);
  add_block(d, p, gather_scales(sfa, byte_a, thread_a, sfb, byte_b, thread_b), 0);
  return registers_of(d);
}

// mma .m16n8k64 of e2m1 with ue8m0 scales, BLOCKS = 2 (.scale_vec::2X) or 4 (.scale_vec::4X) of them along K. Register r
// of A is row g + 8 (r & 1), k = 8 t + 32 (r >> 1) + 0..7; register r of B is column g, k = 8 t + 32 r + 0..7.
// A product of two e2m1 is a multiple of 1/4 no larger than 36: the sum of a block is exact in fp32. Blocks are scaled
// and added to C in the order of k, with one rounding each.
template <int BLOCKS>
__device__ __forceinline__ Registers<4> mxf4_ue8m0(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                   uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                   uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb,
                                                   uint32_t byte_b, uint32_t thread_b) {
  uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1}, t = lane_id() & 3;
  float d[4] = {__uint_as_float(c0), __uint_as_float(c1), __uint_as_float(c2), __uint_as_float(c3)};
  Scales s = gather_scales(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  for (int block = 0; block < BLOCKS; block++) {
    int half = block * 2 / BLOCKS;
    // With four blocks, the lanes of the quad that hold another block give zeros.
    bool mine = BLOCKS == 2 || (t >> 1) == (block & 1);
    uint32_t lo = mine ? a[2 * half] : 0, hi = mine ? a[2 * half + 1] : 0, col = mine ? b[half] : 0;
    float p[4] = {};
    for (int i = 0; i < 8; i += 4)
      mma_fp16(p, nibble_pair(lo, i), nibble_pair(hi, i), nibble_pair(lo, i + 2), nibble_pair(hi, i + 2),
               nibble_pair(col, i), nibble_pair(col, i + 2));
    add_block(d, p, s, block);
  }
  return registers_of(d);
}

// A ue4m3 scale as fp16, the same in both halves; the top bit is no part of it, 0x7f is NaN.
__device__ __forceinline__ __half2 ue4m3(uint32_t byte) { return decode<E4M3>((byte & 0x7f) * 0x10001u); }

// mma .kind::mxf4nvf4 .scale_vec::4X with ue4m3 scales. An element times its scale has no more than 2 + 4 significant
// bits and is 0 or between 2^-10 and 2688: exact in fp16, so each lane scales its own elements. Four MMAs onto C, one
// after the other: nibbles 0 and 1 of each register, then 2 and 3, 4 and 5, 6 and 7.
__device__ __forceinline__ Registers<4> mxf4nvf4_ue4m3(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                       uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                       uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb,
                                                       uint32_t byte_b, uint32_t thread_b) {
  float d[4] = {__uint_as_float(c0), __uint_as_float(c1), __uint_as_float(c2), __uint_as_float(c3)};
  Scales s = gather_scales(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  // Block of K of the registers of the lower half (k < 32) and of the upper half.
  uint32_t low = 8 * ((lane_id() & 3) >> 1), high = low + 16;
  __half2 row_low = ue4m3(s.row >> low), row_high = ue4m3(s.row >> high), row8_low = ue4m3(s.row8 >> low),
          row8_high = ue4m3(s.row8 >> high), col_low = ue4m3(s.column >> low), col_high = ue4m3(s.column >> high);
  for (int i = 0; i < 8; i += 2)
    mma_fp16(d, __hmul2(nibble_pair(a0, i), row_low), __hmul2(nibble_pair(a1, i), row8_low),
             __hmul2(nibble_pair(a2, i), row_high), __hmul2(nibble_pair(a3, i), row8_high),
             __hmul2(nibble_pair(b0, i), col_low), __hmul2(nibble_pair(b1, i), col_high));
  return registers_of(d);
}

// ---- Matrices to and from shared memory -----------------------------------------------------------------------------

template <int BYTES>
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t x;
  if (BYTES == 1) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  if (BYTES == 2) asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// Element `i` of 16 elements of WIDTH bits, packed from the lowest bit of the first byte on, in the low bits of a byte.
template <int WIDTH>
__device__ __forceinline__ uint32_t element(uint32_t row, uint32_t i) {
  if (WIDTH == 8) return load_shared<1>(row + i);
  uint32_t bit = WIDTH * i, byte = row + (bit >> 3), shift = bit & 7;
  // A 6-bit element may cross into the next byte, which is always inside the 16 bytes of a row.
  uint32_t two = load_shared<1>(byte) | (shift + WIDTH > 8 ? load_shared<1>(byte + 1) << 8 : 0);
  return (two >> shift) & ((1u << WIDTH) - 1);
}

// ldmatrix .m8n16: lane 8 q + i has the address of row i of matrix q; register q of lane 4 g + t is row g, elements
// 4 t + 0..3, one a byte.
template <int NUM, int WIDTH>
__device__ __forceinline__ Registers<NUM> ldmatrix_m8n16(uint32_t address) {
  uint32_t lane = lane_id();
  Registers<NUM> out;
  for (int q = 0; q < NUM; q++) {
    uint32_t row = __shfl_sync(~0u, address, 8 * q + (lane >> 2));
    out.r[q] = 0;
    for (int i = 0; i < 4; i++) out.r[q] |= element<WIDTH>(row, 4 * (lane & 3) + i) << (8 * i);
  }
  return out;
}

// ldmatrix .m16n16 .trans: lane 16 q + i has the address of row i of matrix q as it lies in memory; registers 2 q and
// 2 q + 1 of lane 4 g + t are rows g and g + 8 of the transposed matrix, columns 4 t + 0..3, one a byte.
template <int NUM, int WIDTH>
__device__ __forceinline__ Registers<2 * NUM> ldmatrix_m16n16(uint32_t address) {
  uint32_t lane = lane_id();
  Registers<2 * NUM> out;
  for (int q = 0; q < NUM; q++) {
    out.r[2 * q] = out.r[2 * q + 1] = 0;
    for (int i = 0; i < 4; i++) {
      uint32_t row = __shfl_sync(~0u, address, 16 * q + 4 * (lane & 3) + i);
      out.r[2 * q] |= element<WIDTH>(row, lane >> 2) << (8 * i);
      out.r[2 * q + 1] |= element<WIDTH>(row, (lane >> 2) + 8) << (8 * i);
    }
  }
  return out;
}

// stmatrix .m16n8 .trans .b8: lane 8 q + i has the address of 16 bytes for column i of matrix q; bytes 0 and 1 of
// register q of lane 4 g + t are row g, columns 2 t and 2 t + 1, bytes 2 and 3 row g + 8, the same columns.
template <int NUM>
__device__ __forceinline__ void stmatrix_m16n8(uint32_t address, const uint32_t (&r)[NUM]) {
  uint32_t lane = lane_id();
  for (int q = 0; q < NUM; q++)
    for (int i = 0; i < 4; i++) {
      uint32_t column = __shfl_sync(~0u, address, 8 * q + 2 * (lane & 3) + (i & 1));
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(column + (lane >> 2) + 8 * (i >> 1)), "r"(r[q] >> (8 * i))
                   : "memory");
    }
}
__device__ __forceinline__ void stmatrix_m16n8(uint32_t address, uint32_t r0) {
  uint32_t r[1] = {r0};
  stmatrix_m16n8<1>(address, r);
}
__device__ __forceinline__ void stmatrix_m16n8(uint32_t address, uint32_t r0, uint32_t r1) {
  uint32_t r[2] = {r0, r1};
  stmatrix_m16n8<2>(address, r);
}
__device__ __forceinline__ void stmatrix_m16n8(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  stmatrix_m16n8<4>(address, r);
}

// ---- Conversions ----------------------------------------------------------------------------------------------------

// A float to a 4-bit or 6-bit element, nearest, ties to even, saturated; NaN gives the largest positive element.
template <class F, bool RELU>
__device__ __forceinline__ uint32_t encode(float x) {
  constexpr uint32_t largest = (1u << (F::BITS - 1)) - 1;  // of the code: these formats have neither NaN nor infinity
  constexpr int dropped = 23 - F::MANTISSA;
  uint32_t u = __float_as_uint(x), magnitude = u & 0x7fffffff, code;
  if (magnitude > 0x7f800000) return largest;
  if (RELU && (u >> 31)) return 0;
  if (magnitude >= uint32_t(128 - F::BIAS) << 23)  // a normal number of F: round the mantissa, a carry goes upwards
    code = ((magnitude + ((magnitude >> dropped) & 1) + (1u << (dropped - 1)) - 1) >> dropped) -
           ((127 - F::BIAS) << F::MANTISSA);
  else  // subnormal: a multiple of 2^(1 - BIAS - MANTISSA)
    code = __float2uint_rn(__uint_as_float(magnitude) * float(1 << (F::BIAS - 1 + F::MANTISSA)));
  return (code > largest ? largest : code) | ((u >> 31) << (F::BITS - 1));
}

// Where the second element of a pair starts: 4-bit elements share a byte, others have one each.
template <class F>
constexpr int SECOND = F::BITS == 4 ? 4 : 8;

template <class F, bool RELU>
__device__ __forceinline__ Registers<1> encode_f32(uint32_t high, uint32_t low) {
  return {encode<F, RELU>(__uint_as_float(high)) << SECOND<F> | encode<F, RELU>(__uint_as_float(low))};
}
template <class F, bool RELU>
__device__ __forceinline__ Registers<1> encode_f16x2(uint32_t x) {
  return {encode<F, RELU>(fp16(x >> 16)) << SECOND<F> | encode<F, RELU>(fp16(x))};
}
template <class F, bool RELU>
__device__ __forceinline__ Registers<1> encode_bf16x2(uint32_t x) {
  return {encode<F, RELU>(bf16(x >> 16)) << SECOND<F> | encode<F, RELU>(bf16(x & 0xffff))};
}

template <class F, bool RELU>
__device__ __forceinline__ __half2 decoded(uint32_t x) {
  __half2 h = decode<F>((x & ((1u << SECOND<F>) - 1)) | ((x >> SECOND<F>) << 16));
  return RELU ? __hmax2_nan(h, half2_of(0)) : h;
}
template <class F, bool RELU>
__device__ __forceinline__ Registers<1> decode_f16x2(uint32_t x) {
  return {bits(decoded<F, RELU>(x))};
}
template <class F, bool RELU>  // every element of every format is a bf16 number too
__device__ __forceinline__ Registers<1> decode_bf16x2(uint32_t x) {
  float2 f = __half22float2(decoded<F, RELU>(x));
  return {(__float_as_uint(f.x) >> 16) | (__float_as_uint(f.y) & 0xffff0000u)};
}

// A pair of elements times a ue8m0 scale each (high byte: the high element), rounded to bf16 once: the product is exact
// in fp32 unless it is infinite there. Without a scale, 0x7f7f stands for 1.
template <class F, bool RELU, bool SATFINITE>
__device__ __forceinline__ Registers<1> decode_scaled_bf16x2(uint32_t x, uint32_t scales) {
  float2 f = __half22float2(decoded<F, RELU>(x));
  uint32_t low = scales & 0xff, high = (scales >> 8) & 0xff, out;
  f.x = low == 255 ? __int_as_float(0x7fffffff) : ldexpf(f.x, int(low) - 127);
  f.y = high == 255 ? __int_as_float(0x7fffffff) : ldexpf(f.y, int(high) - 127);
  if (SATFINITE)
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(f.y), "f"(f.x));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(f.y), "f"(f.x));
  return {out};
}

// bf16 pairs to e4m3 or e5m2: by way of fp32, so that there is one rounding.
#define B12X_BF16_TO_FP8(FORMAT, RELU, INSTRUCTION)                                         \
  template <>                                                                               \
  __device__ __forceinline__ Registers<1> encode_bf16x2<FORMAT, RELU>(uint32_t x) {         \
    uint16_t out;                                                                           \
    asm(INSTRUCTION " %0, %1, %2;" : "=h"(out) : "f"(bf16(x >> 16)), "f"(bf16(x & 0xffff))); \
    return {out};                                                                           \
  }
B12X_BF16_TO_FP8(E4M3, false, "cvt.rn.satfinite.e4m3x2.f32")
B12X_BF16_TO_FP8(E4M3, true, "cvt.rn.satfinite.relu.e4m3x2.f32")
B12X_BF16_TO_FP8(E5M2, false, "cvt.rn.satfinite.e5m2x2.f32")
B12X_BF16_TO_FP8(E5M2, true, "cvt.rn.satfinite.relu.e5m2x2.f32")
#undef B12X_BF16_TO_FP8

// |x| to ue8m0: its exponent, rounded towards zero or (UP) towards infinity. 0 and what is below 2^-127 give code 0.
// What is above 2^127 gives NaN, or code 254 with SATFINITE; NaN gives NaN.
template <bool UP, bool SATFINITE>
__device__ __forceinline__ uint32_t encode_ue8m0(uint32_t f32) {
  uint32_t magnitude = f32 & 0x7fffffff, code = magnitude >> 23;
  if (magnitude > 0x7f800000) return 255;
  if (UP && (magnitude & 0x7fffff) && magnitude > 0x400000) code++;  // 0x400000 is 2^-127 itself
  return SATFINITE && code == 255 ? 254 : code;
}
template <bool UP, bool SATFINITE>
__device__ __forceinline__ Registers<1> encode_ue8m0_f32(uint32_t high, uint32_t low) {
  return {encode_ue8m0<UP, SATFINITE>(high) << 8 | encode_ue8m0<UP, SATFINITE>(low)};
}
template <bool UP, bool SATFINITE>
__device__ __forceinline__ Registers<1> encode_ue8m0_bf16x2(uint32_t x) {
  return {encode_ue8m0<UP, SATFINITE>(x & 0xffff0000u) << 8 | encode_ue8m0<UP, SATFINITE>(x << 16)};
}

__device__ __forceinline__ uint32_t ue8m0_to_bf16(uint32_t code) {
  if (code == 255) return 0x7fff;
  return code ? code << 7 : 0x40;  // 2^-127 is subnormal
}
__device__ __forceinline__ Registers<1> decode_ue8m0(uint32_t x) {
  return {ue8m0_to_bf16((x >> 8) & 0xff) << 16 | ue8m0_to_bf16(x & 0xff)};
}

}  // namespace b12x
