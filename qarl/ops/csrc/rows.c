// Row-wise operations: normalization, gating, quantization of activations.

#include "lanes.h"

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

// The scale of a row, and in `factor` what turns it into codes; 0 where they are all 0.
static float row_scale(const float *x, int64_t n, float limit, float *factor) {
    float amax = row_amax(x, n);
    *factor = amax >= SMALLEST_AMAX ? limit / amax : 0.0f;
    return isnan(amax) ? amax : amax >= SMALLEST_AMAX ? amax / limit : 1.0f;
}

static float quantize_row_wide(const float *x, int64_t n, float limit, int16_t *codes) {
    float factor, scale = row_scale(x, n, limit, &factor);
    if (factor == 0.0f) memset(codes, 0, n * sizeof(int16_t));
    for (int64_t i = 0; factor != 0.0f && i < n; i++) codes[i] = (int16_t)__builtin_rintf(x[i] * factor);
    return scale;
}

// The same onto a grid that needs 16 bits.
void qarl_quantize_rows_wide(const float *x, float limit, int64_t rows, int64_t n, int16_t *codes, float *scales) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t t = 0; t < rows; t++) scales[t] = quantize_row_wide(x + t * n, n, limit, codes + t * n);
}

static inline uint32_t mixed(uint32_t h) {  // the finalizer of MurmurHash3
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

// By dither: up with the probability of the fraction, so that the mean is the value itself. The uniform number of an
// element, in 24 bits, is a hash of the row's key and its place. Adding it to the value first would round the sum.
static float quantize_row_dithered(const float *x, int64_t n, float limit, uint32_t key, int8_t *codes) {
    float factor, scale = row_scale(x, n, limit, &factor);
    for (int64_t i = 0; i < n; i++) {
        float uniform = (float)(int32_t)(mixed(key ^ (uint32_t)i * 0x9e3779b9u) >> 8) * 0x1p-24f;
        float value = x[i] * factor, inside = value > limit ? limit : value < -limit ? -limit : value;
        float low = floorf(inside);
        codes[i] = factor == 0.0f ? 0 : (int8_t)(low + (uniform < inside - low ? 1.0f : 0.0f));
    }
    return scale;
}

static uint32_t row_key(int64_t seed, int64_t row) {  // splitmix64 (Steele et al. 2014) at that row
    uint64_t z = (uint64_t)seed + ((uint64_t)row + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

// Row `row` of a gradient as codes of `bytes` bytes: two, to nearest, or one, by dither.
static float quantize_gradient(const float *x, int64_t n, float limit, int bytes, int64_t seed, int64_t row,
                               void *codes) {
    if (bytes == 2) return quantize_row_wide(x, n, limit, (int16_t *)codes + row * n);
    return quantize_row_dithered(x, n, limit, row_key(seed, row), (int8_t *)codes + row * n);
}

// Gradients of a linear layer for integer GEMMs: codes of x[t, c] * factor[c], one scale a row.
void qarl_quantize_scaled_rows(const float *x, const float *factors, float limit, int bytes, int64_t seed, int64_t rows,
                               int64_t n, void *codes, float *scales) {
#pragma omp parallel
    {
        float *scaled = malloc(n * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            for (int64_t i = 0; i < n; i++) scaled[i] = x[t * n + i] * factors[i];
            scales[t] = quantize_gradient(scaled, n, limit, bytes, seed, t, codes);
        }
        free(scaled);
    }
}

#define COLUMN_BLOCK 64  // columns at a time: the whole of a few cache lines of every row

// x[t, c] * factor[t] of `width` columns, a column after another, `stride` numbers apart.
static void scaled_columns(const float *x, const float *factors, int64_t rows, int64_t n, int64_t width, int64_t stride,
                           float *columns) {
    for (int64_t t = 0; t < rows; t += LANES)
        for (int64_t c = 0; c < width; c += LANES) {
            int64_t height = rows - t < LANES ? rows - t : LANES;
            vf block[LANES];
            for (int64_t i = 0; i < LANES; i++)
                block[i] = i < height ? load_up_to(x + (t + i) * n + c, width - c) * splat(factors[t + i]) : splat(0);
            transpose(block);
            for (int64_t i = 0; i < LANES; i++) store(columns + (c + i) * stride + t, block[i]);
        }
}

// Codes of x[t, c] * factor[t] with one scale a column, transposed to [n, rows].
void qarl_quantize_scaled_columns(const float *x, const float *factors, float limit, int bytes, int64_t seed,
                                  int64_t rows, int64_t n, void *codes, float *scales) {
    int64_t stride = ((rows / LANES + 1) | 1) * LANES;  // an odd number of vectors: columns share no cache set
#pragma omp parallel
    {
        float *columns = aligned_alloc(64, COLUMN_BLOCK * stride * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += COLUMN_BLOCK) {
            int64_t width = n - first < COLUMN_BLOCK ? n - first : COLUMN_BLOCK;
            scaled_columns(x + first, factors, rows, n, width, stride, columns);
            for (int64_t c = 0; c < width; c++)
                scales[first + c] = quantize_gradient(columns + c * stride, rows, limit, bytes, seed, first + c, codes);
        }
        free(columns);
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

// ---------------------------------------------------------------------------------------------- gradients

// One row of the gradient of `rms_norm_row`; the gain's is added to `grad_gain`.
static void rms_norm_gradient(const float *grad, const float *x, const float *gain, float eps, int64_t n, float *grad_x,
                              float *grad_gain) {
    vf squares = splat(0), products = splat(0);
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = load_up_to(x + i, n - i);
        squares = fused(v, v, squares);
        products = fused(load_up_to(grad + i, n - i) * load_up_to(gain + i, n - i), v, products);
    }
    float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)n + eps);
    vf factor = splat(inverse), mean = splat(sum_lanes(products) * inverse / (float)n);
    for (int64_t i = 0; i < n; i += LANES) {
        vf g = load_up_to(grad + i, n - i), unit = load_up_to(x + i, n - i) * factor;
        store_up_to(grad_gain + i, n - i, fused(g, unit, load_up_to(grad_gain + i, n - i)));
        store_up_to(grad_x + i, n - i, (g * load_up_to(gain + i, n - i) - unit * mean) * factor);
    }
}

#define GAIN_ROWS 64  // whose gradients of the gain are summed first: the order of the sum must not depend on threads

// Gradients of RMSNorm: of x, and of the gain in blocks of rows, [ceil(rows / GAIN_ROWS), n].
void qarl_rms_norm_backward(const float *grad, const float *x, const float *gain, float eps, int64_t rows, int64_t n,
                            float *grad_x, float *grad_gains) {
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (int64_t b = 0; b < (rows + GAIN_ROWS - 1) / GAIN_ROWS; b++) {
        float *grad_gain = grad_gains + b * n;
        memset(grad_gain, 0, n * sizeof(float));
        for (int64_t t = b * GAIN_ROWS; t < rows && t < (b + 1) * GAIN_ROWS; t++)
            rms_norm_gradient(grad + t * n, x + t * n, gain, eps, n, grad_x + t * n, grad_gain);
    }
}

int64_t qarl_gain_rows(void) { return GAIN_ROWS; }

// Gradient of silu(gate) * up with respect to gate_up [rows, 2n], gate first.
void qarl_gated_backward(const float *grad, const float *gate_up, int64_t rows, int64_t n, float *grad_gate_up) {
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t t = 0; t < rows; t++) {
        const float *gate = gate_up + t * 2 * n, *up = gate + n;
        float *grad_gate = grad_gate_up + t * 2 * n, *grad_up = grad_gate + n;
        for (int64_t i = 0; i < n; i += LANES) {
            vf x = load_up_to(gate + i, n - i), g = load_up_to(grad + t * n + i, n - i), one = splat(1.0f);
            vf sigmoid = one / (one + vexp(-vmax(x, splat(-88.0f))));
            vf value = x * sigmoid;
            store_up_to(grad_up + i, n - i, g * value);
            store_up_to(grad_gate + i, n - i, g * load_up_to(up + i, n - i) * (sigmoid + value * (one - sigmoid)));
        }
    }
}
