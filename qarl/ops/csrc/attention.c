// Rotary split and attention over key/value stores that hold fp32, or int8 codes with one scale a token and head.
//
// A query's keys are gathered by position, LANES at a time from position 0, whatever rows they live in: prefill,
// decode, shared prompts and packed training batches give the same bits. An int8 store is read as code * scale in fp32,
// which is what a learner that rounds its keys and values the same way multiplies.

#include "lanes.h"

#include <omp.h>

// ---------------------------------------------------------------------------------------------- rope

// Rotate one head in the half-split layout by an angle, or by its opposite with `direction` -1:
// (a, b) -> (a cos - b sin, b cos + a sin).
ALWAYS_INLINE void rotate(const float *x, const float *cosine, const float *sine, float direction, int64_t half,
                          float *y) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], s = direction * sine[i];
        y[i] = a * cosine[i] - b * s;
        y[i + half] = b * cosine[i] + a * s;
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
                    rotate(x, cosine, sine, 1, half, q + (t * heads + h) * d);
                } else {
                    rotate(x, cosine, sine, 1, half, rotated);
                    put(&keys, place(&keys, slots[t], h - heads), d, rotated);
                }
            }
            for (int64_t g = 0; g < kv_heads; g++)
                put(&values, place(&values, slots[t], g), d, qkv + t * width + (heads + kv_heads + g) * d);
        }
        free(normed);
    }
}

