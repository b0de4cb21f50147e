// Integer GEMMs on dot products of four bytes, unsigned by signed: AVX-512 VNNI, or AVX-VNNI at half the width.

#pragma once

#include "integer.h"

#if defined(__AVX512VNNI__)
#define DOTS 16        // columns of one vector
#define DOT_VECTORS 4  // of one tile: with 6 rows 24 sums, in 32 registers
#else
#define DOTS 8
#define DOT_VECTORS 2  // 12 sums, in 16 registers
#endif
#define DOT_COLUMNS (DOTS * DOT_VECTORS)

typedef int32_t dot_sums __attribute__((vector_size(4 * DOTS)));
typedef int32_t loose_dot_sums __attribute__((vector_size(4 * DOTS), aligned(1)));

static inline dot_sums add_dots(dot_sums sums, dot_sums x, dot_sums w) {
#if defined(__AVX512VNNI__)
    return (dot_sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#else
    return (dot_sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)w);
#endif
}

static inline dot_sums load_dots(const void *p) { return *(const loose_dot_sums *)p; }

// Column vector v of a tile, in its panel and in a group of that panel.
static inline const int8_t *column_vector(const int8_t *w, int64_t width, int v) {
    return w + v * DOTS / COLUMNS * width * COLUMNS + v * DOTS % COLUMNS * 4;
}

// `m` rows (a compile-time constant) of bytes offset by 128, times DOT_COLUMNS columns; `corrections` undo the offset.
#define DEFINE_DOT_TILE(m)                                                                                      \
    static void dot_tile_##m(const int8_t *a, int64_t width, const int8_t *w, const int32_t *corrections,       \
                             int32_t *sums) {                                                                   \
        dot_sums acc[m][DOT_VECTORS];                                                                           \
        for (int r = 0; r < m; r++)                                                                             \
            for (int v = 0; v < DOT_VECTORS; v++) acc[r][v] = load_dots(corrections + v * DOTS);                \
        for (int64_t g = 0; g < width / 4; g++) {                                                               \
            dot_sums b[DOT_VECTORS];                                                                            \
            for (int v = 0; v < DOT_VECTORS; v++) b[v] = load_dots(column_vector(w, width, v) + g * 4 * COLUMNS); \
            _Pragma("GCC unroll 6") for (int r = 0; r < m; r++) {                                               \
                int32_t four;                                                                                   \
                memcpy(&four, a + r * width + g * 4, 4);                                                        \
                dot_sums x = (dot_sums){0} + four;                                                              \
                _Pragma("GCC unroll 4") for (int v = 0; v < DOT_VECTORS; v++) acc[r][v] =                       \
                    add_dots(acc[r][v], x, b[v]);                                                               \
            }                                                                                                   \
        }                                                                                                       \
        for (int r = 0; r < m; r++) memcpy(sums + r * DOT_COLUMNS, acc[r], sizeof acc[r]);                      \
    }
DEFINE_DOT_TILE(1)
DEFINE_DOT_TILE(2)
DEFINE_DOT_TILE(3)
DEFINE_DOT_TILE(4)
DEFINE_DOT_TILE(5)
DEFINE_DOT_TILE(6)

#define DOT_ROWS 6
typedef void (*dot_tile)(const int8_t *, int64_t, const int8_t *, const int32_t *, int32_t *);
static const dot_tile DOT_TILES[] = {NULL,       dot_tile_1, dot_tile_2, dot_tile_3,
                                     dot_tile_4, dot_tile_5, dot_tile_6};

static void vnni_int8(const int8_t *codes, const packed_codes *packed, const int32_t *corrections, int64_t rows,
                      int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), blocks = round_up(e->n, DOT_COLUMNS) / DOT_COLUMNS;
    int8_t *a = padded_rows(codes, rows, k, 1, 0x80);
#pragma omp parallel
    {
        int8_t *room = room_for(packed, DOT_COLUMNS / COLUMNS, width);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            int32_t sums[DOT_ROWS * DOT_COLUMNS] __attribute__((aligned(64)));
            int64_t first = b * DOT_COLUMNS, columns = at_most(DOT_COLUMNS, e->n - first);
            const int8_t *w = panels_of(packed, first / COLUMNS, DOT_COLUMNS / COLUMNS, width, room);
            for (int64_t t = 0; t < rows; t += DOT_ROWS) {
                int64_t count = at_most(DOT_ROWS, rows - t);
                DOT_TILES[count](a + t * width, width, w, corrections + first, sums);
                for (int64_t r = 0; r < count; r++) finish_int8(e, t + r, first, columns, sums + r * DOT_COLUMNS);
            }
        }
        free(room);
    }
    free(a);
}
