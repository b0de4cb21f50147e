// Integer GEMMs with their epilogue: y = (codes @ weight^T) * (row scale * column scale) (+ bias) (+ residual).
//
// Sums are exact integers, so neither tiling nor threads can change a bit; only the last few floating-point
// operations of an element are ordered, and those are its own. Weights are packed once per published version as
// panels of 16 columns by groups of 4 along k, the layout that both AMX tiles and VNNI dot products want:
// [panels][k / 4][16 columns][4]. k is padded with zeros to 64 and the panels to a multiple of 4.
//
// 16-bit codes are two int8 planes, code = 256 high + low: their product is three exact int32 sums,
// 65536 hh + 256 (hl + lh) + ll, combined in 64 bits and rounded to a float once.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512VNNI__) || defined(__AMX_INT8__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#endif

#define COLUMNS 16       // of one panel
#define BLOCK_PANELS 4   // panels are padded to a multiple of this
#define K_MULTIPLE 64    // one AMX tile row

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

typedef struct {  // everything an epilogue needs to finish rows of y
    const float *row_scales, *column_scales, *bias, *residual;
    float *y;
    int64_t n;
} epilogue;

static inline void finish_row(const epilogue *e, int64_t row, int64_t first, int64_t columns, const float *sums) {
    float row_scale = e->row_scales[row], *out = e->y + row * e->n + first;
    const float *rest = e->residual ? e->residual + row * e->n + first : NULL;
    for (int64_t j = 0; j < columns; j++) {
        float value = sums[j] * (e->column_scales ? row_scale * e->column_scales[first + j] : row_scale);
        if (e->bias) value = value + e->bias[first + j];
        if (rest) value = value + rest[j];
        out[j] = value;
    }
}

static inline void finish_int8(const epilogue *e, int64_t row, int64_t first, int64_t columns, const int32_t *sums) {
    float values[BLOCK_PANELS * COLUMNS];
    for (int64_t j = 0; j < columns; j++) values[j] = (float)sums[j];
    finish_row(e, row, first, columns, values);
}

static inline void finish_int16(const epilogue *e, int64_t row, int64_t first, int64_t columns, const int32_t *high,
                                const int32_t *middle, const int32_t *low) {
    float values[BLOCK_PANELS * COLUMNS];
    for (int64_t j = 0; j < columns; j++)
        values[j] = (float)((int64_t)high[j] * 65536 + (int64_t)middle[j] * 256 + low[j]);
    finish_row(e, row, first, columns, values);
}

static inline void finish_mixed(const epilogue *e, int64_t row, int64_t first, int64_t columns, const int32_t *high,
                                const int32_t *low) {
    float values[BLOCK_PANELS * COLUMNS];
    for (int64_t j = 0; j < columns; j++) values[j] = (float)((int64_t)high[j] * 256 + low[j]);
    finish_row(e, row, first, columns, values);
}

// Which code path runs: 2 AMX tiles, 1 AVX-512 VNNI, 0 none (the caller then uses another GEMM).
int qarl_integer_level(void) {
#if defined(HAVE_AMX)
    // Ask Linux for the tile registers (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA); a container may refuse.
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) return 2;
#endif
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

// int8 codes [n, k] to packed panels; `corrections` [padded n] are
// -128 * (sum of a column), which undo the offset that makes VNNI's left operand unsigned.
static void pack_plane(const int8_t *codes, int64_t n, int64_t k, int8_t *packed, int32_t *corrections) {
    int64_t groups = round_up(k, K_MULTIPLE) / 4, panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int8_t *out = packed + p * groups * COLUMNS * 4;
        for (int64_t c = 0; c < COLUMNS; c++) {
            int64_t row = p * COLUMNS + c;
            int32_t sum = 0;
            for (int64_t g = 0; g < groups; g++)
                for (int64_t j = 0; j < 4; j++) {
                    int8_t code = row < n && g * 4 + j < k ? codes[row * k + g * 4 + j] : 0;
                    out[(g * COLUMNS + c) * 4 + j] = code;
                    sum += code;
                }
            corrections[row] = -128 * sum;
        }
    }
}

