// CPU kernels of the operations that engine and learner share.
//
// Every kernel obeys one law: an output element sees the same sequence of floating-point operations whatever
// its neighbours are. So rows may be batched, split over threads or computed alone, and the bits agree.
//  - A reduction runs over one row in a fixed order: 16 lanes, lane = index % 16, lanes summed in order.
//  - Rows are padded to whole vectors, so no element takes a scalar path with another `exp`.
//  - Attention walks keys from position 0 of the sequence, wherever their rows are stored.
//  - A GEMM output accumulates over k in order; threads split columns, never k.
// `reference.py` defines the same operations in torch. Vectors are GCC/Clang vector extensions: the compiler
// lowers 16 lanes to AVX-512, AVX2 or NEON.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef int8_t vb __attribute__((vector_size(16), aligned(1)));

#if defined(__AVX512F__)
#define ROW_TILE 12
#else
#define ROW_TILE 4
#endif
#define PANEL 32  // output columns of one packed weight panel

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

// ---------------------------------------------------------------------------------------------- rows

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
static float quantize_row(const float *x, int64_t n, float limit, int8_t *codes) {
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

static void rms_norm_row(const float *x, const float *gain, float eps, int64_t n, float *y) {
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

static inline vf silu(vf gate) {  // past -88, where `vexp` would overflow, the quotient is below 1e-36 anyway
    return gate / (splat(1.0f) + vexp(-vmax(gate, splat(-88.0f))));
}

// silu(gate) * up of one row; gate_up is [2n], gate first.
static void gated_row(const float *gate_up, int64_t n, float *y) {
    const float *gate = gate_up, *up = gate_up + n;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, silu(load(gate + i)) * load(up + i));
    if (i < n) store_part(y + i, n - i, silu(load_part(gate + i, n - i, 0)) * load_part(up + i, n - i, 0));
}

void qarl_rms_norm(const float *x, const float *gain, float eps, int64_t rows, int64_t n, float *y) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t t = 0; t < rows; t++) rms_norm_row(x + t * n, gain, eps, n, y + t * n);
}

void qarl_rms_norm_quantize(const float *x, const float *gain, float eps, int64_t rows, int64_t n, int8_t *codes,
                            float *scales) {
#pragma omp parallel if (rows * n > 16384)
    {
        float *y = malloc(n * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            rms_norm_row(x + t * n, gain, eps, n, y);
            scales[t] = quantize_row(y, n, 127.0f, codes + t * n);
        }
        free(y);
    }
}

void qarl_quantize_rows(const float *x, float limit, int64_t rows, int64_t n, int8_t *codes, float *scales) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t t = 0; t < rows; t++) scales[t] = quantize_row(x + t * n, n, limit, codes + t * n);
}

// The same onto a grid that needs 16 bits.
void qarl_quantize_rows_wide(const float *x, float limit, int64_t rows, int64_t n, int16_t *codes, float *scales) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = x + t * n;
        int16_t *out = codes + t * n;
        float amax = row_amax(row, n);
        int is_zero = amax < SMALLEST_AMAX, is_bad = isnan(amax);
        float factor = is_zero || is_bad ? 0.0f : limit / amax;
        for (int64_t i = 0; i < n; i++) out[i] = is_bad ? 0 : (int16_t)__builtin_rintf(row[i] * factor);
        scales[t] = is_bad ? amax : is_zero ? 1.0f : amax / limit;
    }
}

void qarl_gated(const float *gate_up, int64_t rows, int64_t n, float *y) {
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t t = 0; t < rows; t++) gated_row(gate_up + t * 2 * n, n, y + t * n);
}

void qarl_gated_quantize(const float *gate_up, int64_t rows, int64_t n, int8_t *codes, float *scales) {
#pragma omp parallel if (rows * n > 8192)
    {
        float *y = malloc(n * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            gated_row(gate_up + t * 2 * n, n, y);
            scales[t] = quantize_row(y, n, 127.0f, codes + t * n);
        }
        free(y);
    }
}

// y = accumulator * (row scale * column scale) (+ bias) (+ residual); bias and residual may be NULL.
void qarl_dequantize(const int32_t *accumulator, const float *row_scales, const float *column_scales,
                     const float *bias, const float *residual, int64_t rows, int64_t n, float *y) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t t = 0; t < rows; t++) {
        const int32_t *a = accumulator + t * n;
        const float *r = residual ? residual + t * n : NULL;
        float *out = y + t * n, row_scale = row_scales[t];
        for (int64_t j = 0; j < n; j++) {
            float value = (float)a[j] * (row_scale * column_scales[j]);
            if (bias) value = value + bias[j];
            if (r) value = value + r[j];
            out[j] = value;
        }
    }
}

