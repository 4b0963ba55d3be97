/* One step along the mean of all trainers' gradients: reduced, clipped, by Adam (Kingma & Ba 2015, algorithm 1). After thread_pool.h.

Trainers either have parameters of their own, and then only gradients are reduced; or they have one copy, of which each reduces and steps
its share. */
#include <math.h>
#include <stdint.h>
#include <time.h>

enum { REDUCE, NORM, BARRIER, DONE, AGAIN }; /* what the caller has to do, or finish; or nothing; or only call again */
enum { STEP_CHUNK = 4096, SUMS = 16, STRIDE = 8 };

typedef struct {
    /* What this trainer steps, (count,) each. */
    float *parameters;
    const float *gradients;
    float *exp_avg, *exp_avg_sq;
    int64_t count;
    float *steps; /* made so far */
    double learning_rate, beta1, beta2, eps, max_grad_norm;
    double *chunk_sums; /* sums of squares */
    double *share_sums; /* (trainers, STRIDE): the same of what each trainer steps, where all see it */
    int64_t rank, trainers; /* of one copy; 0 of 1: all of it is this one's own */
    /* Operations of all trainers: none, or the caller's, or this program's own. */
    int64_t reduces;
    int (*run)(void *member, const void *operation); /* 0: it is complete */
    void *member;
    const void *reduce, *barrier;
    int64_t next; /* operation */
    int64_t waited_ns;
    /* Of this step. */
    float scale, rate, root; /* of gradients; of steps; of second moments, inverted */
} OptimizerStep;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Take part in the operation. Whether it is complete; else the caller does or finishes it, and then calls again. */
static int all_reduce_or_yield(OptimizerStep *d, int what) {
    const void *operation = what == REDUCE ? d->reduce : d->barrier;
    d->next = what + 1;
    if (what == REDUCE ? !d->reduces : d->trainers == 1) return 1;
    if (!operation) return 0;
    const int64_t began = now_ns();
    const int complete = d->run(d->member, operation) == 0;
    d->waited_ns += now_ns() - began;
    return complete;
}

/* The sum of a chunk's squares: products of floats are exact in a double, and so many partial sums are added in one order. */
static void sum_squares(void *given, int64_t chunk) {
    const OptimizerStep *d = given;
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

static void adam_update(void *given, int64_t chunk) {
    const OptimizerStep *d = given;
    const int64_t begin = chunk * STEP_CHUNK, end = begin + STEP_CHUNK < d->count ? begin + STEP_CHUNK : d->count;
    const float *restrict gradients = d->gradients, scale = d->scale, rate = d->rate, root = d->root, eps = d->eps;
    const float rest1 = 1.0 - d->beta1, rest2 = 1.0 - d->beta2, beta2 = d->beta2;
    float *restrict parameters = d->parameters, *restrict first = d->exp_avg, *restrict second = d->exp_avg_sq;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float g = scale * gradients[i];
        const float m = first[i] + rest1 * (g - first[i]), v = beta2 * second[i] + rest2 * g * g;
        first[i] = m;
        second[i] = v;
        parameters[i] -= rate * m / (sqrtf(v) * root + eps);
    }
}

static void prepare(OptimizerStep *d, double norm) {
    const double most = d->max_grad_norm, scale = most / (norm + 1e-6), steps = *d->steps += 1.0f;
    d->scale = most > 0.0 && !(scale >= 1.0) ? scale : 1.0; /* NaN makes all of them NaN */
    d->rate = d->learning_rate / (1.0 - pow(d->beta1, steps));
    d->root = 1.0 / sqrt(1.0 - pow(d->beta2, steps));
}

/* DONE, and the norm before clipping; or what the caller has to do before it calls again. */
static int64_t optimizer_step(OptimizerStep *d, ThreadPool *pool, float *norm) {
    const int64_t chunks = (d->count + STEP_CHUNK - 1) / STEP_CHUNK;
    double sum = 0.0;
    switch (d->next) {
    case REDUCE:
        if (!all_reduce_or_yield(d, REDUCE)) return REDUCE;
        /* fall through */
    case NORM:
        parallel_for(pool, sum_squares, d, chunks);
        for (int64_t k = 0; k < chunks; k++) sum += d->chunk_sums[k];
        d->share_sums[d->rank * STRIDE] = sum;
        if (!all_reduce_or_yield(d, NORM)) return NORM;
        /* fall through */
    case BARRIER:
        for (int64_t k = 0; k < d->trainers; k++) sum = k ? sum + d->share_sums[k * STRIDE] : d->share_sums[0];
        *norm = sqrt(sum);
        prepare(d, sqrt(sum));
        parallel_for(pool, adam_update, d, chunks);
        if (!all_reduce_or_yield(d, BARRIER)) return BARRIER; /* before anybody looks at the others' shares */
    }
    d->next = REDUCE;
    return DONE;
}

int64_t rayagi_optimizer_step(OptimizerStep *d, ThreadPool *pool, float *norm) {
    FLUSH_DENORMALS;
    return optimizer_step(d, pool, norm);
}
