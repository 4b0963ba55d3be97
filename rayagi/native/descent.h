/* One step along the mean of all trainers' gradients: reduced, clipped, by Adam (Kingma & Ba 2015, algorithm 1). After team.h.

Trainers either have parameters of their own, and then only gradients meet; or they have one copy, of which each reduces and steps
its share. */
#include <math.h>
#include <stdint.h>
#include <time.h>

enum { REDUCE, ADD, MEET, STEPPED, AGAIN }; /* what the caller has to do, or finish; or nothing; or only call again */
enum { PIECE = 4096, SUMS = 16, STRIDE = 8 };

typedef struct {
    /* What this trainer steps, (count,) each. */
    float *parameters;
    const float *gradients;
    float *exp_avg, *exp_avg_sq;
    int64_t count;
    float *steps; /* made so far */
    double learning_rate, beta1, beta2, eps, max_grad_norm;
    double *of_pieces; /* sums of squares */
    double *of_shares; /* (trainers, STRIDE): the same of what each trainer steps, where all see it */
    int64_t rank, trainers; /* of one copy; 0 of 1: all of it is this one's own */
    /* Operations of all trainers: none, or the caller's, or this program's own. */
    int64_t reduces;
    int (*run)(void *member, const void *operation); /* 0: it is complete */
    void *member;
    const void *reduce, *meet;
    int64_t next; /* operation */
    int64_t waited_ns;
    /* Of this step. */
    float scale, rate, root; /* of gradients; of steps; of second moments, inverted */
} Descent;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Take part in the operation. Whether it is complete; else the caller does or finishes it, and then calls again. */
static int meets(Descent *d, int what) {
    const void *operation = what == REDUCE ? d->reduce : d->meet;
    d->next = what + 1;
    if (what == REDUCE ? !d->reduces : d->trainers == 1) return 1;
    if (!operation) return 0;
    const int64_t began = now_ns();
    const int complete = d->run(d->member, operation) == 0;
    d->waited_ns += now_ns() - began;
    return complete;
}

/* The sum of a piece's squares: products of floats are exact in a double, and so many partial sums are added in one order. */
static void square(void *given, int64_t piece) {
    const Descent *d = given;
    const int64_t begin = piece * PIECE, end = begin + PIECE < d->count ? begin + PIECE : d->count;
    double sums[SUMS] = {0}, sum = 0.0;
    int64_t i = begin;
    for (; i + SUMS <= end; i += SUMS)
#pragma omp simd
        for (int j = 0; j < SUMS; j++) sums[j] += (double)d->gradients[i + j] * (double)d->gradients[i + j];
    for (int j = 0; i + j < end; j++) sums[j] += (double)d->gradients[i + j] * (double)d->gradients[i + j];
    for (int j = 0; j < SUMS; j++) sum += sums[j];
    d->of_pieces[piece] = sum;
}

static void move(void *given, int64_t piece) {
    const Descent *d = given;
    const int64_t begin = piece * PIECE, end = begin + PIECE < d->count ? begin + PIECE : d->count;
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

static void prepare(Descent *d, double norm) {
    const double most = d->max_grad_norm, scale = most / (norm + 1e-6), steps = *d->steps += 1.0f;
    d->scale = most > 0.0 && !(scale >= 1.0) ? scale : 1.0; /* NaN makes all of them NaN */
    d->rate = d->learning_rate / (1.0 - pow(d->beta1, steps));
    d->root = 1.0 / sqrt(1.0 - pow(d->beta2, steps));
}

/* STEPPED, and the norm before clipping; or what the caller has to do before it calls again. */
static int64_t descend(Descent *d, Team *team, float *norm) {
    const int64_t pieces = (d->count + PIECE - 1) / PIECE;
    double sum = 0.0;
    switch (d->next) {
    case REDUCE:
        if (!meets(d, REDUCE)) return REDUCE;
        /* fall through */
    case ADD:
        share_out(team, square, d, pieces);
        for (int64_t k = 0; k < pieces; k++) sum += d->of_pieces[k];
        d->of_shares[d->rank * STRIDE] = sum;
        if (!meets(d, ADD)) return ADD;
        /* fall through */
    case MEET:
        for (int64_t k = 0; k < d->trainers; k++) sum = k ? sum + d->of_shares[k * STRIDE] : d->of_shares[0];
        *norm = sqrt(sum);
        prepare(d, sqrt(sum));
        share_out(team, move, d, pieces);
        if (!meets(d, MEET)) return MEET; /* before anybody looks at the others' shares */
    }
    d->next = REDUCE;
    return STEPPED;
}

int64_t rayagi_descend(Descent *d, Team *team, float *norm) {
    FLUSH_DENORMALS;
    return descend(d, team, norm);
}
