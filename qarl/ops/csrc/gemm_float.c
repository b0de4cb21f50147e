// fp32 GEMM in a fixed order: each output is one multiply-add chain over k, whatever the batch or the threads.

#include "lanes.h"

#if LANES == 16
#define ROW_TILE 12  // 24 sums in 32 registers
#else
#define ROW_TILE 6  // 12 sums in 16 registers
#endif
#define PANEL (2 * LANES)  // output columns of one packed weight panel
#define AHEAD 4096         // how far ahead weights are asked for; the processor itself stops at the end of a page

int64_t qarl_panel_columns(void) { return PANEL; }

// [n, k] row-major to panels [ceil(n / PANEL)][k][PANEL], zero-padded.
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

// One tile: `m` rows (a compile-time constant) times `k` rows of one panel, each output summed over k in order, on top
// of what `tile` [m][PANEL] holds.
#define DEFINE_TILE(m)                                                                                     \
    static void tile_##m(const float *x, int64_t stride, const float *panel, int64_t k, float *tile) {     \
        vf low[m], high[m];                                                                                \
        for (int r = 0; r < m; r++) {                                                                      \
            low[r] = load(tile + r * PANEL);                                                               \
            high[r] = load(tile + r * PANEL + LANES);                                                      \
        }                                                                                                  \
        for (int64_t i = 0; i < k; i++) {                                                                  \
            vf b0 = load(panel + i * PANEL), b1 = load(panel + i * PANEL + LANES);                         \
            __builtin_prefetch((const char *)(panel + i * PANEL) + AHEAD);                                 \
            _Pragma("GCC unroll 12") for (int r = 0; r < m; r++) {                                         \
                vf a = splat(x[r * stride + i]);                                                           \
                low[r] = fused(a, b0, low[r]);                                                              \
                high[r] = fused(a, b1, high[r]);                                                            \
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
DEFINE_TILE(5)
DEFINE_TILE(6)
#if ROW_TILE == 12
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)
#endif

typedef void (*tile_function)(const float *, int64_t, const float *, int64_t, float *);
static const tile_function TILES[] = {
    NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6,
#if ROW_TILE == 12
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
#endif
};

// Add `rows` rows of x, times `k` rows of a panel to their sums [rows][PANEL].
static void accumulate(const float *x, int64_t stride, const float *panel, int64_t rows, int64_t k, float *sums) {
    for (int64_t t = 0; t < rows; t += ROW_TILE) {
        int64_t m = rows - t < ROW_TILE ? rows - t : ROW_TILE;
        TILES[m](x + t * stride, stride, panel, k, sums + t * PANEL);
    }
}

// y = sums (+ bias) (+ residual) for `rows` rows of one panel's columns, which start at `first`.
static void finish(const float *sums, const float *bias, const float *residual, int64_t rows, int64_t n, int64_t first,
                   float *y) {
    int64_t columns = n - first < PANEL ? n - first : PANEL;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            float value = sums[r * PANEL + c];
            if (bias) value = value + bias[first + c];
            if (residual) value = value + residual[r * n + first + c];
            y[r * n + first + c] = value;
        }
}

#define ROW_BLOCK 240  // rows whose sums are kept at a time
#define DEPTH 256      // of k at a time: this much of a panel stays in the first-level cache

// y[rows, n] = x[rows, k] @ weight[n, k]^T (+ bias) (+ residual).
void qarl_matmul(const float *x, const float *packed, const float *bias, const float *residual, int64_t rows, int64_t n,
                 int64_t k, float *y) {
    int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t p = 0; p < panels; p++) {
        float sums[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
        for (int64_t t = 0; t < rows; t += ROW_BLOCK) {
            int64_t count = rows - t < ROW_BLOCK ? rows - t : ROW_BLOCK;
            memset(sums, 0, count * PANEL * sizeof(float));
            for (int64_t i = 0; i < k; i += DEPTH)
                accumulate(x + t * k + i, k, packed + (p * k + i) * PANEL, count, k - i < DEPTH ? k - i : DEPTH, sums);
            finish(sums, bias, residual ? residual + t * n : NULL, count, n, p * PANEL, y + t * n);
        }
    }
}

// ------------------------------------------------------------------------------------------------- adapters

#define ADAPTER_ROWS (4 * ROW_TILE)  // rows of a task: few, since there are few panels to share out

// Of sibling matrices [first column of y, columns, first column of `inner`] each, the one that owns a panel of B, and
// the panel's place among its own.
static const int64_t *sibling_of(const int64_t *siblings, int64_t *panel) {
    while (*panel >= (siblings[1] + PANEL - 1) / PANEL) {
        *panel -= (siblings[1] + PANEL - 1) / PANEL;
        siblings += 3;
    }
    return siblings;
}

