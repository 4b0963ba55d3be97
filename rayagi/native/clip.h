/* A gradient's norm, and its clipping. The sum is the same on every machine: products of floats are exact in a double, and so many
partial sums are added in one order. */
#include <math.h>
#include <stdint.h>

#define PARTS 16

/* Scale so many numbers, a multiple of PARTS, so that their norm is at most ``most`` (0: leave them). Returns the norm before. */
double rayagi_clip(float *x, int64_t count, double most) {
    double sums[PARTS] = {0}, sum = 0.0;
    for (int64_t i = 0; i < count; i += PARTS)
#pragma omp simd
        for (int j = 0; j < PARTS; j++) sums[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; j < PARTS; j++) sum += sums[j];
    const double norm = sqrt(sum), scale = most / (norm + 1e-6);
    if (most > 0.0 && !(scale >= 1.0)) { /* NaN makes all of them NaN */
        const float by = (float)scale;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) x[i] *= by;
    }
    return norm;
}
