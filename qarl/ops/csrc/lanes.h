// A vector of fp32 lanes as wide as this CPU's registers, and the row primitives that every kernel shares.
//
// All kernels obey one law: an output element sees the same sequence of floating-point operations whatever its
// neighbours are. So rows may be batched, split over threads or computed alone, and the bits agree.
//  - A reduction runs over one row in a fixed order: lane = index % LANES, lanes summed in one tree.
//  - Rows are padded to whole vectors, so no element takes a scalar path with another `exp`.
//  - Attention walks keys from position 0 of the sequence, wherever their rows are stored.
//  - A GEMM output accumulates over k in order; threads split columns, never k.
// `reference.py` defines the same operations in torch. Vectors are GCC/Clang vector extensions. Their width is the
// machine's, for GCC keeps wider ones in memory, which makes every kernel tens of times slower.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else  // SSE, NEON
#define LANES 4
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1)));

static inline vf splat(float x) { return x - (vf){0}; }  // not x + 0, which would turn -0 to 0 and so cost an addition

static inline vf load(const float *p) { return *(const vf *)p; }

static inline void store(float *p, vf x) { *(vf *)p = x; }

static inline vf load_part(const float *p, int64_t n, float fill) {  // the first n < LANES lanes, the rest `fill`
    float buffer[LANES];
    for (int i = 0; i < LANES; i++) buffer[i] = i < n ? p[i] : fill;
    return load(buffer);
}

static inline void store_part(float *p, int64_t n, vf x) { memcpy(p, &x, n * sizeof(float)); }

// a * b + c, rounded once where the machine can. The compiler must not fuse on its own (`-ffp-contract=off`): whether
// it does depends on how a loop was unrolled or inlined, and the same operation would get different bits in two places.
static inline vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    vf y;
    for (int i = 0; i < LANES; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return y;
#else
    return a * b + c;
#endif
}

static inline vf vmax(vf a, vf b) {  // b where either is NaN
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
#endif
}

static inline vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

// The same where `left` numbers remain, be they a whole vector or fewer.
static inline vf load_up_to(const float *p, int64_t left) { return left >= LANES ? load(p) : load_part(p, left, 0); }

static inline void store_up_to(float *p, int64_t left, vf x) {
    if (left >= LANES)  // apart: a copy of a length that is not constant is a call
        store(p, x);
    else
        store_part(p, left & (LANES - 1), x);  // which `left` is already, but GCC does not know
}

typedef float v4 __attribute__((vector_size(16)));

static inline float sum_lanes(vf x) {  // always the same tree: halves are added until one lane is left
#if LANES == 16
    typedef float v8 __attribute__((vector_size(32)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    vf a = x;
#endif
#if LANES > 4
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
#else
    v4 b = a;
#endif
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline float max_lanes(vf x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Of blocks of `d` lanes (a power of two below LANES, constant) the even-numbered ones of a and of b in turn, and the
// odd-numbered ones.
#if LANES == 16
#define FIRST_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define OTHER_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define FIRST_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define OTHER_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define FIRST_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define OTHER_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define FIRST_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define OTHER_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#elif LANES == 8
#define FIRST_4 0, 1, 2, 3, 8, 9, 10, 11
#define OTHER_4 4, 5, 6, 7, 12, 13, 14, 15
#define FIRST_2 0, 1, 8, 9, 4, 5, 12, 13
#define OTHER_2 2, 3, 10, 11, 6, 7, 14, 15
#define FIRST_1 0, 8, 2, 10, 4, 12, 6, 14
#define OTHER_1 1, 9, 3, 11, 5, 13, 7, 15
#else
#define FIRST_2 0, 1, 4, 5
#define OTHER_2 2, 3, 6, 7
#define FIRST_1 0, 4, 2, 6
#define OTHER_1 1, 5, 3, 7
#endif

typedef struct {
    vf first, other;
} vf_pair;

ALWAYS_INLINE vf_pair shuffled(vf a, vf b, int d) {
#if LANES > 8
    if (d == 8) return (vf_pair){__builtin_shufflevector(a, b, FIRST_8), __builtin_shufflevector(a, b, OTHER_8)};
#endif
#if LANES > 4
    if (d == 4) return (vf_pair){__builtin_shufflevector(a, b, FIRST_4), __builtin_shufflevector(a, b, OTHER_4)};
#endif
    if (d == 2) return (vf_pair){__builtin_shufflevector(a, b, FIRST_2), __builtin_shufflevector(a, b, OTHER_2)};
    return (vf_pair){__builtin_shufflevector(a, b, FIRST_1), __builtin_shufflevector(a, b, OTHER_1)};
}

// Sums of the lanes of LANES vectors, as the lanes of one: a tree of pairwise merges, always the same.
ALWAYS_INLINE vf sum_each(const vf x[LANES]) {
    vf sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = x[i];
    _Pragma("GCC unroll 4") for (int d = LANES / 2; d > 0; d /= 2)
        _Pragma("GCC unroll 8") for (int i = 0; i < d; i++) {
            vf_pair both = shuffled(sums[i], sums[i + d], d);
            sums[i] = both.first + both.other;
        }
    return sums[0];
}

// Row i of a square block becomes column i.
ALWAYS_INLINE void transpose(vf x[LANES]) {
    _Pragma("GCC unroll 4") for (int d = LANES / 2; d > 0; d /= 2)
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
            if (!(i & d)) {
                vf_pair both = shuffled(x[i], x[i + d], d);
                x[i] = both.first;
                x[i + d] = both.other;
            }
}

// The nearest integers, halves to even.
static inline vi nearest(vf x) {
#if LANES == 16
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    vi y;
    for (int i = 0; i < LANES; i++) y[i] = (int32_t)__builtin_rintf(x[i]);
    return y;
#endif
}

static inline vb narrow(vi x) {  // of integers within int8
#if LANES == 16
    return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#elif LANES == 8
    __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extractf128_si256((__m256i)x, 1));
    int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(shorts, shorts));
    return (vb)bytes;
#else
    return __builtin_convertvector(x, vb);
#endif
}

static inline vf as_floats(vb x) {
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x)));
#else
    return __builtin_convertvector(x, vf);
