// Integer GEMMs on AMX tiles: 16 rows by 64 bytes of k meet 16 columns.
//
// One block of the product takes two tiles of rows and two of columns, four loads for four multiplications. Which two
// they are tells the three GEMMs apart, and how their sums are put together: neighbours, where codes are bytes, or the
// planes of wider codes.

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

typedef struct {  // a block that has been multiplied: rows of y from `t` on, of which the first `done` are finished
    tile_sums sums __attribute__((aligned(64)));
    int64_t t, rows, first, done;
} tile_block;

// Finish rows of a block until `until` of them are done; `is_whole` tells that y has all of its columns.
ALWAYS_INLINE void finish_columns(enum tile_product kind, int is_whole, tile_block *block, const epilogue *given,
                                  int64_t until) {
    const epilogue e = *given;  // apart: for all the compiler knows, what is stored could change it
    int sides = kind == PLANES ? 1 : 2;
    vf scales[2] = {splat(1), splat(1)}, biases[2] = {splat(0), splat(0)};
    for (int side = 0; side < sides; side++) {
        int64_t column = block->first + side * TILE, left = is_whole ? TILE : e.n - column;
        if (left > 0 && e.column_scales) scales[side] = load_up_to(e.column_scales + column, left);
        if (left > 0 && e.bias) biases[side] = load_up_to(e.bias + column, left);
    }
    for (int64_t r = block->done; r < until; r++) {
        int64_t at = (block->t + r) * e.n + block->first, left = e.n - block->first;
        vf row_scale = splat(e.row_scales[block->t + r]);
        for (int side = 0; side < sides; side++, at += TILE, left -= TILE) {
            if (!is_whole && left <= 0) break;
            vf sums = block_values(kind, block->sums, r, side);
            finish_values(&e, at, is_whole ? TILE : left, sums, row_scale * scales[side], biases[side]);
        }
    }
    block->done = until;
}

ALWAYS_INLINE void finish_rows(enum tile_product kind, tile_block *block, const epilogue *e, int64_t until) {
    if (block->done == until) return;
    if (e->n - block->first >= (kind == PLANES ? 1 : 2) * TILE)
        finish_columns(kind, 1, block, e, until);
    else
        finish_columns(kind, 0, block, e, until);
}

// Tiles of rows a0 and, unless it is NULL, a1 times panels w0 and w1. The processor would not look far enough ahead to
// do anything else while it waits for the tiles: so the block before is finished in between, a few rows with every
// step, and `lines` cache lines of what comes next are asked for.
ALWAYS_INLINE void multiply_tiles(enum tile_product kind, const int8_t *a0, const int8_t *a1, int64_t width,
                                  const int8_t *w0, const int8_t *w1, const char *next, int64_t lines,
                                  tile_block *before, const epilogue *e, tile_sums sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t share = width ? (before->rows * 64 + width - 1) / width : 0;
    for (int64_t i = 0; i < width; i += 64) {
        _tile_loadd(4, a0 + i, width);
        _tile_loadd(6, w0 + i * COLUMNS, 64);
        _tile_loadd(7, w1 + i * COLUMNS, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (a1) {
            _tile_loadd(5, a1 + i, width);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        for (int64_t j = 0; j < lines; j++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        finish_rows(kind, before, e, at_most(before->done + share, before->rows));
    }
    finish_rows(kind, before, e, before->rows);
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
}

#define CACHED_TILES (1 << 20)  // bytes: a block of rows that stays in the second-level cache while columns pass

typedef struct {  // the left side: rows, or their planes, [rows, width], padded to whole tiles
    enum tile_product kind;
    const int8_t *a, *a_low;
    int64_t rows, width;
} tile_rows;

typedef struct {  // of one thread: two blocks in turn, and room to expand nibbles
    tile_block blocks[2];
    int turn;
    int8_t *room;
} tile_thread;

// Panels 2 b and 2 b + 1 times rows `t` to `end`. The panels after them are asked for on the way, a share with every
// block. The last block is left unfinished.
ALWAYS_INLINE void amx_columns(enum tile_product kind, const tile_rows *x, const packed_codes *packed, int64_t b,
                               int64_t t, int64_t end, const epilogue *e, tile_thread *own) {
    int64_t width = x->width, height = kind == BYTES ? 2 * TILE : TILE, columns = kind == PLANES ? TILE : 2 * TILE;
    int64_t lines = packed->bytes ? 2 * COLUMNS : COLUMNS, steps = round_up(end - t, height) / height;
    int64_t share = (lines + steps - 1) / steps;
    const int8_t *w0 = panels_of(packed, 2 * b, 2, width, own->room), *w1 = w0 + width * COLUMNS;
    const char *next = packed_panel(packed, 2 * b + 2, width);
    for (; t < end; t += height, lines -= share, next += share * width, own->turn ^= 1) {
        const int8_t *a0 = x->a + t * width, *a1 = kind == BYTES ? a0 + TILE * width : x->a_low + t * width;
        if (kind == BYTES && t + TILE >= x->rows) a1 = NULL;
        tile_block *block = &own->blocks[own->turn], *before = &own->blocks[own->turn ^ 1];
        multiply_tiles(kind, a0, a1, width, w0, w1, next, lines > 0 ? share : 0, before, e, block->sums);
        block->t = t, block->rows = at_most(height, x->rows - t), block->first = b * columns, block->done = 0;
    }
}

static void amx_share(const tile_rows *x, const packed_codes *packed, int64_t b, int64_t t, int64_t end,
                      const epilogue *e, tile_thread *own) {
    if (x->kind == BYTES) amx_columns(BYTES, x, packed, b, t, end, e, own);
    if (x->kind == MIXED) amx_columns(MIXED, x, packed, b, t, end, e, own);
    if (x->kind == PLANES) amx_columns(PLANES, x, packed, b, t, end, e, own);
}

static void amx_multiply(const tile_rows *x, const packed_codes *packed, const epilogue *e) {
    int64_t columns = x->kind == PLANES ? TILE : 2 * TILE, blocks = round_up(e->n, columns) / columns;
    int64_t bytes_per_row = x->kind == BYTES ? x->width : 2 * x->width;
    int64_t chunk = round_up(CACHED_TILES / (bytes_per_row + 1) + 1, 2 * TILE);
#pragma omp parallel
    {
        tile_thread own;
        own.turn = 0, own.room = room_for(packed, 2, x->width);
        for (int i = 0; i < 2; i++) own.blocks[i].rows = own.blocks[i].done = 0;
        configure_tiles();
        for (int64_t t = 0; t < x->rows; t += chunk) {
#pragma omp for schedule(static) nowait
            for (int64_t b = 0; b < blocks; b++) amx_share(x, packed, b, t, at_most(t + chunk, x->rows), e, &own);
        }
        tile_block *last = &own.blocks[own.turn ^ 1];
        finish_rows(x->kind, last, e, last->rows);
        _tile_release();
        free(own.room);
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
