/* A rollout in one kernel: observation, inference, sampling, simulation, reset and storage, tile by tile. */

#include <time.h>

#define NOISE (CHOICES ? CHOICES : A)               /* noise numbers per step = outputs of the policy */
#define NOISE_DRAWS (CHOICES ? CHOICES : (A + 1) / 2 * 2) /* uniform numbers per step: Box-Muller makes pairs */

/* Output tensors of a rollout, allocated by Python (rollout.py). Each thread writes only the rows of its own environments, so
   nothing is shared and nothing is atomic. */
typedef struct {
    real *raw_obs;          /* (T, n, D): observations before normalisation */
    real *obs;              /* (T, n, D): input of the network */
    real *outputs;          /* (T, n, NOISE): logits, or means */
    int64_t *choices;        /* (T, n): discrete actions, or null */
    real *reals;            /* (T, n, A): real actions, not clipped, or null */
    real *rewards;          /* (T, n) */
    uint8_t *terminated;     /* (T, n) */
    uint8_t *truncated;      /* (T, n) */
    real *last_obs;         /* (n, D): observation after the last step */
    real *final_obs;        /* (T, n, D): last observation, written only where an episode ended */
    double *running;         /* (n): return of the running episode, read and written */
    double *final_returns;   /* (T, n): written only where an episode ended */
    int32_t *final_lengths;  /* (T, n): written only where an episode ended */
} Rollout;

/* For a profile: how long a thread acted, and when it ended. */
typedef struct {
    int64_t acted_ns;
    int64_t ended_ns; /* CLOCK_MONOTONIC */
} Timing;

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Transpose a tile's rows (width, L) to environments' rows (n, width). */
static void put(real *restrict to, const real *restrict from, int width, int count) {
    for (int j = 0; j < count; j++)
        for (int d = 0; d < width; d++) to[j * width + d] = from[d * L + j];
}

/* Uniform numbers to exploration noise, in place; (NOISE, L). v = (floor(2^23 u) + 1/2) / 2^23 is in (0, 1), so that log v is
   finite. Discrete: Gumbel noise -log(-log v). Real: Box-Muller, sqrt(-2 log v1) cos(2 pi v2) and ... sin(2 pi v2). */
static void noise(real *restrict u) {
#if CHOICES
    for (int i = 0; i < CHOICES; i++, u += L)
#pragma omp simd
        for (int j = 0; j < L; j++) u[j] = -real_log(-real_log(real_floor(u[j] * 0x1p23f) * 0x1p-23f + 0x1p-24f));
#else
    for (int i = 0; i < A; i += 2, u += 2 * L)
#pragma omp simd
        for (int j = 0; j < L; j++) {
            real radius = real_sqrt(-2.0f * real_log(real_floor(u[j] * 0x1p23f) * 0x1p-23f + 0x1p-24f));
            real angle = (real_floor(u[L + j] * 0x1p23f) * 0x1p-23f + 0x1p-24f) * (real)6.28318530717958648;
            u[j] = radius * real_cos(angle);
            u[L + j] = radius * real_sin(angle);
        }
#endif
}

/* Sample actions: into ``action`` as the policy chose them, and into the tile as the simulator's input (clipped). */
static void sample(Tile *t, const Policy *p, const real *restrict outputs, const real *restrict drawn, real *restrict action) {
#if CHOICES
    (void)p; /* Gumbel-max: argmax(logits + Gumbel noise) is a sample of softmax(logits) */
    real best[L] __attribute__((aligned(64)));
    for (int j = 0; j < L; j++) best[j] = outputs[j] + drawn[j], action[j] = 0.0f;
    for (int i = 1; i < CHOICES; i++)
#pragma omp simd
        for (int j = 0; j < L; j++) {
            real score = outputs[i * L + j] + drawn[i * L + j];
            action[j] = score > best[j] ? (real)i : action[j];
            best[j] = real_max(best[j], score);
        }
    memcpy(t->x[S], action, L * sizeof(real));
#else
    for (int i = 0; i < A; i++)
#pragma omp simd
        for (int j = 0; j < L; j++) {
            action[i * L + j] = real_fma(drawn[i * L + j], p->std[i], outputs[i * L + j]); /* mean + std * noise */
            t->x[S + i][j] = real_min(real_max(action[i * L + j], low[i]), high[i]);
        }
#endif
}

