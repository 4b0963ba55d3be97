/* Backpropagation through multilayer perceptrons: forward pass, backward pass and weight gradients.

Samples are split into tiles of L lanes. CHUNK tiles pass through all layers before the next ones do, so activations
stay in the caches. A tile's activations are (units, L). For layer i with input x_i, z_(i+1) = W_i x_i + b_i and x_(i+1)
= f(z_(i+1)), the gradients of the loss, written g_i = dL/dz_i, are:

    g_i = f'(z_i) * W_i^T g_(i+1)                          backward
    dL/dW_i = sum over samples of g_(i+1) x_i^T            layer_weight_grads
    dL/db_i = sum over samples of g_(i+1)                  layer_weight_grads

The order of each sum does not depend on threads: a tile, and a row of a weight gradient, belong to one thread. */

#if defined(__AVX512F__)
#define BYTES 64
#define ROWS 6 /* of a weight gradient at a time: with four columns, as many sums as the registers can hold */
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
#define PANEL 12 /* inputs whose activations in CHUNK tiles fit the L1 cache */
#define UNROLL _Pragma("GCC unroll 16")

typedef real vector __attribute__((vector_size(BYTES)));
typedef real quarter __attribute__((vector_size(16)));

enum { TANH = 0, ELU = 1, RELU = 2, SILU = 3 };

/* A network and its buffers. Python fills it (learning.py). The thread that has a tile writes its ``activations`` and
   ``grads``; the thread that has a row of a gradient writes that row. */
typedef struct {
    int64_t layers;       /* linear maps */
    const int64_t *sizes; /* (layers + 1): observation, hidden ..., outputs */
    const real *const *weights, *const *biases;            /* (out, in) and (out,) of each layer */
    real *const *weight_gradients, *const *bias_gradients; /* the same shapes */
    real *const *activations; /* (layers + 1): each layer's input x_i, and the outputs: CHUNK tiles each */
    real *const *grads;       /* (layers + 1): ``forward`` writes f'(z_i), ``backward`` makes it g_i; [0] is not used */
} Network;

/* Reals from tile to tile, PAD included: at a distance of a power of two, tiles would compete for the same cache sets. */
ALWAYS int64_t tile_size(int64_t units) { return units * L + PAD; }

ALWAYS int64_t outputs(const Network *n) { return n->sizes[n->layers]; }

#define KERNELS(R)                                                                                                      \
    /* R rows of y = W x + b: y_r = b_r + sum_i w_ri x_i. */                                                            \
    static void forward_##R(const real *restrict w, const real *restrict b, int64_t in, const real *restrict x,         \
                            real *restrict y) {                                                                         \
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
    /* R columns of W: input_grads_r = f'(z_r) sum_o w_or grads_o. On entry input_grads holds f'(z). */                 \
    static void backward_##R(const real *restrict w, int64_t in, int64_t out, const real *restrict grads,               \
                             real *restrict input_grads) {                                                              \
        for (int g = 0; g < L; g += SPAN) {                                                                             \
            vector sum[R][COLUMNS];                                                                                     \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++) sum[r][c] = (vector){0};        \
            for (int64_t o = 0; o < out; o++) {                                                                         \
                const vector *v = (const vector *)(grads + o * L + g);                                                  \
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                             \
                    sum[r][c] += w[o * in + r] * v[c];                                                                  \
            }                                                                                                           \
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLUMNS; c++)                                 \
                ((vector *)(input_grads + r * L + g))[c] *= sum[r][c];                                                  \
        }                                                                                                               \
    }
KERNELS(6)
KERNELS(2)
KERNELS(1)

/* The sum of a vector's 16-byte quarters. */
ALWAYS quarter sum_quarters(vector v) {
    quarter sum = {0}, part;
    UNROLL for (int k = 0; k < WIDTH / 4; k++) {
        memcpy(&part, (const char *)&v + 16 * k, 16);
        sum += part;
    }
    return sum;
}