// ---------------------------------------------------------------------------------------------- GEMM

// [n, k] row-major to panels [ceil(n / 32)][k][32], zero-padded.
void qarl_pack_panels(const float *weight, int64_t n, int64_t k, float *packed) {
    int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        float *out = packed + p * k * PANEL;
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = p * PANEL + c;
            for (int64_t i = 0; i < k; i++) out[i * PANEL + c] = row < n ? weight[row * k + i] : 0.0f;
        }
    }
}

// One tile: `m` rows (a compile-time constant) times one panel, each output summed over k in order.
#define DEFINE_TILE(m)                                                                                     \
    static void tile_##m(const float *x, int64_t stride, const float *panel, int64_t k, float *tile) {     \
        vf low[m], high[m];                                                                                \
        for (int r = 0; r < m; r++) low[r] = high[r] = splat(0);                                           \
        for (int64_t i = 0; i < k; i++) {                                                                  \
            vf b0 = load(panel + i * PANEL), b1 = load(panel + i * PANEL + LANES);                         \
            _Pragma("GCC unroll 12") for (int r = 0; r < m; r++) {                                         \
                vf a = splat(x[r * stride + i]);                                                           \
                low[r] = low[r] + a * b0;                                                                  \
                high[r] = high[r] + a * b1;                                                                \
            }                                                                                              \
        }                                                                                                  \
        for (int r = 0; r < m; r++) {                                                                      \
            store(tile + r * PANEL, low[r]);                                                               \
            store(tile + r * PANEL + LANES, high[r]);                                                      \
        }                                                                                                  \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
#if ROW_TILE == 12
DEFINE_TILE(5)
DEFINE_TILE(6)
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)
#endif

