/* Shared by all compiled tasks: pointers to the worlds' data, random numbers, and torch's minimum and maximum. Float64, as in
   MuJoCo on a CPU. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* A tensor (n, ...) of doubles; world i's values are contiguous at at + i * stride. */
typedef struct {
    double *at;
    int64_t stride; /* doubles from one world to the next */
} Rows;

/* The worlds of one VecEnv. Python (program.py) fills the struct; the pointers are into its tensors. One thread calls the
   library, and never during physics, so nothing here is atomic. */
typedef struct {
    int64_t n;        /* number of worlds */
    uint64_t seed;    /* of the random numbers */
    int64_t limit;    /* maximum steps of an episode */
    int64_t *indices; /* global indices of the worlds, over all GMIs (n,); read only */
    int64_t *elapsed; /* steps of the running episode (n,): rayagi_control adds 1, rayagi_start sets 0 */
    int64_t *episode; /* number of the running episode (n,): rayagi_start adds 1 */
    ROWS              /* a Rows for each MjData field, each memory tensor, actions and controls */
} TaskWorlds;

/* Minimum and maximum that propagate NaN, as torch's do. */
static inline double least(double a, double b) { return a < b || a != a ? a : b; }
static inline double most(double a, double b) { return a > b || a != a ? a : b; }

/* Round to float32. Volatile: gcc 12 with -fno-trapping-math drops the conversion when it vectorises four of them. */
static inline double single(double a) {
    volatile float rounded = (float)a;
    return rounded;
}

/* Counter-based random numbers: SplitMix64, as in tasks/random_uniforms.py. */
#define WEYL 0x9E3779B97F4A7C15ull

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* count uniform numbers in [0, 1) of world i at a step (-1: an episode's start):
   s = mix(mix(mix(index W + seed) + (episode + 1) W) + (step + 2) W); number k = 1, 2, ...: (mix(s + k W) >> 40) / 2^24. */
static inline void draw(const TaskWorlds *w, int64_t i, int64_t step, int count, double *draws) {
    uint64_t state = mixed((uint64_t)w->indices[i] * WEYL + w->seed);
    state = mixed(state + (uint64_t)(w->episode[i] + 1) * WEYL);
    state = mixed(state + (uint64_t)(step + 2) * WEYL);
    for (int k = 0; k < count; k++)
        draws[k] = (double)(mixed(state + (uint64_t)(k + 1) * WEYL) >> 40) * 0x1p-24;
}
