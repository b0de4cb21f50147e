// The end of the model: log-probabilities, entropies and sampling from rows of logits.

#include "lanes.h"

#define BLOCK 1024  // logits whose sum is kept for sampling

#define LOWEST -200.0f  // where exp is 0 already

#define WAYS 4  // sums that grow side by side

static inline vf load_logits(const float *logits, int64_t left) {
    if (left >= LANES) return load(logits);
    return left > 0 ? load_part(logits, left, -INFINITY) : splat(-INFINITY);
}

typedef struct {  // of one row: e = exp(z), z = (logit - peak) * inverse_temperature
    double sum, weighted;  // of e and of e z
} exp_sums;

// `blocks` may be NULL.
static exp_sums sums_of(const float *logits, int64_t n, float peak, float inverse_temperature, double *blocks) {
    exp_sums total = {0, 0};
    vf top = splat(peak), factor = splat(inverse_temperature), lowest = splat(LOWEST);
    for (int64_t first = 0; first < n; first += BLOCK) {
        int64_t width = n - first < BLOCK ? n - first : BLOCK;
        vf sum[WAYS], weighted[WAYS];
        for (int w = 0; w < WAYS; w++) sum[w] = weighted[w] = splat(0);
        for (int64_t i = 0; i < width; i += WAYS * LANES)
            for (int w = 0; w < WAYS; w++) {
                vf x = load_logits(logits + first + i + w * LANES, width - i - w * LANES);
                vf z = vmax(lowest, (x - top) * factor), e = vexp(z);
                sum[w] = sum[w] + e;
                weighted[w] = fused(e, z, weighted[w]);
            }
        double block = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
        if (blocks) blocks[first / BLOCK] = block;
        total.sum += block;
        total.weighted += sum_lanes((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
    }
    return total;
}

static float row_max(const float *x, int64_t n) {
    vf best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) best = vmax(best, load(x + i));
    if (i < n) best = vmax(best, load_part(x + i, n - i, -INFINITY));
    return max_lanes(best);
}

static float logprob(float logit, float peak, float inverse_temperature, float sum) {
    return (logit - peak) * inverse_temperature - logf(sum);
}

// Log-probability of one token a row under softmax(logits / temperature), and the row's entropy; `shifts` and `sums`
// serve the backward pass.
void qarl_token_logprobs(const float *logits, const int64_t *targets, float inverse_temperature, int64_t rows,
                         int64_t n, float *logprobs, float *shifts, float *sums, float *entropies) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = logits + t * n;
        shifts[t] = row_max(row, n);
        exp_sums found = sums_of(row, n, shifts[t], inverse_temperature, NULL);
        sums[t] = (float)found.sum;
        logprobs[t] = logprob(row[targets[t]], shifts[t], inverse_temperature, sums[t]);
        // -sum p log p = log(sum) - sum(e z) / sum
        entropies[t] = (float)(log(found.sum) - found.weighted / found.sum);
    }
}

// The gradient of the loss with respect to a block of logits [rows, n], in place, from the shifts, sums and entropies
// above. Row t has p = softmax; its log-probability's gradient `grads[t]` gives (onehot - p) / temperature, and, unless
// they are NULL, its entropy's `entropy_grads[t]` gives -p (log p + entropy) / temperature. `targets` count from the
// block's first column and may lie outside.
void qarl_logits_gradient(float *logits, const int64_t *targets, const float *shifts, const float *sums,
                          const float *entropies, const float *grads, const float *entropy_grads,
                          float inverse_temperature, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        float *row = logits + t * n, scale = inverse_temperature / sums[t];
        float of_entropy = entropy_grads ? entropy_grads[t] : 0.0f;
        float constant = grads[t] + of_entropy * (entropies[t] - logf(sums[t]));
        vf top = splat(shifts[t]), factor = splat(inverse_temperature), minus_scale = splat(-scale);
        vf lowest = splat(LOWEST);
        for (int64_t i = 0; i < n; i += LANES) {
            vf z = vmax(lowest, (load_up_to(row + i, n - i) - top) * factor);
            vf towards = entropy_grads ? fused(splat(of_entropy), z, splat(constant)) : splat(constant);
            store_up_to(row + i, n - i, vexp(z) * minus_scale * towards);
        }
        if (targets[t] >= 0 && targets[t] < n) row[targets[t]] += grads[t] * inverse_temperature;
    }
}

// The token at which the cumulative weight passes `uniform` of their sum; a token of weight 0 is never chosen.
static int64_t choose(const float *row, int64_t n, float peak, float inverse_temperature, const double *blocks,
                      double total, float uniform) {
    double threshold = (double)uniform * total, passed = 0;
    int64_t block = 0, last_nonzero = -1;
    while ((block + 1) * BLOCK < n && passed + blocks[block] <= threshold) passed += blocks[block++];
    vf top = splat(peak), factor = splat(inverse_temperature);
    for (int64_t i = block * BLOCK; i < n; i += LANES) {
        int64_t width = n - i < LANES ? n - i : LANES;
        vf weights = vexp((load_part(row + i, width, -INFINITY) - top) * factor);
        for (int64_t lane = 0; lane < width; lane++) {
            if (weights[lane] > 0) last_nonzero = i + lane;
            passed += weights[lane];
            if (passed > threshold && weights[lane] > 0) return i + lane;
        }
    }
    if (last_nonzero >= 0) return last_nonzero;
    for (int64_t i = n - 1; i > 0; i--)  // rounding left the threshold past the end: the last token that can be drawn
        if ((vexp((splat(row[i]) - top) * factor))[0] > 0) return i;
    return 0;  // or none can be drawn, of logits that are NaN: its log-probability tells
}

// Draw one token a row by inverting the cumulative distribution at `uniforms[t]` in [0, 1).
void qarl_sample(const float *logits, const float *uniforms, float inverse_temperature, int64_t rows, int64_t n,
                 int64_t *tokens, float *logprobs) {
#pragma omp parallel
    {
        double *blocks = malloc((n + BLOCK - 1) / BLOCK * sizeof(double));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            const float *row = logits + t * n;
            float peak = row_max(row, n);
            exp_sums found = sums_of(row, n, peak, inverse_temperature, blocks);
            tokens[t] = choose(row, n, peak, inverse_temperature, blocks, found.sum, uniforms[t]);
            logprobs[t] = logprob(row[tokens[t]], peak, inverse_temperature, (float)found.sum);
        }
        free(blocks);
    }
}
