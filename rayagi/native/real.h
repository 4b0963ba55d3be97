/* The type ``real``: float32, or float64 (REAL_BITS 64) for comparisons with the reference (experiments.fusion.parity). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

#if REAL_BITS == 64
typedef double real;
#define real_abs fabs
#define real_sqrt sqrt
#define real_floor floor
#define real_fma(a, b, c) ((a) * (b) + (c))
#define real_exp exp /* from here on: the C library's functions; numbers.h has those of float32 */
#define real_expm1 expm1
#define real_log log
#define real_sin sin
#define real_cos cos
#define real_tan tan
#define real_tanh tanh
#else
typedef float real;
#define real_abs fabsf
#define real_sqrt sqrtf
#define real_floor floorf
#define real_fma fmaf
#if !defined(__FMA__) && !defined(__aarch64__)
#define fmaf(a, b, c) ((a) * (b) + (c)) /* without the instruction, fmaf is a library call per lane */
#endif
#endif

ALWAYS real real_min(real a, real b) { return a > b ? b : a; } /* NaN if a is NaN */
ALWAYS real real_max(real a, real b) { return a < b ? b : a; }
ALWAYS real real_minimum(real a, real b) { return (a > b) | (b != b) ? b : a; } /* NaN if either is, as in torch */
ALWAYS real real_maximum(real a, real b) { return (a < b) | (b != b) ? b : a; }
