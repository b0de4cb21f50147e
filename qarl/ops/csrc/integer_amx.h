// Integer GEMMs on AMX tiles: 16 rows by 64 bytes of k meet 16 columns.

#pragma once

#include "integer.h"

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

// 32 rows by 2 panels a tile block; `short_block` leaves the second 16 rows out.
static void amx_int8_block(const int8_t *a, int64_t width, const int8_t *w0, const int8_t *w1, int short_block,
                           int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < width; i += 64) {
        _tile_loadd(4, a + i, width);
        _tile_loadd(6, w0 + i * COLUMNS, 64);
        _tile_loadd(7, w1 + i * COLUMNS, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (!short_block) {
            _tile_loadd(5, a + 16 * width + i, width);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

static void amx_int8(const int8_t *codes, const packed_codes *packed, int64_t rows, int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), blocks = round_up(e->n, 32) / 32;
    int is_whole = rows % 16 == 0 && k % K_MULTIPLE == 0;
    int8_t *copy = is_whole ? NULL : padded_rows(codes, rows, k, 16, 0);
    const int8_t *a = copy ? copy : codes;
#pragma omp parallel
    {
        int32_t sums[32 * 32] __attribute__((aligned(64)));
        int8_t *room = room_for(packed, 2, width);
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int8_t *w = panels_of(packed, 2 * b, 2, width, room);
            int64_t first = b * 32, columns = e->n - first < 32 ? e->n - first : 32;
            for (int64_t t = 0; t < rows; t += 32) {
                int64_t count = rows - t < 32 ? rows - t : 32;
                amx_int8_block(a + t * width, width, w, w + width * COLUMNS, count <= 16, sums);
                for (int64_t r = 0; r < count; r++) finish_int8(e, t + r, first, columns, sums + r * 32);
            }
        }
        _tile_release();
        free(room);
    }
    free(copy);
}

// The two planes of 16-bit rows, each as `padded_rows` makes them; the caller frees both.
static void padded_planes(const int16_t *codes, int64_t rows, int64_t k, int8_t **high, int8_t **low) {
    int8_t *planes = malloc(2 * rows * k);
    split_planes(codes, rows * k, planes, planes + rows * k);
    *high = padded_rows(planes, rows, k, 16, 0);
    *low = padded_rows(planes + rows * k, rows, k, 16, 0);
    free(planes);
}

static void amx_int16(const int16_t *codes, const int8_t *packed, int64_t rows, int64_t k, const epilogue *e) {
    int8_t *a_high, *a_low;
    padded_planes(codes, rows, k, &a_high, &a_low);
    int64_t width = round_up(k, K_MULTIPLE);
    int64_t panels = round_up(e->n, COLUMNS) / COLUMNS;
#pragma omp parallel
    {
        int32_t sums[3][16 * COLUMNS] __attribute__((aligned(64)));
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            int64_t high_panel = p / BLOCK_PANELS * 2 * BLOCK_PANELS + p % BLOCK_PANELS;
            const int8_t *w_high = packed + high_panel * width * COLUMNS, *w_low = w_high + BLOCK_PANELS * width * COLUMNS;
            int64_t first = p * COLUMNS, columns = e->n - first < COLUMNS ? e->n - first : COLUMNS;
            for (int64_t t = 0; t < rows; t += 16) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                for (int64_t i = 0; i < width; i += 64) {
                    _tile_loadd(3, a_high + t * width + i, width);
                    _tile_loadd(4, a_low + t * width + i, width);
                    _tile_loadd(5, w_high + i * COLUMNS, 64);
                    _tile_loadd(6, w_low + i * COLUMNS, 64);
                    _tile_dpbssd(0, 3, 5);
                    _tile_dpbssd(1, 3, 6);
                    _tile_dpbssd(2, 4, 6);
                    _tile_dpbssd(1, 4, 5);
                }
                _tile_stored(0, sums[0], 64);
                _tile_stored(1, sums[1], 64);
                _tile_stored(2, sums[2], 64);
                int64_t count = rows - t < 16 ? rows - t : 16;
                for (int64_t r = 0; r < count; r++)
                    finish_int16(e, t + r, first, columns, sums[0] + r * COLUMNS, sums[1] + r * COLUMNS,
                                 sums[2] + r * COLUMNS);
            }
        }
        _tile_release();
    }
    free(a_high);
    free(a_low);
}

static void amx_mixed(const int16_t *codes, const int8_t *packed, int64_t rows, int64_t k, const epilogue *e) {
    int8_t *a_high, *a_low;
    padded_planes(codes, rows, k, &a_high, &a_low);
    int64_t width = round_up(k, K_MULTIPLE);
    int64_t blocks = round_up(e->n, 32) / 32;
#pragma omp parallel
    {
        int32_t high[16 * 32] __attribute__((aligned(64))), low[16 * 32] __attribute__((aligned(64)));
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int8_t *w0 = packed + b * 2 * width * COLUMNS, *w1 = w0 + width * COLUMNS;
            int64_t first = b * 32, columns = e->n - first < 32 ? e->n - first : 32;
            for (int64_t t = 0; t < rows; t += 16) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t i = 0; i < width; i += 64) {
                    _tile_loadd(4, a_high + t * width + i, width);
                    _tile_loadd(5, a_low + t * width + i, width);
                    _tile_loadd(6, w0 + i * COLUMNS, 64);
                    _tile_loadd(7, w1 + i * COLUMNS, 64);
                    _tile_dpbssd(0, 4, 6);
                    _tile_dpbssd(1, 4, 7);
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
                _tile_stored(0, high, 128);
                _tile_stored(1, high + 16, 128);
                _tile_stored(2, low, 128);
                _tile_stored(3, low + 16, 128);
                int64_t count = rows - t < 16 ? rows - t : 16;
                for (int64_t r = 0; r < count; r++) finish_mixed(e, t + r, first, columns, high + r * 32, low + r * 32);
            }
        }
        _tile_release();
    }
    free(a_high);
    free(a_low);
}
