/* PPO's update of a policy, Gaussian or of choices, and a value network: minibatch after minibatch its loss's gradient, and a step along it.
After backprop.h and optimizer_step.h.

Of two threads one has the policy network and the other the value network, where neither is behind: what a thread reads it has
written itself. */

typedef struct {
    Network policy, value;
    int64_t activation, samples;
    const real *log_std; /* of a Gaussian; none of choices */
    real *log_std_gradient;
    double clip_ratio, value_clip, value_coef, entropy_coef; /* value_clip: infinite for none */
    double weight; /* of this trainer's mean in that of all */
    double *sums; /* (CHUNK, MEASURED + outputs): policy loss, value loss, KL, clipped, entropy of choices, then log_std's gradient */
} Learner;

enum { POLICY_LOSS, VALUE_LOSS, KL, CLIPPED, ENTROPY, MEASURED };

/* A rollout, a row a sample. */
typedef struct {
    const real *obs;
    const void *actions; /* of a Gaussian, reals; else choices, int64_t, each below the policy's outputs: the caller checks */
    const real *log_probs, *values, *advantages, *targets;
} Batch;

static void gather(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    int64_t D = l->policy.sizes[0];
    real *x = l->policy.activations[0] + t * tile(D);
    for (int j = 0; j < count; j++) {
        const real *row = b->obs + order[j] * D;
        for (int64_t d = 0; d < D; d++) x[d * L + j] = row[d];
    }
    for (int64_t d = 0; d < D; d++)
        for (int j = count; j < L; j++) x[d * L + j] = 0.0f; /* 0 times what was there may be NaN */
}

/* Eq. 7 of Schulman et al. 2017 for a sample of ratio r = exp(log_prob - old log_prob): adds min(r A, clip(r) A) and what else is
   measured to the tile's sums. Returns d loss / d log_prob: -r A / samples, or 0 where the clipped term is the smaller. */
ALWAYS real clipped_loss(const Learner *l, const Batch *b, int64_t sample, real log_prob, double *sums) {
    const real low = 1.0 - l->clip_ratio, high = 1.0 + l->clip_ratio, weight = l->weight;
    const real advantage = b->advantages[sample];
    const real log_ratio = log_prob - b->log_probs[sample], ratio = real_exp(log_ratio);
    const real plain = ratio * advantage, kept = real_min(real_max(ratio, low), high) * advantage;
    const int moves = (ratio >= low && ratio <= high) || !(plain >= kept);
    sums[POLICY_LOSS] -= real_min(plain, kept);
    sums[KL] += (ratio - 1.0f) - log_ratio;
    sums[CLIPPED] += real_abs(ratio - 1.0f) > (real)l->clip_ratio;
    return moves ? -plain * weight / l->samples : 0.0f;
}

/* Of a diagonal Gaussian around the policy's outputs; grads by the means, and by log_std into the sums. */
static void gaussian_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const int64_t A = outputs(&l->policy);
    const real *mean = l->policy.activations[l->policy.layers] + t * tile(A);
    real *grad = l->policy.grads[l->policy.layers] + t * tile(A);
    double *sums = l->sums + t * (MEASURED + A);
    real precision[A], constant = 0.0f;
    for (int64_t k = 0; k < A; k++) {
        precision[k] = real_exp(-l->log_std[k]);
        constant += l->log_std[k] + 0.918938533f; /* log sqrt(2 pi) */
    }
    for (int j = 0; j < count; j++) {
        const real *action = (const real *)b->actions + order[j] * A;
        real log_prob = -constant;
        for (int64_t k = 0; k < A; k++) {
            real off = (action[k] - mean[k * L + j]) * precision[k];
            grad[k * L + j] = off;
            log_prob -= 0.5f * off * off;
        }
        const real by_log_prob = clipped_loss(l, b, order[j], log_prob, sums);
        for (int64_t k = 0; k < A; k++) {
            real off = grad[k * L + j];
            sums[MEASURED + k] += by_log_prob * (off * off - 1.0f);
            grad[k * L + j] = by_log_prob * off * precision[k];
        }
    }
    for (int64_t k = 0; k < A; k++)
        for (int j = count; j < L; j++) grad[k * L + j] = 0.0f;
}

