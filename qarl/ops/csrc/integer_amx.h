// Integer GEMMs on AMX tiles: 16 rows by 64 bytes of k meet 16 columns.
//
// One block of the product takes two tiles of rows and two of columns, four loads for four multiplications. Which two
// they are is all that tells the three GEMMs apart: neighbours, where codes are bytes, or the two planes of wider codes.

#pragma once

#include "integer.h"

#define TILE 16  // rows, and columns

static void configure_tiles(void) {  // eight tiles of 16 rows by 64 bytes
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes_per_row[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // GCC before 12.4 takes the call to read 8 bytes of it only
    _tile_loadconfig(&config);
}

typedef int32_t tile_sums[2][2][TILE * TILE];  // of the first or second rows, and the first or second columns

// `a1`, the second rows, may be NULL. On the way `lines` cache lines of what comes next are asked for in every step.
static void multiply_tiles(const int8_t *a0, const int8_t *a1, int64_t width, const int8_t *w0, const int8_t *w1,
                           const char *next, int64_t lines, tile_sums sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < width; i += 64) {
        _tile_loadd(4, a0 + i, width);
        _tile_loadd(6, w0 + i * COLUMNS, 64);
        _tile_loadd(7, w1 + i * COLUMNS, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        for (int64_t j = 0; j < lines; j++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        if (a1) {
            _tile_loadd(5, a1 + i, width);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
}

enum tile_product {  // which rows, and which columns, the two tiles of a block hold
    BYTES,           // 16 of both and the next 16
    MIXED,           // the high and the low plane of 16-bit rows; 16 columns of bytes and the next 16
    PLANES,          // the high and the low plane of both
};

typedef struct {  // 16 integers as doubles, which hold sums of products of planes exactly
    __m512d lower, upper;
} wide_row;

static inline wide_row widen_row(const int32_t *sums) {
    return (wide_row){_mm512_cvtepi32_pd(_mm256_load_si256((const __m256i *)sums)),
                      _mm512_cvtepi32_pd(_mm256_load_si256((const __m256i *)(sums + 8)))};
}

static inline wide_row plus(wide_row a, wide_row b, double factor) {  // a + factor b
    __m512d times = _mm512_set1_pd(factor);
    return (wide_row){_mm512_fmadd_pd(b.lower, times, a.lower), _mm512_fmadd_pd(b.upper, times, a.upper)};
}

static inline vf rounded(wide_row x) {
    __m512d lower = _mm512_castps_pd(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.lower)));
    return (vf)_mm512_castpd_ps(_mm512_insertf64x4(lower, _mm256_castps_pd(_mm512_cvtpd_ps(x.upper)), 1));
}

// 16 columns of row `row` of a block that has been multiplied.
ALWAYS_INLINE vf block_values(enum tile_product kind, tile_sums sums, int64_t row, int side) {
    int64_t at = row % TILE * TILE;
    if (kind == BYTES) return (vf)_mm512_cvtepi32_ps(_mm512_load_si512(sums[row / TILE][side] + at));
    if (kind == MIXED) return rounded(plus(widen_row(sums[1][side] + at), widen_row(sums[0][side] + at), 256));
    wide_row middle = plus(widen_row(sums[0][1] + at), widen_row(sums[1][0] + at), 1);
    middle = plus(middle, widen_row(sums[0][0] + at), 256);
    return rounded(plus(widen_row(sums[1][1] + at), middle, 256));
}

ALWAYS_INLINE void finish_tiles(enum tile_product kind, tile_sums sums, const epilogue *e, int64_t t, int64_t rows,
                                int64_t first) {
    for (int side = 0; side < (kind == PLANES ? 1 : 2); side++, first += TILE) {
        if (e->n - first < TILE)
            for (int64_t r = 0; r < rows && first < e->n; r++)
                finish_values(e, t + r, first, e->n - first, block_values(kind, sums, r, side));
        else
            for (int64_t r = 0; r < rows; r++) finish_values(e, t + r, first, TILE, block_values(kind, sums, r, side));
    }
}

static void finish_block(enum tile_product kind, tile_sums sums, const epilogue *e, int64_t t, int64_t rows,
                         int64_t first) {
    if (kind == BYTES) finish_tiles(BYTES, sums, e, t, rows, first);
    if (kind == MIXED) finish_tiles(MIXED, sums, e, t, rows, first);
    if (kind == PLANES) finish_tiles(PLANES, sums, e, t, rows, first);
}

#define CACHED_TILES (1 << 20)  // bytes: a block of rows that stays in the second-level cache while columns pass

typedef struct {  // the left side: rows, or their planes, [rows, width], padded to whole tiles
    enum tile_product kind;
    const int8_t *a, *a_low;
    int64_t rows, width;
} tile_rows;

// Panels 2 b and 2 b + 1 times rows `t` to `end`. The panels after them are asked for on the way, a share with every tile.
static void amx_columns(const tile_rows *x, const packed_codes *packed, int64_t b, int64_t t, int64_t end, int8_t *room,
                        const epilogue *e) {
    int64_t width = x->width, height = x->kind == BYTES ? 2 * TILE : TILE, columns = x->kind == PLANES ? TILE : 2 * TILE;
    int64_t lines = packed->bytes ? 2 * COLUMNS : COLUMNS, steps = round_up(end - t, height) / height;
    int64_t share = steps < lines ? lines / steps : 1;
    const int8_t *w0 = panels_of(packed, 2 * b, 2, width, room), *w1 = w0 + width * COLUMNS;
    const char *next = packed_panel(packed, 2 * b + 2, width);
    tile_sums sums __attribute__((aligned(64)));
    for (; t < end; t += height, lines -= share, next += share * width) {
        const int8_t *a0 = x->a + t * width, *a1 = x->kind == BYTES ? a0 + TILE * width : x->a_low + t * width;
        if (x->kind == BYTES && t + TILE >= x->rows) a1 = NULL;
        multiply_tiles(a0, a1, width, w0, w1, next, lines > 0 ? share : 0, sums);
        finish_block(x->kind, sums, e, t, at_most(height, x->rows - t), b * columns);
    }
}

static void amx_multiply(const tile_rows *x, const packed_codes *packed, const epilogue *e) {
    int64_t columns = x->kind == PLANES ? TILE : 2 * TILE, blocks = round_up(e->n, columns) / columns;
    int64_t bytes_per_row = x->kind == BYTES ? x->width : 2 * x->width;
    int64_t chunk = round_up(CACHED_TILES / (bytes_per_row + 1) + 1, 2 * TILE);
#pragma omp parallel
    {
        int8_t *room = room_for(packed, 2, x->width);
        configure_tiles();
        for (int64_t t = 0; t < x->rows; t += chunk) {
#pragma omp for schedule(static) nowait
            for (int64_t b = 0; b < blocks; b++) amx_columns(x, packed, b, t, at_most(t + chunk, x->rows), room, e);
        }
        _tile_release();
        free(room);
    }
}

static void amx_int8(const int8_t *codes, const packed_codes *packed, int64_t rows, int64_t k, const epilogue *e) {
    int is_whole = rows % TILE == 0 && k % K_MULTIPLE == 0;
    int8_t *padded = is_whole ? NULL : padded_rows(codes, rows, k, TILE, 0);
    tile_rows x = {BYTES, padded ? padded : codes, NULL, rows, round_up(k, K_MULTIPLE)};
    amx_multiply(&x, packed, e);
    free(padded);
}

// The planes of 16-bit rows [rows, k], both [height, width] and zero where they are padded.
static void padded_planes(const int16_t *codes, int64_t rows, int64_t k, int64_t height, int64_t width, int8_t *high,
                          int8_t *low) {
#pragma omp parallel for schedule(static) if (rows * k > 65536)
    for (int64_t t = 0; t < height; t++) {
        int64_t filled = t < rows ? k : 0, at = t * width;
        split_planes(codes + t * k, filled, high + at, low + at);
        memset(high + at + filled, 0, width - filled);
        memset(low + at + filled, 0, width - filled);
    }
}

static void amx_wide(enum tile_product kind, const int16_t *codes, const int8_t *weights, int64_t rows, int64_t k,
                     const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), height = round_up(rows, TILE);
    int8_t *planes = aligned_alloc(64, 2 * height * width);
    packed_codes packed = {weights, NULL};
    padded_planes(codes, rows, k, height, width, planes, planes + height * width);
    tile_rows x = {kind, planes, planes + height * width, rows, width};
    amx_multiply(&x, &packed, e);
    free(planes);
}
