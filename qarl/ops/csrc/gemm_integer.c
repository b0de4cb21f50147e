// Integer GEMMs of 8-bit, 12-bit and mixed codes: packing, and the choice of this machine's instructions.

#include "integer.h"
#include "integer_pairs.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#include "integer_amx.h"
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAVE_VNNI 1
#include "integer_vnni.h"
#endif

#if defined(__AVX2__)
#define HAVE_NIBBLES 1
#include "integer_nibbles.h"
#endif

// Whether 4-bit weights have a GEMM of their own where 8-bit codes are multiplied in pairs.
int qarl_multiplies_nibbles(void) {
#if defined(HAVE_NIBBLES)
    return 1;
#else
    return 0;
#endif
}

// The best code path for 8-bit codes here: 2 AMX tiles, 1 VNNI dot products, 0 multiply-adds of pairs.
int qarl_integer_level(void) {
#if defined(HAVE_AMX)
    // Ask Linux for the tile registers (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA); a container may refuse.
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) return 2;
#endif
#if defined(HAVE_VNNI)
    return 1;
#else
    return 0;
#endif
}

static inline int64_t panel_size(int64_t k) { return round_up(k, K_MULTIPLE) * COLUMNS; }  // in codes

// A panel of up to 16 rows of codes [rows, k] of `size` bytes.
static void pack_panel(const char *codes, int64_t rows, int64_t k, int64_t size, char *out) {
    int64_t group = 4 * size;
    memset(out, 0, panel_size(k) * size);
    for (int64_t c = 0; c < at_most(COLUMNS, rows); c++) {
        const char *row = codes + c * k * size;
        for (int64_t g = 0; g < k / 4; g++) memcpy(out + (g * COLUMNS + c) * group, row + g * group, group);
        memcpy(out + (k / 4 * COLUMNS + c) * group, row + k / 4 * group, k % 4 * size);
    }
}

static void pack_panels(const void *codes, int64_t n, int64_t k, int64_t size, void *packed) {
    int64_t panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int64_t first = at_most(p * COLUMNS, n);
        char *out = (char *)packed + p * panel_size(k) * size;
        pack_panel((const char *)codes + first * k * size, n - first, k, size, out);
    }
}

// -128 * (sum of a column of packed panels), [padded n], which undoes the offset that makes the left operand of VNNI
// unsigned.
static void correct_columns(const int8_t *packed, int64_t n, int64_t k, int32_t *corrections) {
    int64_t groups = round_up(k, K_MULTIPLE) / 4, panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int32_t sums[4 * COLUMNS] = {0};
        for (int64_t g = 0; g < groups; g++)
            for (int64_t i = 0; i < 4 * COLUMNS; i++) sums[i] += packed[(p * groups + g) * 4 * COLUMNS + i];
        for (int64_t c = 0; c < COLUMNS; c++)
            corrections[p * COLUMNS + c] = -128 * (sums[4 * c] + sums[4 * c + 1] + sums[4 * c + 2] + sums[4 * c + 3]);
    }
}

// int8 codes [n, k] to packed panels with their corrections.
void qarl_pack_int8(const int8_t *codes, int64_t n, int64_t k, int8_t *packed, int32_t *corrections) {
    pack_panels(codes, n, k, 1, packed);
    correct_columns(packed, n, k, corrections);
}

// 4-bit codes, held in int8, to packed panels of nibbles.
void qarl_pack_nibbles(const int8_t *codes, int64_t n, int64_t k, uint8_t *packed, int32_t *corrections) {
    int64_t groups = round_up(n, COLUMNS * BLOCK_PANELS) * round_up(k, K_MULTIPLE) / (4 * COLUMNS), half = 2 * COLUMNS;
    int8_t *bytes = malloc(groups * 4 * COLUMNS);
    qarl_pack_int8(codes, n, k, bytes, corrections);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < groups; i++)
        for (int64_t j = 0; j < half; j++) {
            int8_t low = bytes[i * 2 * half + j], high = bytes[i * 2 * half + half + j];
            packed[i * half + j] = (uint8_t)((low + 8) | (high + 8) << 4);
        }
    free(bytes);
}

// 12-bit codes to packed panels of shorts or, for AMX, to those of their two planes in turn: two bytes a code.
void qarl_pack_int12(int level, const int16_t *codes, int64_t n, int64_t k, void *packed) {
    if (level != 2) {
        pack_panels(codes, n, k, 2, packed);
        return;
    }
    int64_t panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel
    {
        int8_t *planes = malloc(2 * COLUMNS * k), *low = planes + COLUMNS * k;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            int64_t first = at_most(p * COLUMNS, n), rows = at_most(COLUMNS, n - first);  // none in panels of padding
            char *out = (char *)packed + 2 * p * panel_size(k);
            split_planes(codes + first * k, rows * k, planes, low);
            pack_panel((const char *)planes, rows, k, 1, out);
            pack_panel((const char *)low, rows, k, 1, out + panel_size(k));
        }
        free(planes);
    }
}

// The first `rows` rows of a packed panel, as codes [rows, k] of `size` bytes.
static void unpack_panel(const char *panel, int64_t rows, int64_t k, int64_t size, char *codes) {
    int64_t group = 4 * size;
    for (int64_t c = 0; c < rows; c++) {
        char *row = codes + c * k * size;
        for (int64_t g = 0; g < k / 4; g++) memcpy(row + g * group, panel + (g * COLUMNS + c) * group, group);
        memcpy(row + k / 4 * group, panel + (k / 4 * COLUMNS + c) * group, k % 4 * size);
    }
}

