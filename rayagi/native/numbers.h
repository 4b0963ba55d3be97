/* Elementary functions of float32 that compilers vectorise: no branches, tables or calls. Relative error about 1e-7.

The polynomials are minimax fits (Lawson iteration over Chebyshev nodes). Their relative errors before rounding: sine
4e-9, cosine 1e-10, exponential 3e-9, logarithm 8e-10, hyperbolic tangent near 0 4e-9. Range reduction is accurate for
angles up to 1e5. */

ALWAYS float real_of(int32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
ALWAYS int32_t bits_of(float x) { int32_t bits; memcpy(&bits, &x, 4); return bits; }

/* Range reduction: x = n pi/2 + r with |r| <= pi/4. Returns r, and n modulo 4. pi/2 is a sum of three floats (Cody & Waite). */
ALWAYS float reduced(float x, float *quadrant) {
    float n = floorf(x * 0.636619772f + 0.5f);
    *quadrant = n - 4.0f * floorf(n * 0.25f);
    float r = fmaf(n, -1.57079637050628662f, x);
    r = fmaf(n, 4.37113900018624283e-8f, r);
    return fmaf(n, 1.71512449e-15f, r);
}
/* sin r = r + r z P(z), cos r = 1 - z/2 + z^2 Q(z) with z = r^2, for |r| <= pi/4. */
ALWAYS float near_sin(float r) {
    float z = r * r;
    return fmaf(r * z, fmaf(z, fmaf(z, -0.00019515f, 0.00833216f), -0.16666655f), r);
}
ALWAYS float near_cos(float r) {
    float z = r * r;
    return fmaf(z * z, fmaf(z, fmaf(z, 2.44324129e-05f, -1.38873099e-03f), 4.16666456e-02f), fmaf(z, -0.5f, 1.0f));
}
/* sin(n pi/2 + r), by quadrant n: sin r, cos r, -sin r, -cos r; the cosine is a quadrant ahead. tan is s / c in even
   quadrants, -c / s in odd ones. */
ALWAYS float real_sin(float x) {
    float q, r = reduced(x, &q), s = near_sin(r), c = near_cos(r);
    float y = (q == 1.0f) | (q == 3.0f) ? c : s;
    return q >= 2.0f ? -y : y;
}
ALWAYS float real_cos(float x) {
    float q, r = reduced(x, &q), s = near_sin(r), c = near_cos(r);
    float y = (q == 1.0f) | (q == 3.0f) ? s : c;
    return (q == 1.0f) | (q == 2.0f) ? -y : y;
}
ALWAYS float real_tan(float x) {
    float q, r = reduced(x, &q), s = near_sin(r), c = near_cos(r);
    int odd = (q == 1.0f) | (q == 3.0f);
    return (odd ? -c : s) / (odd ? s : c);
}
/* exp(c) = (1 + y) 2^n for |c| <= 104. Returns y = exp(r) - 1, where c = n log 2 + r and |r| <= log(2) / 2. */
ALWAYS float exp_rest(float c, float *n) {
    *n = floorf(fmaf(c, 1.44269504f, 0.5f));
    float r = fmaf(*n, -1.42860677e-06f, fmaf(*n, -0.693145752f, c));
    float p = fmaf(r, fmaf(r, fmaf(r, fmaf(r, 0.00138145f, 0.00836878f), 0.04166839f), 0.1666652f), 0.49999993f);
    return fmaf(r * r, p, r);
}
ALWAYS float exp_part(float c, float *n) { return exp_rest(c, n) + 1.0f; }
ALWAYS float real_exp(float x) {
    float n, y = exp_part(real_min(real_max(x, -104.0f), 89.0f), &n);
    int32_t e = (int32_t)n, half = e >> 1; /* 2^n in two factors: it may overflow where y 2^n does not */
    return y * real_of((half + 127) << 23) * real_of((e - half + 127) << 23);
}
/* exp(x) - 1 = y 2^n + (2^n - 1): accurate near 0, too. */
ALWAYS float real_expm1(float x) {
    float n, y = exp_rest(real_min(real_max(x, -104.0f), 89.0f), &n);
    int32_t e = (int32_t)n, half = e >> 1;
    float power = real_of((half + 127) << 23) * real_of((e - half + 127) << 23);
    return fmaf(power, y, power - 1.0f);
}
/* log(x) = n log 2 + log(1 + f) with 1 + f in [sqrt(0.5), sqrt(2)). The exponent of a denormal is that of 2^23 x, less 23. */
ALWAYS float real_log(float x) {
    int denormal = x < 0x1p-126f;
    int32_t bits = bits_of(denormal ? x * 0x1p23f : x);
    int32_t e = (bits - 0x3f3504f3) >> 23; /* n: exponent of x / sqrt(0.5) */
    float f = real_of(bits - (e << 23)) - 1.0f, z = f * f, n = (float)e - (denormal ? 23.0f : 0.0f);
    float p = fmaf(f, fmaf(f, fmaf(f, fmaf(f, 0.06746641f, -0.11675652f), 0.11888162f), -0.12405589f), 0.14219552f);
    p = fmaf(f, fmaf(f, fmaf(f, fmaf(f, p, -0.16667996f), 0.20002119f), -0.2500001f), 0.33333313f);
    float y = fmaf(f * z, p, n * -2.12194440e-4f);
    y = fmaf(z, -0.5f, y) + f;
    y = fmaf(n, 0.693359375f, y);
    y = x == INFINITY ? x : y;
    y = x > 0.0f ? y : NAN;
    return x == 0.0f ? -INFINITY : y;
}
/* tanh(x) = 1 - 2 / (exp(2 |x|) + 1) with the sign of x; below 0.625 an odd polynomial. */
ALWAYS float real_tanh(float x) {
    float z = x * x, n, y = exp_part(real_min(2.0f * fabsf(x), 18.1f), &n);
    float large = 1.0f - 2.0f / fmaf(y, real_of(((int32_t)n + 127) << 23), 1.0f);
    float p = fmaf(z, fmaf(z, fmaf(z, -0.00570499f, 0.02063909f), -0.05373972f), 0.13331442f);
    float small = fmaf(x * z, fmaf(z, p, -0.33333282f), x);
    return fabsf(x) < 0.625f ? small : copysignf(large, x);
}
