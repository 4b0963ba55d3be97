/* PPO (Schulman et al. 2017): the gradient of a minibatch's loss. The policy is Gaussian or categorical; the value network
is separate. Include it after backprop.h and thread_pool.h.

A minibatch is processed in chunks of CHUNK tiles, each tile L samples: gather, forward and backward, weight gradients.
With two threads, one has the policy network's tiles and the other the value network's, so each reads what it has
written itself. */

/* Networks, settings and sums of one trainer. Python fills it (learning.py); the sums are written here. */
typedef struct {
    Network policy, value;
    int64_t activation, samples; /* samples: of a minibatch */
    const real *log_std;    /* of the Gaussian, (A,); NULL: categorical */
    real *log_std_gradient;
    double clip_ratio, value_clip, value_coef, entropy_coef; /* value_clip: infinite for none */
    double weight; /* of this trainer's gradient in the mean over trainers */
    double *sums;  /* (CHUNK, NUM_SUMS + A): a row per tile, written by the thread that has the tile; last A: by log_std */
} Learner;

enum { POLICY_LOSS, VALUE_LOSS, KL, CLIPPED, ENTROPY, NUM_SUMS };

/* A rollout, one row per sample. */
typedef struct {
    const real *obs;
    const void *actions; /* Gaussian: (B, A) reals. Categorical: (B,) int64_t, which the caller checks to be below A */
    const real *log_probs, *values, *advantages, *targets; /* (B,) each; log_probs and values of the policy that acted */
} Batch;

/* Copy the observations of a tile's samples, transposed to (D, L). */
static void gather(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    int64_t D = l->policy.sizes[0];
    real *x = l->policy.activations[0] + t * tile_size(D);
    for (int j = 0; j < count; j++) {
        const real *row = b->obs + order[j] * D;
        for (int64_t d = 0; d < D; d++) x[d * L + j] = row[d];
    }
    for (int64_t d = 0; d < D; d++)
        for (int j = count; j < L; j++) x[d * L + j] = 0.0f; /* unused lanes: their gradient is 0, but 0 times NaN is NaN */
}

/* PPO's clipped loss, eq. 7, of one sample with ratio r = exp(log_prob - old log_prob): -min(r A, clip(r, 1 - eps, 1 +
   eps) A). Adds it, KL and clipping to the tile's sums.

   Returns d loss / d log_prob: -r A weight / samples, or 0 where the clipped term is the smaller one. */
ALWAYS real clipped_loss(const Learner *l, const Batch *b, int64_t sample, real log_prob, double *sums) {
    const real low = 1.0 - l->clip_ratio, high = 1.0 + l->clip_ratio, weight = l->weight;
    const real advantage = b->advantages[sample];
    const real log_ratio = log_prob - b->log_probs[sample], ratio = real_exp(log_ratio);
    const real surrogate = ratio * advantage, clipped = real_min(real_max(ratio, low), high) * advantage;
    const int has_gradient = (ratio >= low && ratio <= high) || !(surrogate >= clipped); /* NaN has one, too */
    sums[POLICY_LOSS] -= real_min(surrogate, clipped);
    sums[KL] += (ratio - 1.0f) - log_ratio; /* unbiased estimate of KL(old, new), at least 0 */
    sums[CLIPPED] += real_abs(ratio - 1.0f) > (real)l->clip_ratio;
    return has_gradient ? -surrogate * weight / l->samples : 0.0f;
}

/* Diagonal Gaussian: the policy's outputs are the means mu. With z = (a - mu) / sigma:
     log p = -1/2 sum z^2 - sum log sigma - A/2 log 2 pi
     d log p / d mu_k = z_k / sigma_k,   d log p / d log sigma_k = z_k^2 - 1
   Writes d loss / d mu to grads, and adds d loss / d log sigma to the tile's sums. */
static void gaussian_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const int64_t A = outputs(&l->policy);
    const real *mean = l->policy.activations[l->policy.layers] + t * tile_size(A);
    real *grad = l->policy.grads[l->policy.layers] + t * tile_size(A);
    double *sums = l->sums + t * (NUM_SUMS + A);
    real precision[A], constant = 0.0f; /* precision: 1 / sigma */
    for (int64_t k = 0; k < A; k++) {
        precision[k] = real_exp(-l->log_std[k]);
        constant += l->log_std[k] + 0.918938533f; /* log sqrt(2 pi) */
    }
    for (int j = 0; j < count; j++) {
        const real *action = (const real *)b->actions + order[j] * A;
        real log_prob = -constant;
        for (int64_t k = 0; k < A; k++) {
            real z = (action[k] - mean[k * L + j]) * precision[k];
            grad[k * L + j] = z; /* kept for the loop below */
            log_prob -= 0.5f * z * z;
        }
        const real by_log_prob = clipped_loss(l, b, order[j], log_prob, sums);
        for (int64_t k = 0; k < A; k++) {
            real z = grad[k * L + j];
            sums[NUM_SUMS + k] += by_log_prob * (z * z - 1.0f);
            grad[k * L + j] = by_log_prob * z * precision[k];
        }
    }
    for (int64_t k = 0; k < A; k++)
        for (int j = count; j < L; j++) grad[k * L + j] = 0.0f;
}