// The transpose of int8 codes [k, n] packed in the same way: columns of `codes` become outputs.
void qarl_pack_int8_transposed(const int8_t *codes, int64_t n, int64_t k, int8_t *packed, int32_t *corrections) {
    int64_t groups = round_up(k, K_MULTIPLE) / 4, panels = round_up(n, COLUMNS * BLOCK_PANELS) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        int64_t first = p * COLUMNS, columns = n - first < COLUMNS ? n - first : COLUMNS;
        int32_t sums[COLUMNS] = {0};
        int8_t *out = packed + p * groups * COLUMNS * 4;
        memset(out, 0, groups * COLUMNS * 4);
        for (int64_t i = 0; i < k; i++)
            for (int64_t c = 0; c < columns; c++) {
                int8_t code = codes[i * n + first + c];
                out[(i / 4 * COLUMNS + c) * 4 + i % 4] = code;
                sums[c] += code;
            }
        for (int64_t c = 0; c < COLUMNS; c++) corrections[first + c] = -128 * sums[c];
    }
}

void qarl_pack_int8(const int8_t *codes, int64_t n, int64_t k, int8_t *packed, int32_t *corrections) {
    pack_plane(codes, n, k, packed, corrections);
}

// Split 16-bit codes in [-32512, 32512] into planes in [-127, 127] and [-128, 127].
static void split_planes(const int16_t *codes, int64_t count, int8_t *high, int8_t *low) {
#pragma omp parallel for schedule(static) if (count > 65536)
    for (int64_t i = 0; i < count; i++) {
        high[i] = (int8_t)((codes[i] + 128) >> 8);
        low[i] = (int8_t)codes[i];
    }
}

void qarl_pack_int16(const int16_t *codes, int64_t n, int64_t k, int8_t *high, int8_t *low, int32_t *high_corrections,
                     int32_t *low_corrections) {
    int8_t *planes = malloc(2 * n * k);
    split_planes(codes, n * k, planes, planes + n * k);
    pack_plane(planes, n, k, high, high_corrections);
    pack_plane(planes + n * k, n, k, low, low_corrections);
    free(planes);
}

// Rows [rows, k] copied to [padded rows, padded k] with `flip` xor-ed in (0x80 turns int8 into offset uint8); padding
// is arbitrary but finite work: its products are never read, and its k part meets zero weights.
static int8_t *padded_rows(const int8_t *codes, int64_t rows, int64_t k, int64_t row_multiple, uint8_t flip) {
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

// The two planes of 16-bit rows, each as `padded_rows` makes them; the caller frees both.
static void padded_planes(const int16_t *codes, int64_t rows, int64_t k, uint8_t flip, int8_t **high, int8_t **low) {
    int8_t *planes = malloc(2 * rows * k);
    split_planes(codes, rows * k, planes, planes + rows * k);
    *high = padded_rows(planes, rows, k, 16, flip);
    *low = padded_rows(planes + rows * k, rows, k, 16, flip);
    free(planes);
}

#if defined(HAVE_AMX)

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

static void amx_int8(const int8_t *codes, const int8_t *packed, int64_t rows, int64_t k, const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), blocks = round_up(e->n, 32) / 32;
    int is_whole = rows % 16 == 0 && k % K_MULTIPLE == 0;
    int8_t *copy = is_whole ? NULL : padded_rows(codes, rows, k, 16, 0);
    const int8_t *a = copy ? copy : codes;
#pragma omp parallel
    {
        int32_t sums[32 * 32] __attribute__((aligned(64)));
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int8_t *w = packed + b * 2 * width * COLUMNS;
            int64_t first = b * 32, columns = e->n - first < 32 ? e->n - first : 32;
            for (int64_t t = 0; t < rows; t += 32) {
                int64_t count = rows - t < 32 ? rows - t : 32;
                amx_int8_block(a + t * width, width, w, w + width * COLUMNS, count <= 16, sums);
                for (int64_t r = 0; r < count; r++) finish_int8(e, t + r, first, columns, sums + r * 32);
            }
        }
        _tile_release();
    }
    free(copy);
}

