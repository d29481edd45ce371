/* Sixteen floats, the number types that weights and K/V are stored in, and one rule:

   every operation here rounds the same way wherever it is inlined (-ffp-contract=off, FMA only by name), so a result
   depends on the numbers that went into it and on their order, never on what was computed beside it. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef float f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float f32x4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));

/* A register of the processor: GCC keeps wider vectors in memory. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__aarch64__)
#define WIDTH 4
#else
#define WIDTH 8
#endif
typedef float native __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t native_bits __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t native_halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* How a tensor is stored. Sums are always fp32. */
enum type { F32 = 0, BF16 = 1, F16 = 2 };

INLINE long type_size(int type) { return type == F32 ? 4 : 2; }

INLINE f32x16 splat(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* `a` where all bits of the mask are set, `b` where none is. */
INLINE f32x16 select16(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* a * b + c, rounded once where the processor can. */
INLINE native fma_native(native a, native b, native c) {
#if defined(__AVX512F__)
    return (native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (native)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
    union { f32x16 whole; native part[LANES / WIDTH]; } x = {a}, y = {b}, z = {c};
    UNROLL for (int i = 0; i < LANES / WIDTH; i++) z.part[i] = fma_native(x.part[i], y.part[i], z.part[i]);
    return z.whole;
}

/* The sum of all lanes, halves first. */
INLINE float sum16(f32x16 x) {
    union { f32x16 whole; f32x8 half[2]; } a = {x};
    union { f32x8 whole; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
    f32x4 c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

#ifdef __AVX512F__
/* [a8, b8], where a8 are the lanes of the halves of `a` added: the first step of `sum16`, of two vectors at once. */
INLINE f32x16 halves(f32x16 a, f32x16 b) {
    const __m512 x = (__m512)a, y = (__m512)b;
    return (f32x16)_mm512_shuffle_f32x4(x, y, 0x44) + (f32x16)_mm512_shuffle_f32x4(x, y, 0xEE);
}

/* [a4, b4, c4, d4]: its first two steps, of four vectors. */
INLINE f32x16 quarters(const f32x16 x[4]) {
    const __m512 ab = (__m512)halves(x[0], x[1]), cd = (__m512)halves(x[2], x[3]);
    return (f32x16)_mm512_shuffle_f32x4(ab, cd, 0x88) + (f32x16)_mm512_shuffle_f32x4(ab, cd, 0xDD);
}

/* `sum16` of sixteen vectors: lane 4i + j is that of vector i of the four in `quarters` j, to the same bits. */
INLINE f32x16 sums16(const f32x16 x[4]) {
    __m512 pair[2];
    for (int i = 0; i < 2; i++) {
        const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
        pair[i] = (__m512)((f32x16)_mm512_shuffle_ps(a, b, 0x44) + (f32x16)_mm512_shuffle_ps(a, b, 0xEE));
    }
    return (f32x16)_mm512_shuffle_ps(pair[0], pair[1], 0x88) + (f32x16)_mm512_shuffle_ps(pair[0], pair[1], 0xDD);
}
#endif

/* WIDTH numbers as fp32. */
INLINE native load_native(int type, const void *at) {
    if (type == F32) return *(const native *)at;
#if defined(__AVX512F__) /* GCC converts a half at a time */
    if (type == BF16)
        return (native)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#else
    if (type == BF16) return (native)(__builtin_convertvector(*(const native_halves *)at, native_bits) << 16);
#endif
#if defined(__AVX512F__)
    return (native)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__)
    return (native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif defined(__aarch64__)
    return (native)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
    native x;
    for (int i = 0; i < WIDTH; i++) x[i] = ((const _Float16 *)at)[i];
    return x;
#endif
}

INLINE f32x16 load16(int type, const void *at) {
    union { native part[LANES / WIDTH]; f32x16 whole; } x;
    UNROLL for (int i = 0; i < LANES / WIDTH; i++)
        x.part[i] = load_native(type, (const char *)at + i * WIDTH * type_size(type));
    return x.whole;
}

/* fp32 to bf16, to nearest even; NaN stays NaN. */
INLINE uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Store `count` floats as `type`. */
INLINE void store(int type, void *at, long offset, const float *x, long count) {
    if (type == F32) {
        memcpy((float *)at + offset, x, count * sizeof *x);
    } else if (type == BF16) {
        for (long i = 0; i < count; i++) ((uint16_t *)at)[offset + i] = bf16_of(x[i]);
    } else {
        for (long i = 0; i < count; i++) ((_Float16 *)at)[offset + i] = (_Float16)x[i];
    }
}

/* One number as fp32. */
INLINE float get(int type, const void *at, long offset) {
    if (type == F32) return ((const float *)at)[offset];
    if (type == F16) return (float)((const _Float16 *)at)[offset];
    const uint32_t bits = (uint32_t)((const uint16_t *)at)[offset] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* e^x for x <= 0, of NaN NaN: 2^n times a polynomial of the rest (Cephes' expf). */
INLINE f32x16 exp16(f32x16 x) {
    const f32x16 least = splat(-87.0f);
    x = select16(x < least, least, x);
    f32x16 n = x * splat(1.44269504088896341f);
    i32x16 whole = __builtin_convertvector(n - splat(0.5f), i32x16); /* truncates: to nearest, as x <= 0 */
    n = __builtin_convertvector(whole, f32x16);
    f32x16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r + splat(1.0f));
    return p * (f32x16)((whole + 127) << 23);
}

INLINE f32x16 silu16(f32x16 x) {
    const f32x16 e = exp16(select16(x > splat(0), -x, x)); /* e^-|x| */
    return x * (select16(x > splat(0), splat(1), e) / (splat(1) + e));
}

/* --- norms and rotations of a row --- */

static void rms_norm(const float *x, const float *weight, float eps, float *out, long size) {
    f32x16 squares = splat(0);
    float rest = 0;
    long i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma16(*(f32x16 *)(x + i), *(f32x16 *)(x + i), squares);
    for (long j = i; j < size; j++) rest += x[j] * x[j];
    const float scale = 1.0f / sqrtf((sum16(squares) + rest) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

static void rotate(float *x, const float *cos, const float *sin, long size) {
    const long half = size / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}
