/* Flush denormals to zero while a policy computes or learns.

Denormals are floats with fewer significant digits (below 1.2e-38 in float32). Arithmetic on them is up to a hundred
times slower, and no policy learns from them.

The mode is per thread, in the processor's control register. FLUSH_DENORMALS restores the caller's mode at every exit of
its block: a simulator's exact results depend on it. On processors other than x86-64 and aarch64 it does nothing. */

#include <stdint.h>

/* float_mode: the thread's control register; set_float_mode: writes it. */
#if defined(__x86_64__)
typedef uint32_t FloatMode;                   /* MXCSR */
#define FLUSHES 0x8040u                       /* FTZ: results; DAZ: operands */
ALWAYS FloatMode float_mode(void) { return __builtin_ia32_stmxcsr(); }
ALWAYS void set_float_mode(FloatMode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;                   /* FPCR */
#define FLUSHES (1ull << 24)                  /* FZ: results and operands */
ALWAYS FloatMode float_mode(void) {
    FloatMode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
ALWAYS void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
typedef int FloatMode;
#define FLUSHES 0
ALWAYS FloatMode float_mode(void) { return 0; }
ALWAYS void set_float_mode(FloatMode mode) { (void)mode; }
#endif

/* Compilers do not know that arithmetic depends on the mode. The barrier keeps loads and stores on their side of the
   switch. */
#define MODE_BARRIER() __asm__ volatile("" : : : "memory")

ALWAYS FloatMode flush_denormals(void) {
    const FloatMode before = float_mode();
    set_float_mode(before | FLUSHES);
    MODE_BARRIER();
    return before;
}

ALWAYS void restore_float_mode(const FloatMode *before) {
    MODE_BARRIER();
    set_float_mode(*before);
}

/* As the first statement of a block: denormals are zeros until the block ends. */
#define FLUSH_DENORMALS FloatMode float_mode_before __attribute__((cleanup(restore_float_mode))) = flush_denormals()