static void amx_int16(const int8_t *a_high, const int8_t *a_low, const int8_t *high, const int8_t *low, int64_t rows,
                      int64_t width, const epilogue *e) {
    int64_t panels = round_up(e->n, COLUMNS) / COLUMNS;
#pragma omp parallel
    {
        int32_t sums[3][16 * COLUMNS] __attribute__((aligned(64)));
        configure_tiles();
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const int8_t *w_high = high + p * width * COLUMNS, *w_low = low + p * width * COLUMNS;
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
}

static void amx_mixed(const int8_t *a_high, const int8_t *a_low, const int8_t *packed, int64_t rows, int64_t width,
                      const epilogue *e) {
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
}

#endif

#if defined(__AVX512VNNI__)

// `m` rows (a compile-time constant) times 4 panels: uint8 x int8 dot products of 4, summed along k.
#define DEFINE_INT8_TILE(m)                                                                                 \
    static void int8_tile_##m(const int8_t *a, int64_t width, const int8_t *w, const int32_t *corrections,  \
                              int32_t *sums) {                                                              \
        __m512i acc[m][4];                                                                                  \
        for (int r = 0; r < m; r++)                                                                         \
            for (int p = 0; p < 4; p++) acc[r][p] = _mm512_loadu_si512(corrections + p * COLUMNS);          \
        for (int64_t g = 0; g < width / 4; g++) {                                                           \
            __m512i b[4];                                                                                   \
            for (int p = 0; p < 4; p++) b[p] = _mm512_loadu_si512(w + p * width * COLUMNS + g * 64);        \
            _Pragma("GCC unroll 8") for (int r = 0; r < m; r++) {                                           \
                int32_t four;                                                                               \
                memcpy(&four, a + r * width + g * 4, 4);                                                    \
                __m512i x = _mm512_set1_epi32(four);                                                        \
                _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++) acc[r][p] =                             \
                    _mm512_dpbusd_epi32(acc[r][p], x, b[p]);                                                \
            }                                                                                               \
        }                                                                                                   \
        for (int r = 0; r < m; r++)                                                                         \
            for (int p = 0; p < 4; p++) _mm512_storeu_si512(sums + r * 64 + p * COLUMNS, acc[r][p]);        \
    }
DEFINE_INT8_TILE(1)
DEFINE_INT8_TILE(2)
DEFINE_INT8_TILE(3)
DEFINE_INT8_TILE(4)
DEFINE_INT8_TILE(5)
DEFINE_INT8_TILE(6)

typedef void (*int8_tile)(const int8_t *, int64_t, const int8_t *, const int32_t *, int32_t *);
static const int8_tile INT8_TILES[] = {NULL,        int8_tile_1, int8_tile_2, int8_tile_3,
                                       int8_tile_4, int8_tile_5, int8_tile_6};

static void vnni_int8(const int8_t *codes, const int8_t *packed, const int32_t *corrections, int64_t rows, int64_t k,
                      const epilogue *e) {
    int64_t width = round_up(k, K_MULTIPLE), blocks = round_up(e->n, 64) / 64;
    int8_t *a = padded_rows(codes, rows, k, 1, 0x80);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        int32_t sums[6 * 64] __attribute__((aligned(64)));
        int64_t first = b * 64, columns = e->n - first < 64 ? e->n - first : 64;
        for (int64_t t = 0; t < rows; t += 6) {
            int64_t count = rows - t < 6 ? rows - t : 6;
            INT8_TILES[count](a + t * width, width, packed + b * 4 * width * COLUMNS, corrections + first, sums);
            for (int64_t r = 0; r < count; r++) finish_int8(e, t + r, first, columns, sums + r * 64);
        }
    }
    free(a);
}

#define ROWS16 4  // rows of one 16-bit tile: 3 sums by 2 panels each

