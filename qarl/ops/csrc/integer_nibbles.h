// Integer GEMMs on 4-bit weights where bytes cannot be summed in one instruction but pairs of their products can: a
// weight is at least -7, so weight + 8 is an unsigned byte, and a few products with it fit 16 bits. That is twice the
// work of 16-bit pairs for an instruction, and half the weights to read. sum (w + 8) x = sum w x + 8 sum x.

#pragma once

#include "integer.h"

#define NIBBLE_ROWS 4   // of one tile: with 2 halves of a panel 8 sums in registers
#define SHORT_GROUPS 8  // groups whose sums fit 16 bits: 8 groups * 2 products * 15 * 127 = 30480
#define CACHED_BYTES (1 << 17)  // a block of rows that stays in the second-level cache

// Sums of `m` rows (a compile-time constant) times 16 columns; rows of `sums` are COLUMNS apart.
static inline __attribute__((always_inline)) void nibble_tile(const int8_t *x, int64_t stride, const uint8_t *w,
                                                              int64_t groups, int m, int32_t *sums) {
    const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i totals[NIBBLE_ROWS][2];
    for (int r = 0; r < m; r++) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
    for (int64_t first = 0; first < groups; first += SHORT_GROUPS) {
        __m256i part[NIBBLE_ROWS][2];
        for (int r = 0; r < m; r++) part[r][0] = part[r][1] = _mm256_setzero_si256();
        _Pragma("GCC unroll 1") for (int64_t i = first; i < first + SHORT_GROUPS; i++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + i * 2 * COLUMNS));
            __m256i low = _mm256_and_si256(both, low_bits);
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
            __builtin_prefetch((const char *)(w + i * 2 * COLUMNS) + AHEAD);
            _Pragma("GCC unroll 4") for (int r = 0; r < m; r++) {
                int32_t four;
                memcpy(&four, x + r * stride + i * 4, 4);
                __m256i codes = _mm256_set1_epi32(four);
                part[r][0] = _mm256_add_epi16(part[r][0], _mm256_maddubs_epi16(low, codes));
                part[r][1] = _mm256_add_epi16(part[r][1], _mm256_maddubs_epi16(high, codes));
                __asm__("" : "+x"(part[r][0]), "+x"(part[r][1]));  // else GCC keeps products of all rows, and no sums
            }
        }
        for (int r = 0; r < m; r++)
            for (int h = 0; h < 2; h++)
                totals[r][h] = _mm256_add_epi32(totals[r][h], _mm256_madd_epi16(part[r][h], ones));
    }
    for (int r = 0; r < m; r++)
        for (int h = 0; h < 2; h++)
            _mm256_storeu_si256((__m256i *)(sums + r * COLUMNS + h * COLUMNS / 2), totals[r][h]);
}

// Rows `t` to `end` times one panel, whose columns start at `first`; `offsets` are 8 times the sums of the rows.
static void multiply_nibbles(const int8_t *x, int64_t width, const uint8_t *panel, const int32_t *offsets, int64_t t,
                             int64_t end, int64_t first, const epilogue *e) {
    int64_t columns = at_most(COLUMNS, e->n - first), groups = width / 4;
    while (t < end) {
        int64_t rows = at_most(NIBBLE_ROWS, end - t);
        int32_t sums[NIBBLE_ROWS * COLUMNS];
        switch (rows) {
            case 1: nibble_tile(x + t * width, width, panel, groups, 1, sums); break;
            case 2: nibble_tile(x + t * width, width, panel, groups, 2, sums); break;
            case 3: nibble_tile(x + t * width, width, panel, groups, 3, sums); break;
            default: nibble_tile(x + t * width, width, panel, groups, 4, sums);
        }
        for (int64_t r = 0; r < rows; r++, t++) {
            for (int64_t j = 0; j < COLUMNS; j++) sums[r * COLUMNS + j] -= offsets[t];
            finish_int8(e, t, first, columns, sums + r * COLUMNS);
        }
    }
}

static void nibbles_int8(const int8_t *codes, const uint8_t *packed, int64_t rows, int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), panels = round_up(e->n, COLUMNS) / COLUMNS;
    int8_t *padded = width == k ? NULL : padded_rows(codes, rows, k, 1, 0);
    const int8_t *x = padded ? padded : codes;
    int32_t *offsets = malloc(rows * sizeof(int32_t));
    int64_t block = round_up(CACHED_BYTES / width + 1, NIBBLE_ROWS);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < width; i++) sum += x[t * width + i];
            offsets[t] = 8 * sum;
        }
        for (int64_t t = 0; t < rows; t += block) {
#pragma omp for schedule(static) nowait
            for (int64_t p = 0; p < panels; p++)
                multiply_nibbles(x, width, packed + p * width * COLUMNS / 2, offsets, t, at_most(t + block, rows),
                                 p * COLUMNS, e);
        }
    }
    free(offsets);
    free(padded);
}
