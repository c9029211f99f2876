// A chunk of logits to its part of the loss and, in place, to the loss's gradient: one row per thread at a time.
#include <omp.h>

#include <cmath>

#include "exponential.h"

namespace rmt {

constexpr long STRETCH = 4096;  // summed in float, the stretches in double

RMT_INLINE float largest_of(const float* row, long width) {
    const long vectors = width / LANES * LANES;
    Vec a = all(row[0]), b = a;
    long i = 0;
    for (; i + TILE <= vectors; i += TILE) {
        a = largest(a, load(row + i));
        b = largest(b, load(row + i + LANES));
    }
    float found = largest(largest(a, b));
    for (; i < width; i++) found = std::fmax(found, row[i]);
    return found;
}

// row = exp(scale * (row - top)); returns its sum.
RMT_INLINE double exponentials(float* row, long width, float scale, float top) {
    const long vectors = width / LANES * LANES;
    double total = 0;
    long i = 0;
    while (i < vectors) {
        const long end = i + STRETCH < vectors ? i + STRETCH : vectors;
        Vec part{};
        for (; i < end; i += LANES) {
            const Vec e = exponential(scale * (load(row + i) - top));
            store(row + i, e);
            part += e;
        }
        total += sum(part);
    }
    for (; i < width; i++) total += row[i] = std::exp(scale * (row[i] - top));
    return total;
}

}  // namespace rmt

// Rows begin `apart` numbers after one another. terms[row] = log-partition, logit of the target, largest logit. With
// `weight` (scale / number of targets) not zero, the logits become the gradient with respect to the unscaled ones; rows
// whose target is negative count nothing.
extern "C" void rmt_loss_rows(long rows, long width, long apart, float* logits, const long* targets, float scale,
                              float z_loss, float weight, float* terms, int threads) {
    using namespace rmt;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        float *row = logits + r * apart, *term = terms + 3 * r;
        const long target = targets[r];
        if (target < 0) {
            term[0] = term[1] = term[2] = 0;
            std::memset(row, 0, width * sizeof(float));
            continue;
        }
        const float top = largest_of(row, width), hit = row[target];
        const double total = exponentials(row, width, scale, top);
        const float partition = scale * top + float(std::log(total));
        term[0] = partition, term[1] = scale * hit, term[2] = scale * top;
        if (weight == 0) continue;
        const float factor = float(weight * (1 + 2 * z_loss * partition) / total);
        long i = 0;
        for (; i + LANES <= width; i += LANES) store(row + i, factor * load(row + i));
        for (; i < width; i++) row[i] *= factor;
        row[target] -= weight;
    }
}
