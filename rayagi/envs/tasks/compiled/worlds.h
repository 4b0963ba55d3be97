/* What all tasks' programs share: where worlds are, random numbers, and least and most. Float64, as MuJoCo on a CPU. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    double *at;
    int64_t stride; /* from one world to the next */
} Rows;

typedef struct {
    int64_t n;
    uint64_t seed;
    int64_t limit;    /* steps of an episode */
    int64_t *indices; /* of worlds, over all GMIs (n,) */
    int64_t *elapsed; /* steps (n,) */
    int64_t *episode; /* (n,) */
    ROWS
} TaskWorlds;

static inline double least(double a, double b) { return a < b || a != a ? a : b; }
static inline double most(double a, double b) { return a > b || a != a ? a : b; }

/* The nearest float32. Volatile, since gcc 12 with -fno-trapping-math makes a plain copy of four conversions there and back. */
static inline double single(double a) {
    volatile float rounded = (float)a;
    return rounded;
}

/* random_uniforms.py's SplitMix64. */
#define WEYL 0x9E3779B97F4A7C15ull

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline void draw(const TaskWorlds *w, int64_t i, int64_t step, int count, double *draws) {
    uint64_t state = mixed((uint64_t)w->indices[i] * WEYL + w->seed);
    state = mixed(state + (uint64_t)(w->episode[i] + 1) * WEYL);
    state = mixed(state + (uint64_t)(step + 2) * WEYL);
    for (int k = 0; k < count; k++)
        draws[k] = (double)(mixed(state + (uint64_t)(k + 1) * WEYL) >> 40) * 0x1p-24;
}
