/* Random numbers: PCG-4D (Jarzynski, Olano 2020), as rayagi/envs/fused/draws.py has it. */

enum { START = 0, EXPLORE = 1 };

/* Four numbers of 24 bits per block and lane, in [0, 1). out: (4 * blocks, L). */
static void uniform(uint32_t word, const uint32_t *restrict index, const uint32_t *restrict position, uint32_t step,
                    uint32_t purpose, int blocks, float *restrict out) {
    for (int block = 0; block < blocks; block++, out += 4 * L) {
        uint32_t w0 = (word + (uint32_t)block * 0x9E3779B9u) * 1664525u + 1013904223u;
        uint32_t z0 = (step * 4u + purpose) * 1664525u + 1013904223u;
#pragma omp simd
        for (int j = 0; j < L; j++) {
            uint32_t x = index[j] * 1664525u + 1013904223u, y = position[j] * 1664525u + 1013904223u, z = z0, w = w0;
            x += y * w; y += z * x; z += x * y; w += y * z;
            x ^= x >> 16; y ^= y >> 16; z ^= z >> 16; w ^= w >> 16;
            x += y * w; y += z * x; z += x * y; w += y * z;
            out[j] = (float)(int32_t)(x >> 8) * 0x1p-24f;
            out[L + j] = (float)(int32_t)(y >> 8) * 0x1p-24f;
            out[2 * L + j] = (float)(int32_t)(z >> 8) * 0x1p-24f;
            out[3 * L + j] = (float)(int32_t)(w >> 8) * 0x1p-24f;
        }
    }
}
