// Integer GEMMs on multiply-adds of pairs of 16-bit numbers, which every CPU has in some form. 8-bit weights are
// widened on the way to the registers, so rows of 16 bits, which gradients have, cost no more than rows of 8, and a
// product of 12-bit codes, which the output head has, no more than one of 8-bit codes.

#pragma once

#include "integer.h"

#if defined(__AVX512BW__)
#define PAIRS 16  // sums of one vector, two of each column
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX2__)
#define PAIRS 8
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#else
#define PAIRS 4
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#endif

typedef int32_t pair_sums __attribute__((vector_size(4 * PAIRS)));
typedef int16_t shorts __attribute__((vector_size(4 * PAIRS)));

static inline shorts widen(const int8_t *w) {
#if PAIRS == 16
    return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w));
#elif PAIRS == 8
    return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#else
    typedef int8_t bytes __attribute__((vector_size(2 * PAIRS), aligned(1)));
    return __builtin_convertvector(*(const bytes *)w, shorts);
#endif
}

static inline shorts four_of(const int16_t *x) {  // x[0 .. 4], repeated
    typedef int64_t quads __attribute__((vector_size(4 * PAIRS)));
    int64_t four;
    memcpy(&four, x, 8);
    return (shorts)((quads){0} + four);
}

static inline pair_sums add_pairs(pair_sums sums, shorts x, shorts w) {  // + x[2i] w[2i] + x[2i + 1] w[2i + 1]
#if PAIRS == 16 && defined(__AVX512VNNI__)
    return (pair_sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif PAIRS == 16
    return sums + (pair_sums)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif PAIRS == 8 && defined(__AVXVNNI__)
    return (pair_sums)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)w);
#elif PAIRS == 8
    return sums + (pair_sums)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__SSE2__)
    return sums + (pair_sums)_mm_madd_epi16((__m128i)x, (__m128i)w);
#else
    for (int i = 0; i < PAIRS; i++) sums[i] += (int32_t)x[2 * i] * w[2 * i] + (int32_t)x[2 * i + 1] * w[2 * i + 1];
    return sums;
#endif
}

static inline void store_columns(pair_sums a, pair_sums b, int32_t *sums) {  // the two sums of a column become one
    pair_sums columns = __builtin_shufflevector(a, b, EVEN_LANES) + __builtin_shufflevector(a, b, ODD_LANES);
    memcpy(sums, &columns, sizeof columns);
}

#define PAIR_ROWS 6  // of one tile: with 2 vectors of columns 12 sums, in 16 registers

static inline shorts load_shorts(const int16_t *w) {
    shorts x;
    memcpy(&x, w, sizeof x);
    return x;
}

// `m` rows (a compile-time constant) times PAIRS columns of one panel; rows of `sums` are COLUMNS apart.
#define DEFINE_PAIR_TILE(name, type, load, m)                                                                          \
    static void name##_##m(const int16_t *x, int64_t stride, const void *panel, int64_t groups, int32_t *sums) {       \
        const type *w = panel;                                                                                         \
        pair_sums a[m], b[m];                                                                                          \
        for (int r = 0; r < m; r++) a[r] = b[r] = (pair_sums){0};                                                      \
        for (int64_t i = 0; i < groups; i++) {                                                                         \
            shorts low = load(w + i * 4 * COLUMNS), high = load(w + i * 4 * COLUMNS + 2 * PAIRS);                      \
            for (int line = 0; line < (int)sizeof(type); line++)                                                       \
                __builtin_prefetch((const char *)(w + i * 4 * COLUMNS) + AHEAD + 64 * line);                           \
            _Pragma("GCC unroll 6") for (int r = 0; r < m; r++) {                                                      \
                shorts four = four_of(x + r * stride + i * 4);                                                         \
                a[r] = add_pairs(a[r], four, low);                                                                     \
                b[r] = add_pairs(b[r], four, high);                                                                    \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < m; r++) store_columns(a[r], b[r], sums + r * COLUMNS);                                     \
    }
#define DEFINE_PAIR_TILES(name, type, load)                                                                            \
    DEFINE_PAIR_TILE(name, type, load, 1)                                                                              \
    DEFINE_PAIR_TILE(name, type, load, 2)                                                                              \
    DEFINE_PAIR_TILE(name, type, load, 3)                                                                              \
    DEFINE_PAIR_TILE(name, type, load, 4)                                                                              \
    DEFINE_PAIR_TILE(name, type, load, 5)                                                                              \
    DEFINE_PAIR_TILE(name, type, load, 6)                                                                              \
    static const pair_tile name##s[] = {NULL, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6};
typedef void (*pair_tile)(const int16_t *, int64_t, const void *, int64_t, int32_t *);
DEFINE_PAIR_TILES(byte_tile, int8_t, widen)
DEFINE_PAIR_TILES(short_tile, int16_t, load_shorts)

typedef struct {  // packed weights of 4 or 8 bits, or of 12, and whether sums may pass int32 on the way
    packed_codes codes;
    const int16_t *shorts;
    int is_wide;
} pair_weights;

typedef struct {  // one panel of them
    const int8_t *bytes;
    const int16_t *shorts;
} pair_panel;

