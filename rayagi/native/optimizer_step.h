/* Optimizer step on the mean of all trainers' gradients: reduce, clip by the global norm, Adam (Kingma & Ba 2015,
algorithm 1). Include it after thread_pool.h.

Trainers either each have all parameters, and then only reduce gradients; or they share one copy of the parameters in
shared memory (a sharded optimizer), and each reduces and steps its own share.

The step is a state machine: where a collective operation cannot be run from C, it returns to the caller, which runs the
operation and calls again. */
#include <math.h>
#include <stdint.h>
#include <time.h>

/* REDUCE, NORM, BARRIER: the state, named by the collective operation that ends it; as a return value: the caller must
   complete that operation and call again. NORM's operation is a barrier, too. DONE: the step is done. AGAIN: only call
   again. */
enum { REDUCE, NORM, BARRIER, DONE, AGAIN };
/* STEP_CHUNK: parameters per item of the thread pool. SUMS: partial sums. STRIDE: float64 from trainer to trainer, a
   cache line. */
enum { STEP_CHUNK = 4096, SUMS = 16, STRIDE = 8 };

/* One trainer's optimizer. Python fills it once; learning_rate, next and waited_ns before every run (optimizer_step.py). */
typedef struct {
    /* This trainer's share, or all: (count,) each. Only this trainer writes its share. */
    float *parameters;
    const float *gradients; /* stays as it is before clipping */
    float *exp_avg, *exp_avg_sq; /* Adam's moments m and v */
    int64_t count;
    float *steps; /* t of Adam: steps done so far */
    double learning_rate, beta1, beta2, eps, max_grad_norm; /* max_grad_norm 0: no clipping */
    double *chunk_sums; /* sum of squared gradients of each chunk; written by the thread that takes the chunk */
    double *share_sums; /* (trainers, STRIDE): sum of squared gradients of each share, in memory that all trainers see.
                           A trainer writes its own row; the barrier of NORM orders it before the others' reads */
    int64_t rank, trainers; /* this trainer among those that share the parameters; 0 of 1 where it has all of them */
    /* Collective operations. */
    int64_t reduces; /* whether gradients of other trainers belong to the mean */
    int (*run)(void *member, const void *operation); /* 0: it is complete; else the caller must complete it */
    void *member;
    const void *reduce, *barrier; /* NULL: the caller runs them */
    int64_t next;      /* state to continue in */
    int64_t waited_ns; /* time in ``run`` */
    /* Factors of the current step: written by ``prepare``, read by ``adam_update``. */
    float grad_scale;   /* min(1, max_grad_norm / norm) */
    float step_size;    /* learning_rate / (1 - beta1^t) */
    float inverse_bias; /* 1 / sqrt(1 - beta2^t) */
} OptimizerStep;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Run the collective operation that ends ``state``. Returns 1 where it is complete or not needed, 0 where the caller
   must complete it. Either way the next call continues in the state after it. */
static int run_collective_or_yield(OptimizerStep *d, int state) {
    const void *operation = state == REDUCE ? d->reduce : d->barrier;
    d->next = state + 1;
    if (state == REDUCE ? !d->reduces : d->trainers == 1) return 1;
    if (!operation) return 0;
    const int64_t began = now_ns();
    const int complete = d->run(d->member, operation) == 0;
    d->waited_ns += now_ns() - began;
    return complete;
}

/* sum g_i^2 of a chunk, in float64: the product of two float32 is exact there. The order of the SUMS partial sums is
   fixed, so the result does not depend on threads. */
static void sum_squares(void *argument, int64_t chunk) {
    const OptimizerStep *d = argument;
    const int64_t begin = chunk * STEP_CHUNK, end = begin + STEP_CHUNK < d->count ? begin + STEP_CHUNK : d->count;
    double sums[SUMS] = {0}, sum = 0.0;
    int64_t i = begin;
    for (; i + SUMS <= end; i += SUMS)
#pragma omp simd
        for (int j = 0; j < SUMS; j++) sums[j] += (double)d->gradients[i + j] * (double)d->gradients[i + j];
    for (int j = 0; i + j < end; j++) sums[j] += (double)d->gradients[i + j] * (double)d->gradients[i + j];
    for (int j = 0; j < SUMS; j++) sum += sums[j];
    d->chunk_sums[chunk] = sum;
}

