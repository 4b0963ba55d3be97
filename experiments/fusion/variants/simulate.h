/* K steps with given actions and the knobs of the MLBench'22 paper (section 4.2); only sums are kept. Included after worlds.h.
   Actions: (K, n) bytes, or (K, A, n) reals. copies: (num_copies, S, n), to which every change of the state is added. */

/* Actions of step k into the tile, reals clipped. */
static void tile_given(Tile *t, const uint8_t *choices, const real *reals, int64_t n, int64_t k, int64_t begin, int count) {
#if CHOICES
    (void)reals;
    for (int j = 0; j < count; j++) t->x[S][j] = (real)choices[k * n + begin + j];
#else
    (void)choices;
    for (int i = 0; i < A; i++) {
        const real *row = reals + (k * A + i) * n + begin;
        for (int j = 0; j < count; j++) t->x[S + i][j] = real_min(real_max(row[j], low[i]), high[i]);
    }
#endif
}

/* Add the state's change since ``from`` to every copy: extra loads and stores that no compiler can remove. */
static void copies_follow(const Tile *t, real from[S][L], const BatchedEnvState *f, int64_t begin, int count, int64_t num_copies,
                          real *copies) {
    for (int64_t c = 0; c < num_copies; c++)
        for (int i = 0; i < S; i++) {
            real *copy = copies + (c * S + i) * f->n + begin;
            for (int j = 0; j < count; j++) copy[j] += t->x[i][j] - from[i][j];
        }
}

/* Each step iterates the dynamics ``compute`` times; reward and termination are the last iteration's. */
void rayagi_simulate(const BatchedEnvState *f, int64_t begin, int64_t end, int64_t steps, int64_t compute, int64_t num_copies,
                     const uint8_t *choices, const real *reals, real *copies, real *rewards, int32_t *ended) {
    Tile t;
    real from[S][L] __attribute__((aligned(64)));
    real sum[L] __attribute__((aligned(64)));
    int32_t ends[L] __attribute__((aligned(64)));
    for (; begin < end; begin += L) {
        int count = tile_count(f, begin);
        tile_load(&t, f, begin, count);
        memcpy(from, t.x, sizeof from);
        memset(sum, 0, sizeof sum);
        memset(ends, 0, sizeof ends);
        for (int64_t k = 0; k < steps; k++) {
            tile_given(&t, choices, reals, f->n, k, begin, count);
            for (int64_t c = 1; c < compute; c++) {
                simulator_step(t.x[0], t.y[0]);
                memcpy(t.x[0], t.y[0], S * L * sizeof(real));
            }
            int any = tile_step(&t, f->limit, count);
#pragma omp simd
            for (int j = 0; j < L; j++) {
                sum[j] += t.y[S][j];
                ends[j] += t.ended[j] ? 1 : 0;
            }
            if (any) tile_renew(&t, f->word);
        }
        memcpy(rewards + begin, sum, count * sizeof(real));
        memcpy(ended + begin, ends, count * sizeof(int32_t));
        tile_store(&t, f, begin, count);
        copies_follow(&t, from, f, begin, count, num_copies, copies);
    }
}
