/* Denormals: reals so close to zero that they have fewer digits (below 1.2e-38 in float32). Arithmetic on them takes a hundred times
as long as on others, and no policy learns from them. Compiled programs take them for zero while a policy computes or learns.

A processor keeps the mode per thread, in its control register. The caller's mode, of which simulators' exact numbers depend,
is put back whenever the block ends, by whatever return. Elsewhere than on x86-64 and aarch64 nothing changes. */

#include <stdint.h>

#if defined(__x86_64__)
typedef uint32_t FloatMode;                   /* MXCSR */
#define FLUSHES 0x8040u                       /* FTZ, of results, and DAZ, of operands */
ALWAYS FloatMode float_mode(void) { return __builtin_ia32_stmxcsr(); }
ALWAYS void set_float_mode(FloatMode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;                   /* FPCR */
#define FLUSHES (1ull << 24)                  /* FZ, of both */
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

/* Compilers do not know that arithmetic depends on the mode: the barriers keep what is loaded or stored on its side of the switch. */
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

/* First in a block: denormals are zeros until it ends. */
#define FLUSH_DENORMALS FloatMode float_mode_before __attribute__((cleanup(restore_float_mode))) = flush_denormals()
