/* Optimizer step on a mean gradient: clip by the global norm, Adam (Kingma & Ba 2015, algorithm 1). Include it after
thread_pool.h. */
#include <math.h>
#include <stdint.h>

/* STEP_CHUNK: parameters per item of the thread pool. SUMS: partial sums. */
enum { STEP_CHUNK = 4096, SUMS = 16 };

/* One trainer's optimizer. Python fills it once; learning_rate before every step (learning.py). */
typedef struct {
    float *parameters;      /* (count,), as the next three */
    const float *gradients; /* stays as it is before clipping */
    float *exp_avg, *exp_avg_sq; /* Adam's moments m and v */
    int64_t count;
    float *steps; /* t of Adam: steps done so far */
    double learning_rate, beta1, beta2, eps, max_grad_norm; /* max_grad_norm 0: no clipping */
    double *chunk_sums; /* sum of squared gradients of each chunk; written by the thread that takes the chunk */
    /* Factors of the current step: written by ``prepare``, read by ``adam_update``. */
    float grad_scale;   /* min(1, max_grad_norm / norm) */
    float step_size;    /* learning_rate / (1 - beta1^t) */
    float inverse_bias; /* 1 / sqrt(1 - beta2^t) */
} OptimizerStep;

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

/* One step. Writes the norm of the gradients before clipping. */
void rayagi_optimizer_step(OptimizerStep *d, ThreadPool *pool, float *norm) {
    FLUSH_DENORMALS;
    const int64_t chunks = (d->count + STEP_CHUNK - 1) / STEP_CHUNK;
    double sum = 0.0;
    parallel_for(pool, sum_squares, d, chunks);
    for (int64_t k = 0; k < chunks; k++) sum += d->chunk_sums[k]; /* in one order, for any number of threads */
    prepare(d, sqrt(sum));
    parallel_for(pool, adam_update, d, chunks);
    *norm = sqrt(sum);
}
