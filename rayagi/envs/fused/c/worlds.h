/* N environments in tiles of L: a tile runs all its steps while it is in the cache. The generated program (source.py) defines:
S, A, D: reals of state, action (CHOICES > 0: one discrete action) and observation; DRAWS: random numbers of a start;
low and high: bounds of the actions; simulator_start, simulator_step, simulator_observe: each (inputs, L) -> (outputs, L).

Every tile computes L lanes, even a partial last one, so that an environment's results do not depend on its position. */

#define DRAW_BLOCKS ((DRAWS + 3) / 4)

/* State of all environments, in Python's tensors (backends.py's BatchedEnvState). Threads get disjoint ranges begin..end of
   environments, so nothing is atomic. */
typedef struct {
    int64_t n;           /* number of environments: length of the rows */
    uint32_t first;      /* global index of the first environment */
    uint32_t word;       /* draws.seed_word of the seed */
    int32_t limit;       /* time limit of an episode, steps */
    real *state;        /* (S, n) */
    int32_t *elapsed;    /* (n): steps of the running episode */
    int32_t *episode;    /* (n): number of the running episode */
} BatchedEnvState;

/* Working copy of L environments on a thread's stack: one lane each, a structure of arrays for the vector unit. */
typedef struct {
    real x[S + A][L] __attribute__((aligned(64)));       /* inputs of simulator_step: state, then action */
    real y[S + 2][L] __attribute__((aligned(64)));       /* its outputs: next state, reward, terminated */
    real obs[D][L] __attribute__((aligned(64)));
    int32_t elapsed[L] __attribute__((aligned(64)));
    uint32_t episode[L] __attribute__((aligned(64)));
    uint32_t index[L] __attribute__((aligned(64)));       /* global index: counter word x of the random numbers */
    int32_t ended[L] __attribute__((aligned(64)));        /* after a step: 0 running, 1 terminated, 2 truncated */
} Tile;

/* Copy ``count`` environments into the tile; further lanes are zero. */
static void tile_load(Tile *t, const BatchedEnvState *f, int64_t begin, int count) {
    memset(t, 0, sizeof *t);
    for (int i = 0; i < S; i++) memcpy(t->x[i], f->state + i * f->n + begin, count * sizeof(real));
    memcpy(t->elapsed, f->elapsed + begin, count * sizeof(int32_t));
    memcpy(t->episode, f->episode + begin, count * sizeof(int32_t));
    for (int j = 0; j < L; j++) t->index[j] = f->first + (uint32_t)(begin + j);
}

static void tile_store(const Tile *t, const BatchedEnvState *f, int64_t begin, int count) {
    for (int i = 0; i < S; i++) memcpy(f->state + i * f->n + begin, t->x[i], count * sizeof(real));
    memcpy(f->elapsed + begin, t->elapsed, count * sizeof(int32_t));
    memcpy(f->episode + begin, t->episode, count * sizeof(int32_t));
}

/* Write initial states into the lanes with ``where`` set; t->episode already holds the new episodes' numbers. */
static void tile_begin(Tile *t, uint32_t word, const int32_t *restrict where) {
    real draws[4 * DRAW_BLOCKS + 1][L] __attribute__((aligned(64)));
    real fresh[S][L] __attribute__((aligned(64)));
    uniform(word, t->index, t->episode, 0, START, DRAWS, draws[0]);
    simulator_start(draws[0], fresh[0]);
    for (int i = 0; i < S; i++) {
#pragma omp simd
        for (int j = 0; j < L; j++) t->x[i][j] = where[j] ? fresh[i][j] : t->x[i][j];
    }
}

/* One step of every lane with the action in x. Returns nonzero if an episode of the first ``count`` lanes ended; tile_renew then
   resets them. */
static int tile_step(Tile *t, int32_t limit, int count) {
    simulator_step(t->x[0], t->y[0]);
    memcpy(t->x[0], t->y[0], S * L * sizeof(real));
#pragma omp simd
    for (int j = 0; j < L; j++) {
        int32_t elapsed = t->elapsed[j] + 1, cut = elapsed >= limit ? 2 : 0;
        t->elapsed[j] = elapsed;
        t->ended[j] = t->y[S + 1][j] != 0.0f ? 1 : cut;
    }
    int32_t any = 0;
#pragma omp simd reduction(| : any)
    for (int j = 0; j < L; j++) any |= j < count ? t->ended[j] : 0;
    return any;
}

