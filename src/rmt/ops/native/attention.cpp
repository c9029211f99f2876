// Causal attention of all heads in float32: y = softmax(scale * q k^T + bias) v, and its backward pass.
//
// One head of one sequence at a time; a block of 48 queries against all keys it may see, whose logits stay in the second
// cache. The backward pass computes the probabilities again from the saved log-partition. Query t sees the keys
// start[t] .. t; the bias is -slope * distance (ALiBi).
//
// Axes: B batch, T tokens, H query heads, G key/value heads, V head_dim; Vp and Tp padded to whole tiles.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "exponential.h"

namespace rmt {

constexpr long BLOCK = 48;  // queries

// Where element [b, t, h, :] of a tensor lies.
struct Heads {
    float* data;
    const long* stride;  // of batch, token, head
    float* at(long b, long t, long h) const { return data + b * stride[0] + t * stride[1] + h * stride[2]; }
};

struct Problem {
    long B, T, H, G, V, Vp, Tp, row;
    float scale;
    const long* start_BT;    // first key that each query sees; null: the first of the sequence
    const float* slopes_H;   // ALiBi; null: none

    Problem(long B, long T, long H, long G, long V, float scale, const long* start_BT, const float* slopes_H)
        : B(B), T(T), H(H), G(G), V(V), Vp(whole_tiles(V)), Tp(whole_tiles(T)),
          row(Tp + TILE),  // not a power of two, so that rows of logits do not compete for the same cache lines
          scale(scale), start_BT(start_BT), slopes_H(slopes_H) {}
    long start(long b, long t) const { return start_BT ? start_BT[b * T + t] : 0; }
    float slope(long h) const { return slopes_H ? slopes_H[h] : 0; }
};

// The keys, or values, of one head as panels [Vp x 16] of the transpose: ready to be the right factor of a product.
static void pack_turned(const Problem& p, Heads x, long b, long g, float* to) {
    Scratch rows = scratch(TILE * p.Vp);
    for (long t = 0; t < p.Tp; t += TILE, to += p.Vp * TILE) {
        pad(x.at(b, t, g), std::min(TILE, p.T - t), p.V, x.stride[1], rows.get(), TILE, p.Vp);
        transpose(rows.get(), TILE, p.Vp, p.Vp, to, TILE);
    }
}

// Rows of one block, multiplied by `factor`.
static void pack_rows(const Problem& p, Heads x, long b, long h, long first, long count, float factor, float* to) {
    pad(x.at(b, first, h), count, p.V, x.stride[1], to, count, p.Vp);
    for (long i = 0; i < count * p.Vp; i += LANES) store(to + i, factor * load(to + i));
}

// One block of queries and the keys, in whole tiles, that any of them sees.
struct Block {
    long first, count, from, to;