typedef void (*tile_function)(const float *, int64_t, const float *, int64_t, float *);
static const tile_function TILES[] = {
    NULL, tile_1, tile_2, tile_3, tile_4,
#if ROW_TILE == 12
    tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

// y[rows, n] = x[rows, k] @ weight[n, k]^T (* row scale * column scale) (+ bias) (+ residual).
void qarl_matmul(const float *x, const float *packed, const float *row_scales, const float *column_scales,
                 const float *bias, const float *residual, int64_t rows, int64_t n, int64_t k, float *y) {
    int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t p = 0; p < panels; p++) {
        const float *panel = packed + p * k * PANEL;
        int64_t first = p * PANEL, columns = n - first < PANEL ? n - first : PANEL;
        float tile[ROW_TILE * PANEL];
        for (int64_t t = 0; t < rows; t += ROW_TILE) {
            int64_t m = rows - t < ROW_TILE ? rows - t : ROW_TILE;
            TILES[m](x + t * k, k, panel, k, tile);
            for (int64_t r = 0; r < m; r++) {
                float *out = y + (t + r) * n + first;
                const float *rest = residual ? residual + (t + r) * n + first : NULL;
                for (int64_t c = 0; c < columns; c++) {
                    float value = tile[r * PANEL + c];
                    if (row_scales) value = value * (row_scales[t + r] * column_scales[first + c]);
                    if (bias) value = value + bias[first + c];
                    if (rest) value = value + rest[c];
                    out[c] = value;
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- rope

// Rotate one head in the half-split layout: (a, b) -> (a cos - b sin, b cos + a sin).
static void rotate(const float *x, const float *cosine, const float *sine, int64_t half, float *y) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Split qkv [rows, (heads + 2 kv_heads) * d] into rotated queries [rows, heads, d] and rotated keys and plain
// values, which go to rows `slots[t]` of the stores [*, kv_heads, d]. Head norms (Qwen3) may be NULL.
void qarl_split_rotate(const float *qkv, const int64_t *positions, const int64_t *slots, const float *cosines,
                       const float *sines, const float *q_gain, const float *k_gain, float eps, int64_t rows,
                       int64_t heads, int64_t kv_heads, int64_t d, float *q, float *keys, float *values) {
    int64_t width = (heads + 2 * kv_heads) * d, half = d / 2;
#pragma omp parallel if (rows * width > 16384)
    {
        float *normed = malloc(d * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            const float *cosine = cosines + positions[t] * half, *sine = sines + positions[t] * half;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                const float *x = qkv + t * width + h * d, *gain = h < heads ? q_gain : k_gain;
                float *y = h < heads ? q + (t * heads + h) * d : keys + (slots[t] * kv_heads + h - heads) * d;
                if (gain) {
                    rms_norm_row(x, gain, eps, d, normed);
                    x = normed;
                }
                rotate(x, cosine, sine, half, y);
            }
            memcpy(values + slots[t] * kv_heads * d, qkv + t * width + (heads + kv_heads) * d,
                   kv_heads * d * sizeof(float));
        }
        free(normed);
    }
}

// ---------------------------------------------------------------------------------------------- attention

static inline float dot(const float *a, const float *b, int64_t d) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) sum = sum + load(a + i) * load(b + i);
    if (i < d) sum = sum + load_part(a + i, d - i, 0) * load_part(b + i, d - i, 0);
    return sum_lanes(sum);
}

static inline void add_scaled(float *y, float factor, const float *x, int64_t d) {  // y += factor * x
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) store(y + i, load(y + i) + splat(factor) * load(x + i));
    if (i < d) store_part(y + i, d - i, load_part(y + i, d - i, 0) + splat(factor) * load_part(x + i, d - i, 0));
}

// The key rows that one query sees: the spans of its sequence, cut after `visible` rows.
typedef struct {
    const int64_t *starts, *lengths;
    int64_t spans;
} sequence;

static inline sequence sequence_of(const int64_t *pointers, const int64_t *starts, const int64_t *lengths, int64_t s) {
    return (sequence){starts + pointers[s], lengths + pointers[s], pointers[s + 1] - pointers[s]};
}

#define FOR_EACH_KEY(keys_of, visible, j, row)                                                            \
    for (int64_t j = 0, span_ = 0; j < (visible); span_++)                                                \
        for (int64_t row = (keys_of).starts[span_], end_ = row + (keys_of).lengths[span_];                \
             row < end_ && j < (visible); row++, j++)

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Scores of one query against its visible keys, in position order; lanes past the end are -inf.
static void scores_of(const float *q, const float *keys, int64_t stride, sequence seq, int64_t visible, int64_t d,
                      float scale, float *scores) {
    FOR_EACH_KEY(seq, visible, j, row) scores[j] = dot(q, keys + row * stride, d) * scale;
    for (int64_t j = visible; j < padded(visible); j++) scores[j] = -INFINITY;
}

// Softmax over scores in place (unnormalized); returns the sum, sets the maximum.
static float exponentiate(float *scores, int64_t visible, float *maximum) {
    vf best = splat(-INFINITY);
    for (int64_t j = 0; j < padded(visible); j += LANES) best = vmax(best, load(scores + j));
    *maximum = max_lanes(best);
    vf peak = splat(*maximum), sum = splat(0);
    for (int64_t j = 0; j < padded(visible); j += LANES) {
        vf e = vexp(load(scores + j) - peak);
        store(scores + j, e);
        sum = sum + e;
    }
    return sum_lanes(sum);
}

// out [d] = weighted sum of one query's visible values, divided by the weights' `total`.
static void mix(const float *weights, float total, const float *values, int64_t stride, sequence seq, int64_t visible,
                int64_t d, float *out) {
    vf inverse = splat(1.0f / total);
    int64_t c = 0, vectors = d / LANES;
    for (int64_t first = 0; first < vectors; first += 4) {  // up to four accumulators wide
        int64_t width = vectors - first < 4 ? vectors - first : 4;
        vf acc[4] = {splat(0), splat(0), splat(0), splat(0)};
        FOR_EACH_KEY(seq, visible, j, row) {
            vf p = splat(weights[j]);
            for (int64_t w = 0; w < width; w++) acc[w] = acc[w] + p * load(values + row * stride + c + w * LANES);
        }
        for (int64_t w = 0; w < width; w++, c += LANES) store(out + c, acc[w] * inverse);
    }
    if (c < d) {
        vf acc = splat(0);
        FOR_EACH_KEY(seq, visible, j, row)
            acc = acc + splat(weights[j]) * load_part(values + row * stride + c, d - c, 0);
        store_part(out + c, d - c, acc * inverse);
    }
}

// out [queries, heads, d] and lse [queries, heads]. Query t belongs to sequence `sequences[t]` and sees its first
// `visible[t]` keys; sequence s owns spans pointers[s] .. pointers[s+1] of rows in keys/values [*, kv_heads, d].
void qarl_attention(const float *q, const float *keys, const float *values, const int64_t *sequences,
                    const int64_t *visible, const int64_t *pointers, const int64_t *starts, const int64_t *lengths,
                    int64_t queries, int64_t heads, int64_t kv_heads, int64_t d, float scale, int64_t longest,
                    float *out, float *lse) {
    int64_t repeat = heads / kv_heads, stride = kv_heads * d;
#pragma omp parallel if (queries * longest * heads * d > 16384)
    {
        float *scores = aligned_alloc(64, padded(longest) * sizeof(float));
#pragma omp for schedule(dynamic, 2) collapse(2)
        for (int64_t t = 0; t < queries; t++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                sequence seq = sequence_of(pointers, starts, lengths, sequences[t]);
                for (int64_t h = g * repeat; h < (g + 1) * repeat; h++) {
                    int64_t at = (t * heads + h) * d;
                    float maximum;
                    scores_of(q + at, keys + g * d, stride, seq, visible[t], d, scale, scores);
                    float sum = exponentiate(scores, visible[t], &maximum);
                    mix(scores, sum, values + g * d, stride, seq, visible[t], d, out + at);
                    lse[t * heads + h] = maximum + logf(sum);
                }
            }
        }
        free(scores);
    }
}

