/* A gradient's norm, and its clipping. Sums are the same on every machine: products of floats are exact in a double, and so many
partial sums are added in one order. */
#include <math.h>
#include <stdint.h>

#define PARTS 16

/* The sum of so many numbers' squares. */
double rayagi_squares(const float *x, int64_t count) {
    double sums[PARTS] = {0}, sum = 0.0;
    int64_t i = 0;
    for (; i + PARTS <= count; i += PARTS)
#pragma omp simd
        for (int j = 0; j < PARTS; j++) sums[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i + j < count; j++) sums[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; j < PARTS; j++) sum += sums[j];
    return sum;
}

/* Scale what is part of a whole with this norm, so that the whole's is at most ``most`` (0: leave it). */
void rayagi_clip(float *x, int64_t count, double norm, double most) {
    const double scale = most / (norm + 1e-6);
    if (most > 0.0 && !(scale >= 1.0)) { /* NaN makes all of them NaN */
        const float by = (float)scale;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) x[i] *= by;
    }
}