// Sums of up to PAIR_ROWS rows and the columns of one panel, `groups` groups of k from group `i` on.
static inline void panel_sums(const int16_t *x, int64_t stride, const pair_panel *w, int64_t rows, int64_t i,
                              int64_t groups, int32_t *sums) {
    for (int c = 0; c < COLUMNS; c += PAIRS) {
        int64_t first = 4 * (i * COLUMNS + c);
        if (w->bytes)
            byte_tiles[rows](x + 4 * i, stride, w->bytes + first, groups, sums + c);
        else
            short_tiles[rows](x + 4 * i, stride, w->shorts + first, groups, sums + c);
    }
}

#define WIDE_GROUPS 128  // 4 * 128 products of 32512 * 128 or of 2047 * 2047 still fit int32

// The same in doubles, which hold these sums exactly: int32 sums are taken of as many groups as are safe.
static void wide_sums(const int16_t *x, int64_t stride, const pair_panel *w, int64_t rows, int64_t groups,
                      double *totals) {
    int64_t chunks = groups / WIDE_GROUPS + 1, chunk = (groups + chunks - 1) / chunks;
    memset(totals, 0, rows * COLUMNS * sizeof(double));
    for (int64_t i = 0; i < groups; i += chunk) {
        int32_t sums[PAIR_ROWS * COLUMNS];
        panel_sums(x, stride, w, rows, i, at_most(chunk, groups - i), sums);
        for (int64_t j = 0; j < rows * COLUMNS; j++) totals[j] += sums[j];
    }
}

// One panel's columns, which start at `first`, of rows `t` to `end`.
static void multiply_panel(const int16_t *x, const pair_panel *w, int is_wide, int64_t t, int64_t end, int64_t width,
                           int64_t first, const epilogue *e) {
    int64_t columns = at_most(COLUMNS, e->n - first), groups = width / 4;
    for (; t < end; t += PAIR_ROWS) {
        int64_t rows = at_most(PAIR_ROWS, end - t);
        int32_t sums[PAIR_ROWS * COLUMNS];
        double totals[PAIR_ROWS * COLUMNS];
        if (is_wide)
            wide_sums(x + t * width, width, w, rows, groups, totals);
        else
            panel_sums(x + t * width, width, w, rows, 0, groups, sums);
        for (int64_t r = 0; r < rows; r++) {
            if (is_wide)
                finish_wide(e, t + r, first, columns, totals + r * COLUMNS);
            else
                finish_int8(e, t + r, first, columns, sums + r * COLUMNS);
        }
    }
}

#define CACHED_ROWS (1 << 17)  // 16-bit numbers: a block of rows that stays in the second-level cache

static void multiply_in_pairs(const int16_t *x, const pair_weights *w, int64_t rows, int64_t width, const epilogue *e) {
    int64_t panels = round_up(e->n, COLUMNS) / COLUMNS;
    int64_t block = CACHED_ROWS / (width + 1) / PAIR_ROWS * PAIR_ROWS;
    if (block < PAIR_ROWS) block = PAIR_ROWS;
#pragma omp parallel
    {
        int8_t *room = w->shorts ? NULL : room_for(&w->codes, 1, width);
        for (int64_t t = 0; t < rows; t += block) {
#pragma omp for schedule(static) nowait
            for (int64_t p = 0; p < panels; p++) {
                pair_panel panel = {NULL, NULL};
                if (w->shorts)
                    panel.shorts = w->shorts + p * width * COLUMNS;
                else
                    panel.bytes = panels_of(&w->codes, p, 1, width, room);
                multiply_panel(x, &panel, w->is_wide, t, at_most(t + block, rows), width, p * COLUMNS, e);
            }
        }
        free(room);
    }
}

// 8-bit rows [rows, k] widened to [rows, width], zero-padded; the caller frees them.
static int16_t *widened_rows(const int8_t *codes, int64_t rows, int64_t k, int64_t width) {
    int16_t *wide = aligned_alloc(64, rows * width * sizeof(int16_t));
#pragma omp parallel for schedule(static) if (rows * k > 65536)
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t i = 0; i < k; i++) wide[t * width + i] = codes[t * k + i];
        memset(wide + t * width + k, 0, (width - k) * sizeof(int16_t));
    }
    return wide;
}

static void pairs_int8(const int8_t *codes, const packed_codes *packed, int64_t rows, int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE);
    int16_t *x = widened_rows(codes, rows, k, width);
    pair_weights w = {*packed, NULL, 0};
    multiply_in_pairs(x, &w, rows, width, e);
    free(x);
}

// 16-bit rows times 8-bit weights, or 12-bit rows times 12-bit weights.
static void pairs_wide(const int16_t *codes, const pair_weights *w, int64_t rows, int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE);
    int16_t *padded = NULL;
    if (width != k) {
        padded = aligned_alloc(64, rows * width * sizeof(int16_t));
#pragma omp parallel for schedule(static) if (rows * k > 65536)
        for (int64_t t = 0; t < rows; t++) {
            memcpy(padded + t * width, codes + t * k, k * sizeof(int16_t));
            memset(padded + t * width + k, 0, (width - k) * sizeof(int16_t));
        }
    }
    multiply_in_pairs(padded ? padded : codes, w, rows, width, e);
    free(padded);
}
