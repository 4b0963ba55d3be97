/* Networks forwards and backwards, and their weights' gradients.

Samples are dealt to tiles of L lanes, CHUNK of which go all the way before the next ones do, so that what is between the layers
stays in the caches. A tile's activations are (units, L). Every number is summed in the same order however many threads there
are: tiles do not meet, and a row of a gradient is one thread's. */

#if defined(__AVX512F__)
#define BYTES 64
#define ROWS 6 /* of a gradient at a time: with four columns as many sums as there are registers for */
#elif defined(__AVX__)
#define BYTES 32
#define ROWS 3
#else
#define BYTES 16
#define ROWS 3
#endif
#define WIDTH ((int)(BYTES / sizeof(real)))
#define COLUMNS 2
#define SPAN (COLUMNS * WIDTH)
#define PANEL 12 /* inputs whose activations in CHUNK tiles fit the first-level cache */
#define UNROLL _Pragma("GCC unroll 16")

typedef real vector __attribute__((vector_size(BYTES)));
typedef real quarter __attribute__((vector_size(16)));

enum { TANH = 0, ELU = 1, RELU = 2, SILU = 3 };

typedef struct {
    int64_t layers;       /* linear maps */
    const int64_t *sizes; /* (layers + 1): observation, hidden ..., outputs */
    const real *const *weights, *const *biases;
    real *const *weight_gradients, *const *bias_gradients;
    real *const *activations;   /* (layers + 1): what each layer takes in, and the outputs: CHUNK tiles each */
    real *const *grads; /* (layers + 1): of the activations, then of the loss before these; the first is not used */
} Network;

/* Tiles begin a few lines later than the last one would end: as many bytes apart as a power of two, they would meet in a cache. */
ALWAYS int64_t tile(int64_t units) { return units * L + PAD; }

ALWAYS int64_t outputs(const Network *n) { return n->sizes[n->layers]; }

#define KERNELS(R)                                                                                                      \
    /* R rows of y = W x + b. */                                                                                        \
    static void forward_##R(const real *restrict w, const real *restrict b, int64_t in, const real *restrict x,         \
                            real *restrict y) {                                                                        \
        for (int g = 0; g < L; g += SPAN) {                                                                             \
            vector sum[R][COLUMNS];                                                                                     \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++) sum[r][c] = (vector){0} + b[r]; \
            for (int64_t i = 0; i < in; i++) {                                                                          \
                const vector *v = (const vector *)(x + i * L + g);                                                      \
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                             \
                    sum[r][c] += w[r * in + i] * v[c];                                                                  \
            }                                                                                                           \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                                 \
                ((vector *)(y + r * L + g))[c] = sum[r][c];                                                             \
        }                                                                                                               \
    }                                                                                                                   \
    /* R columns of W: their inputs' grads times the grads by these. */                                               \
    static void backward_##R(const real *restrict w, int64_t in, int64_t out, const real *restrict grads,              \
                             real *restrict input_grads) {                                                               \
        for (int g = 0; g < L; g += SPAN) {                                                                             \
            vector sum[R][COLUMNS];                                                                                     \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++) sum[r][c] = (vector){0};        \
            for (int64_t o = 0; o < out; o++) {                                                                         \
                const vector *v = (const vector *)(grads + o * L + g);                                                 \
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                             \
                    sum[r][c] += w[o * in + r] * v[c];                                                                  \
            }                                                                                                           \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                                 \
                ((vector *)(input_grads + r * L + g))[c] *= sum[r][c];                                                    \
        }                                                                                                               \
    }
KERNELS(6)
KERNELS(2)
KERNELS(1)

ALWAYS quarter folded(vector v) {
    quarter sum = {0}, part;
    UNROLL for (int k = 0; k < WIDTH / 4; k++) {
        memcpy(&part, (const char *)&v + 16 * k, 16);
        sum += part;
    }
    return sum;
}

ALWAYS real total(vector v) {
    quarter s = folded(v);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* In every quarter of a register, these of the same quarters of a (0 to 3) and b (4 to 7). */
#define AT(q, p) ((p) < 4 ? 4 * (q) + (p) : WIDTH + 4 * (q) + (p) - 4)
#define FOUR(q, p0, p1, p2, p3) AT(q, p0), AT(q, p1), AT(q, p2), AT(q, p3)
#if BYTES == 64
#define EVERY(...) FOUR(0, __VA_ARGS__), FOUR(1, __VA_ARGS__), FOUR(2, __VA_ARGS__), FOUR(3, __VA_ARGS__)
#elif BYTES == 32
#define EVERY(...) FOUR(0, __VA_ARGS__), FOUR(1, __VA_ARGS__)
#else
#define EVERY(...) FOUR(0, __VA_ARGS__)
#endif
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, EVERY(__VA_ARGS__))
#else
typedef int32_t places __attribute__((vector_size(BYTES)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (places){EVERY(__VA_ARGS__)})
#endif

/* The totals of four, side by side. */
ALWAYS quarter totals(const vector *v) {
    vector first = PICK(v[0], v[1], 0, 4, 1, 5) + PICK(v[0], v[1], 2, 6, 3, 7);
    vector second = PICK(v[2], v[3], 0, 4, 1, 5) + PICK(v[2], v[3], 2, 6, 3, 7);
    return folded(PICK(first, second, 0, 1, 4, 5) + PICK(first, second, 2, 3, 6, 7));
}

/* R rows and C columns of a weight's gradient, from so many tiles: in place of what is there, or added to it. */
#define PRODUCTS(NAME, R, C, STORE)                                                                                         \
    static void NAME(const real *restrict grads, int64_t grads_tile, const real *restrict activations,                          \
                     int64_t activations_tile, int64_t tiles, real *restrict gradient, int64_t in, int adds) {                    \
        vector sum[R][C];                                                                                                  \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = (vector){0};                     \
        for (int64_t t = 0; t < tiles; t++, grads += grads_tile, activations += activations_tile)                                      \
            UNROLL for (int g = 0; g < L; g += WIDTH) {                                                                    \
                vector v[C];                                                                                               \
                UNROLL for (int c = 0; c < C; c++) v[c] = *(const vector *)(activations + c * L + g);                             \
                UNROLL for (int r = 0; r < R; r++) {                                                                       \
                    vector s = *(const vector *)(grads + r * L + g);                                                      \
                    UNROLL for (int c = 0; c < C; c++) sum[r][c] += s * v[c];                                              \
                }                                                                                                          \
            }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++) STORE(gradient + r * in, sum[r], adds);                                         \
    }

