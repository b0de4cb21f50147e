// Rotary split and attention over key/value stores that hold fp32, or int8 codes with one scale a token and head.
//
// A query's keys are gathered by position, LANES at a time from position 0, whatever rows they live in: prefill, decode,
// shared prompts and packed training batches give the same bits. An int8 store is read as code * scale in fp32, which
// is what a learner that rounds its keys and values the same way multiplies.

#include "lanes.h"

// ---------------------------------------------------------------------------------------------- rope

// Rotate one head in the half-split layout: (a, b) -> (a cos - b sin, b cos + a sin).
static void rotate(const float *x, const float *cosine, const float *sine, int64_t half, float *y) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Keys or values of all tokens and heads: `values`, or where that is NULL `codes` and `scales`. Row r of head g is the
// vector r * row_step + g * head_step, and the scale of the same number.
typedef struct {
    float *values;
    int8_t *codes;
    float *scales;
    int64_t row_step, head_step;
} kv_store;

static inline int64_t place(const kv_store *store, int64_t row, int64_t head) {
    return row * store->row_step + head * store->head_step;
}

static void put(const kv_store *store, int64_t at, int64_t d, const float *x) {
    if (store->values)
        memcpy(store->values + at * d, x, d * sizeof(float));
    else
        store->scales[at] = quantize_row(x, d, 127.0f, store->codes + at * d);
}

// Split qkv [rows, (heads + 2 kv_heads) * d] into rotated queries [rows, heads, d] and rotated keys and plain
// values, which go to rows `slots[t]` of the stores. Head norms (Qwen3) may be NULL.
void qarl_split_rotate(const float *qkv, const int64_t *positions, const int64_t *slots, const float *cosines,
                       const float *sines, const float *q_gain, const float *k_gain, float *q, float *key_values,
                       int8_t *key_codes, float *key_scales, float *value_values, int8_t *value_codes,
                       float *value_scales, int64_t row_step, int64_t head_step, float eps, int64_t rows,
                       int64_t heads, int64_t kv_heads, int64_t d) {
    int64_t width = (heads + 2 * kv_heads) * d, half = d / 2;
    kv_store keys = {key_values, key_codes, key_scales, row_step, head_step};
    kv_store values = {value_values, value_codes, value_scales, row_step, head_step};
#pragma omp parallel if (rows * width > 16384)
    {
        float *normed = malloc(2 * d * sizeof(float)), *rotated = normed + d;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            const float *cosine = cosines + positions[t] * half, *sine = sines + positions[t] * half;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                const float *x = qkv + t * width + h * d, *gain = h < heads ? q_gain : k_gain;
                if (gain) {
                    rms_norm_row(x, gain, eps, d, normed);
                    x = normed;
                }
                if (h < heads) {
                    rotate(x, cosine, sine, half, q + (t * heads + h) * d);
                } else {
                    rotate(x, cosine, sine, half, rotated);
                    put(&keys, place(&keys, slots[t], h - heads), d, rotated);
                }
            }
            for (int64_t g = 0; g < kv_heads; g++)
                put(&values, place(&values, slots[t], g), d, qkv + t * width + (heads + kv_heads + g) * d);
        }
        free(normed);
    }
}

// ---------------------------------------------------------------------------------------------- attention

