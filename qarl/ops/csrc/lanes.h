// Sixteen lanes of fp32 and the row primitives that every kernel shares.
//
// All kernels obey one law: an output element sees the same sequence of floating-point operations whatever its
// neighbours are. So rows may be batched, split over threads or computed alone, and the bits agree.
//  - A reduction runs over one row in a fixed order: 16 lanes, lane = index % 16, lanes summed in one tree.
//  - Rows are padded to whole vectors, so no element takes a scalar path with another `exp`.
//  - Attention walks keys from position 0 of the sequence, wherever their rows are stored.
//  - A GEMM output accumulates over k in order; threads split columns, never k.
// `reference.py` defines the same operations in torch. Vectors are GCC/Clang vector extensions: the compiler
// lowers 16 lanes to AVX-512, AVX2 or NEON.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef int8_t vb __attribute__((vector_size(16), aligned(1)));

static inline vf splat(float x) { return (vf){0} + x; }

static inline vf load(const float *p) { return *(const vf *)p; }

static inline void store(float *p, vf x) { *(vf *)p = x; }

static inline vf load_part(const float *p, int64_t n, float fill) {  // the first n < 16 lanes, the rest `fill`
    float buffer[LANES];
    for (int i = 0; i < LANES; i++) buffer[i] = i < n ? p[i] : fill;
    return load(buffer);
}

static inline void store_part(float *p, int64_t n, vf x) { memcpy(p, &x, n * sizeof(float)); }

static inline vf vmax(vf a, vf b) {
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}

static inline vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

static inline float sum_lanes(vf x) {  // always the same tree
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline float max_lanes(vf x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Round half to even. (Adding and subtracting 2^23 would be fused with a preceding product and round once only.)
static inline vf round_even(vf x) {
    float y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = __builtin_rintf(x[i]);
    return load(y);
}

// exp(x) for x <= 88; below -87 the result is 0; NaN stays NaN. Relative error below 2e-7 (Cephes' reduction and
// polynomial).
static inline vf vexp(vf x) {
    vi underflow = x < splat(-87.0f);
    x = vmax(splat(-87.0f), x);  // in this order a NaN comes through
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
    vf n = (x * splat(1.44269504088896341f) + magic) - magic;
    vf r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vf y = splat(1.9875691500e-4f);
    y = y * r + splat(1.3981999507e-3f);
    y = y * r + splat(8.3334519073e-3f);
    y = y * r + splat(4.1665795894e-2f);
    y = y * r + splat(1.6666665459e-1f);
    y = y * r + splat(5.0000001201e-1f);
    y = y * (r * r) + r + splat(1.0f);
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

static inline vb codes_of(vf x, vf inverse) {
    return __builtin_convertvector(__builtin_convertvector(round_even(x * inverse), vi), vb);
}

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
        squares = squares + v * v;
    }
    if (i < n) {
        vf v = load_part(x + i, n - i, 0);
        squares = squares + v * v;
    }
    vf inverse = splat(1.0f / sqrtf(sum_lanes(squares) / (float)n + eps));
    for (i = 0; i + LANES <= n; i += LANES) store(y + i, (load(x + i) * inverse) * load(gain + i));
    if (i < n) store_part(y + i, n - i, (load_part(x + i, n - i, 0) * inverse) * load_part(gain + i, n - i, 0));
}