    Block(const Problem& p, long b, long first) : first(first), count(std::min(BLOCK, p.T - first)) {
        from = first;
        for (long t = first; t < first + count; t++) from = std::min(from, p.start(b, t));
        from = from / TILE * TILE;
        to = whole_tiles(first + count);
    }
    long width() const { return to - from; }
};

// logits[i, c] = q_i . panel c, for the keys of the block.
static void inner_products(const Problem& p, const Block& k, const float* rows, const float* panels, float* logits) {
    for (long c = k.from; c < k.to; c += TILE)
        product<SET>(k.count, TILE, p.Vp, rows_of(rows, p.Vp), panels + c * p.Vp, TILE, logits + (c - k.from), p.row);
}

// The visible range of a query, relative to the block's first key, widened to whole vectors.
struct Seen {
    long low, high, low_vector, high_vector;
    Seen(const Problem& p, const Block& k, long b, long t)
        : low(p.start(b, t) - k.from), high(t + 1 - k.from), low_vector(low / LANES * LANES),
          high_vector((high + LANES - 1) / LANES * LANES) {}
    void fill_outside(float* row, float value, long width) const {
        std::fill(row, row + low, value);
        std::fill(row + high, row + width, value);
    }
};

RMT_INLINE void add_bias(float* row, const Seen& seen, long from, long t, float slope) {
    const Vec lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (long c = seen.low_vector; c < seen.high_vector; c += LANES)
        store(row + c, load(row + c) + slope * (lane + float(from + c - t)));
}

// Logits to unnormalised probabilities, in place; zero where the query does not see. Returns largest and sum.
RMT_INLINE void soften(float* row, const Seen& seen, long width, float& top, float& total) {
    seen.fill_outside(row, -1e30f, width);
    Vec high = all(-1e30f);
    for (long c = seen.low_vector; c < seen.high_vector; c += LANES) high = largest(high, load(row + c));
    top = largest(high);
    const Vec shift = all(top);
    for (long c = seen.low_vector; c < seen.high_vector; c += LANES) store(row + c, exponential(load(row + c) - shift));
    seen.fill_outside(row, 0.0f, width);
    Vec sums{};
    for (long c = seen.low_vector; c < seen.high_vector; c += LANES) sums += load(row + c);
    total = sum(sums);
}

static void forward(const Problem& p, Heads q, Heads k, Heads v, Heads y, float* partition_BHT, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Scratch keys = scratch(p.Tp * p.Vp), values = scratch(p.Tp * p.Vp), logits = scratch(BLOCK * p.row);
        Scratch queries = scratch(BLOCK * p.Vp), out = scratch(BLOCK * p.Vp);
#pragma omp for schedule(dynamic)
        for (long bh = 0; bh < p.B * p.H; bh++) {
            const long b = bh / p.H, h = bh % p.H, g = h / (p.H / p.G);
            pack_turned(p, k, b, g, keys.get());
            pad(v.at(b, 0, g), p.T, p.V, v.stride[1], values.get(), p.Tp, p.Vp);
            for (long first = 0; first < p.T; first += BLOCK) {
                const Block block(p, b, first);
                pack_rows(p, q, b, h, first, block.count, p.scale, queries.get());
                inner_products(p, block, queries.get(), keys.get(), logits.get());
                float inverse[BLOCK];
                for (long i = 0; i < block.count; i++) {
                    float *row = logits.get() + i * p.row, top, total;
                    const Seen seen(p, block, b, first + i);
                    if (p.slopes_H) add_bias(row, seen, block.from, first + i, p.slope(h));
                    soften(row, seen, block.width(), top, total);
                    inverse[i] = 1 / total;
                    partition_BHT[bh * p.T + first + i] = top + std::log(total);
                }
                product<SET>(block.count, p.Vp, block.width(), rows_of(logits.get(), p.row),
                             values.get() + block.from * p.Vp, p.Vp, out.get(), p.Vp);
                for (long i = 0; i < block.count; i++) {
                    float* row = out.get() + i * p.Vp;
                    for (long c = 0; c < p.Vp; c += LANES) store(row + c, inverse[i] * load(row + c));
                }
                unpad(out.get(), block.count, p.V, p.Vp, y.at(b, first, h), y.stride[1]);
            }
        }
    }
}