ALWAYS void store_four(real *gradient, const vector *sums, int adds) {
    quarter found = totals(sums), before;
    if (adds) {
        memcpy(&before, gradient, sizeof before);
        found += before;
    }
    memcpy(gradient, &found, sizeof found);
}

ALWAYS void store_one(real *gradient, const vector *sum, int adds) { *gradient = total(*sum) + (adds ? *gradient : 0.0f); }

PRODUCTS(rows_by_four, ROWS, 4, store_four)
PRODUCTS(rows_by_one, ROWS, 1, store_one)
PRODUCTS(row_by_four, 1, 4, store_four)
PRODUCTS(row_by_one, 1, 1, store_one)

/* In place; and the grads there. Of NaN: NaN, so that it is found. */
static void activate(int64_t kind, int64_t units, real *restrict x, real *restrict grad) {
    int64_t count = units * L;
    switch (kind) {
    case TANH:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            real y = real_tanh(x[j]);
            grad[j] = 1.0f - y * y;
            x[j] = x[j] == x[j] ? y : x[j];
        }
        break;
    case ELU:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            real below = real_min(x[j], 0.0f);
            grad[j] = real_exp(below); /* 1 above 0 */
            x[j] = x[j] > 0.0f ? x[j] : real_expm1(below);
        }
        break;
    case RELU:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            grad[j] = x[j] > 0.0f ? 1.0f : 0.0f;
            x[j] = real_max(x[j], 0.0f);
        }
        break;
    default:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            real s = 1.0f / (1.0f + real_exp(-x[j]));
            grad[j] = s * (1.0f + x[j] * (1.0f - s));
            x[j] *= s;
        }
    }
}

static void forward(const Network *n, int64_t activation, int64_t t) {
    for (int64_t i = 0; i < n->layers; i++) {
        int64_t in = n->sizes[i], out = n->sizes[i + 1], o = 0;
        const real *w = n->weights[i], *b = n->biases[i], *x = n->activations[i] + t * tile(in);
        real *y = n->activations[i + 1] + t * tile(out);
        for (; o + 6 <= out; o += 6) forward_6(w + o * in, b + o, in, x, y + o * L);
        for (; o + 2 <= out; o += 2) forward_2(w + o * in, b + o, in, x, y + o * L);
        if (o < out) forward_1(w + o * in, b + o, in, x, y + o * L);
        if (i + 1 < n->layers) activate(activation, out, y, n->grads[i + 1] + t * tile(out));
    }
}

static void backward(const Network *n, int64_t t) {
    for (int64_t i = n->layers - 1; i > 0; i--) {
        int64_t in = n->sizes[i], out = n->sizes[i + 1], k = 0;
        const real *w = n->weights[i], *grads = n->grads[i + 1] + t * tile(out);
        real *input_grads = n->grads[i] + t * tile(in);
        for (; k + 6 <= in; k += 6) backward_6(w + k, in, out, grads, input_grads + k * L);
        for (; k + 2 <= in; k += 2) backward_2(w + k, in, out, grads, input_grads + k * L);
        if (k < in) backward_1(w + k, in, out, grads, input_grads + k * L);
    }
}

/* Rows begin to end of a layer's gradients, from so many tiles: in place of what is there, or added to it. */
static void layer_weight_grads(const Network *n, int64_t i, int64_t tiles, int64_t begin, int64_t end, int adds) {
    const int64_t in = n->sizes[i], out = n->sizes[i + 1];
    const real *activations = n->activations[i], *grads = n->grads[i + 1];
    real *gradient = n->weight_gradients[i];
#define BLOCK(KERNEL) KERNEL(grads + o * L, tile(out), activations + k * L, tile(in), tiles, gradient + o * in + k, in, adds)
    for (int64_t first = 0; first < in; first += PANEL) {
        const int64_t last = first + PANEL < in ? first + PANEL : in;
        int64_t o = begin, k;
        for (; o + ROWS <= end; o += ROWS) {
            for (k = first; k + 4 <= last; k += 4) BLOCK(rows_by_four);
            for (; k < last; k++) BLOCK(rows_by_one);
        }
        for (; o < end; o++) {
            for (k = first; k + 4 <= last; k += 4) BLOCK(row_by_four);
            for (; k < last; k++) BLOCK(row_by_one);
        }
    }
    for (int64_t o = begin; o < end; o++) {
        vector sum = {0};
        for (int64_t t = 0; t < tiles; t++)
            for (int g = 0; g < L; g += WIDTH) sum += *(const vector *)(grads + t * tile(out) + o * L + g);
        n->bias_gradients[i][o] = total(sum) + (adds ? n->bias_gradients[i][o] : 0.0f);
    }
}

