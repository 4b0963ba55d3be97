/* Forward pass of a policy's multilayer perceptron over one tile of observations, with register-blocked matrix
products.

A lane is an environment; a tile has L of them. Activations are (units, L). Weights are packed as (ceil(out / ROWS), in,
ROWS), so a block of ROWS outputs reads its weights in order. A block keeps ROWS x COLUMNS vectors of sums in registers:
each loaded input vector is used ROWS times, each weight COLUMNS times. A lane's sums do not depend on the number of
lanes. */

#include <stdlib.h>

#if defined(__AVX512F__) && L >= 64
#define BYTES 64
#define ROWS 6
#define COLUMNS 4
#elif defined(__AVX512F__) /* a tile of 32 */
#define BYTES 64
#define ROWS 12
#define COLUMNS 2
#elif defined(__AVX__)
#define BYTES 32
#define ROWS 6
#define COLUMNS 2
#else
#define BYTES 16
#define ROWS 4
#define COLUMNS 4
#endif
#define WIDTH ((int)(BYTES / sizeof(real)))

typedef real vector __attribute__((vector_size(BYTES)));

enum { TANH = 0, ELU = 1, RELU = 2, SILU = 3 };

/* A policy's parameters, read-only. Python fills it (acting.py). */
typedef struct {
    int64_t layers;       /* linear maps */
    const int64_t *sizes; /* (layers + 1): observation, hidden ..., outputs */
    const real *weights;  /* packed weights of all layers, one after another */
    const real *biases;   /* of all layers, each padded to a multiple of ROWS */
    int64_t activation;   /* TANH, ELU, RELU or SILU, between layers */
    int64_t normalise;    /* whether observations become clip((obs - shift) * scale, -clip, clip) */
    const real *shift;    /* (D,) */
    const real *scale;    /* (D,) */
    double clip;
    const real *std;      /* (A,): of a Gaussian; NULL for a categorical policy */
} Policy;

/* For Python, which packs the weights. */
int64_t rayagi_rows(void) { return ROWS; }

static int64_t padded(int64_t size) { return (size + ROWS - 1) / ROWS * ROWS; }

/* A block of y = W x + b: ROWS outputs of N * WIDTH lanes, y_r = b_r + sum_i w_ri x_i. */
#define PRODUCT(NAME, N)                                                                                         \
    static void NAME(const real *restrict w, const real *restrict b, int64_t in, const real *restrict x,         \
                     real *restrict y) {                                                                         \
        vector sum[ROWS][N];                                                                                     \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                  \
            _Pragma("GCC unroll 16") for (int c = 0; c < N; c++) sum[r][c] = (vector){0} + b[r];                 \
        for (int64_t i = 0; i < in; i++, w += ROWS, x += L) {                                                    \
            vector v[N];                                                                                         \
            _Pragma("GCC unroll 16") for (int c = 0; c < N; c++) v[c] = *(const vector *)(x + c * WIDTH);        \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                              \
                _Pragma("GCC unroll 16") for (int c = 0; c < N; c++) sum[r][c] += w[r] * v[c];                   \
        }                                                                                                        \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                  \
            _Pragma("GCC unroll 16") for (int c = 0; c < N; c++) *(vector *)(y + r * L + c * WIDTH) = sum[r][c]; \
    }
PRODUCT(product_wide, COLUMNS)
PRODUCT(product_narrow, 1)

/* y = W x + b. x: (in, L), y: (padded(out), L); lanes from ``count`` on may keep their old values. */
static void linear(const real *w, const real *b, int64_t in, int64_t out, int count, const real *x, real *y) {
    for (int64_t o = 0; o < out; o += ROWS) {
        int g = 0;
        for (; g + WIDTH < count; g += COLUMNS * WIDTH) product_wide(w + o * in, b + o, in, x + g, y + o * L + g);
        for (; g < count; g += WIDTH) product_narrow(w + o * in, b + o, in, x + g, y + o * L + g);
    }
}

/* x = f(x) in place, at least for the first ``count`` lanes. */
static void activate(int64_t kind, int64_t units, int count, real *restrict x) {
    int lanes = count <= WIDTH ? WIDTH : L;
    for (int64_t u = 0; u < units; u++, x += L) {
        switch (kind) {
        case TANH:
#pragma omp simd
            for (int j = 0; j < lanes; j++) x[j] = real_tanh(x[j]);
            break;
        case ELU:
#pragma omp simd
            for (int j = 0; j < lanes; j++) x[j] = x[j] > 0.0f ? x[j] : real_expm1(x[j]);
            break;
        case RELU:
#pragma omp simd
            for (int j = 0; j < lanes; j++) x[j] = real_max(x[j], 0.0f);
            break;
        default:
#pragma omp simd
            for (int j = 0; j < lanes; j++) x[j] = x[j] / (1.0f + real_exp(-x[j]));
        }
    }
}

/* Units of the widest layer, padded. */
static int64_t widest(const Policy *p) {
    int64_t most = 0;
    for (int64_t i = 0; i <= p->layers; i++) most = padded(p->sizes[i]) > most ? padded(p->sizes[i]) : most;
    return most;
}

/* The policy's outputs (distribution parameters) for a tile of observations. a: observations (D, L), overwritten; b:
   scratch; both (widest, L). Returns a or b, whichever holds the outputs (A, L). */
static real *infer(const Policy *p, int count, real *a, real *b) {
    const real *w = p->weights, *bias = p->biases;
    for (int64_t i = 0; i < p->layers; i++) {
        int64_t in = p->sizes[i], out = p->sizes[i + 1];
        linear(w, bias, in, out, count, a, b);
        if (i + 1 < p->layers) activate(p->activation, out, count, b);
        w += padded(out) * in;
        bias += padded(out);
        real *output = b; /* the next layer's input */
        b = a;
        a = output;
    }
    return a;
}
