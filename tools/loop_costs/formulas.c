// The headline kernels' formulas as one writes them in C: what a compiler makes of these is compared with our kernels.
// Compiled with -O3 and -ffast-math, so that the compiler may use vectors for sums and polynomials.

#include <stdint.h>

#define N (1 << 20)  // a number that the compiler knows, so that it adds no loop for rests

// e**x for x <= 0 at about 1 ulp: 2**n * p(r) with n = round(x * log2(e)) and r = x - n * log(2).
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

#define EACH(name, formula)                                            \
    void name(const float *restrict x, float *restrict y) {            \
        for (int64_t i = 0; i < N; i++) y[i] = formula;                \
    }
#define EACH_GRADIENT(name, formula)                                                              \
    void name(const float *restrict dy, const float *restrict y, float *restrict dx, float s) {   \
        for (int64_t i = 0; i < N; i++) dx[i] = formula;                                          \
    }
#define SUM(name, arguments, term)             \
    float name arguments {                     \
        float s = 0;                           \
        for (int64_t i = 0; i < N; i++) s += term; \
        return s;                              \
    }

EACH(relu, x[i] > 0 ? x[i] : 0)
EACH(leaky_relu, x[i] > 0 ? x[i] : x[i] * 0.01f)
EACH(sigmoid, 1 / (1 + exponential(x[i] > 0 ? -x[i] : x[i])))
EACH(tanh_, 1 - 2 / (exponential(x[i] > 0 ? -2 * x[i] : 2 * x[i]) + 1))
EACH(quick_gelu, x[i] / (1 + exponential(-1.702f * x[i])))
EACH_GRADIENT(relu_grad, y[i] > 0 ? dy[i] : 0)
EACH_GRADIENT(leaky_relu_grad, y[i] > 0 ? dy[i] : dy[i] * 0.01f)
EACH_GRADIENT(sigmoid_grad, dy[i] * y[i] * (1 - y[i]))
EACH_GRADIENT(tanh_grad, dy[i] * (1 - y[i] * y[i]))

float row_max(const float *restrict x) {
    float m = x[0];
    for (int64_t i = 0; i < N; i++) m = x[i] > m ? x[i] : m;
    return m;
}

float row_sum_exp(const float *restrict x, float m, float *restrict e) {
    float s = 0;
    for (int64_t i = 0; i < N; i++) s += e[i] = exponential(x[i] - m);
    return s;
}

void row_write(const float *restrict e, float factor, float *restrict y) {
    for (int64_t i = 0; i < N; i++) y[i] = e[i] * factor;
}

SUM(log_row_sum_exp, (const float *restrict x, float m), exponential(x[i] - m))
SUM(gradient_sum, (const float *restrict dy, const float *restrict y), dy[i] * y[i])
EACH_GRADIENT(gradient_write, y[i] * (dy[i] - s))
EACH_GRADIENT(log_gradient_write, dy[i] - exponential(y[i]) * s)