/* Categorical: the policy's outputs are the logits z of A choices. With p = softmax(z) and entropy H = -sum p log p:
     log p_k = (z_k - max z) - log sum_i exp(z_i - max z)
     d log p_a / d z_k = [k = a] - p_k,   d H / d z_k = -p_k (log p_k + H)
   Writes d loss / d z to grads. */
static void categorical_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const int64_t A = outputs(&l->policy);
    const real *logit = l->policy.activations[l->policy.layers] + t * tile_size(A);
    real *grad = l->policy.grads[l->policy.layers] + t * tile_size(A);
    double *sums = l->sums + t * (NUM_SUMS + A);
    const real entropy_grad = l->weight * l->entropy_coef / l->samples; /* -d loss / d H */
    real top[L], log_total[L], entropy[L] = {0}, by_log_prob[L] = {0};
    int64_t chosen[L] = {0};
    /* 1. max z, and log sum_i exp(z_i - max z): no exponential is above 1, and one of them is 1. */
    for (int j = 0; j < L; j++) top[j] = logit[j], log_total[j] = 0.0f;
    for (int64_t k = 1; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) top[j] = real_max(top[j], logit[k * L + j]);
    for (int64_t k = 0; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) log_total[j] += real_exp(logit[k * L + j] - top[j]);
#pragma omp simd
    for (int j = 0; j < L; j++) log_total[j] = real_log(log_total[j]);
    /* 2. log p_k, kept in grads for steps 3 and 4, and H. */
    for (int64_t k = 0; k < A; k++)
#pragma omp simd
        for (int j = 0; j < L; j++) {
            const real log_p = (logit[k * L + j] - top[j]) - log_total[j];
            grad[k * L + j] = log_p;
            entropy[j] -= real_exp(log_p) * log_p;
        }
    /* 3. The clipped loss of the chosen action. */
    for (int j = 0; j < count; j++) {
        chosen[j] = ((const int64_t *)b->actions)[order[j]];
        by_log_prob[j] = clipped_loss(l, b, order[j], grad[chosen[j] * L + j], sums);
        sums[ENTROPY] += entropy[j];
    }
    /* 4. d loss / d z_k = d loss / d log p_a ([k = a] - p_k) + entropy_coef p_k (log p_k + H). */
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

/* Value loss with clipping: max((V - target)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - target)^2).
   Writes d loss / d V to grads: 2 (V - target), or 0 where the clipped term is the larger one. */
static void value_loss(const Learner *l, const Batch *b, const int64_t *order, int count, int64_t t) {
    const real *value = l->value.activations[l->value.layers] + t * tile_size(1);
    real *grad = l->value.grads[l->value.layers] + t * tile_size(1);
    const real clip = l->value_clip, weight = l->weight * l->value_coef / l->samples;
    double loss = 0.0;
    for (int j = 0; j < count; j++) {
        const real old_value = b->values[order[j]], target = b->targets[order[j]], change = value[j] - old_value;
        const real error = value[j] - target, clipped_error = old_value + real_min(real_max(change, -clip), clip) - target;
        const int inside = real_abs(change) <= clip;
        loss += inside ? error * error : real_max(error * error, clipped_error * clipped_error);
        grad[j] = inside || !(error * error <= clipped_error * clipped_error) ? 2.0f * weight * error : 0.0f;
    }
    for (int j = count; j < L; j++) grad[j] = 0.0f;
    l->sums[t * (NUM_SUMS + outputs(&l->policy)) + VALUE_LOSS] += loss;
}

/* A chunk of a minibatch: the argument of the three jobs below. Read-only in all threads. */
typedef struct {
    const Learner *learner;
    const Batch *batch;
    const int64_t *order;  /* (count,): the chunk's samples */
    int64_t count, tiles;
    int64_t parts;         /* that each layer's rows are split into, for the threads */
    int accumulate;        /* whether earlier chunks' gradient is added to */
} Chunk;

ALWAYS int lanes(const Chunk *c, int64_t t) { return c->count - t * L < L ? (int)(c->count - t * L) : L; }