// What qarl_pack_int8 or, with `nibbles`, qarl_pack_nibbles packed: codes [n, k].
void qarl_unpack_int8(int nibbles, const void *packed, int64_t n, int64_t k, int8_t *codes) {
    packed_codes from = {nibbles ? NULL : packed, nibbles ? packed : NULL};
    int64_t width = round_up(k, K_MULTIPLE);
#pragma omp parallel
    {
        int8_t *room = room_for(&from, 1, width);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += COLUMNS) {
            const int8_t *panel = panels_of(&from, first / COLUMNS, 1, width, room);
            unpack_panel((const char *)panel, at_most(COLUMNS, n - first), k, 1, (char *)codes + first * k);
        }
        free(room);
    }
}

// What qarl_pack_int12 packed at this level: codes [n, k].
void qarl_unpack_int12(int level, const void *packed, int64_t n, int64_t k, int16_t *codes) {
#pragma omp parallel
    {
        int8_t *planes = malloc(2 * COLUMNS * k), *low = planes + COLUMNS * k;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += COLUMNS) {
            int64_t rows = at_most(COLUMNS, n - first);
            const char *panel = (const char *)packed + 2 * (first / COLUMNS) * panel_size(k);
            int16_t *out = codes + first * k;
            if (level != 2) {
                unpack_panel(panel, rows, k, 2, (char *)out);
                continue;
            }
            unpack_panel(panel, rows, k, 1, (char *)planes);
            unpack_panel(panel + panel_size(k), rows, k, 1, (char *)low);
            for (int64_t i = 0; i < rows * k; i++) out[i] = (int16_t)(256 * planes[i] + low[i]);
        }
        free(planes);
    }
}

// The transpose of int8 codes [k, n] packed in the same way: columns of `codes` become outputs.
void qarl_pack_int8_transposed(const int8_t *codes, int64_t n, int64_t k, int8_t *packed, int32_t *corrections) {
    int64_t groups = round_up(k, K_MULTIPLE) / 4, panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int8_t *out = packed + p * groups * COLUMNS * 4;
        int64_t first = p * COLUMNS, columns = at_most(COLUMNS, n - first), whole = columns == COLUMNS ? k / 4 : 0;
        for (int64_t g = 0; g < whole; g++) {
            const int8_t *four = codes + g * 4 * n + first;
            for (int64_t c = 0; c < COLUMNS; c++)
                for (int64_t j = 0; j < 4; j++) out[(g * COLUMNS + c) * 4 + j] = four[j * n + c];
        }
        memset(out + whole * COLUMNS * 4, 0, (groups - whole) * COLUMNS * 4);
        for (int64_t i = whole * 4; i < k; i++)
            for (int64_t c = 0; c < columns; c++) out[(i / 4 * COLUMNS + c) * 4 + i % 4] = codes[i * n + first + c];
    }
    if (corrections) correct_columns(packed, n, k, corrections);
}

// `level` is at most what `qarl_integer_level` answered. `nibbles` tells that weights are packed as such. Column
// scales, bias and residual, which may be y itself, may be NULL.
void qarl_int8_matmul(int level, int nibbles, const int8_t *codes, const float *row_scales, const void *weights,
                      const int32_t *corrections, const float *column_scales, const float *bias, const float *residual,
                      int64_t rows, int64_t n, int64_t k, float *y) {
    epilogue e = {row_scales, column_scales, bias, residual, y, n};
    packed_codes packed = {nibbles ? NULL : weights, nibbles ? weights : NULL};
    (void)corrections, (void)level;
#if defined(HAVE_AMX)
    if (level == 2) {
        amx_int8(codes, &packed, rows, k, &e);
        return;
    }
#endif
#if defined(HAVE_VNNI)
    if (level == 1) {
        vnni_int8(codes, &packed, corrections, rows, k, &e);
        return;
    }
#endif
#if defined(HAVE_NIBBLES)
    if (nibbles) {
        nibbles_int8(codes, weights, rows, k, &e);
        return;
    }
#endif
    pairs_int8(codes, &packed, rows, k, &e);
}

// The same for 12-bit codes [rows, k] and weights.
void qarl_int12_matmul(int level, const int16_t *codes, const float *row_scales, const void *packed,
                       const float *column_scales, const float *bias, const float *residual, int64_t rows, int64_t n,
                       int64_t k, float *y) {
    epilogue e = {row_scales, column_scales, bias, residual, y, n};
    (void)level;
#if defined(HAVE_AMX)
    if (level == 2) {
        amx_wide(PLANES, codes, packed, rows, k, &e);
        return;
    }
#endif
    pair_weights w = {{NULL, NULL}, packed, 1};
    pairs_wide(codes, &w, rows, k, &e);
}

// 16-bit codes [rows, k] times int8 weights: y = (codes @ weight^T) * row scale (+ added, which may be y
// itself). Gradients use it.
void qarl_mixed_matmul(int level, const int16_t *codes, const float *row_scales, const int8_t *packed,
                       const float *added, int64_t rows, int64_t n, int64_t k, float *y) {
    epilogue e = {row_scales, NULL, NULL, added, y, n};
    (void)level;
#if defined(HAVE_AMX)
    if (level == 2) {
        amx_wide(MIXED, codes, packed, rows, k, &e);
        return;
    }
#endif
    pair_weights w = {{packed, NULL}, NULL, 1};
    pairs_wide(codes, &w, rows, k, &e);
}
