// exp of eight floats at once, to about one unit in the last place.
#pragma once
#include "tile.h"

namespace rmt {

typedef int IntVec __attribute__((vector_size(LANES * sizeof(int))));

RMT_INLINE Vec largest(Vec a, Vec b) { return a > b ? a : b; }
RMT_INLINE float largest(Vec v) {
    float found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
}

// exp(x) = 2^n exp(f), n the nearest whole number to x / ln 2, and exp(f) by a polynomial. x is held in [-87, 88].
RMT_INLINE Vec exponential(Vec x) {
    const Vec low = all(-87.0f), high = all(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec rounding = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest whole number in the last bits
    const Vec n = (x * 1.44269504f + rounding) - rounding;
    const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, so that f is exact
    Vec p = all(1.0f / 5040);
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * (f * f) + (f + 1.0f);
    const IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

}  // namespace rmt