/* Add the rewards to the running returns; store return, length and last observation of ended episodes. Before tile_renew. */
static void record_finals(Tile *t, const Rollout *out, int64_t at, int64_t begin, int count) {
    for (int j = 0; j < count; j++) {
        double sum = out->running[begin + j] + t->y[S][j];
        out->running[begin + j] = t->ended[j] ? 0.0 : sum;
        if (t->ended[j]) {
            out->final_returns[at + j] = sum;
            out->final_lengths[at + j] = t->elapsed[j];
            for (int d = 0; d < D; d++) out->final_obs[(at + j) * D + d] = t->obs[d][j];
        }
    }
}

/* T steps of environments begin..end (begin is a multiple of L). Returns 0, or 1 if the scratch memory cannot be allocated.
   ``timing`` is filled, or null: acting alternates with steps of a microsecond, so only sums are told. */
int64_t rayagi_rollout(const BatchedEnvState *f, int64_t begin, int64_t end, int64_t steps, uint32_t iteration, const Policy *p,
                       const Rollout *out, Timing *timing) {
    Tile t;
    real drawn[(NOISE_DRAWS + 3) / 4 * 4][L] __attribute__((aligned(64)));
    real action[A][L] __attribute__((aligned(64)));
    uint32_t position[L] __attribute__((aligned(64)));
    size_t size = (size_t)widest(p) * L * sizeof(real);
    real *scratch = aligned_alloc(64, 2 * size);
    if (!scratch) return 1;
    memset(scratch, 0, 2 * size);
    for (int j = 0; j < L; j++) position[j] = iteration;
    for (; begin < end; begin += L) {
        int count = tile_count(f, begin);
        tile_load(&t, f, begin, count);
        simulator_observe(t.x[0], t.obs[0]);
        for (int64_t k = 0; k < steps; k++) {
            int64_t at = k * f->n + begin, since = timing ? monotonic_ns() : 0;
            { /* 1. normalise, infer, sample: with denormals flushed here only, not in the simulator */
                FLUSH_DENORMALS;
                real *input = scratch, *other = scratch + size / sizeof(real);
                for (int d = 0; d < D; d++)
#pragma omp simd
                    for (int j = 0; j < L; j++) {
                        real x = (t.obs[d][j] - (p->normalise ? p->shift[d] : 0.0f)) * (p->normalise ? p->scale[d] : 1.0f);
                        input[d * L + j] = p->normalise ? real_min(real_max(x, -p->clip), p->clip) : t.obs[d][j];
                    }
                put(out->raw_obs + at * D, t.obs[0], D, count);
                put(out->obs + at * D, input, D, count);
                real *outputs = infer(p, count, input, other);
                put(out->outputs + at * NOISE, outputs, NOISE, count);
                uniform(f->word, t.index, position, (uint32_t)k, EXPLORE, NOISE_DRAWS, drawn[0]);
                noise(drawn[0]);
                sample(&t, p, outputs, drawn[0], action[0]);
            }
            if (timing) timing->acted_ns += monotonic_ns() - since;
#if CHOICES
            for (int j = 0; j < count; j++) out->choices[at + j] = (int64_t)action[0][j];
#else
            put(out->reals + at * A, action[0], A, count);
#endif
            /* 2. simulate, store; 3. reset the lanes whose episode ended */
            int any = tile_step(&t, f->limit, count);
            memcpy(out->rewards + at, t.y[S], count * sizeof(real));
            for (int j = 0; j < count; j++) {
                out->terminated[at + j] = t.ended[j] == 1;
                out->truncated[at + j] = t.ended[j] == 2;
            }
            simulator_observe(t.x[0], t.obs[0]);
            record_finals(&t, out, at, begin, count);
            if (any) {
                tile_renew(&t, f->word);
                simulator_observe(t.x[0], t.obs[0]);
            }
        }
        put(out->last_obs + begin * D, t.obs[0], D, count);
        tile_store(&t, f, begin, count);
    }
    free(scratch);
    if (timing) timing->ended_ns = monotonic_ns();
    return 0;
}
