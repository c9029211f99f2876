// Attention of one new token of each sequence over all cached keys. Nothing is allocated, and no scratch grows with the
// number of cached tokens.
//
// Axes: B batch, H query heads, G key/value heads, V head_dim, S cached tokens.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "exponential.h"

namespace rmt {

constexpr long KEYS = 64;  // at a time: their logits are on the stack

RMT_INLINE float inner(const float* a, const float* b, long n) {
    Vec left{}, right{};
    long i = 0;
    for (; i + TILE <= n; i += TILE) {
        left += load(a + i) * load(b + i);
        right += load(a + i + LANES) * load(b + i + LANES);
    }
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return sum(left + right) + rest;
}

// y += sum over i of weight[i] * rows[i]
RMT_INLINE void add_rows(const float* weight, long count, const float* rows, long stride, float* y, long V) {
    long c = 0;
    for (; c + TILE <= V; c += TILE) tile<1, ADD>({weight, 0, 1}, rows + c, stride, y + c, 0, count);
    for (; c < V; c++)
        for (long i = 0; i < count; i++) y[c] += weight[i] * rows[i * stride + c];
}

// One head: y = softmax(scale * keys q - slope * distance) values, over the keys from .. to - 1; the query is the last.
static void attend(const float* q, const float* keys, long key_stride, const float* values, long value_stride, long V,
                   long from, long to, float scale, float slope, float* y) {
    alignas(64) float weight[KEYS];
    float top = -1e30f, total = 0;
    std::fill(y, y + V, 0.0f);
    for (long first = from; first < to; first += KEYS) {
        const long count = std::min(KEYS, to - first);
        float high = top;
        for (long i = 0; i < count; i++) {
            weight[i] = scale * inner(q, keys + (first + i) * key_stride, V) - slope * float(to - 1 - first - i);
            high = std::max(high, weight[i]);
        }
        std::fill(weight + count, weight + KEYS, high);
        const float shrink = std::exp(top - high);
        total *= shrink;
        for (long c = 0; c < V; c++) y[c] *= shrink;
        for (long i = 0; i < count; i += LANES) store(weight + i, exponential(load(weight + i) - high));
        for (long i = 0; i < count; i++) total += weight[i];
        add_rows(weight, count, values + first * value_stride, value_stride, y, V);
        top = high;
    }
    const float inverse = 1 / total;
    for (long c = 0; c < V; c++) y[c] *= inverse;
}

}  // namespace rmt

// Query b sees the keys start_B[b] .. S - 1, all of them if start_B is null. `k_new` and `v_new`, unless null, are those
// of the last token and are first written to their place. `strides`: batch and head of q, k_new, v_new; batch, head and
// token of k, v. y is [B, H, V] in one piece.
extern "C" void rmt_attention_token(long B, long H, long G, long V, float scale, const float* slopes_H, const float* q,
                                    const float* k_new, const float* v_new, float* k, float* v, const long* strides,
                                    float* y, long S, const long* start_B, int threads) {
    const long *new_k = strides + 2, *new_v = strides + 4, *all_k = strides + 6, *all_v = strides + 9;
    for (long b = 0; k_new && b < B; b++)
        for (long g = 0; g < G; g++) {
            std::memcpy(k + b * all_k[0] + g * all_k[1] + (S - 1) * all_k[2], k_new + b * new_k[0] + g * new_k[1], V * sizeof(float));
            std::memcpy(v + b * all_v[0] + g * all_v[1] + (S - 1) * all_v[2], v_new + b * new_v[0] + g * new_v[1], V * sizeof(float));
        }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long bh = 0; bh < B * H; bh++) {
        const long b = bh / H, h = bh % H, g = h / (H / G);
        rmt::attend(q + b * strides[0] + h * strides[1], k + b * all_k[0] + g * all_k[1], all_k[2],
                    v + b * all_v[0] + g * all_v[1], all_v[2], V, start_B ? start_B[b] : 0, S, scale,
                    slopes_H ? slopes_H[h] : 0, y + bh * V);
    }
}