// Gradients of attention. `families` [n_families + 1] cuts the queries into runs whose keys are shared with no other
// run, so that (family, kv head) pairs are independent and each dk/dv element is summed in query order.
// dk and dv must arrive zeroed.
void qarl_attention_backward(const float *grad, const float *q, const float *keys, const float *values,
                             const float *out, const float *lse, const int64_t *sequences, const int64_t *visible,
                             const int64_t *pointers, const int64_t *starts, const int64_t *lengths,
                             const int64_t *families, int64_t n_families, int64_t heads, int64_t kv_heads, int64_t d,
                             float scale, int64_t longest, float *dq, float *dk, float *dv) {
    int64_t repeat = heads / kv_heads, stride = kv_heads * d;
#pragma omp parallel
    {
        float *p = aligned_alloc(64, padded(longest) * sizeof(float));
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t f = 0; f < n_families; f++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                for (int64_t t = families[f]; t < families[f + 1]; t++) {
                    sequence seq = sequence_of(pointers, starts, lengths, sequences[t]);
                    for (int64_t h = g * repeat; h < (g + 1) * repeat; h++) {
                        int64_t at = (t * heads + h) * d;
                        float delta = dot(grad + at, out + at, d);
                        vf peak = splat(lse[t * heads + h]);
                        scores_of(q + at, keys + g * d, stride, seq, visible[t], d, scale, p);
                        for (int64_t j = 0; j < padded(visible[t]); j += LANES) store(p + j, vexp(load(p + j) - peak));
                        memset(dq + at, 0, d * sizeof(float));
                        FOR_EACH_KEY(seq, visible[t], j, row) {
                            int64_t kv = row * stride + g * d;
                            float ds = p[j] * (dot(grad + at, values + kv, d) - delta) * scale;
                            add_scaled(dv + kv, p[j], grad + at, d);
                            add_scaled(dk + kv, ds, q + at, d);
                            add_scaled(dq + at, ds, keys + kv, d);
                        }
                    }
                }
            }
        }
        free(p);
    }
}

// ---------------------------------------------------------------------------------------------- head

// Sum of exp((logit - peak) * inverse_temperature) over a row, four vectors wide.
static float exp_sum(const float *logits, int64_t n, float peak, float inverse_temperature) {
    vf sums[4] = {splat(0), splat(0), splat(0), splat(0)};
    vf top = splat(peak), factor = splat(inverse_temperature);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int w = 0; w < 4; w++) sums[w] = sums[w] + vexp((load(logits + i + w * LANES) - top) * factor);
    for (; i + LANES <= n; i += LANES) sums[0] = sums[0] + vexp((load(logits + i) - top) * factor);
    if (i < n) sums[0] = sums[0] + vexp((load_part(logits + i, n - i, -INFINITY) - top) * factor);
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static float row_max(const float *x, int64_t n) {
    vf best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) best = vmax(best, load(x + i));
    if (i < n) best = vmax(best, load_part(x + i, n - i, -INFINITY));
    return max_lanes(best);
}

