// Products of rows with panels of bf16 weights by ARM's products of bf16 (see widened_rows.h for other processors): of
// 2 x 4 by 4 x 2 numbers, and dot products for a single row. These round sums to odd, and denormals to 0.
#pragma once

#include "fetch.h"
#include "multiply.h"
#include "rows.h"

#if defined(PAGODA_ARM_BF16)
struct BrainRows {
  typedef uint16_t element;
  static constexpr int64_t kRows = 6, kPanel = 16;

  // x[k / 4][r][k % 4] of R rows, an odd number of them with a row of zeros; a single row as it is.
  static void pack(uint16_t* to, const uint16_t* from, int64_t from_row, int64_t rows, int64_t inputs,
                   int64_t columns) {
    if (rows == 1) {
      std::memcpy(to, from, inputs * 2);
      std::memset(to + inputs, 0, (columns - inputs) * 2);
      return;
    }
    const int64_t even = round_up(rows, 2), whole = inputs / 4;
    std::memset(to + whole * 4 * even, 0, (columns - whole * 4) * even * 2);
    for (int64_t k = 0; k < whole; ++k)
      for (int64_t r = 0; r < even; ++r, to += 4)
        if (r < rows) std::memcpy(to, from + r * from_row + k * 4, 8);
        else std::memset(to, 0, 8);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * 4, from + r * from_row + whole * 4, (inputs - whole * 4) * 2);
  }

  // to[r][n] = sum_k x[r][k] w[k][n] for `rows` packed rows and a panel of N outputs, [pairs][N] pairs.
  template <int N>
  static void multiply(const uint16_t* x, int64_t rows, const uint32_t* w, int64_t pairs, float* to, Fetch fetch) {
    static constexpr decltype(&one_row<N>) by_rows[kRows] = {one_row<N>,    many_rows<2, N>, many_rows<3, N>,
                                                             many_rows<4, N>, many_rows<5, N>, many_rows<6, N>};
    for (int64_t n = 0; n < N; n += 16) by_rows[rows - 1](x, w + n, pairs, to + n, fetch);
  }

 private:
  static inline bfloat16x8_t read(const void* p) { return vreinterpretq_bf16_u16(vld1q_u16((const uint16_t*)p)); }

  // Adds the kLane-th pair of `inputs` times 16 outputs.
  template <int kLane>
  static inline void add_pair(float32x4_t* sums, bfloat16x8_t inputs, const uint32_t* w) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[v] = vbfdotq_laneq_f32(sums[v], read(w + v * 4), inputs, kLane);
  }

  template <int N>
  static void one_row(const uint16_t* x, const uint32_t* w, int64_t pairs, float* to, Fetch fetch) {
    float32x4_t sums[4][4];  // a sum waits for the one before it: four are taken of each result
    for (auto& chain : sums)
      for (auto& sum : chain) sum = vdupq_n_f32(0.f);
    for (int64_t k = 0; k < pairs; k += 4, w += 4 * N) {
      const bfloat16x8_t inputs = read(x + 2 * k);
      for (int i = 0; i < 4; ++i) fetch.round();
      add_pair<0>(sums[0], inputs, w);
      add_pair<1>(sums[1], inputs, w + N);
      add_pair<2>(sums[2], inputs, w + 2 * N);
      add_pair<3>(sums[3], inputs, w + 3 * N);
    }
    for (int v = 0; v < 4; ++v)
      vst1q_f32(to + v * 4, vaddq_f32(vaddq_f32(sums[0][v], sums[1][v]), vaddq_f32(sums[2][v], sums[3][v])));
  }

  // sums[p][v] holds the outputs 2 v and 2 v + 1 of the pair's first row and of its second, in turns.
  template <int R, int N>
  static void many_rows(const uint16_t* x, const uint32_t* w, int64_t pairs, float* to, Fetch fetch) {
    constexpr int kPairs = (R + 1) / 2;
    float32x4_t sums[kPairs][8];
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) sums[p][v] = vdupq_n_f32(0.f);
    for (int64_t k = 0; k < pairs; k += 2, w += 2 * N, x += kPairs * 8) {
      fetch.round();
      fetch.round();
      bfloat16x8_t inputs[kPairs];
#pragma GCC unroll 3
      for (int p = 0; p < kPairs; ++p) inputs[p] = read(x + p * 8);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        read_no_earlier();
        const uint32x4_t upper = vld1q_u32(w + v * 4), lower = vld1q_u32(w + N + v * 4);
        const bfloat16x8_t first = vreinterpretq_bf16_u32(vzip1q_u32(upper, lower));
        const bfloat16x8_t second = vreinterpretq_bf16_u32(vzip2q_u32(upper, lower));
#pragma GCC unroll 3
        for (int p = 0; p < kPairs; ++p) {
          sums[p][2 * v] = vbfmmlaq_f32(sums[p][2 * v], first, inputs[p]);
          sums[p][2 * v + 1] = vbfmmlaq_f32(sums[p][2 * v + 1], second, inputs[p]);
        }
      }
    }
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        float* at = to + 2 * p * N + v * 4;
        vst1q_f32(at, vuzp1q_f32(sums[p][2 * v], sums[p][2 * v + 1]));
        if (2 * p + 1 < R) vst1q_f32(at + N, vuzp2q_f32(sums[p][2 * v], sums[p][2 * v + 1]));
      }
  }
};
#endif
