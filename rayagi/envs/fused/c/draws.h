/* Counter-based random numbers: PCG-4D (Jarzynski, Olano 2020), the same as rayagi/envs/fused/draws.py. */

enum { START = 0, EXPLORE = 1 };

/* The upper 24 bits as a real in [0, 1). */
ALWAYS real unit(uint32_t word) { return (real)(int32_t)(word >> 8) * (real)0x1p-24; }

/* ``count`` uniform numbers in [0, 1) per lane; a block gives four. out: (count, L), allocated for whole blocks.
   Counter words: x = environment index, y = position, z = 4 * step + purpose, w = word + block * 0x9E3779B9. */
static inline void uniform(uint32_t word, const uint32_t *restrict index, const uint32_t *restrict position, uint32_t step,
                           uint32_t purpose, int count, real *restrict out) {
    uint32_t z0 = (step * 4u + purpose) * 1664525u + 1013904223u;
    for (; count > 0; count -= 4, out += 4 * L, word += 0x9E3779B9u) {
        uint32_t w0 = word * 1664525u + 1013904223u;
#pragma omp simd
        for (int j = 0; j < L; j++) {
            /* an LCG step of each word, a mixing round, a xorshift, a second mixing round */
            uint32_t x = index[j] * 1664525u + 1013904223u, y = position[j] * 1664525u + 1013904223u, z = z0, w = w0;
            x += y * w; y += z * x; z += x * y; w += y * z;
            x ^= x >> 16; y ^= y >> 16; z ^= z >> 16; w ^= w >> 16;
            out[j] = unit(x += y * w);
            if (count > 1) out[L + j] = unit(y += z * x);
            if (count > 2) out[2 * L + j] = unit(z += x * y);
            if (count > 3) out[3 * L + j] = unit(w + y * z);
        }
    }
}