#endif
}

// exp(x) for x <= 88; below -87 the result is 0; NaN stays NaN. Relative error below 2e-7 (Cephes' reduction and
// polynomial).
static inline vf vexp(vf x) {
    vi underflow = x < splat(-87.0f);
    x = vmax(splat(-87.0f), x);  // in this order a NaN comes through
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
    vf n = fused(x, splat(1.44269504088896341f), magic) - magic;
    vf r = fused(n, splat(-0.693359375f), x);
    r = fused(n, splat(2.12194440e-4f), r);
    vf y = splat(1.9875691500e-4f);
    y = fused(y, r, splat(1.3981999507e-3f));
    y = fused(y, r, splat(8.3334519073e-3f));
    y = fused(y, r, splat(4.1665795894e-2f));
    y = fused(y, r, splat(1.6666665459e-1f));
    y = fused(y, r, splat(5.0000001201e-1f));
    y = fused(y, r * r, r) + splat(1.0f);
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(y * (vf)exponent) & ~underflow);
}

// Rows of activations: norm and quantization.

static inline float row_amax(const float *x, int64_t n) {  // NaN when any element is not finite
    vf best = splat(0), poison = splat(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = load(x + i);
        best = vmax(best, vabs(v));
        poison = poison + (v - v);
    }
    if (i < n) {
        vf v = load_part(x + i, n - i, 0);
        best = vmax(best, vabs(v));
        poison = poison + (v - v);
    }
    return max_lanes(best) + sum_lanes(poison);
}

static inline vb codes_of(vf x, vf inverse) { return narrow(nearest(x * inverse)); }

#define SMALLEST_AMAX 0x1p-100f  // below it a row counts as zero

// The definition is `quant/qtensor.py`: scale = amax / limit, codes = round_half_even(x * (limit / amax)).
// A row that is not finite gets scale NaN, so that its outputs say so.
static inline float quantize_row(const float *x, int64_t n, float limit, int8_t *codes) {
    float amax = row_amax(x, n);
    if (amax < SMALLEST_AMAX || isnan(amax)) {
        memset(codes, 0, n);
        return isnan(amax) ? amax : 1.0f;
    }
    vf inverse = splat(limit / amax);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(vb *)(codes + i) = codes_of(load(x + i), inverse);
    if (i < n) {
        vb rounded = codes_of(load_part(x + i, n - i, 0), inverse);
        memcpy(codes + i, &rounded, n - i);
    }
    return amax / limit;
}

static inline void rms_norm_row(const float *x, const float *gain, float eps, int64_t n, float *y) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = load(x + i);
        squares = fused(v, v, squares);
    }
    if (i < n) {
        vf v = load_part(x + i, n - i, 0);
        squares = fused(v, v, squares);
    }
    vf inverse = splat(1.0f / sqrtf(sum_lanes(squares) / (float)n + eps));
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, (load(x + i) * inverse) * load(gain + i));
    if (i < n) store_part(y + i, n - i, (load_part(x + i, n - i, 0) * inverse) * load_part(gain + i, n - i, 0));
}
