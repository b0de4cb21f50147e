// The end of the model: log-probabilities, entropies and sampling from rows of logits.

#include "lanes.h"

// Sum of exp((logit - peak) * inverse_temperature) over a row, four vectors wide.
static float exp_sum(const float *logits, int64_t n, float peak, float inverse_temperature) {
    vf sums[4] = {splat(0), splat(0), splat(0), splat(0)};
    vf top = splat(peak), factor = splat(inverse_temperature);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int w = 0; w < 4; w++) sums[w] = sums[w] + vexp((load(logits + i + w * LANES) - top) * factor);
    for (; i + LANES <= n; i += LANES) sums[0] = sums[0] + vexp((load(logits + i) - top) * factor);
    if (i < n) sums[0] = sums[0] + vexp((load_part(logits + i, n - i, -INFINITY) - top) * factor);
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
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

// -sum p log p of a row, p being its softmax: log(sum) - sum(e z) / sum with z = (logit - peak) / temperature.
static float entropy_of(const float *logits, int64_t n, float peak, float inverse_temperature, float sum) {
    vf weighted = splat(0), top = splat(peak), factor = splat(inverse_temperature);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf z = (load(logits + i) - top) * factor;
        weighted = weighted + vexp(z) * z;
    }
    if (i < n) {
        vf z = (load_part(logits + i, n - i, peak) - top) * factor;  // the padding has z = 0
        weighted = weighted + vexp(z) * z;
    }
    return logf(sum) - sum_lanes(weighted) / sum;
}

// Log-probability of one token a row under softmax(logits / temperature), and the row's entropy; `shifts` and `sums`
// serve the backward pass.
void qarl_token_logprobs(const float *logits, const int64_t *targets, float inverse_temperature, int64_t rows,
                         int64_t n, float *logprobs, float *shifts, float *sums, float *entropies) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = logits + t * n;
        shifts[t] = row_max(row, n);
        sums[t] = exp_sum(row, n, shifts[t], inverse_temperature);
        logprobs[t] = logprob(row[targets[t]], shifts[t], inverse_temperature, sums[t]);
        entropies[t] = entropy_of(row, n, shifts[t], inverse_temperature, sums[t]);
    }
}

// Softmax of rows in place, from the shift and sum above: the backward pass's probabilities.
void qarl_softmax(float *logits, const float *shifts, const float *sums, float inverse_temperature, int64_t rows,
                  int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        float *row = logits + t * n;
        vf top = splat(shifts[t]), factor = splat(inverse_temperature), inverse = splat(1.0f / sums[t]);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(row + i, vexp((load(row + i) - top) * factor) * inverse);
        if (i < n) store_part(row + i, n - i, vexp((load_part(row + i, n - i, -INFINITY) - top) * factor) * inverse);
    }
}

#define SAMPLE_BLOCK 1024

// The token at which the cumulative weight passes `threshold`; a token of weight 0 is never chosen.
static int64_t choose(const float *row, int64_t n, float peak, float inverse_temperature, float uniform) {
    int64_t blocks = (n + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    double total = 0, *block_sums = malloc(blocks * sizeof(double));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * SAMPLE_BLOCK, width = n - first < SAMPLE_BLOCK ? n - first : SAMPLE_BLOCK;
        total += block_sums[b] = exp_sum(row + first, width, peak, inverse_temperature);
    }
    double threshold = (double)uniform * total, passed = 0;
    int64_t block = 0, last_nonzero = -1;
    while (block + 1 < blocks && passed + block_sums[block] <= threshold) passed += block_sums[block++];
    free(block_sums);
    vf top = splat(peak), factor = splat(inverse_temperature);
    for (int64_t i = block * SAMPLE_BLOCK; i < n; i += LANES) {
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
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *row = logits + t * n;
        float peak = row_max(row, n);
        tokens[t] = choose(row, n, peak, inverse_temperature, uniforms[t]);
        float sum = exp_sum(row, n, peak, inverse_temperature);
        logprobs[t] = logprob(row[tokens[t]], peak, inverse_temperature, sum);
    }
}
