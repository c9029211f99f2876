// One boundary of the matrix stream, token by token: X += W d ; y = r . norm(X), and its backward pass.
//
// A token's matrix (8 KiB for 32 x 64) stays in the first cache through all products. Where the dimensions are not whole
// tiles, a token is worked on in a padded copy, and the padding is zero wherever it enters a sum.
//
// Axes: N tokens, R vectors written, P vectors read, K key_dim, V value_dim; Kp, Vp padded to whole tiles.
#include <omp.h>

#include <cmath>

#include "tile.h"

namespace rmt {

struct Shape {
    long N, K, V, R, P, Vp, Kp;
    bool whole;  // no padding is needed
    bool centred;  // LayerNorm; else RMSNorm
    float eps;

    Shape(long N, long K, long V, long R, long P, int centred, float eps)
        : N(N), K(K), V(V), R(R), P(P), Vp(whole_tiles(V)), Kp(whole_tiles(K)),
          whole(V == whole_tiles(V) && K == whole_tiles(K)), centred(centred), eps(eps) {}
    long size() const { return Kp * Vp; }
};

// Asks for a token's memory while the token before it is computed.
RMT_INLINE void prefetch(const float* from, long floats) {
    for (long i = 0; i < floats; i += 16) __builtin_prefetch(from + i);
}

// Mean and 1 / deviation of the K x V entries of x[K x Vp].
RMT_INLINE void statistics(const Shape& s, const float* x, float& mean, float& rstd) {
    const long count = s.K * s.V, vectors = s.V / LANES * LANES;
    Vec a{}, b{};
    float rest = 0;
    mean = 0;
    if (s.centred) {
        for (long i = 0; i < s.K * s.Vp; i += TILE) {
            a += load(x + i);
            b += load(x + i + LANES);
        }
        mean = sum(a + b) / count;
    }
    const Vec m = all(mean);
    a = b = Vec{};
    for (long k = 0; k < s.K; k++) {
        const float* row = x + k * s.Vp;
        long v = 0;
        for (; v + TILE <= vectors; v += TILE) {
            const Vec left = load(row + v) - m, right = load(row + v + LANES) - m;
            a += left * left;
            b += right * right;
        }
        for (; v < s.V; v++) rest += (row[v] - mean) * (row[v] - mean);
    }
    rstd = 1 / std::sqrt((sum(a + b) + rest) / count + s.eps);
}

static void forward(const Shape& s, float* X_NKV, bool first, const float* d_NRV, long d_token, const float* write_KR,
                    const float* gain_KV, const float* read_PK, float* y_NPV, float* mean_N, float* rstd_N, int threads) {
    Scratch gain_pad = scratch(s.size());
    pad(gain_KV, s.K, s.V, s.V, gain_pad.get(), s.Kp, s.Vp);
#pragma omp parallel num_threads(threads)
    {
        Scratch h = scratch(s.size()), x_pad = scratch(s.size()), d_pad = scratch(s.R * s.Vp), y_pad = scratch(s.P * s.Vp);
#pragma omp for schedule(static)
        for (long t = 0; t < s.N; t++) {
            float *X = X_NKV + t * s.K * s.V, *y = y_NPV + t * s.P * s.V, *x = X, *out = y;
            const float* d = d_NRV + t * d_token;
            if (!s.whole) {
                pad(d, s.R, s.V, s.V, d_pad.get(), s.R, s.Vp);
                if (!first) pad(X, s.K, s.V, s.V, x_pad.get(), s.Kp, s.Vp);
                d = d_pad.get(), x = x_pad.get(), out = y_pad.get();
            }
            if (t + 1 < s.N) prefetch(d_NRV + (t + 1) * d_token, s.R * s.V);
            if (first)
                product<SET>(s.K, s.Vp, s.R, rows_of(write_KR, s.R), d, s.Vp, x, s.Vp);
            else
                product<ADD>(s.K, s.Vp, s.R, rows_of(write_KR, s.R), d, s.Vp, x, s.Vp);
            if (!first && t + 1 < s.N) prefetch(X + s.K * s.V, s.K * s.V);

            statistics(s, x, mean_N[t], rstd_N[t]);
            const Vec mean = all(mean_N[t]), rstd = all(rstd_N[t]);
            for (long i = 0; i < s.K * s.Vp; i += LANES)
                store(h.get() + i, (load(x + i) - mean) * rstd * load(gain_pad.get() + i));
            product<SET>(s.P, s.Vp, s.K, rows_of(read_PK, s.K), h.get(), s.Vp, out, s.Vp);
            if (!s.whole) {
                unpad(x, s.K, s.V, s.Vp, X, s.V);
                unpad(out, s.P, s.V, s.Vp, y, s.V);
            }
        }
    }
}

// X becomes the stream before the write, G its gradient. `fresh`: G holds nothing yet.
static void backward(const Shape& s, float* X_NKV, float* G_NKV, bool fresh, bool first, const float* d_NRV, long d_token,
                     const float* write_KR, const float* gain_KV, const float* read_PK, const float* mean_N,
                     const float* rstd_N, const float* dy_NPV, long dy_token, float* dd_NRV, float* dwrite_KR,
                     float* dgain_KV, float* dread_PK, int threads) {
    const long read_size = s.P * s.Kp, write_size = s.R * s.Kp, sums_size = read_size + write_size + s.size();
    Scratch gain_pad = scratch(s.size()), all_sums = scratch(threads * sums_size);
    pad(gain_KV, s.K, s.V, s.V, gain_pad.get(), s.Kp, s.Vp);
    std::memset(all_sums.get(), 0, threads * sums_size * sizeof(float));
#pragma omp parallel num_threads(threads)
    {
        float* dread_PKp = all_sums.get() + omp_get_thread_num() * sums_size;
        float *dwrite_RKp = dread_PKp + read_size, *dgain = dwrite_RKp + write_size;
        Scratch z_own = scratch(s.size()), h_own = scratch(s.size()), turned_own = scratch(s.size());
        Scratch x_pad = scratch(s.size()), g_pad = scratch(s.size()), d_pad = scratch(s.R * s.Vp);
        Scratch dy_pad = scratch(s.P * s.Vp), dd_pad = scratch(s.R * s.Vp);
        float *z = z_own.get(), *h = h_own.get(), *turned = turned_own.get();
        std::memset(h, 0, s.size() * sizeof(float));
#pragma omp for schedule(static)
        for (long t = 0; t < s.N; t++) {
            float *X = X_NKV + t * s.K * s.V, *G = G_NKV + t * s.K * s.V, *dd_out = dd_NRV + t * s.R * s.V;
            float *x = X, *g = G, *dd = dd_out;
            const float *d = d_NRV + t * d_token, *dy = dy_NPV + t * dy_token;
            if (!s.whole) {
                pad(d, s.R, s.V, s.V, d_pad.get(), s.R, s.Vp);
                pad(dy, s.P, s.V, s.V, dy_pad.get(), s.P, s.Vp);
                pad(X, s.K, s.V, s.V, x_pad.get(), s.Kp, s.Vp);
                if (fresh)
                    std::memset(g_pad.get(), 0, s.size() * sizeof(float));
                else
                    pad(G, s.K, s.V, s.V, g_pad.get(), s.Kp, s.Vp);
                d = d_pad.get(), dy = dy_pad.get(), x = x_pad.get(), g = g_pad.get(), dd = dd_pad.get();
            }
            const bool more = t + 1 < s.N;
            // The first stream is computed anew, exactly, rather than left over from all the subtractions.
            if (first) product<SET>(s.K, s.Vp, s.R, rows_of(write_KR, s.R), d, s.Vp, x, s.Vp);
            product<SET>(s.K, s.Vp, s.P, columns_of(read_PK, s.K), dy, s.Vp, z, s.Vp);

            // h = norm(x), dgain += z * unit, z = gradient of the unit vector, and its two projections.
            const Vec mean = all(mean_N[t]), rstd = all(rstd_N[t]);
            Vec total{}, along{};
            for (long i = 0; i < s.K * s.Vp; i += LANES) {
                const Vec unit = (load(x + i) - mean) * rstd, gain = load(gain_pad.get() + i), dh = load(z + i);
                store(dgain + i, load(dgain + i) + dh * unit);
                store(h + i, unit * gain);
                const Vec dunit = dh * gain;
                store(z + i, dunit);
                total += dunit;
                along += dunit * unit;
            }
            transpose(h, s.Kp, s.Vp, s.Vp, turned, s.Kp);
            if (more) prefetch(X + s.K * s.V, s.K * s.V);
            product<ADD>(s.P, s.Kp, s.V, rows_of(dy, s.Vp), turned, s.Kp, dread_PKp, s.Kp);

            const Vec common = all(s.centred ? sum(total) / (s.K * s.V) : 0), slope = all(sum(along) / (s.K * s.V));
            for (long i = 0; i < s.K * s.Vp; i += LANES) {
                const Vec unit = (load(x + i) - mean) * rstd;
                const Vec dx = rstd * (load(z + i) - common - unit * slope);
                store(g + i, fresh ? dx : load(g + i) + dx);
            }
            if (more && !fresh) prefetch(G + s.K * s.V, s.K * s.V);
            product<SET>(s.R, s.Vp, s.K, columns_of(write_KR, s.R), g, s.Vp, dd, s.Vp);
            transpose(g, s.Kp, s.Vp, s.Vp, turned, s.Kp);
            product<ADD>(s.R, s.Kp, s.V, rows_of(d, s.Vp), turned, s.Kp, dwrite_RKp, s.Kp);
            if (more) prefetch(dy_NPV + (t + 1) * dy_token, s.P * s.V);
            if (!first) product<SUBTRACT>(s.K, s.Vp, s.R, rows_of(write_KR, s.R), d, s.Vp, x, s.Vp);
            if (!s.whole) {
                unpad(x, s.K, s.V, s.Vp, X, s.V);
                unpad(g, s.K, s.V, s.Vp, G, s.V);
                unpad(dd, s.R, s.V, s.Vp, dd_out, s.V);
            }
        }
    }
    // The threads' sums, always in the same order: equal inputs give equal bits.
    std::memset(dread_PK, 0, s.P * s.K * sizeof(float));
    std::memset(dwrite_KR, 0, s.K * s.R * sizeof(float));
    std::memset(dgain_KV, 0, s.K * s.V * sizeof(float));
    for (int thread = 0; thread < threads; thread++) {
        const float *dread = all_sums.get() + thread * sums_size, *dwrite = dread + read_size, *dgain = dwrite + write_size;
        for (long p = 0; p < s.P; p++)
            for (long k = 0; k < s.K; k++) dread_PK[p * s.K + k] += dread[p * s.Kp + k];
        for (long k = 0; k < s.K; k++)
            for (long r = 0; r < s.R; r++) dwrite_KR[k * s.R + r] += dwrite[r * s.Kp + k];
        for (long k = 0; k < s.K; k++)
            for (long v = 0; v < s.V; v++) dgain_KV[k * s.V + v] += dgain[k * s.Vp + v];
    }
}

}  // namespace rmt

