// What is asked of published weights: the sums that their checksum is made of (sync/checksum.py), and how many codes
// an update has changed.

#include <stdint.h>
#include <string.h>

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

static inline uint64_t word_at(const uint8_t *bytes, int64_t at, int64_t end) {  // zeros from `end` on
    uint64_t word = 0;
    memcpy(&word, bytes + at, end - at < 8 ? end - at : 8);
    return word;
}

// How many of a word's fields of so many bits, a power of two, are not zero.
static inline int64_t fields_set(uint64_t word, int bits) {
    for (int shift = bits / 2; shift; shift /= 2) word |= word >> shift;
    return __builtin_popcountll(word & ~0ull / ((1ull << bits) - 1));
}

// `changed` becomes how many codes of so many bits differ between two packings of [blocks, size] bytes. With `planes`,
// codes have their bits of one half of a block and as many of the other (see integer.h).
void qarl_count_changed(const uint8_t *before, const uint8_t *after, int64_t blocks, int64_t size, int bits, int planes,
                        int64_t *changed) {
    int64_t found = 0, plane = planes ? size / 2 : size;
#pragma omp parallel for schedule(static) reduction(+ : found)
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *x = before + b * size, *y = after + b * size;
        for (int64_t i = 0; i < plane; i += 8) {
            uint64_t differing = word_at(x, i, plane) ^ word_at(y, i, plane);
            if (planes) differing |= word_at(x + plane, i, plane) ^ word_at(y + plane, i, plane);
            if (differing) found += fields_set(differing, bits);  // an update changes few codes
        }
    }
    *changed = found;
}