/* Reset the lanes whose episode ended: elapsed = 0, the next episode's number, an initial state. */
static void tile_renew(Tile *t, uint32_t word) {
#pragma omp simd
    for (int j = 0; j < L; j++) {
        t->elapsed[j] = t->ended[j] ? 0 : t->elapsed[j];
        t->episode[j] += t->ended[j] ? 1u : 0u;
    }
    tile_begin(t, word, t->ended);
}

static int tile_count(const BatchedEnvState *f, int64_t begin) { return f->n - begin < L ? (int)(f->n - begin) : L; }

/* Start a new episode in environments begin..end; begin is a multiple of L. */
void rayagi_start(const BatchedEnvState *f, int64_t begin, int64_t end) {
    Tile t;
    int32_t everywhere[L];
    for (int j = 0; j < L; j++) everywhere[j] = 1;
    for (; begin < end; begin += L) {
        int count = tile_count(f, begin);
        tile_load(&t, f, begin, count);
        for (int j = 0; j < L; j++) t.elapsed[j] = 0, t.episode[j] += 1u;
        tile_begin(&t, f->word, everywhere);
        tile_store(&t, f, begin, count);
    }
}

/* Observations of environments begin..end into obs (D, n). */
void rayagi_observe(const BatchedEnvState *f, int64_t begin, int64_t end, real *obs) {
    Tile t;
    for (; begin < end; begin += L) {
        int count = tile_count(f, begin);
        tile_load(&t, f, begin, count);
        simulator_observe(t.x[0], t.obs[0]);
        for (int d = 0; d < D; d++) memcpy(obs + d * f->n + begin, t.obs[d], count * sizeof(real));
    }
}

/* One step's actions into the tile: choices (n), or reals (n, A) clipped to low and high. */
static void tile_act(Tile *t, const int64_t *choices, const real *reals, int64_t begin, int count) {
#if CHOICES
    (void)reals;
    for (int j = 0; j < count; j++) t->x[S][j] = (real)choices[begin + j];
#else
    (void)choices;
    for (int i = 0; i < A; i++)
        for (int j = 0; j < count; j++)
            t->x[S + i][j] = real_min(real_max(reals[(begin + j) * A + i], low[i]), high[i]);
#endif
}

/* Output tensors of rayagi_run (backends.py's StepBatch); each thread writes its own environments' columns. */
typedef struct {
    real *obs;           /* (K, D, n): after the step; of the new episode if one ended */
    real *rewards;       /* (K, n) */
    uint8_t *terminated;  /* (K, n) */
    uint8_t *truncated;   /* (K, n) */
    real *final_obs;     /* (K, D, n): before the reset, written only where an episode ended */
} StepBatch;

/* ``steps`` steps of environments begin..end. Actions: (K, n) choices, or (K, n, A) reals. */
void rayagi_run(const BatchedEnvState *f, int64_t begin, int64_t end, int64_t steps, const int64_t *choices, const real *reals,
                const StepBatch *out) {
    Tile t;
    int64_t n = f->n;
    for (; begin < end; begin += L) {
        int count = tile_count(f, begin);
        tile_load(&t, f, begin, count);
        for (int64_t k = 0; k < steps; k++) {
            /* 1. Clipped actions, dynamics, reward, end of the episode. */
            tile_act(&t, choices + k * n, reals + k * n * A, begin, count);
            int any = tile_step(&t, f->limit, count);
            memcpy(out->rewards + k * n + begin, t.y[S], count * sizeof(real));
            for (int j = 0; j < count; j++) {
                out->terminated[k * n + begin + j] = t.ended[j] == 1;
                out->truncated[k * n + begin + j] = t.ended[j] == 2;
            }
            /* 2. Observation; where an episode ended it is the final one, and the reset's replaces it in obs. */
            simulator_observe(t.x[0], t.obs[0]);
            if (any) {
                for (int j = 0; j < count; j++)
                    if (t.ended[j])
                        for (int d = 0; d < D; d++) out->final_obs[(k * D + d) * n + begin + j] = t.obs[d][j];
                tile_renew(&t, f->word);
                simulator_observe(t.x[0], t.obs[0]);
            }
            for (int d = 0; d < D; d++) memcpy(out->obs + (k * D + d) * n + begin, t.obs[d], count * sizeof(real));
        }
        tile_store(&t, f, begin, count);
    }
}