static void vnni_int16_tile(const int8_t *a_high, const int8_t *a_low, int64_t width, int64_t rows, const int8_t *high,
                            const int8_t *low, const int32_t *high_corrections, const int32_t *low_corrections,
                            int32_t *sums) {
    __m512i hh[ROWS16][2], mid[ROWS16][2], ll[ROWS16][2];
    for (int p = 0; p < 2; p++) {
        __m512i of_high = _mm512_loadu_si512(high_corrections + p * COLUMNS);
        __m512i of_low = _mm512_loadu_si512(low_corrections + p * COLUMNS);
        for (int r = 0; r < ROWS16; r++) {
            hh[r][p] = of_high;
            mid[r][p] = _mm512_add_epi32(of_high, of_low);
            ll[r][p] = of_low;
        }
    }
    for (int64_t g = 0; g < width / 4; g++) {
        __m512i w_high[2], w_low[2];
        for (int p = 0; p < 2; p++) {
            w_high[p] = _mm512_loadu_si512(high + p * width * COLUMNS + g * 64);
            w_low[p] = _mm512_loadu_si512(low + p * width * COLUMNS + g * 64);
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < ROWS16; r++) {
            int64_t at = (r < rows ? r : rows - 1) * width + g * 4;
            int32_t four_high, four_low;
            memcpy(&four_high, a_high + at, 4);
            memcpy(&four_low, a_low + at, 4);
            __m512i x_high = _mm512_set1_epi32(four_high), x_low = _mm512_set1_epi32(four_low);
            _Pragma("GCC unroll 2") for (int p = 0; p < 2; p++) {
                hh[r][p] = _mm512_dpbusd_epi32(hh[r][p], x_high, w_high[p]);
                mid[r][p] = _mm512_dpbusd_epi32(mid[r][p], x_high, w_low[p]);
                mid[r][p] = _mm512_dpbusd_epi32(mid[r][p], x_low, w_high[p]);
                ll[r][p] = _mm512_dpbusd_epi32(ll[r][p], x_low, w_low[p]);
            }
        }
    }
    for (int r = 0; r < ROWS16; r++)
        for (int p = 0; p < 2; p++) {
            _mm512_storeu_si512(sums + r * 32 + p * COLUMNS, hh[r][p]);
            _mm512_storeu_si512(sums + (ROWS16 + r) * 32 + p * COLUMNS, mid[r][p]);
            _mm512_storeu_si512(sums + (2 * ROWS16 + r) * 32 + p * COLUMNS, ll[r][p]);
        }
}

static void vnni_int16(const int8_t *a_high, const int8_t *a_low, const int8_t *high, const int8_t *low,
                       const int32_t *high_corrections, const int32_t *low_corrections, int64_t rows, int64_t width,
                       const epilogue *e) {
    int64_t blocks = round_up(e->n, 32) / 32;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        int32_t sums[3 * ROWS16 * 32] __attribute__((aligned(64)));
        int64_t first = b * 32, columns = e->n - first < 32 ? e->n - first : 32, at = b * 2 * width * COLUMNS;
        for (int64_t t = 0; t < rows; t += ROWS16) {
            int64_t count = rows - t < ROWS16 ? rows - t : ROWS16;
            vnni_int16_tile(a_high + t * width, a_low + t * width, width, count, high + at, low + at,
                            high_corrections + first, low_corrections + first, sums);
            for (int64_t r = 0; r < count; r++)
                finish_int16(e, t + r, first, columns, sums + r * 32, sums + (ROWS16 + r) * 32,
                             sums + (2 * ROWS16 + r) * 32);
        }
    }
}

static void vnni_mixed_tile(const int8_t *a_high, const int8_t *a_low, int64_t width, int64_t rows, const int8_t *w,
                            const int32_t *corrections, int32_t *high, int32_t *low) {
    __m512i of_high[6][2], of_low[6][2];
    for (int r = 0; r < 6; r++)
        for (int p = 0; p < 2; p++) of_high[r][p] = of_low[r][p] = _mm512_loadu_si512(corrections + p * COLUMNS);
    for (int64_t g = 0; g < width / 4; g++) {
        __m512i b[2];
        for (int p = 0; p < 2; p++) b[p] = _mm512_loadu_si512(w + p * width * COLUMNS + g * 64);
        _Pragma("GCC unroll 6") for (int r = 0; r < 6; r++) {
            int64_t at = (r < rows ? r : rows - 1) * width + g * 4;
            int32_t four_high, four_low;
            memcpy(&four_high, a_high + at, 4);
            memcpy(&four_low, a_low + at, 4);
            _Pragma("GCC unroll 2") for (int p = 0; p < 2; p++) {
                of_high[r][p] = _mm512_dpbusd_epi32(of_high[r][p], _mm512_set1_epi32(four_high), b[p]);
                of_low[r][p] = _mm512_dpbusd_epi32(of_low[r][p], _mm512_set1_epi32(four_low), b[p]);
            }
        }
    }
    for (int r = 0; r < 6; r++)
        for (int p = 0; p < 2; p++) {
            _mm512_storeu_si512(high + r * 32 + p * COLUMNS, of_high[r][p]);
            _mm512_storeu_si512(low + r * 32 + p * COLUMNS, of_low[r][p]);
        }
}