/* Of one choice out of A, whose logits z are the policy's outputs; grads by these. */
static void categorical_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const int64_t A = outputs(&l->policy);
    const real *logit = l->policy.activations[l->policy.layers] + t * tile(A);
    real *grad = l->policy.grads[l->policy.layers] + t * tile(A);
    double *sums = l->sums + t * (MEASURED + A);
    const real entropy_grad = l->weight * l->entropy_coef / l->samples;
    real top[L], log_total[L], entropy[L] = {0}, by_log_prob[L] = {0};
    int64_t chosen[L] = {0};
    /* log p_k = (z_k - max z) - log sum_i exp(z_i - max z): no exponential is above 1, one of them is. */
    for (int j = 0; j < L; j++) top[j] = logit[j], log_total[j] = 0.0f;
    for (int64_t k = 1; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) top[j] = real_max(top[j], logit[k * L + j]);
    for (int64_t k = 0; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) log_total[j] += real_exp(logit[k * L + j] - top[j]);
#pragma omp simd
    for (int j = 0; j < L; j++) log_total[j] = real_log(log_total[j]);
    /* H = -sum p log p; log p in the grads' place until these are known. */
    for (int64_t k = 0; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) {
            const real log_p = (logit[k * L + j] - top[j]) - log_total[j];
            grad[k * L + j] = log_p;
            entropy[j] -= real_exp(log_p) * log_p;
        }
    for (int j = 0; j < count; j++) {
        chosen[j] = ((const int64_t *)b->actions)[order[j]];
        by_log_prob[j] = clipped_loss(l, b, order[j], grad[chosen[j] * L + j], sums);
        sums[ENTROPY] += entropy[j];
    }
    /* d log p_a / d z_k = [k = a] - p_k, and d H / d z_k = -p_k (log p_k + H). */
    for (int64_t k = 0; k < A; k++) {
#pragma omp simd
        for (int j = 0; j < L; j++) {
            const real log_p = grad[k * L + j], p = real_exp(log_p), is_chosen = k == chosen[j] ? 1.0f : 0.0f;
            grad[k * L + j] = by_log_prob[j] * (is_chosen - p) + entropy_grad * p * (log_p + entropy[j]);
        }
        for (int j = count; j < L; j++) grad[k * L + j] = 0.0f;
    }
}

static void policy_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    (l->log_std ? gaussian_loss : categorical_loss)(l, b, order, count, t);
}

static void value_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const real *value = l->value.activations[l->value.layers] + t * tile(1);
    real *grad = l->value.grads[l->value.layers] + t * tile(1);
    const real most = l->value_clip, weight = l->weight * l->value_coef / l->samples;
    double loss = 0.0;
    for (int j = 0; j < count; j++) {
        const real before = b->values[order[j]], target = b->targets[order[j]], moved = value[j] - before;
        const real error = value[j] - target, kept = before + real_min(real_max(moved, -most), most) - target;
        const int inside = real_abs(moved) <= most;
        loss += inside ? error * error : real_max(error * error, kept * kept);
        grad[j] = inside || !(error * error <= kept * kept) ? 2.0f * weight * error : 0.0f;
    }
    for (int j = count; j < L; j++) grad[j] = 0.0f;
    l->sums[t * (MEASURED + outputs(&l->policy)) + VALUE_LOSS] += loss;
}

/* So many samples in this order, of a minibatch. */
typedef struct {
    const Learner *learner;
    const Batch *batch;
    const int64_t *order;
    int64_t count, tiles;
    int64_t parts; /* of a layer's rows */
    int adds;      /* to the gradient of those before */
} Chunk;

ALWAYS int lanes(const Chunk *c, int64_t t) { return c->count - t * L < L ? (int)(c->count - t * L) : L; }

static void gather_tile(void *given, int64_t t) {
    const Chunk *c = given;
    gather(c->learner, c->batch, c->order + t * L, lanes(c, t), t);
}

/* A tile through a network and back. */
static void forward_backward(void *given, int64_t item) {
    const Chunk *c = given;
    const int64_t t = item % c->tiles, of_policy = item < c->tiles;
    const Network *n = of_policy ? &c->learner->policy : &c->learner->value;
    forward(n, c->learner->activation, t);
    (of_policy ? policy_loss : value_loss)(c->learner, c->batch, c->order + t * L, lanes(c, t), t);
    backward(n, t);
}

/* A part of a layer's gradients, whole blocks of rows. */
static void weight_grad(void *given, int64_t item) {
    const Chunk *c = given;
    const int64_t layer = item / c->parts, part = item % c->parts, before = c->learner->policy.layers;
    const Network *n = layer < before ? &c->learner->policy : &c->learner->value;
    const int64_t i = layer < before ? layer : layer - before, out = n->sizes[i + 1], blocks = (out + ROWS - 1) / ROWS;
    const int64_t begin = blocks * part / c->parts * ROWS, end = blocks * (part + 1) / c->parts * ROWS;
    layer_weight_grads(n, i, c->tiles, begin, end < out ? end : out, c->adds);
}