/* The sum of a vector's lanes. */
ALWAYS real sum_lanes(vector v) {
    quarter s = sum_quarters(v);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* SHUFFLE(a, b, ...): in each 16-byte quarter, the elements of that quarter of a (0 to 3) and b (4 to 7) with these
   indices. */
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
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, EVERY(__VA_ARGS__))
#else
typedef int32_t indices __attribute__((vector_size(BYTES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (indices){EVERY(__VA_ARGS__)})
#endif

/* The sums of the lanes of four vectors, as one quarter: two transposing additions, then a sum over quarters. */
ALWAYS quarter sum_lanes_of_four(const vector *v) {
    vector first = SHUFFLE(v[0], v[1], 0, 4, 1, 5) + SHUFFLE(v[0], v[1], 2, 6, 3, 7);
    vector second = SHUFFLE(v[2], v[3], 0, 4, 1, 5) + SHUFFLE(v[2], v[3], 2, 6, 3, 7);
    return sum_quarters(SHUFFLE(first, second, 0, 1, 4, 5) + SHUFFLE(first, second, 2, 3, 6, 7));
}

/* R rows and C columns of dL/dW = sum of g x^T over a chunk's samples. ``accumulate``: add to ``gradient``. */
#define PRODUCTS(NAME, R, C, STORE)                                                                                  \
    static void NAME(const real *restrict grads, int64_t grads_tile, const real *restrict activations,               \
                     int64_t activations_tile, int64_t tiles, real *restrict gradient, int64_t in, int accumulate) { \
        vector sum[R][C];                                                                                            \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = (vector){0};               \
        for (int64_t t = 0; t < tiles; t++, grads += grads_tile, activations += activations_tile)                    \
            UNROLL for (int g = 0; g < L; g += WIDTH) {                                                              \
                vector v[C];                                                                                         \
                UNROLL for (int c = 0; c < C; c++) v[c] = *(const vector *)(activations + c * L + g);                \
                UNROLL for (int r = 0; r < R; r++) {                                                                 \
                    vector s = *(const vector *)(grads + r * L + g);                                                 \
                    UNROLL for (int c = 0; c < C; c++) sum[r][c] += s * v[c];                                        \
                }                                                                                                    \
            }                                                                                                        \
        UNROLL for (int r = 0; r < R; r++) STORE(gradient + r * in, sum[r], accumulate);                             \
    }

ALWAYS void store_four(real *gradient, const vector *sums, int accumulate) {
    quarter result = sum_lanes_of_four(sums), before;
    if (accumulate) {
        memcpy(&before, gradient, sizeof before);
        result += before;
    }
    memcpy(gradient, &result, sizeof result);
}

ALWAYS void store_one(real *gradient, const vector *sum, int accumulate) {
    *gradient = sum_lanes(*sum) + (accumulate ? *gradient : 0.0f);
}

PRODUCTS(rows_by_four, ROWS, 4, store_four)
PRODUCTS(rows_by_one, ROWS, 1, store_one)
PRODUCTS(row_by_four, 1, 4, store_four)
PRODUCTS(row_by_one, 1, 1, store_one)

/* x = f(z) in place, and grad = f'(z). NaN stays NaN, so that it is detected. */
static void activate(int64_t kind, int64_t units, real *restrict x, real *restrict grad) {
    int64_t count = units * L;
    switch (kind) {
    case TANH:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            real y = real_tanh(x[j]);
            grad[j] = 1.0f - y * y; /* tanh' = 1 - tanh^2 */
            x[j] = x[j] == x[j] ? y : x[j];
        }
        break;
    case ELU:
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            real below = real_min(x[j], 0.0f);
            grad[j] = real_exp(below); /* ELU' = exp(min(z, 0)) */
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
            grad[j] = s * (1.0f + x[j] * (1.0f - s)); /* SiLU = z s with s = sigmoid(z), s' = s (1 - s) */
            x[j] *= s;
        }
    }
}

/* Forward pass over tile t: activations of all layers, and f'(z) in grads. The last layer is linear. */
static void forward(const Network *n, int64_t activation, int64_t t) {
    for (int64_t i = 0; i < n->layers; i++) {
        int64_t in = n->sizes[i], out = n->sizes[i + 1], o = 0;
        const real *w = n->weights[i], *b = n->biases[i], *x = n->activations[i] + t * tile_size(in);
        real *y = n->activations[i + 1] + t * tile_size(out);
        for (; o + 6 <= out; o += 6) forward_6(w + o * in, b + o, in, x, y + o * L);
        for (; o + 2 <= out; o += 2) forward_2(w + o * in, b + o, in, x, y + o * L);
        if (o < out) forward_1(w + o * in, b + o, in, x, y + o * L);
        if (i + 1 < n->layers) activate(activation, out, y, n->grads[i + 1] + t * tile_size(out));
    }
}

/* Backward pass over tile t, from grads of the outputs: g_i = f'(z_i) * W_i^T g_(i+1), down to the first hidden layer. */
static void backward(const Network *n, int64_t t) {
    for (int64_t i = n->layers - 1; i > 0; i--) {
        int64_t in = n->sizes[i], out = n->sizes[i + 1], k = 0;
        const real *w = n->weights[i], *grads = n->grads[i + 1] + t * tile_size(out);
        real *input_grads = n->grads[i] + t * tile_size(in);
        for (; k + 6 <= in; k += 6) backward_6(w + k, in, out, grads, input_grads + k * L);
        for (; k + 2 <= in; k += 2) backward_2(w + k, in, out, grads, input_grads + k * L);
        if (k < in) backward_1(w + k, in, out, grads, input_grads + k * L);
    }
}

/* Rows begin to end of dL/dW and dL/db of layer i, over all tiles of a chunk. ``accumulate``: add to earlier chunks'. */
static void layer_weight_grads(const Network *n, int64_t i, int64_t tiles, int64_t begin, int64_t end, int accumulate) {
    const int64_t in = n->sizes[i], out = n->sizes[i + 1];
    const real *activations = n->activations[i], *grads = n->grads[i + 1];
    real *gradient = n->weight_gradients[i];
#define BLOCK(KERNEL)                                                                \
    KERNEL(grads + o * L, tile_size(out), activations + k * L, tile_size(in), tiles, \
           gradient + o * in + k, in, accumulate)
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
            for (int g = 0; g < L; g += WIDTH) sum += *(const vector *)(grads + t * tile_size(out) + o * L + g);
        n->bias_gradients[i][o] = sum_lanes(sum) + (accumulate ? n->bias_gradients[i][o] : 0.0f);
    }
}