static float logprob(float logit, float peak, float inverse_temperature, float sum) {
    return (logit - peak) * inverse_temperature - logf(sum);
}

// -sum p log p of a row, p being its softmax: log(sum) - sum(e z) / sum with z = (logit - peak) / temperature.
static float entropy_of(const float *logits, int64_t n, float peak, float inverse_temperature, float sum) {
    vf weighted = splat(0), top = splat(peak), factor = splat(inverse_temperature);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf z = (load(logits + i) - top) * factor;
        weighted = weighted + vexp(z) * z;
    }
    if (i < n) {
        vf z = (load_part(logits + i, n - i, peak) - top) * factor;  // the padding has z = 0
        weighted = weighted + vexp(z) * z;
    }
    return logf(sum) - sum_lanes(weighted) / sum;
}

// Log-probability of one token a row under softmax(logits / temperature), and the row's entropy; `shifts` and `sums`
// serve the backward pass.
void qarl_token_logprobs(const float *logits, const int64_t *targets, float inverse_temperature, int64_t rows,
                         int64_t n, float *logprobs, float *shifts, float *sums, float *entropies) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = logits + t * n;
        shifts[t] = row_max(row, n);
        sums[t] = exp_sum(row, n, shifts[t], inverse_temperature);
        logprobs[t] = logprob(row[targets[t]], shifts[t], inverse_temperature, sums[t]);
        entropies[t] = entropy_of(row, n, shifts[t], inverse_temperature, sums[t]);
    }
}

// Softmax of rows in place, from the shift and sum above: the backward pass's probabilities.
void qarl_softmax(float *logits, const float *shifts, const float *sums, float inverse_temperature, int64_t rows,
                  int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        float *row = logits + t * n;
        vf top = splat(shifts[t]), factor = splat(inverse_temperature), inverse = splat(1.0f / sums[t]);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(row + i, vexp((load(row + i) - top) * factor) * inverse);
        if (i < n) store_part(row + i, n - i, vexp((load_part(row + i, n - i, -INFINITY) - top) * factor) * inverse);
    }
}

#define SAMPLE_BLOCK 1024

// The token at which the cumulative weight passes `threshold`; a token of weight 0 is never chosen.
static int64_t choose(const float *row, int64_t n, float peak, float inverse_temperature, float uniform) {
    int64_t blocks = (n + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    double total = 0, *block_sums = malloc(blocks * sizeof(double));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * SAMPLE_BLOCK, width = n - first < SAMPLE_BLOCK ? n - first : SAMPLE_BLOCK;
        total += block_sums[b] = exp_sum(row + first, width, peak, inverse_temperature);
    }
    double threshold = (double)uniform * total, passed = 0;
    int64_t block = 0, last_nonzero = -1;
    while (block + 1 < blocks && passed + block_sums[block] <= threshold) passed += block_sums[block++];
    free(block_sums);
    vf top = splat(peak), factor = splat(inverse_temperature);
    for (int64_t i = block * SAMPLE_BLOCK; i < n; i += LANES) {
        int64_t width = n - i < LANES ? n - i : LANES;
        vf weights = vexp((load_part(row + i, width, -INFINITY) - top) * factor);
        for (int64_t lane = 0; lane < width; lane++) {
            if (weights[lane] > 0) last_nonzero = i + lane;
            passed += weights[lane];
            if (passed > threshold && weights[lane] > 0) return i + lane;
        }
    }
    if (last_nonzero >= 0) return last_nonzero;
    for (int64_t i = n - 1; i > 0; i--)  // rounding left the threshold past the end: the last token that can be drawn
        if ((vexp((splat(row[i]) - top) * factor))[0] > 0) return i;
    return 0;  // or none can be drawn, of logits that are NaN: its log-probability tells
}

// Draw one token a row by inverting the cumulative distribution at `uniforms[t]` in [0, 1).
void qarl_sample(const float *logits, const float *uniforms, float inverse_temperature, int64_t rows, int64_t n,
                 int64_t *tokens, float *logprobs) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = logits + t * n;
        float peak = row_max(row, n);
        tokens[t] = choose(row, n, peak, inverse_temperature, uniforms[t]);
        float sum = exp_sum(row, n, peak, inverse_temperature);
        logprobs[t] = logprob(row[tokens[t]], peak, inverse_temperature, sum);
    }
}
