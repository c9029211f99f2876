// The feed-forward core's activation and its gradient: gelu (tanh form), or silu(gate) * up with gate and up side by side
// in a row. Both are x * sigmoid(...), so one exponential and one division serve eight neurons.
#include <omp.h>

#include "exponential.h"

namespace rmt {

constexpr float SLOPE = 1.5957691216f;  // 2 sqrt(2 / pi): gelu(x) = x sigmoid(SLOPE x + CUBE x^3)
constexpr float CUBE = 0.044715f * SLOPE;

// sigmoid(x), and 1 - sigmoid(x) without the cancellation.
struct Sigmoid {
    Vec value, rest;
};
RMT_INLINE Sigmoid sigmoid(Vec x) {
    const Vec e = exponential(-x), value = 1.0f / (1.0f + e);
    return {value, e * value};
}

RMT_INLINE Vec gelu(Vec x) { return x * sigmoid(x * (SLOPE + CUBE * x * x)).value; }
RMT_INLINE Vec gelu_slope(Vec x) {
    const Vec square = x * x;
    const Sigmoid s = sigmoid(x * (SLOPE + CUBE * square));
    return s.value + x * s.value * s.rest * (SLOPE + 3 * CUBE * square);
}
RMT_INLINE Vec silu(Vec x) { return x * sigmoid(x).value; }
RMT_INLINE Vec silu_slope(Vec x) {
    const Sigmoid s = sigmoid(x);
    return s.value + x * s.value * s.rest;
}

// The last neurons of a row, fewer than a vector holds.
RMT_INLINE Vec load(const float* from, long count) {
    Vec v{};
    std::memcpy(&v, from, count * sizeof(float));
    return v;
}
RMT_INLINE void store(float* to, Vec v, long count) { std::memcpy(to, &v, count * sizeof(float)); }

// Calls `each` with the first neuron of every vector of a row, and with how many of its neurons there are.
template <class Each>
RMT_INLINE void along(long width, Each each) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) each(i, LANES);
    if (i < width) each(i, width - i);
}

}  // namespace rmt

// a[rows x width] from h[rows x width], or from h[rows x 2 width] = gate, up.
extern "C" void rmt_activate(long rows, long width, int gated, const float* h, float* a, int threads) {
    using namespace rmt;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        float* to = a + r * width;
        if (gated) {
            const float *gate = h + 2 * r * width, *up = gate + width;
            along(width, [=](long i, long n) { store(to + i, silu(load(gate + i, n)) * load(up + i, n), n); });
        } else {
            const float* from = h + r * width;
            along(width, [=](long i, long n) { store(to + i, gelu(load(from + i, n)), n); });
        }
    }
}

// dh from da and h. Without a gate dh may be da.
extern "C" void rmt_activate_backward(long rows, long width, int gated, const float* h, const float* da, float* dh,
                                      int threads) {
    using namespace rmt;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        const float* slope = da + r * width;
        if (gated) {
            const float *gate = h + 2 * r * width, *up = gate + width;
            float *dgate = dh + 2 * r * width, *dup = dgate + width;
            along(width, [=](long i, long n) {
                const Vec g = load(gate + i, n), d = load(slope + i, n);
                store(dup + i, d * silu(g), n);
                store(dgate + i, d * load(up + i, n) * silu_slope(g), n);
            });
        } else {
            const float* from = h + r * width;
            float* to = dh + r * width;
            along(width, [=](long i, long n) { store(to + i, load(slope + i, n) * gelu_slope(load(from + i, n)), n); });
        }
    }
}