// The gradient of qkv from those of rotated queries and keys and of values: turned back by the opposite angle.
void qarl_split_rotate_backward(const float *dq, const float *dk, const float *dv, const int64_t *positions,
                                const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t kv_heads,
                                int64_t d, float *grad) {
    int64_t half = d / 2;
#pragma omp parallel for schedule(static) if (rows * heads * d > 16384)
    for (int64_t t = 0; t < rows; t++) {
        const float *cosine = cosines + positions[t] * half, *sine = sines + positions[t] * half;
        float *out = grad + t * (heads + 2 * kv_heads) * d;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            const float *x = h < heads ? dq + (t * heads + h) * d : dk + (t * kv_heads + h - heads) * d;
            rotate(x, cosine, sine, -1, half, out + h * d);
        }
        memcpy(out + (heads + kv_heads) * d, dv + t * kv_heads * d, kv_heads * d * sizeof(float));
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

ALWAYS_INLINE vf load_kv(const kv_store *store, int64_t at, int64_t d, int64_t c) {  // lanes c .. c + LANES of one head
    if (store->values) return load_up_to(store->values + at * d + c, d - c);
    vb codes = {0};
    memcpy(&codes, store->codes + at * d + c, d - c < LANES ? d - c : LANES);
    return as_floats(codes) * splat(store->scales[at]);
}

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

// One head's vectors in the order of positions: rows[0] to rows[padded - 1], of which the last are repeated; and what
// will be read after them, if anything.
typedef struct {
    const kv_store *store;
    int64_t head;
    const kv_store *next_store;
    int64_t next_head;
    const int64_t *rows;
    int64_t padded;
} walk;

ALWAYS_INLINE int64_t at_row(const walk *w, int64_t j) { return place(w->store, w->rows[j], w->head); }

#define VECTORS_AHEAD 16  // of this head, into the first-level cache

// Ask for a vector of one head, where the processor does not expect it; `locality` as __builtin_prefetch has it.
#define ASK_FOR(store, at, d, locality)                                                                               \
    do {                                                                                                               \
        int64_t size = (store)->values ? 4 : 1;                                                                        \
        const char *start = (store)->values ? (const char *)(store)->values : (const char *)(store)->codes;           \
        start += (at) * (d) * size;                                                                                    \
        for (int64_t byte = 0; byte < (d) * size; byte += 64) __builtin_prefetch(start + byte, 0, locality);          \
    } while (0)

// Ask for vectors to come. Few can be on their way to the nearest cache at a time: so those of the next head are asked
// for while this one is computed, and only come nearer.
ALWAYS_INLINE void look_ahead(const walk *w, int64_t j, int64_t d) {
    if (j + VECTORS_AHEAD < w->padded) ASK_FOR(w->store, at_row(w, j + VECTORS_AHEAD), d, 3);
    if (w->next_store) ASK_FOR(w->next_store, place(w->next_store, w->rows[j], w->next_head), d, 2);
}

#define MOST_HEADS 4  // query heads of one kv head that are computed together

// Scores of `heads` queries [heads, d] against the keys of one kv head; lanes past `visible` are -inf.
ALWAYS_INLINE void scores_of(const float *q, const walk *keys, int64_t visible, int64_t heads, int64_t d, float scale,
                             float *scores) {
    int64_t chunks = (d + LANES - 1) / LANES;
    for (int64_t first = 0; first < keys->padded; first += LANES) {
        vf partial[MOST_HEADS][LANES];
        for (int64_t jj = 0; jj < LANES; jj++) {
            int64_t at = at_row(keys, first + jj);
            look_ahead(keys, first + jj, d);
            for (int64_t w = 0; w < chunks; w++) {
                vf key = load_kv(keys->store, at, d, w * LANES);
                for (int64_t h = 0; h < heads; h++) {
                    vf query = load_up_to(q + h * d + w * LANES, d - w * LANES);
                    partial[h][jj] = w ? fused(query, key, partial[h][jj]) : query * key;
                }
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            float *out = scores + h * keys->padded + first;
            store(out, sum_each(partial[h]) * splat(scale));
            for (int64_t jj = visible < first ? 0 : visible - first; jj < LANES; jj++) out[jj] = -INFINITY;
        }
    }
}

#define SUMS (LANES == 16 ? 24 : 12)  // vectors of sums that fit in registers, with room for operands

// out [heads, d] = values weighted by `weights` [heads, padded], in position order, divided by `totals`.
ALWAYS_INLINE void mix(const float *weights, const float *totals, const walk *values, int64_t visible, int64_t heads,
                       int64_t d, float *out) {
    int64_t chunks = (d + LANES - 1) / LANES;
    int64_t most = SUMS / heads;
    for (int64_t first = 0; first < chunks; first += most) {
        int64_t count = chunks - first < most ? chunks - first : most;
        vf acc[MOST_HEADS][SUMS];
        for (int64_t h = 0; h < heads; h++)
            for (int64_t w = 0; w < count; w++) acc[h][w] = splat(0);
        for (int64_t j = 0; j < visible; j++) {
            int64_t at = at_row(values, j);
            look_ahead(values, j, d);
            for (int64_t w = 0; w < count; w++) {
                vf value = load_kv(values->store, at, d, (first + w) * LANES);
                for (int64_t h = 0; h < heads; h++)
                    acc[h][w] = fused(splat(weights[h * values->padded + j]), value, acc[h][w]);
            }
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t w = 0; w < count; w++) {
                vf result = acc[h][w] * splat(1.0f / totals[h]);
                int64_t at = (first + w) * LANES;
                store_up_to(out + h * d + at, d - at, result);
            }
    }
}

ALWAYS_INLINE void attend_heads(const float *q, const walk *keys, const walk *values, int64_t visible, int64_t heads,
                                int64_t d, float scale, float *scores, float *out, float *lse) {
    scores_of(q, keys, visible, heads, d, scale, scores);
    float totals[MOST_HEADS];
    for (int64_t h = 0; h < heads; h++) {
        float maximum;
        totals[h] = exponentiate(scores + h * keys->padded, keys->padded, &maximum);
        lse[h] = maximum + logf(totals[h]);
    }
    mix(scores, totals, values, visible, heads, d, out);
}

// (heads, d) that are compiled with their loops unrolled.
#define COMMON_SIZES(CASE) \
    CASE(1, 64) CASE(2, 64) CASE(3, 64) CASE(4, 64) CASE(1, 128) CASE(2, 128) CASE(4, 128)

// Up to MOST_HEADS query heads of one kv head. Each kind of store is told apart from the other once.
static void attend(const float *q, const walk *keys, const walk *values, int64_t visible, int64_t heads, int64_t d,
                   float scale, float *scores, float *out, float *lse) {
    kv_store key_store = *keys->store, value_store = *values->store;
    walk k = *keys, v = *values;
    k.store = &key_store, v.store = &value_store;
#define CASE(count, size)                                                                   \
    if (heads == count && d == size && keys->store->values) {                               \
        key_store.codes = value_store.codes = NULL;                                         \
        attend_heads(q, &k, &v, visible, count, size, scale, scores, out, lse);             \
        return;                                                                             \
    }                                                                                       \
    if (heads == count && d == size) {                                                      \
        key_store.values = value_store.values = NULL;                                       \
        attend_heads(q, &k, &v, visible, count, size, scale, scores, out, lse);             \
        return;                                                                             \
    }
    COMMON_SIZES(CASE)
#undef CASE
    attend_heads(q, keys, values, visible, heads, d, scale, scores, out, lse);
}

// out [queries, heads, d] and lse [queries, heads]. Query t belongs to sequence `sequences[t]` and sees its first
// `visible[t]` keys; sequence s owns spans pointers[s] .. pointers[s+1] of rows in the stores.
void qarl_attention(const float *q, float *key_values, int8_t *key_codes, float *key_scales, float *value_values,
                    int8_t *value_codes, float *value_scales, int64_t row_step, int64_t head_step,
                    const int64_t *sequences, const int64_t *visible, const int64_t *pointers,
                    const int64_t *starts, const int64_t *lengths, float *out, float *lse, float scale,
                    int64_t queries, int64_t heads, int64_t kv_heads, int64_t d, int64_t longest) {
    int64_t repeat = heads / kv_heads, together = repeat < MOST_HEADS ? repeat : MOST_HEADS;
    int64_t room = (longest + LANES - 1) / LANES * LANES;
    kv_store keys = {key_values, key_codes, key_scales, row_step, head_step};
    kv_store values = {value_values, value_codes, value_scales, row_step, head_step};
    // A thread takes all heads of a query, whose rows it then gathers once; one head where queries are too few.
    int64_t grain = queries < 4 * omp_get_max_threads() ? 1 : kv_heads;
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
                // Values are read after their keys, and the next head's keys after these values.
                walk key_walk = {&keys, g, &values, g, rows, padded};
                walk value_walk = {&values, g, g + 1 < kv_heads && grain > 1 ? &keys : NULL, g + 1, rows, padded};
                for (int64_t r = 0; r < repeat; r += together) {
                    int64_t count = repeat - r < together ? repeat - r : together, h = t * heads + g * repeat + r;
                    attend(q + h * d, &key_walk, &value_walk, visible[t], count, d, scale, scores, out + h * d,
                           lse + h);
                }
            }
        }
        free(scores);
        free(rows);
    }
}