static void vnni_mixed(const int8_t *a_high, const int8_t *a_low, const int8_t *packed, const int32_t *corrections,
                       int64_t rows, int64_t width, const epilogue *e) {
    int64_t blocks = round_up(e->n, 32) / 32;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        int32_t high[6 * 32] __attribute__((aligned(64))), low[6 * 32] __attribute__((aligned(64)));
        int64_t first = b * 32, columns = e->n - first < 32 ? e->n - first : 32;
        for (int64_t t = 0; t < rows; t += 6) {
            int64_t count = rows - t < 6 ? rows - t : 6;
            vnni_mixed_tile(a_high + t * width, a_low + t * width, width, count, packed + b * 2 * width * COLUMNS,
                            corrections + first, high, low);
            for (int64_t r = 0; r < count; r++) finish_mixed(e, t + r, first, columns, high + r * 32, low + r * 32);
        }
    }
}

#endif

// `level` is what `qarl_integer_level` answered, never 0 here. bias and residual may be NULL.
void qarl_int8_matmul(int level, const int8_t *codes, const float *row_scales, const int8_t *packed,
                      const int32_t *corrections, const float *column_scales, const float *bias, const float *residual,
                      int64_t rows, int64_t n, int64_t k, float *y) {
    epilogue e = {row_scales, column_scales, bias, residual, y, n};
    (void)corrections, (void)level, (void)e;
#if defined(HAVE_AMX)
    if (level == 2) {
        amx_int8(codes, packed, rows, k, &e);
        return;
    }
#endif
#if defined(__AVX512VNNI__)
    vnni_int8(codes, packed, corrections, rows, k, &e);
#endif
}

// The same for 16-bit codes [rows, k] and weights packed as two planes.
void qarl_int16_matmul(int level, const int16_t *codes, const float *row_scales, const int8_t *high, const int8_t *low,
                       const int32_t *high_corrections, const int32_t *low_corrections, const float *column_scales,
                       const float *bias, const float *residual, int64_t rows, int64_t n, int64_t k, float *y) {
    epilogue e = {row_scales, column_scales, bias, residual, y, n};
    int64_t width = round_up(k, K_MULTIPLE);
    int8_t *a_high, *a_low;
    padded_planes(codes, rows, k, level == 2 ? 0 : 0x80, &a_high, &a_low);
    (void)high_corrections, (void)low_corrections, (void)width, (void)e, (void)high, (void)low;
#if defined(HAVE_AMX)
    if (level == 2) amx_int16(a_high, a_low, high, low, rows, width, &e);
#endif
#if defined(__AVX512VNNI__)
    if (level == 1) vnni_int16(a_high, a_low, high, low, high_corrections, low_corrections, rows, width, &e);
#endif
    free(a_high);
    free(a_low);
}

// 16-bit codes [rows, k] times int8 weights of one plane: y = (codes @ weight^T) * row scale. Gradients use it.
void qarl_mixed_matmul(int level, const int16_t *codes, const float *row_scales, const int8_t *packed,
                       const int32_t *corrections, int64_t rows, int64_t n, int64_t k, float *y) {
    epilogue e = {row_scales, NULL, NULL, NULL, y, n};
    int64_t width = round_up(k, K_MULTIPLE);
    int8_t *a_high, *a_low;
    padded_planes(codes, rows, k, level == 2 ? 0 : 0x80, &a_high, &a_low);
    (void)corrections, (void)width, (void)e, (void)packed;
#if defined(HAVE_AMX)
    if (level == 2) amx_mixed(a_high, a_low, packed, rows, width, &e);
#endif
#if defined(__AVX512VNNI__)
    if (level == 1) vnni_mixed(a_high, a_low, packed, corrections, rows, width, &e);
#endif
    free(a_high);
    free(a_low);
}
