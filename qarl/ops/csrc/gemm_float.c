// fp32 GEMM in a fixed order: each output is one multiply-add chain over k, whatever the batch or the threads.

#include "lanes.h"

#if defined(__AVX512F__)
#define ROW_TILE 12
#else
#define ROW_TILE 4
#endif
#define PANEL 32  // output columns of one packed weight panel

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