// Where one query's visible keys are: row numbers in position order, padded to whole vectors by repeating the last.
static int64_t gather_rows(const int64_t *pointers, const int64_t *starts, const int64_t *lengths, int64_t sequence,
                           int64_t visible, int64_t *rows) {
    int64_t j = 0;
    for (int64_t s = pointers[sequence]; j < visible; s++)
        for (int64_t i = 0; i < lengths[s] && j < visible; i++) rows[j++] = starts[s] + i;
    int64_t padded = (visible + LANES - 1) / LANES * LANES;
    for (; j < padded; j++) rows[j] = rows[visible - 1];
    return padded;
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE vf load_up_to(const float *p, int64_t left) { return left >= LANES ? load(p) : load_part(p, left, 0); }

ALWAYS_INLINE vf load_kv(const kv_store *store, int64_t at, int64_t d, int64_t c) {  // lanes c .. c + LANES of one head
    if (store->values) return load_up_to(store->values + at * d + c, d - c);
    vb codes = {0};
    memcpy(&codes, store->codes + at * d + c, d - c < LANES ? d - c : LANES);
    return as_floats(codes) * splat(store->scales[at]);
}

// Sums of the lanes of LANES vectors, as the lanes of one: a tree of pairwise merges, the same for every query.
#if LANES == 16
ALWAYS_INLINE vf sum_each(const vf x[LANES]) {
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = __builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#elif LANES == 8
ALWAYS_INLINE vf sum_each(const vf x[LANES]) {
    vf a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
ALWAYS_INLINE vf sum_each(const vf x[LANES]) {
    vf a[2];
    for (int i = 0; i < 2; i++)
        a[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 4, 5) + __builtin_shufflevector(x[i], x[i + 2], 2, 3, 6, 7);
    return __builtin_shufflevector(a[0], a[1], 0, 4, 2, 6) + __builtin_shufflevector(a[0], a[1], 1, 5, 3, 7);
}
#endif

// Softmax over scores in place, not yet divided; returns the sum and sets the maximum.
static float exponentiate(float *scores, int64_t padded, float *maximum) {
    vf best = splat(-INFINITY);
    for (int64_t j = 0; j < padded; j += LANES) best = vmax(best, load(scores + j));
    *maximum = max_lanes(best);
    vf peak = splat(*maximum), sum = splat(0);
    for (int64_t j = 0; j < padded; j += LANES) {
        vf e = vexp(load(scores + j) - peak);
        store(scores + j, e);
        sum = sum + e;
    }
    return sum_lanes(sum);
}

#define MOST_HEADS 4  // query heads of one kv head that are computed together

// Scores of `heads` queries [heads, d] against the keys of one kv head; lanes past `visible` are -inf.
ALWAYS_INLINE void scores_of(const float *q, const kv_store *keys, const int64_t *rows, int64_t g, int64_t visible,
                              int64_t padded, int64_t heads, int64_t d, float scale, float *scores) {
    int64_t chunks = (d + LANES - 1) / LANES;
    for (int64_t first = 0; first < padded; first += LANES) {
        vf partial[MOST_HEADS][LANES];
        for (int64_t jj = 0; jj < LANES; jj++) {
            int64_t at = place(keys, rows[first + jj], g);
            for (int64_t w = 0; w < chunks; w++) {
                vf key = load_kv(keys, at, d, w * LANES);
                for (int64_t h = 0; h < heads; h++) {
                    vf product = load_up_to(q + h * d + w * LANES, d - w * LANES) * key;
                    partial[h][jj] = w ? partial[h][jj] + product : product;
                }
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            float *out = scores + h * padded + first;
            store(out, sum_each(partial[h]) * splat(scale));
            for (int64_t jj = visible - first; jj < LANES; jj++) out[jj] = -INFINITY;
        }
    }
}

#define SUMS (LANES == 16 ? 24 : 12)  // vectors of sums that fit in registers, with room for operands

// out [heads, d] = values weighted by `weights` [heads, padded], in position order, divided by `totals`.
ALWAYS_INLINE void mix(const float *weights, const float *totals, const kv_store *values, const int64_t *rows,
                       int64_t g, int64_t visible, int64_t padded, int64_t heads, int64_t d,
                       float *out) {
    int64_t chunks = (d + LANES - 1) / LANES;
    int64_t most = SUMS / heads;
    for (int64_t first = 0; first < chunks; first += most) {
        int64_t count = chunks - first < most ? chunks - first : most;
        vf acc[MOST_HEADS][SUMS];
        for (int64_t h = 0; h < heads; h++)
            for (int64_t w = 0; w < count; w++) acc[h][w] = splat(0);
        for (int64_t j = 0; j < visible; j++) {
            int64_t at = place(values, rows[j], g);
            for (int64_t w = 0; w < count; w++) {
                vf value = load_kv(values, at, d, (first + w) * LANES);
                for (int64_t h = 0; h < heads; h++) acc[h][w] = acc[h][w] + splat(weights[h * padded + j]) * value;
            }
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t w = 0; w < count; w++) {
                vf result = acc[h][w] * splat(1.0f / totals[h]);
                int64_t at = (first + w) * LANES;
                store_part(out + h * d + at, d - at < LANES ? d - at : LANES, result);
            }
    }
}

ALWAYS_INLINE void attend_heads(const float *q, const kv_store *keys, const kv_store *values, const int64_t *rows,
                                int64_t g, int64_t visible, int64_t padded, int64_t heads, int64_t d,
                                float scale, float *scores, float *out, float *lse) {
    scores_of(q, keys, rows, g, visible, padded, heads, d, scale, scores);
    float totals[MOST_HEADS];
    for (int64_t h = 0; h < heads; h++) {
        float maximum;
        totals[h] = exponentiate(scores + h * padded, padded, &maximum);
        lse[h] = maximum + logf(totals[h]);
    }
    mix(scores, totals, values, rows, g, visible, padded, heads, d, out);
}

// Up to MOST_HEADS query heads of one kv head; common sizes are compiled with their loops unrolled.
static void attend(const float *q, const kv_store *keys, const kv_store *values, const int64_t *rows,
                   int64_t g, int64_t visible, int64_t padded, int64_t heads, int64_t d, float scale, float *scores,
                   float *out, float *lse) {
#define CASE(count, size)                                                                                              \
    if (heads == count && d == size && keys->values) {                                                                 \
        kv_store k = *keys, v = *values;                                                                               \
        k.codes = v.codes = NULL;                                                                                      \
        attend_heads(q, &k, &v, rows, g, visible, padded, count, size, scale, scores, out, lse);             \
        return;                                                                                                        \
    }                                                                                                                  \
    if (heads == count && d == size) {                                                                                 \
        kv_store k = *keys, v = *values;                                                                               \
        k.values = v.values = NULL;                                                                                    \
        attend_heads(q, &k, &v, rows, g, visible, padded, count, size, scale, scores, out, lse);             \
        return;                                                                                                        \
    }
    CASE(1, 64)
    CASE(2, 64)
    CASE(3, 64)
    CASE(4, 64)
    CASE(1, 128)
    CASE(2, 128)
#undef CASE
    attend_heads(q, keys, values, rows, g, visible, padded, heads, d, scale, scores, out, lse);
}

// out [queries, heads, d] and lse [queries, heads]. Query t belongs to sequence `sequences[t]` and sees its first
// `visible[t]` keys; sequence s owns spans pointers[s] .. pointers[s+1] of rows in the stores.
void qarl_attention(const float *q, float *key_values, int8_t *key_codes, float *key_scales, float *value_values,
                    int8_t *value_codes, float *value_scales, int64_t row_step, int64_t head_step,
                    const int64_t *sequences, const int64_t *visible, const int64_t *pointers, const int64_t *starts, const int64_t *lengths, float *out, float *lse,
                    float scale, int64_t queries, int64_t heads, int64_t kv_heads, int64_t d, int64_t longest) {
    int64_t repeat = heads / kv_heads, together = repeat < MOST_HEADS ? repeat : MOST_HEADS;
    int64_t room = (longest + LANES - 1) / LANES * LANES;
    kv_store keys = {key_values, key_codes, key_scales, row_step, head_step};
    kv_store values = {value_values, value_codes, value_scales, row_step, head_step};
    int64_t grain = queries > 16 ? kv_heads : 1;  // a query to a thread, unless there are too few to go round
#pragma omp parallel if (queries * longest * heads * d > 16384)
    {
        float *scores = aligned_alloc(64, MOST_HEADS * room * sizeof(float));
        int64_t *rows = malloc(room * sizeof(int64_t));
        int64_t gathered = -1, padded = 0;
#pragma omp for schedule(dynamic, grain) collapse(2)
        for (int64_t t = 0; t < queries; t++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                if (gathered != t) padded = gather_rows(pointers, starts, lengths, sequences[t], visible[t], rows);
                gathered = t;
                for (int64_t r = 0; r < repeat; r += together) {
                    int64_t count = repeat - r < together ? repeat - r : together, h = t * heads + g * repeat + r;
                    attend(q + h * d, &keys, &values, rows, g, visible[t], padded, count, d, scale, scores,
                           out + h * d, lse + h);
                }
            }
        }
        free(scores);
        free(rows);
    }
}

// ---------------------------------------------------------------------------------------------- gradients

static inline float dot(const float *a, const float *b, int64_t d) {
    vf sum = splat(0);
    for (int64_t i = 0; i < d; i += LANES) sum = sum + load_up_to(a + i, d - i) * load_up_to(b + i, d - i);
    return sum_lanes(sum);
}

static inline void add_scaled(float *y, float factor, const float *x, int64_t d) {  // y += factor * x
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) store(y + i, load(y + i) + splat(factor) * load(x + i));
    if (i < d) store_part(y + i, d - i, load_part(y + i, d - i, 0) + splat(factor) * load_part(x + i, d - i, 0));
}

// Gradients of attention over fp32 keys and values. `families` [n_families + 1] cuts the queries into runs whose keys
// are shared with no other run, so that (family, kv head) pairs are independent and each dk/dv element is summed in
// query order. dk and dv must arrive zeroed.
void qarl_attention_backward(const float *grad, const float *q, float *keys, const float *values, const float *out,
                             const float *lse, const int64_t *sequences, const int64_t *visible,
                             const int64_t *pointers, const int64_t *starts, const int64_t *lengths,
                             const int64_t *families, float *dq, float *dk, float *dv, float scale,
                             int64_t n_families, int64_t heads, int64_t kv_heads, int64_t d, int64_t longest) {
    int64_t repeat = heads / kv_heads, room = (longest + LANES - 1) / LANES * LANES;
    kv_store key_store = {keys, NULL, NULL, kv_heads, 1};
#pragma omp parallel
    {
        float *p = aligned_alloc(64, room * sizeof(float));
        int64_t *rows = malloc(room * sizeof(int64_t));
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t f = 0; f < n_families; f++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                for (int64_t t = families[f]; t < families[f + 1]; t++) {
                    int64_t padded = gather_rows(pointers, starts, lengths, sequences[t], visible[t], rows);
                    for (int64_t h = g * repeat; h < (g + 1) * repeat; h++) {
                        int64_t at = (t * heads + h) * d;
                        float delta = dot(grad + at, out + at, d);
                        vf peak = splat(lse[t * heads + h]);
                        scores_of(q + at, &key_store, rows, g, visible[t], padded, 1, d, scale, p);
                        for (int64_t j = 0; j < padded; j += LANES) store(p + j, vexp(load(p + j) - peak));
                        memset(dq + at, 0, d * sizeof(float));
                        for (int64_t j = 0; j < visible[t]; j++) {
                            int64_t kv = (rows[j] * kv_heads + g) * d;
                            float ds = p[j] * (dot(grad + at, values + kv, d) - delta) * scale;
                            add_scaled(dv + kv, p[j], grad + at, d);
                            add_scaled(dk + kv, ds, q + at, d);
                            add_scaled(dq + at, ds, keys + kv, d);
                        }
                    }
                }
            }
        }
        free(p);
        free(rows);
    }
}