/* Adam on a chunk (algorithm 1), with the bias corrections of ``prepare``. */
static void adam_update(void *argument, int64_t chunk) {
    const OptimizerStep *d = argument;
    const int64_t begin = chunk * STEP_CHUNK, end = begin + STEP_CHUNK < d->count ? begin + STEP_CHUNK : d->count;
    const float *restrict gradients = d->gradients;
    const float grad_scale = d->grad_scale, step_size = d->step_size, inverse_bias = d->inverse_bias, eps = d->eps;
    const float rest1 = 1.0 - d->beta1, rest2 = 1.0 - d->beta2, beta2 = d->beta2;
    float *restrict parameters = d->parameters, *restrict exp_avg = d->exp_avg, *restrict exp_avg_sq = d->exp_avg_sq;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float g = grad_scale * gradients[i];
        const float m = exp_avg[i] + rest1 * (g - exp_avg[i]);      /* m_t = beta1 m_(t-1) + (1 - beta1) g */
        const float v = beta2 * exp_avg_sq[i] + rest2 * g * g;      /* v_t = beta2 v_(t-1) + (1 - beta2) g^2 */
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        /* theta -= learning_rate m^ / (sqrt(v^) + eps), m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t) */
        parameters[i] -= step_size * m / (sqrtf(v) * inverse_bias + eps);
    }
}

/* Count the step and compute its factors. ``norm``: of all gradients, before clipping. */
static void prepare(OptimizerStep *d, double norm) {
    /* As torch.nn.utils.clip_grad_norm_: g *= min(1, max_norm / (norm + 1e-6)). A NaN norm makes all gradients NaN. */
    const double max_norm = d->max_grad_norm, scale = max_norm / (norm + 1e-6), steps = *d->steps += 1.0f;
    d->grad_scale = max_norm > 0.0 && !(scale >= 1.0) ? scale : 1.0;
    d->step_size = d->learning_rate / (1.0 - pow(d->beta1, steps));
    d->inverse_bias = 1.0 / sqrt(1.0 - pow(d->beta2, steps));
}

/* One step, continued from ``d->next``. Returns DONE, with the norm before clipping; else what the caller must complete
   first. */
static int64_t optimizer_step(OptimizerStep *d, ThreadPool *pool, float *norm) {
    const int64_t chunks = (d->count + STEP_CHUNK - 1) / STEP_CHUNK;
    double sum = 0.0;
    switch (d->next) {
    case REDUCE: /* gradients = sum over trainers, each weighted before: their mean. Of this trainer's share */
        if (!run_collective_or_yield(d, REDUCE)) return REDUCE;
        /* fall through */
    case NORM: /* this share's sum of squares, chunk by chunk, added in one order */
        parallel_for(pool, sum_squares, d, chunks);
        for (int64_t k = 0; k < chunks; k++) sum += d->chunk_sums[k];
        d->share_sums[d->rank * STRIDE] = sum;
        if (!run_collective_or_yield(d, NORM)) return NORM; /* until all shares' sums are written */
        /* fall through */
    case BARRIER: /* norm = sqrt(sum over all shares): the same bits in every trainer */
        for (int64_t k = 0; k < d->trainers; k++) sum = k ? sum + d->share_sums[k * STRIDE] : d->share_sums[0];
        *norm = sqrt(sum);
        prepare(d, sqrt(sum));
        parallel_for(pool, adam_update, d, chunks);
        if (!run_collective_or_yield(d, BARRIER)) return BARRIER; /* until all shares' parameters are written */
    }
    d->next = REDUCE;
    return DONE;
}

int64_t rayagi_optimizer_step(OptimizerStep *d, ThreadPool *pool, float *norm) {
    FLUSH_DENORMALS;
    return optimizer_step(d, pool, norm);
}