extern "C" {

void rmt_boundary_forward(long N, long K, long V, long R, long P, int centred, float eps, float* X_NKV, int first,
                          const float* d_NRV, long d_token, const float* write_KR, const float* gain_KV,
                          const float* read_PK, float* y_NPV, float* mean_N, float* rstd_N, int threads) {
    rmt::forward(rmt::Shape(N, K, V, R, P, centred, eps), X_NKV, first, d_NRV, d_token, write_KR, gain_KV, read_PK, y_NPV,
                 mean_N, rstd_N, threads);
}

void rmt_boundary_backward(long N, long K, long V, long R, long P, int centred, float eps, float* X_NKV, float* G_NKV,
                           int fresh, int first, const float* d_NRV, long d_token, const float* write_KR,
                           const float* gain_KV, const float* read_PK, const float* mean_N, const float* rstd_N,
                           const float* dy_NPV, long dy_token, float* dd_NRV, float* dwrite_KR, float* dgain_KV,
                           float* dread_PK, int threads) {
    rmt::backward(rmt::Shape(N, K, V, R, P, centred, eps), X_NKV, G_NKV, fresh, first, d_NRV, d_token, write_KR, gain_KV,
                  read_PK, mean_N, rstd_N, dy_NPV, dy_token, dd_NRV, dwrite_KR, dgain_KV, dread_PK, threads);
}
}