// y[rows, n] += inner B^T, a sibling's columns from its `rank` columns of inner[rows, ranks] = x[rows, k] A^T; both
// are chains in order. A is packed in panels, and the B of siblings are so one after another, `panels` in all.
void qarl_add_low_rank(const float *x, const float *a, const float *b, const int64_t *siblings, int64_t rows, int64_t k,
                       int64_t ranks, int64_t rank, int64_t panels, int64_t n, float *inner, float *y) {
    int64_t inner_panels = (ranks + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        float sums[ADAPTER_ROWS * PANEL] __attribute__((aligned(64)));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < rows; t += ADAPTER_ROWS)
            for (int64_t p = 0; p < inner_panels; p++) {
                int64_t count = rows - t < ADAPTER_ROWS ? rows - t : ADAPTER_ROWS;
                memset(sums, 0, count * PANEL * sizeof(float));
                for (int64_t i = 0; i < k; i += DEPTH)
                    accumulate(x + t * k + i, k, a + (p * k + i) * PANEL, count, k - i < DEPTH ? k - i : DEPTH, sums);
                finish(sums, NULL, NULL, count, ranks, p * PANEL, inner + t * ranks);
            }
#pragma omp for collapse(2) schedule(dynamic, 8)
        for (int64_t t = 0; t < rows; t += ADAPTER_ROWS)
            for (int64_t p = 0; p < panels; p++) {
                int64_t count = rows - t < ADAPTER_ROWS ? rows - t : ADAPTER_ROWS, own = p;
                const int64_t *sibling = sibling_of(siblings, &own);
                int64_t columns = sibling[1] - own * PANEL < PANEL ? sibling[1] - own * PANEL : PANEL;
                float *out = y + t * n + sibling[0] + own * PANEL;
                memset(sums, 0, count * PANEL * sizeof(float));
                accumulate(inner + t * ranks + sibling[2], ranks, b + p * rank * PANEL, count, rank, sums);
                for (int64_t r = 0; r < count; r++)
                    for (int64_t c = 0; c < columns; c++) out[r * n + c] += sums[r * PANEL + c];
            }
    }
}

// ---------------------------------------------------------------------------------------------- 4-bit weights

// Codes [n, k] in [-7, 7] and scales [n, k / group] to panels of nibbles [panels][k][LANES bytes], byte c holding
// columns c (low) and c + LANES (high) as code + 8, and scales [panels][k / group][PANEL].
void qarl_pack_int4(const int8_t *codes, const float *scales, int64_t n, int64_t k, int64_t group, uint8_t *nibbles,
                    float *panel_scales) {
    int64_t panels = (n + PANEL - 1) / PANEL, groups = k / group;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = p * PANEL + c;
            int shift = c < LANES ? 0 : 4;
            for (int64_t i = 0; i < k; i++) {
                uint8_t *byte = nibbles + (p * k + i) * LANES + c % LANES;
                uint8_t code = (uint8_t)((row < n ? codes[row * k + i] : 0) + 8);
                *byte = (uint8_t)((shift ? *byte : 0) | code << shift);
            }
            for (int64_t g = 0; g < groups; g++)
                panel_scales[(p * groups + g) * PANEL + c] = row < n ? scales[row * groups + g] : 1.0f;
        }
}

// What qarl_pack_int4 packed: codes [n, k].
void qarl_unpack_int4(const uint8_t *nibbles, int64_t n, int64_t k, int8_t *codes) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        int64_t c = row % PANEL;
        const uint8_t *column = nibbles + row / PANEL * k * LANES + c % LANES;
        int shift = c < LANES ? 0 : 4;
        for (int64_t i = 0; i < k; i++) codes[row * k + i] = (int8_t)((column[i * LANES] >> shift & 15) - 8);
    }
}

#if LANES == 16
typedef uint64_t nibble_row __attribute__((vector_size(16)));
#elif LANES == 8
typedef uint64_t nibble_row;
#else
typedef uint32_t nibble_row;
#endif

// The fp32 weights of one group of one panel: code * scale, as `dequantize` has them.
static void expand(const uint8_t *nibbles, const float *scales, int64_t group, float *panel) {
    vf low_scales = load(scales), high_scales = load(scales + LANES), offset = splat(8.0f);
    nibble_row mask;
    memset(&mask, 15, sizeof mask);
    for (int64_t i = 0; i < group; i++) {
        nibble_row both;
        memcpy(&both, nibbles + i * LANES, sizeof both);
        nibble_row low = both & mask, high = (both >> 4) & mask;
        vb low_codes, high_codes;
        memcpy(&low_codes, &low, sizeof low);
        memcpy(&high_codes, &high, sizeof high);
        store(panel + i * PANEL, (as_floats(low_codes) - offset) * low_scales);
        store(panel + i * PANEL + LANES, (as_floats(high_codes) - offset) * high_scales);
    }
}

#define LARGEST_GROUP 128

// As `qarl_matmul`, for packed 4-bit weights; groups are expanded one at a time and used by a block of rows.
void qarl_matmul_int4(const float *x, const uint8_t *nibbles, const float *scales, const float *bias,
                      const float *residual, int64_t rows, int64_t n, int64_t k, int64_t group, float *y) {
    int64_t panels = (n + PANEL - 1) / PANEL, groups = k / group;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t p = 0; p < panels; p++) {
        float sums[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
        float panel[LARGEST_GROUP * PANEL] __attribute__((aligned(64)));
        for (int64_t t = 0; t < rows; t += ROW_BLOCK) {
            int64_t count = rows - t < ROW_BLOCK ? rows - t : ROW_BLOCK;
            memset(sums, 0, count * PANEL * sizeof(float));
            for (int64_t g = 0; g < groups; g++) {
                expand(nibbles + (p * k + g * group) * LANES, scales + (p * groups + g) * PANEL, group, panel);
                accumulate(x + t * k + g * group, k, panel, count, group, sums);
            }
            finish(sums, bias, residual ? residual + t * n : NULL, count, n, p * PANEL, y + t * n);
        }
    }
}