/* V of some observations. */
typedef struct {
    const Learner *learner;
    const real *obs; /* (count, D) */
    int64_t count;
    real *values;
} Estimate;

static void estimate_tile(void *given, int64_t t) {
    const Estimate *e = given;
    const Network *n = &e->learner->value;
    const int64_t D = n->sizes[0], left = e->count - t * L, count = left < L ? left : L;
    real *x = n->activations[0] + t * tile(D);
    const real *value = n->activations[n->layers] + t * tile(1);
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < D; d++) x[d * L + j] = e->obs[(t * L + j) * D + d];
    forward(n, e->learner->activation, t);
    memcpy(e->values + t * L, value, count * sizeof *value);
}

/* (count, D) -> (count,) */
void rayagi_ppo_values(const Learner *l, ThreadPool *pool, const real *obs, int64_t count, real *values) {
    FLUSH_DENORMALS;
    for (int64_t first = 0; first < count; first += CHUNK * L) {
        const int64_t left = count - first, some = left < CHUNK * L ? left : CHUNK * L;
        Estimate estimate = {l, obs + first * l->value.sizes[0], some, values + first};
        parallel_for(pool, estimate_tile, &estimate, (some + L - 1) / L);
    }
}

/* After all chunks: log_std's gradient, and the statistics: policy loss, value loss, entropy, KL, share of clipped ratios. */
static void write_stats(const Learner *l, real *stats) {
    const int64_t A = outputs(&l->policy), row = MEASURED + A;
    for (int64_t t = 1; t < CHUNK; t++)
        for (int64_t k = 0; k < row; k++) l->sums[k] += l->sums[t * row + k];
    double entropy = l->sums[ENTROPY] / l->samples;
    for (int64_t k = 0; l->log_std && k < A; k++) {
        entropy += l->log_std[k] + 1.418938533204672742; /* log sqrt(2 pi e) */
        l->log_std_gradient[k] = l->sums[MEASURED + k] - l->weight * l->entropy_coef;
    }
    stats[0] = l->sums[POLICY_LOSS] / l->samples;
    stats[1] = l->sums[VALUE_LOSS] / l->samples;
    stats[2] = entropy;
    stats[3] = l->sums[KL] / l->samples;
    stats[4] = l->sums[CLIPPED] / l->samples;
}

/* The gradient of a minibatch's loss, in place of what was there. */
static void compute_gradients(Learner *l, const Batch *b, const int64_t *order, ThreadPool *pool, real *stats) {
    memset(l->sums, 0, CHUNK * (MEASURED + outputs(&l->policy)) * sizeof *l->sums);
    for (int64_t first = 0; first < l->samples; first += CHUNK * L) {
        const int64_t left = l->samples - first, count = left < CHUNK * L ? left : CHUNK * L;
        const int64_t parts = pool->threads == 1 ? 1 : 2 * pool->threads;
        Chunk chunk = {l, b, order + first, count, (count + L - 1) / L, parts, first > 0};
        parallel_for(pool, gather_tile, &chunk, chunk.tiles);
        parallel_for(pool, forward_backward, &chunk, 2 * chunk.tiles);
        parallel_for(pool, weight_grad, &chunk, (l->policy.layers + l->value.layers) * parts);
    }
    write_stats(l, stats);
}

enum { NUM_STATS = 6, MOST_NS = 50000000 }; /* stats: as by ``write_stats``, then the gradient's norm */

typedef struct {
    Learner *learner;
    Batch batch;
    const int64_t *orders; /* (steps, samples) */
    int64_t steps, step;
    int64_t gradient_ready; /* whether this step's gradient is there */
    OptimizerStep *optimizer;
    ThreadPool *pool;
    real *stats; /* (steps, NUM_STATS) */
} Update;

/* DONE when all steps are made; else as ``optimizer_step``, and AGAIN now and then, for signals. */
int64_t rayagi_ppo_update(Update *u) {
    FLUSH_DENORMALS;
    for (const int64_t began = now_ns(); u->step < u->steps; u->step++) {
        real *stats = u->stats + u->step * NUM_STATS;
        if (!u->gradient_ready) {
            if (now_ns() - began > MOST_NS) return AGAIN;
            compute_gradients(u->learner, &u->batch, u->orders + u->step * u->learner->samples, u->pool, stats);
            u->gradient_ready = 1;
        }
        const int64_t found = optimizer_step(u->optimizer, u->pool, stats + NUM_STATS - 1);
        if (found != DONE) return found;
        u->gradient_ready = 0;
    }
    return DONE;
}
