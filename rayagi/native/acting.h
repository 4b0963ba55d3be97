/* A policy's steps through a rollout: observations in, what the networks saw, outputs and sampled actions out. */

/* A field of a rollout: element (t, i) is a row of numbers that lie side by side. Strides in bytes. */
typedef struct {
    char *start;
    int64_t step, row;
} Field;

typedef struct {
    int64_t choices; /* actions are one of so many; 0: reals */
    Field noise, raw_obs, obs, outputs, actions;
} Acting;

static void *cell(const Field *f, int64_t t, int64_t i) { return f->start + t * f->step + i * f->row; }

static void observe_tile(const Policy *p, const Acting *a, int64_t t, int64_t first, int count, const char *obs, int64_t stride, real *x) {
    int64_t D = p->sizes[0];
    for (int j = 0; j < count; j++) {
        const real *given = (const real *)(obs + (first + j) * stride);
        real *raw = cell(&a->raw_obs, t, first + j), *seen = cell(&a->obs, t, first + j);
        for (int64_t d = 0; d < D; d++) {
            raw[d] = given[d];
            real y = given[d];
            if (p->normalise) y = real_min(real_max((y - p->shift[d]) * p->scale[d], -p->clip), p->clip);
            seen[d] = x[d * L + j] = y;
        }
    }
}

static void choose_action(const Acting *a, int64_t t, int64_t i, const real *outputs, const real *noise) {
    int64_t best = 0;
    for (int64_t k = 1; k < a->choices; k++)
        if (outputs[k] + noise[k] > outputs[best] + noise[best]) best = k;
    *(int64_t *)cell(&a->actions, t, i) = best;
}

static void store_actions(const Policy *p, const Acting *a, int64_t t, int64_t first, int count, const real *y) {
    int64_t A = p->sizes[p->layers];
    for (int j = 0; j < count; j++) {
        real *outputs = cell(&a->outputs, t, first + j);
        const real *noise = cell(&a->noise, t, first + j);
        for (int64_t k = 0; k < A; k++) outputs[k] = y[k * L + j];
        if (a->choices) {
            choose_action(a, t, first + j, outputs, noise);
            continue;
        }
        real *actions = cell(&a->actions, t, first + j);
        for (int64_t k = 0; k < A; k++) actions[k] = outputs[k] + noise[k] * p->std[k];
    }
}

/* Step t of environments begin to end, whose observations have rows ``stride`` bytes apart. scratch: (2, widest, L) floats, of zeros
   or of an earlier step: the lanes of a last tile that is not full are computed, too, and told to nobody. */
void rayagi_act(const Policy *p, const Acting *a, int64_t t, int64_t begin, int64_t end, const char *obs, int64_t stride, real *scratch) {
    FLUSH_DENORMALS;
    real *other = scratch + widest(p) * L;
    for (int64_t first = begin; first < end; first += L) {
        int count = end - first < L ? (int)(end - first) : L;
        observe_tile(p, a, t, first, count, obs, stride, scratch);
        store_actions(p, a, t, first, count, infer(p, count, scratch, other));
    }
}
