/* Acting: one step of a rollout. Normalises observations, runs the policy and samples actions. Include it after policy.h. */

/* A field of a rollout: element (t, i) is a contiguous row of values. Strides in bytes. */
typedef struct {
    char *start;
    int64_t step, row; /* from t to t + 1, from i to i + 1 */
} Field;

/* What a rollout's steps read and write. Python fills it (acting.py). */
typedef struct {
    int64_t choices; /* number of discrete actions; 0: continuous */
    Field noise;     /* read: standard normal, or Gumbel for discrete actions */
    Field raw_obs, obs, outputs, actions; /* written: observations before and after normalisation, policy outputs, actions */
} Acting;

static void *cell(const Field *f, int64_t t, int64_t i) { return f->start + t * f->step + i * f->row; }

/* Store a tile's observations in the rollout, and normalised and transposed in x (D, L). */
static void observe_tile(const Policy *p, const Acting *a, int64_t t, int64_t first, int count, const char *obs,
                         int64_t stride, real *x) {
    int64_t D = p->sizes[0];
    for (int j = 0; j < count; j++) {
        const real *row = (const real *)(obs + (first + j) * stride);
        real *raw_obs = cell(&a->raw_obs, t, first + j), *network_obs = cell(&a->obs, t, first + j);
        for (int64_t d = 0; d < D; d++) {
            raw_obs[d] = row[d];
            real y = row[d];
            /* clip((s - mean) / std, -clip, clip): shift is the mean, scale 1 / std (normalisers.py) */
            if (p->normalise) y = real_min(real_max((y - p->shift[d]) * p->scale[d], -p->clip), p->clip);
            network_obs[d] = x[d * L + j] = y;
        }
    }
}

/* Gumbel-max: argmax_k (logit_k + Gumbel noise_k) is a sample of softmax(logits). */
static void sample_discrete(const Acting *a, int64_t t, int64_t i, const real *logits, const real *noise) {
    int64_t best = 0;
    for (int64_t k = 1; k < a->choices; k++)
        if (logits[k] + noise[k] > logits[best] + noise[best]) best = k;
    *(int64_t *)cell(&a->actions, t, i) = best;
}

/* Store a tile's outputs y (A, L) in the rollout, and the actions sampled from them. */
static void store_actions(const Policy *p, const Acting *a, int64_t t, int64_t first, int count, const real *y) {
    int64_t A = p->sizes[p->layers];
    for (int j = 0; j < count; j++) {
        real *outputs = cell(&a->outputs, t, first + j);
        const real *noise = cell(&a->noise, t, first + j);
        for (int64_t k = 0; k < A; k++) outputs[k] = y[k * L + j];
        if (a->choices) {
            sample_discrete(a, t, first + j, outputs, noise);
            continue;
        }
        real *actions = cell(&a->actions, t, first + j);
        for (int64_t k = 0; k < A; k++) actions[k] = outputs[k] + noise[k] * p->std[k]; /* a = mu + sigma * noise */
    }
}

/* Step t of environments begin to end. Rows of ``obs`` are ``stride`` bytes apart. scratch: (2, widest, L), zeros or
   left from an earlier step: unused lanes of a last, partial tile are computed too, but not stored. */
void rayagi_act(const Policy *p, const Acting *a, int64_t t, int64_t begin, int64_t end, const char *obs, int64_t stride,
                real *scratch) {
    FLUSH_DENORMALS;
    real *other = scratch + widest(p) * L;
    for (int64_t first = begin; first < end; first += L) {
        int count = end - first < L ? (int)(end - first) : L;
        observe_tile(p, a, t, first, count, obs, stride, scratch);
        store_actions(p, a, t, first, count, infer(p, count, scratch, other));
    }
}