// ---------------------------------------------------------------------------------------------- gradients

#define BLOCK_QUERIES 8  // neighbours of one sequence, whose share of a key's gradient is added at once

static inline float dot(const float *a, const float *b, int64_t d) {
    vf sum = splat(0);
    for (int64_t i = 0; i < d; i += LANES) sum = fused(load_up_to(a + i, d - i), load_up_to(b + i, d - i), sum);
    return sum_lanes(sum);
}

typedef struct {  // what the gradient of attention reads and writes; see `qarl_attention_backward`
    const float *grad, *q, *out, *lse;
    kv_store keys, values;
    float *dq, *dk, *dv;
    float scale;
    int64_t heads, d;
} attention_gradient;

// Probabilities p and score gradients ds of one query's `heads` heads from `head` on, [heads, padded], zero past
// `visible`; writes dq. `rows` are those of the block's last query, `padded` of them.
ALWAYS_INLINE void query_gradient(const attention_gradient *a, const int64_t *rows, int64_t t, int64_t g, int64_t head,
                                  int64_t visible, int64_t padded, int64_t heads, int64_t d, float *p, float *ds) {
    int64_t at = (t * a->heads + head) * d;
    const float ones[MOST_HEADS] = {1, 1, 1, 1};
    walk keys = {&a->keys, g, NULL, 0, rows, padded}, values = {&a->values, g, NULL, 0, rows, padded};
    scores_of(a->q + at, &keys, visible, heads, d, a->scale, p);
    scores_of(a->grad + at, &values, visible, heads, d, 1.0f, ds);
    for (int64_t h = 0; h < heads; h++) {
        vf delta = splat(dot(a->grad + at + h * d, a->out + at + h * d, d)), factor = splat(a->scale);
        vf peak = splat(a->lse[t * a->heads + head + h]);
        float *p_h = p + h * padded, *ds_h = ds + h * padded;
        for (int64_t j = 0; j < padded; j += LANES) {
            vf e = vexp(load(p_h + j) - peak);
            store(p_h + j, e);
            store(ds_h + j, e * (load(ds_h + j) - delta) * factor);
        }
        for (int64_t j = visible; j < padded; j++) ds_h[j] = 0;  // not 0 * -inf
    }
    mix(ds, ones, &keys, visible, heads, d, a->dq + at);
}

// dk and dv of every row that a block of `count` queries sees: the sums over queries and heads of ds q and p grad.
ALWAYS_INLINE void add_to_rows(const attention_gradient *a, const int64_t *rows, int64_t t, int64_t count, int64_t g,
                               int64_t head, int64_t seen, int64_t padded, int64_t heads, int64_t d, const float *p,
                               const float *ds) {
    enum { CHUNKS = LANES == 16 ? 8 : 4 };
    for (int64_t j = 0; j < seen; j++) {
        int64_t at = place(&a->keys, rows[j], g) * d;
        for (int64_t first = 0; first < d; first += CHUNKS * LANES) {
            int64_t width = d - first < CHUNKS * LANES ? d - first : CHUNKS * LANES;
            int64_t chunks = (width + LANES - 1) / LANES;
            vf of_key[CHUNKS], of_value[CHUNKS];
            for (int64_t w = 0; w < chunks; w++) {
                of_key[w] = load_up_to(a->dk + at + first + w * LANES, width - w * LANES);
                of_value[w] = load_up_to(a->dv + at + first + w * LANES, width - w * LANES);
            }
            for (int64_t b = 0; b < count; b++)
                for (int64_t h = 0; h < heads; h++) {
                    int64_t query = ((t + b) * a->heads + head + h) * d + first, weight = (b * heads + h) * padded + j;
                    vf ds_j = splat(ds[weight]), p_j = splat(p[weight]);
                    for (int64_t w = 0; w < chunks; w++) {
                        int64_t lanes = query + w * LANES, left = width - w * LANES;
                        of_key[w] = fused(ds_j, load_up_to(a->q + lanes, left), of_key[w]);
                        of_value[w] = fused(p_j, load_up_to(a->grad + lanes, left), of_value[w]);
                    }
                }
            for (int64_t w = 0; w < chunks; w++) {
                store_up_to(a->dk + at + first + w * LANES, width - w * LANES, of_key[w]);
                store_up_to(a->dv + at + first + w * LANES, width - w * LANES, of_value[w]);
            }
        }
    }
}

