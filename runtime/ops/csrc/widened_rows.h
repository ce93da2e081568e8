// Products of rows with panels of bf16 weights where the processor multiplies no bf16: the weights of both inputs of a
// pair are widened to floats in registers, where the rows at hand share them.
#pragma once

#include "fetch.h"
#include "multiply.h"
#include "rows.h"

struct WidenedRows {
  typedef float element;
  static constexpr int kVectors = kRegisters == 32 ? 4 : 2;  // of outputs; their sums for all rows fill the registers
  static constexpr int64_t kRows = 6, kPanel = kVectors * kLanes;

  // x[k][r] of R rows.
  static void pack(float* to, const uint16_t* from, int64_t from_row, int64_t rows, int64_t inputs, int64_t columns) {
    if (rows == 1) load_floats(to, (const char*)from, kBFloat16, inputs, 1);
    for (int64_t k = 0; rows > 1 && k < inputs; ++k)
      for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = bf16_to_float(from[r * from_row + k]);
    std::memset(to + inputs * rows, 0, (columns - inputs) * rows * sizeof(float));
  }

  // to[r][n] = sum_k x[r][k] w[k][n] for `rows` packed rows and a panel of N outputs, [pairs][N] pairs.
  template <int N>
  static void multiply(const float* x, int64_t rows, const uint32_t* w, int64_t pairs, float* to, Fetch fetch) {
    constexpr int V = N / kLanes < kVectors ? N / kLanes : kVectors;
    static constexpr decltype(&slice<1, V>) by_rows[kRows] = {slice<1, V>, slice<2, V>, slice<3, V>,
                                                              slice<4, V>, slice<5, V>, slice<6, V>};
    for (int64_t n = 0; n < N; n += V * kLanes) by_rows[rows - 1](x, w + n, N, pairs, to + n, fetch);
  }

 private:
  // R rows and V vectors of outputs.
  template <int R, int V>
  static void slice(const float* x, const uint32_t* w, int64_t panel, int64_t pairs, float* to, Fetch fetch) {
    // A sum waits for the one before it: of few rows, several are taken of each result.
    constexpr int kHalves = R * V * 8 <= kRegisters * 3 ? 2 : 1, kChains = R * V * 4 < kRegisters ? 2 : 1;
    vfloat sums[kChains * kHalves][R][V];
#pragma GCC unroll 4
    for (int c = 0; c < kChains * kHalves; ++c)
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[c][r][v] = vfloat{};
    for (int64_t k = 0; k < pairs; k += kChains)
#pragma GCC unroll 2
      for (int c = 0; c < kChains; ++c, w += panel) {
        fetch.round();
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          read_no_earlier();
          vfloat weights[V];
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) weights[v] = half ? second(w + v * kLanes) : first(w + v * kLanes);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r, ++x) {
            const vfloat spread = splat(*x);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
              vfloat& sum = sums[c * kHalves + half % kHalves][r][v];
              sum = multiply_add(sum, spread, weights[v]);
            }
          }
        }
      }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        vfloat sum = sums[0][r][v];
#pragma GCC unroll 4
        for (int c = 1; c < kChains * kHalves; ++c) sum = sum + sums[c][r][v];
        store(to + r * panel + v * kLanes, sum);
      }
  }

  static inline vuint read(const uint32_t* p) {
    vuint pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  static inline vfloat first(const uint32_t* p) { return (vfloat)(read(p) << 16); }
  static inline vfloat second(const uint32_t* p) { return (vfloat)(read(p) & 0xFFFF0000u); }
};
