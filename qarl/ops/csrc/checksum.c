// The sums of a tensor's bytes that its checksum is made of (sync/checksum.py).

#include <stdint.h>

// Of every chunk of 64-bit words [chunks, size] the sum of word * multiplier, and that of its upper half * multiplier,
// both modulo 2^64: sums [2, chunks].
void qarl_chunk_sums(const int64_t *words, const int64_t *multipliers, int64_t chunks, int64_t size, int64_t *sums) {
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        uint64_t of_words = 0, of_halves = 0;
        for (int64_t i = 0; i < size; i++) {
            uint64_t word = (uint64_t)words[c * size + i], multiplier = (uint64_t)multipliers[i];
            of_words += word * multiplier;
            of_halves += (word >> 32) * multiplier;
        }
        sums[c] = (int64_t)of_words;
        sums[chunks + c] = (int64_t)of_halves;
    }
}