// A key/value head's queries are worked on in one thread, in order: the sums of dk and dv are the same in every run.
static void backward(const Problem& p, Heads q, Heads k, Heads v, Heads y, const float* partition_BHT, Heads dy, Heads dq,
                     Heads dk, Heads dv, int threads) {
    const long size = p.Tp * p.Vp, group = p.H / p.G;
#pragma omp parallel num_threads(threads)
    {
        Scratch keys_turned = scratch(size), values_turned = scratch(size), keys = scratch(size);
        Scratch dkeys = scratch(size), dvalues = scratch(size);
        Scratch probabilities = scratch(BLOCK * p.row), dlogits = scratch(BLOCK * p.row);
        Scratch queries = scratch(BLOCK * p.Vp), dout = scratch(BLOCK * p.Vp), out = scratch(BLOCK * p.Vp);
#pragma omp for schedule(dynamic)
        for (long bg = 0; bg < p.B * p.G; bg++) {
            const long b = bg / p.G, g = bg % p.G;
            pack_turned(p, k, b, g, keys_turned.get());
            pack_turned(p, v, b, g, values_turned.get());
            pad(k.at(b, 0, g), p.T, p.V, k.stride[1], keys.get(), p.Tp, p.Vp);
            std::memset(dkeys.get(), 0, size * sizeof(float));
            std::memset(dvalues.get(), 0, size * sizeof(float));
            for (long h = g * group; h < (g + 1) * group; h++) {
                const float* partition = partition_BHT + (b * p.H + h) * p.T;
                for (long first = 0; first < p.T; first += BLOCK) {
                    const Block block(p, b, first);
                    pack_rows(p, q, b, h, first, block.count, p.scale, queries.get());
                    pack_rows(p, dy, b, h, first, block.count, 1, dout.get());
                    pack_rows(p, y, b, h, first, block.count, 1, out.get());
                    inner_products(p, block, queries.get(), keys_turned.get(), probabilities.get());
                    inner_products(p, block, dout.get(), values_turned.get(), dlogits.get());
                    for (long i = 0; i < block.count; i++) {
                        float *probability = probabilities.get() + i * p.row, *dlogit = dlogits.get() + i * p.row;
                        const Seen seen(p, block, b, first + i);
                        if (p.slopes_H) add_bias(probability, seen, block.from, first + i, p.slope(h));
                        Vec dot{};
                        for (long c = 0; c < p.Vp; c += LANES) dot += load(dout.get() + i * p.Vp + c) * load(out.get() + i * p.Vp + c);
                        const Vec mean = all(sum(dot)), shift = all(partition[first + i]);
                        for (long c = seen.low_vector; c < seen.high_vector; c += LANES) {
                            const Vec chance = exponential(load(probability + c) - shift);
                            store(probability + c, chance);
                            store(dlogit + c, chance * (load(dlogit + c) - mean));
                        }
                        seen.fill_outside(probability, 0, block.width());
                        seen.fill_outside(dlogit, 0, block.width());
                    }
                    product<ADD>(block.width(), p.Vp, block.count, columns_of(probabilities.get(), p.row), dout.get(), p.Vp,
                                 dvalues.get() + block.from * p.Vp, p.Vp);
                    product<ADD>(block.width(), p.Vp, block.count, columns_of(dlogits.get(), p.row), queries.get(), p.Vp,
                                 dkeys.get() + block.from * p.Vp, p.Vp);
                    product<SET>(block.count, p.Vp, block.width(), rows_of(dlogits.get(), p.row),
                                 keys.get() + block.from * p.Vp, p.Vp, out.get(), p.Vp);
                    for (long i = 0; i < block.count * p.Vp; i += LANES) store(out.get() + i, p.scale * load(out.get() + i));
                    unpad(out.get(), block.count, p.V, p.Vp, dq.at(b, first, h), dq.stride[1]);
                }
            }
            unpad(dkeys.get(), p.T, p.V, p.Vp, dk.at(b, 0, g), dk.stride[1]);
            unpad(dvalues.get(), p.T, p.V, p.Vp, dv.at(b, 0, g), dv.stride[1]);
        }
    }
}

}  // namespace rmt

// `strides`: batch, token and head stride of each tensor, in the order of the arguments.
extern "C" {

void rmt_attention_forward(long B, long T, long H, long G, long V, float scale, const long* start_BT, const float* slopes_H,
                           float* q, float* k, float* v, float* y, const long* strides, float* partition_BHT, int threads) {
    rmt::forward(rmt::Problem(B, T, H, G, V, scale, start_BT, slopes_H), {q, strides}, {k, strides + 3}, {v, strides + 6},
                 {y, strides + 9}, partition_BHT, threads);
}

void rmt_attention_backward(long B, long T, long H, long G, long V, float scale, const long* start_BT, const float* slopes_H,
                            float* q, float* k, float* v, float* y, float* dy, float* dq, float* dk, float* dv,
                            const long* strides, const float* partition_BHT, int threads) {
    rmt::backward(rmt::Problem(B, T, H, G, V, scale, start_BT, slopes_H), {q, strides}, {k, strides + 3}, {v, strides + 6},
                  {y, strides + 9}, partition_BHT, {dy, strides + 12}, {dq, strides + 15}, {dk, strides + 18},
                  {dv, strides + 21}, threads);
}
}
