// What every integer GEMM shares: the packed layout, padded rows and the epilogue.
//
// y = (codes @ weight^T) * (row scale * column scale) (+ bias) (+ residual). Sums are exact integers, so neither tiling
// nor threads nor the instruction set can change a bit; only the last few floating-point operations of an element are
// ordered, and those are its own.
//
// Weights are packed once per published version as panels of 16 columns by groups of 4 along k, the layout that AMX
// tiles, VNNI dot products and pairwise multiply-adds all want: [panels][k / 4][16 columns][4]. k is padded with zeros
// to 64 and the panels to a multiple of 4. 12-bit codes are shorts in the same order or, for AMX, two int8 planes with
// code = 256 high + low: a panel of one, then one of the other. So any four panels can be multiplied alone in every
// layout.

#pragma once

#include "lanes.h"

#define COLUMNS 16      // of one panel
#define BLOCK_PANELS 4  // panels are padded to a multiple of this
#define K_MULTIPLE 64   // one AMX tile row

// How far ahead weights are asked for: the processor does so by itself, but only to the end of a page.
#define AHEAD 4096

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

typedef struct {  // packed 8-bit codes; or 4-bit ones, in nibbles: of each group 8 columns low, the other 8 high
    const int8_t *bytes;
    const uint8_t *nibbles;
} packed_codes;

static inline const void *packed_panel(const packed_codes *w, int64_t panel, int64_t width) {
    int64_t at = panel * width * COLUMNS;
    return w->bytes ? (const void *)(w->bytes + at) : w->nibbles + at / 2;
}

// `count` panels from `panel` on as bytes: where they lie, or expanded into `room`, which then stays in the cache.
static inline const int8_t *panels_of(const packed_codes *w, int64_t panel, int64_t count, int64_t width,
                                      int8_t *room) {
    const uint8_t *in = packed_panel(w, panel, width);
    if (w->bytes) return (const int8_t *)in;
    for (int64_t i = 0; i < count * width / 4; i++)
        for (int64_t j = 0; j < 2 * COLUMNS; j++) {
            room[i * 4 * COLUMNS + j] = (int8_t)((in[i * 2 * COLUMNS + j] & 15) - 8);
            room[i * 4 * COLUMNS + 2 * COLUMNS + j] = (int8_t)((in[i * 2 * COLUMNS + j] >> 4) - 8);
        }
    return room;
}

static inline int8_t *room_for(const packed_codes *w, int64_t panels, int64_t width) {
    return w->bytes ? NULL : aligned_alloc(64, panels * width * COLUMNS);
}

typedef struct {  // everything an epilogue needs to finish rows of y
    const float *row_scales, *column_scales, *bias, *residual;
    float *y;
    int64_t n;
} epilogue;

// LANES columns of y from y[at] on, or those that are left; `factor` is row scale * column scale.
ALWAYS_INLINE void finish_values(const epilogue *e, int64_t at, int64_t left, vf sums, vf factor, vf bias) {
    vf value = sums * factor;
    if (e->bias) value = value + bias;  // not + 0, which would turn -0 to 0
    if (e->residual) value = value + load_up_to(e->residual + at, left);
    store_up_to(e->y + at, left, value);
}

static inline void finish_row(const epilogue *e, int64_t row, int64_t first, int64_t columns, const float *sums) {
    for (int64_t j = 0; j < columns; j += LANES) {
        int64_t column = first + j, left = columns - j;
        vf factor = splat(e->row_scales[row]);
        if (e->column_scales) factor = factor * load_up_to(e->column_scales + column, left);
        vf bias = e->bias ? load_up_to(e->bias + column, left) : splat(0);
        finish_values(e, row * e->n + column, left, load(sums + j), factor, bias);
    }
}

static inline void finish_int8(const epilogue *e, int64_t row, int64_t first, int64_t columns, const int32_t *sums) {
    float values[BLOCK_PANELS * COLUMNS];
    for (int64_t j = 0; j < columns; j++) values[j] = (float)sums[j];
    finish_row(e, row, first, columns, values);
}

static inline void finish_wide(const epilogue *e, int64_t row, int64_t first, int64_t columns, const double *sums) {
    float values[COLUMNS];
    for (int64_t j = 0; j < columns; j++) values[j] = (float)sums[j];
    finish_row(e, row, first, columns, values);
}

// Rows [rows, k] copied to [padded rows, padded k] with `flip` xor-ed in (0x80 turns int8 into offset uint8); padding
// is zero: the products of padded rows are never read, and the padded k meets zero weights.
static inline int8_t *padded_rows(const int8_t *codes, int64_t rows, int64_t k, int64_t row_multiple, uint8_t flip) {
    int64_t width = round_up(k, K_MULTIPLE), height = round_up(rows, row_multiple);
    int8_t *copy = aligned_alloc(64, height * width);
    memset(copy + rows * width, 0, (height - rows) * width);
#pragma omp parallel for schedule(static) if (rows * k > 262144)
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t i = 0; i < k; i++) copy[t * width + i] = (int8_t)(codes[t * k + i] ^ flip);
        memset(copy + t * width + k, 0, width - k);
    }
    return copy;
}

// The high and the low byte of 16-bit codes in [-32512, 32512], code = 256 high + low, both of them signed.
static inline void split_planes(const int16_t *codes, int64_t count, int8_t *high, int8_t *low) {
    for (int64_t i = 0; i < count; i++) {
        high[i] = (int8_t)((int16_t)(codes[i] + 128) >> 8);
        low[i] = (int8_t)codes[i];
    }
}
