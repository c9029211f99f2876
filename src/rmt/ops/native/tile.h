// The building blocks of the native operations: vectors of eight floats, a small matrix product whose result stays in
// registers, a transpose, and rows padded to whole tiles. They use the compiler's vector types, so the same source
// serves every CPU that GCC or Clang knows.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>

namespace rmt {

#define RMT_INLINE inline __attribute__((always_inline))

constexpr long LANES = 8;
constexpr long TILE = 2 * LANES;  // columns of a register tile
constexpr int TILE_ROWS = 6;      // 6 x 2 sums, 2 columns and 1 factor fill 15 of 16 AVX registers

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));

RMT_INLINE Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
RMT_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
RMT_INLINE Vec all(float x) { return Vec{} + x; }
RMT_INLINE float sum(Vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

RMT_INLINE long whole_tiles(long n) { return (n + TILE - 1) / TILE * TILE; }

// Aligned scratch memory, not initialised.
struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Scratch = std::unique_ptr<float[], Free>;
inline Scratch scratch(long floats) {
    size_t bytes = (size_t(floats) * sizeof(float) + 63) / 64 * 64;
    float* memory = static_cast<float*>(std::aligned_alloc(64, bytes ? bytes : 64));
#ifdef RMT_POISON  // in tests: whatever is used without being set becomes NaN
    std::memset(memory, 0xff, bytes);
#endif
    return Scratch(memory);
}

// A matrix to read with broadcasts: element (i, k) is at data[i * row + k * column].
struct Factor {
    const float* data;
    long row, column;
};
RMT_INLINE Factor rows_of(const float* data, long width) { return {data, width, 1}; }
RMT_INLINE Factor columns_of(const float* data, long width) { return {data, 1, width}; }  // the transpose

enum Into { SET, ADD, SUBTRACT };

// One register tile: C[ROWS x 16] (=, +=, -=) A[ROWS x depth] B[depth x 16].
template <int ROWS, Into INTO>
RMT_INLINE void tile(Factor A, const float* B, long b_row, float* C, long c_row, long depth) {
    Vec left[ROWS], right[ROWS];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        left[i] = INTO == SET ? Vec{} : load(C + i * c_row);
        right[i] = INTO == SET ? Vec{} : load(C + i * c_row + LANES);
    }
    const float* a = A.data;
    for (long k = 0; k < depth; k++, a += A.column, B += b_row) {
        const Vec b_left = load(B), b_right = load(B + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            const float factor = INTO == SUBTRACT ? -a[i * A.row] : a[i * A.row];
            left[i] += factor * b_left;
            right[i] += factor * b_right;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        store(C + i * c_row, left[i]);
        store(C + i * c_row + LANES, right[i]);
    }
}

// C[rows x columns] (=, +=, -=) A[rows x depth] B[depth x columns]; columns are whole tiles.
template <Into INTO>
inline void product(long rows, long columns, long depth, Factor A, const float* B, long b_row, float* C, long c_row) {
    const long blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long j = 0; j < columns; j += TILE) {
        for (long block = 0, i = 0; block < blocks; block++) {
            const long count = (rows - i + blocks - block - 1) / (blocks - block);
            const Factor part = {A.data + i * A.row, A.row, A.column};
            float* to = C + i * c_row + j;
            switch (count) {
                case 6: tile<6, INTO>(part, B + j, b_row, to, c_row, depth); break;
                case 5: tile<5, INTO>(part, B + j, b_row, to, c_row, depth); break;
                case 4: tile<4, INTO>(part, B + j, b_row, to, c_row, depth); break;
                case 3: tile<3, INTO>(part, B + j, b_row, to, c_row, depth); break;
                case 2: tile<2, INTO>(part, B + j, b_row, to, c_row, depth); break;
                case 1: tile<1, INTO>(part, B + j, b_row, to, c_row, depth); break;
            }
            i += count;
        }
    }
}

// The transpose of 8 x 8 floats, by exchanging halves, quarters and neighbours.
RMT_INLINE void transpose_block(const float* from, long from_row, float* to, long to_row) {
    Vec a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = load(from + i * from_row);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[2 * i + 1] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 1] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        a[i + 2] = __builtin_shufflevector(b[i + 1], b[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 3] = __builtin_shufflevector(b[i + 1], b[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        store(to + i * to_row, __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (i + 4) * to_row, __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

// to[columns x rows] = the transpose of from[rows x columns]; both counts are multiples of 8.
inline void transpose(const float* from, long rows, long columns, long from_row, float* to, long to_row) {
    for (long i = 0; i < rows; i += 8)
        for (long j = 0; j < columns; j += 8) transpose_block(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
}

// Copy rows between arrays of different width; the columns and rows added to reach whole tiles are zero.
inline void pad(const float* from, long rows, long width, long from_row, float* to, long padded_rows, long padded) {
    for (long i = 0; i < rows; i++) {
        std::memcpy(to + i * padded, from + i * from_row, width * sizeof(float));
        std::memset(to + i * padded + width, 0, (padded - width) * sizeof(float));
    }
    std::memset(to + rows * padded, 0, (padded_rows - rows) * padded * sizeof(float));
}
inline void unpad(const float* from, long rows, long width, long padded, float* to, long to_row) {
    for (long i = 0; i < rows; i++) std::memcpy(to + i * to_row, from + i * padded, width * sizeof(float));
}

}  // namespace rmt