ALWAYS_INLINE void block_gradient(const attention_gradient *a, const int64_t *rows, const int64_t *visible, int64_t t,
                                  int64_t count, int64_t g, int64_t head, int64_t seen, int64_t padded, int64_t heads,
                                  int64_t d, float *p, float *ds) {
    for (int64_t b = 0; b < count; b++) {
        int64_t at = b * heads * padded;
        query_gradient(a, rows, t + b, g, head, visible[t + b], padded, heads, d, p + at, ds + at);
    }
    add_to_rows(a, rows, t, count, g, head, seen, padded, heads, d, p, ds);
}

static void block_gradient_of(const attention_gradient *a, const int64_t *rows, const int64_t *visible, int64_t t,
                              int64_t count, int64_t g, int64_t head, int64_t seen, int64_t padded, int64_t heads,
                              float *p, float *ds) {
#define CASE(fixed_heads, size)                                                                                        \
    if (heads == fixed_heads && a->d == size) {                                                                        \
        block_gradient(a, rows, visible, t, count, g, head, seen, padded, fixed_heads, size, p, ds);                   \
        return;                                                                                                        \
    }
    COMMON_SIZES(CASE)
#undef CASE
    block_gradient(a, rows, visible, t, count, g, head, seen, padded, heads, a->d, p, ds);
}

// How many queries from `t` on, before `end`, follow one another in one sequence.
static int64_t block_at(const int64_t *sequences, const int64_t *visible, int64_t t, int64_t end) {
    int64_t count = 1;
    while (count < BLOCK_QUERIES && t + count < end && sequences[t + count] == sequences[t] &&
           visible[t + count] > visible[t + count - 1])
        count++;
    return count;
}

// Gradients of attention over fp32 keys and values. `families` [n_families + 1] cuts the queries into runs whose keys
// are shared with no other run, so that (family, kv head) pairs are independent and each dk/dv element is summed in
// the same order however many threads there are. dk and dv must arrive zeroed.
void qarl_attention_backward(const float *grad, const float *q, float *keys, float *values, const float *out,
                             const float *lse, const int64_t *sequences, const int64_t *visible,
                             const int64_t *pointers, const int64_t *starts, const int64_t *lengths,
                             const int64_t *families, float *dq, float *dk, float *dv, float scale,
                             int64_t n_families, int64_t heads, int64_t kv_heads, int64_t d, int64_t longest) {
    int64_t repeat = heads / kv_heads, together = repeat < MOST_HEADS ? repeat : MOST_HEADS;
    int64_t room = (longest + LANES - 1) / LANES * LANES;
    kv_store key_store = {keys, NULL, NULL, kv_heads, 1}, value_store = {values, NULL, NULL, kv_heads, 1};
    attention_gradient a = {grad, q, out, lse, key_store, value_store, dq, dk, dv, scale, heads, d};
#pragma omp parallel
    {
        float *p = aligned_alloc(64, 2 * BLOCK_QUERIES * MOST_HEADS * room * sizeof(float));
        float *ds = p + BLOCK_QUERIES * MOST_HEADS * room;
        int64_t *rows = malloc(room * sizeof(int64_t));
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t f = 0; f < n_families; f++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                for (int64_t t = families[f], count; t < families[f + 1]; t += count) {
                    count = block_at(sequences, visible, t, families[f + 1]);
                    int64_t seen = visible[t + count - 1];
                    int64_t padded = gather_rows(pointers, starts, lengths, sequences[t], seen, rows);
                    for (int64_t r = 0; r < repeat; r += together) {
                        int64_t some = repeat - r < together ? repeat - r : together;
                        block_gradient_of(&a, rows, visible, t, count, g, g * repeat + r, seen, padded, some, p, ds);
                    }
                }
            }
        }
        free(p);
        free(rows);
    }
}