/* Job 1, an item per tile. */
static void gather_tile(void *argument, int64_t t) {
    const Chunk *c = argument;
    gather(c->learner, c->batch, c->order + t * L, lanes(c, t), t);
}

/* Job 2, an item per network and tile: forward and backward pass over one tile of samples. */
static void forward_backward(void *argument, int64_t item) {
    const Chunk *c = argument;
    const int64_t t = item % c->tiles, of_policy = item < c->tiles;
    const Network *n = of_policy ? &c->learner->policy : &c->learner->value;
    forward(n, c->learner->activation, t);
    (of_policy ? policy_loss : value_loss)(c->learner, c->batch, c->order + t * L, lanes(c, t), t);
    backward(n, t);
}

/* Job 3, an item per layer and part: rows of a layer's weight gradient, in whole blocks of ROWS. */
static void weight_grad(void *argument, int64_t item) {
    const Chunk *c = argument;
    const int64_t layer = item / c->parts, part = item % c->parts, of_policy = c->learner->policy.layers;
    const Network *n = layer < of_policy ? &c->learner->policy : &c->learner->value;
    const int64_t i = layer < of_policy ? layer : layer - of_policy, out = n->sizes[i + 1], blocks = (out + ROWS - 1) / ROWS;
    const int64_t begin = blocks * part / c->parts * ROWS, end = blocks * (part + 1) / c->parts * ROWS;
    layer_weight_grads(n, i, c->tiles, begin, end < out ? end : out, c->accumulate);
}

/* The argument of estimate_tile: V of at most CHUNK tiles of observations. */
typedef struct {
    const Learner *learner;
    const real *obs; /* (count, D) */
    int64_t count;
    real *values; /* (count,) */
} Estimate;

static void estimate_tile(void *argument, int64_t t) {
    const Estimate *e = argument;
    const Network *n = &e->learner->value;
    const int64_t D = n->sizes[0], left = e->count - t * L, count = left < L ? left : L;
    real *x = n->activations[0] + t * tile_size(D);
    const real *value = n->activations[n->layers] + t * tile_size(1);
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < D; d++) x[d * L + j] = e->obs[(t * L + j) * D + d];
    forward(n, e->learner->activation, t);
    memcpy(e->values + t * L, value, count * sizeof *value);
}

/* V(s) of the value network: obs (count, D) -> values (count,). */
void rayagi_ppo_values(const Learner *l, ThreadPool *pool, const real *obs, int64_t count, real *values) {
    FLUSH_DENORMALS;
    for (int64_t first = 0; first < count; first += CHUNK * L) {
        const int64_t left = count - first, size = left < CHUNK * L ? left : CHUNK * L;
        Estimate estimate = {l, obs + first * l->value.sizes[0], size, values + first};
        parallel_for(pool, estimate_tile, &estimate, (size + L - 1) / L);
    }
}

/* After all chunks: add the tiles' sums in one order. Writes log_std's gradient, and stats: policy loss, value loss,
   entropy, KL, share of clipped ratios. */
static void write_stats(const Learner *l, real *stats) {
    const int64_t A = outputs(&l->policy), row = NUM_SUMS + A;
    for (int64_t t = 1; t < CHUNK; t++)
        for (int64_t k = 0; k < row; k++) l->sums[k] += l->sums[t * row + k];
    double entropy = l->sums[ENTROPY] / l->samples; /* of a Gaussian: 0, and H = sum_k (log sigma_k + 1/2 log 2 pi e) */
    for (int64_t k = 0; l->log_std && k < A; k++) {
        entropy += l->log_std[k] + 1.418938533204672742; /* log sqrt(2 pi e) */
        l->log_std_gradient[k] = l->sums[NUM_SUMS + k] - l->weight * l->entropy_coef; /* d H / d log sigma_k = 1 */
    }
    stats[0] = l->sums[POLICY_LOSS] / l->samples;
    stats[1] = l->sums[VALUE_LOSS] / l->samples;
    stats[2] = entropy;
    stats[3] = l->sums[KL] / l->samples;
    stats[4] = l->sums[CLIPPED] / l->samples;
}

/* The gradient of a minibatch's loss (policy loss + value_coef value loss - entropy_coef H). Overwrites the previous one.
   order: (samples,). stats: (5,), those of write_stats. */
void rayagi_ppo_gradient(Learner *l, const Batch *b, const int64_t *order, ThreadPool *pool, real *stats) {
    FLUSH_DENORMALS;
    memset(l->sums, 0, CHUNK * (NUM_SUMS + outputs(&l->policy)) * sizeof *l->sums);
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
