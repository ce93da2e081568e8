// Products of `integer_rows` (see weight_integers.h) with ARM's dot products and, where there are any, its products of
// 2 x 8 by 8 x 2 numbers. Of the dot products the oldest take signed numbers alone: int8 weights lose their zero in
// them.
#pragma once

#include "fetch.h"
#include "panels.h"

// Rows i to i + 3 of a tile, a row of 16 outputs and 4 inputs in 4 vectors; kHigh: of int4, those in the high halves.
template <int kBits, bool kHigh>
static inline uint8x16_t four_weights(const uint8_t* w) {
  const uint8x16_t stored = vld1q_u8(w);
  if constexpr (kBits == 8) return stored;
  else if constexpr (kHigh) return vshrq_n_u8(stored, 4);
  else return vandq_u8(stored, vdupq_n_u8(15));
}

// sum + four products for each of four outputs. `x`: 16 inputs, of which the kLane-th four are taken.
template <int kBits, int kLane>
static inline int32x4_t dot(int32x4_t sum, uint8x16_t weights, int8x16_t x) {
#if defined(PAGODA_ARM_I8MM)
  return vusdotq_laneq_s32(sum, weights, x, kLane);
#else
  if constexpr (kBits == 8) weights = veorq_u8(weights, vdupq_n_u8(kFlip));
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(weights), x, kLane);
#endif
}

// Adds the kLane-th four of R rows of 16 inputs times a row of a tile.
template <int R, int kBits, bool kHigh, int kLane>
static inline void add_four(int32x4_t (*sums)[4], const int8x16_t* inputs, const uint8_t* w) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    read_no_earlier();
    const uint8x16_t weights = four_weights<kBits, kHigh>(w + v * 16);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r][v] = dot<kBits, kLane>(sums[r][v], weights, inputs[r]);
  }
}

// Adds 16 inputs of R rows times four rows of a tile.
template <int R, int kBits, bool kHigh>
static inline void add_sixteen(int32x4_t (*sums)[4], const int8_t* x, int64_t x_stride, const uint8_t* w) {
  int8x16_t inputs[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) inputs[r] = vld1q_s8(x + r * x_stride);
  add_four<R, kBits, kHigh, 0>(sums, inputs, w);
  add_four<R, kBits, kHigh, 1>(sums, inputs, w + 64);
  add_four<R, kBits, kHigh, 2>(sums, inputs, w + 128);
  add_four<R, kBits, kHigh, 3>(sums, inputs, w + 192);
}

// One row of 64 inputs times a tile of a step.
template <int kBits>
static inline void add_tile(int32x4_t (*sums)[4], const int8_t* x, const uint8_t* w, Fetch& fetch) {
#pragma GCC unroll 1
  for (int64_t i = 0; i < kStepBytes / 4 * kBits / 8; i += 256) {
    fetch.round();
    add_sixteen<1, kBits, false>(sums, x + i / 16, 0, w + i);
    if constexpr (kBits == 4) add_sixteen<1, kBits, true>(sums, x + i / 16 + 32, 0, w + i);
  }
}

// One row of inputs and a panel, which is read as it lies in memory.
template <int kBits>
static inline void one_integer_row(const int8_t* x, const uint8_t* w, int64_t steps, int32_t* to, Fetch fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  int32x4_t a[1][4] = {}, b[1][4] = {}, c[1][4] = {}, d[1][4] = {};  // an array of arrays would stay in memory
  for (int64_t s = 0; s < steps; ++s, x += kStep, w += 4 * kTile) {
    add_tile<kBits>(a, x, w, fetch);
    add_tile<kBits>(b, x, w + kTile, fetch);
    add_tile<kBits>(c, x, w + 2 * kTile, fetch);
    add_tile<kBits>(d, x, w + 3 * kTile, fetch);
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    vst1q_s32(to + v * 4, a[0][v]);
    vst1q_s32(to + 16 + v * 4, b[0][v]);
    vst1q_s32(to + 32 + v * 4, c[0][v]);
    vst1q_s32(to + 48 + v * 4, d[0][v]);
  }
}

#if defined(PAGODA_ARM_I8MM)
// Adds 8 inputs of kPairs pairs of rows times two rows of a tile. sums[p][v] holds the outputs 2 v and 2 v + 1 of the
// pair's first row and of its second, in turns.
template <int R, int kBits, bool kHigh>
static inline void add_eight(int32x4_t (*sums)[8], const int8_t* x, int64_t x_stride, const uint8_t* w) {
  constexpr int kPairs = (R + 1) / 2;
  int8x16_t inputs[kPairs];
#pragma GCC unroll 3
  for (int p = 0; p < kPairs; ++p) {
    const int8x8_t first = vld1_s8(x + 2 * p * x_stride);
    inputs[p] = vcombine_s8(first, 2 * p + 1 < R ? vld1_s8(x + (2 * p + 1) * x_stride) : first);
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    read_no_earlier();
    const uint32x4_t upper = vreinterpretq_u32_u8(four_weights<kBits, kHigh>(w + v * 16));
    const uint32x4_t lower = vreinterpretq_u32_u8(four_weights<kBits, kHigh>(w + 64 + v * 16));
    const uint8x16_t first = vreinterpretq_u8_u32(vzip1q_u32(upper, lower));
    const uint8x16_t second = vreinterpretq_u8_u32(vzip2q_u32(upper, lower));
#pragma GCC unroll 3
    for (int p = 0; p < kPairs; ++p) {
      sums[p][2 * v] = vusmmlaq_s32(sums[p][2 * v], first, inputs[p]);
      sums[p][2 * v + 1] = vusmmlaq_s32(sums[p][2 * v + 1], second, inputs[p]);
    }
  }
}

// R rows of inputs and a tile of 16 outputs, of each step its first kBytes bytes.
template <int R, int kBits, int64_t kBytes = kStepBytes / 4 * kBits / 8>
static inline void tile_of_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                                Fetch& fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  constexpr int kPairs = (R + 1) / 2;
  int32x4_t sums[kPairs][8];
#pragma GCC unroll 3
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) sums[p][v] = vdupq_n_s32(0);
  for (int64_t s = 0; s < steps; ++s, x += kStep, w += 4 * kTile)
    for (int64_t i = 0; i < kBytes; i += 256) {
      fetch.round();
#pragma GCC unroll 2
      for (int64_t j = i; j < i + 256; j += 128) {
        add_eight<R, kBits, false>(sums, x + j / 16, x_stride, w + j);
        if constexpr (kBits == 4) add_eight<R, kBits, true>(sums, x + j / 16 + 32, x_stride, w + j);
      }
    }
#pragma GCC unroll 3
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      int32_t* at = to + 2 * p * kPanel + v * 4;
      vst1q_s32(at, vuzp1q_s32(sums[p][2 * v], sums[p][2 * v + 1]));
      if (2 * p + 1 < R) vst1q_s32(at + kPanel, vuzp2q_s32(sums[p][2 * v], sums[p][2 * v + 1]));
    }
}
#else
template <int R, int kBits, int64_t kBytes = kStepBytes / 4 * kBits / 8>
static inline void tile_of_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                                Fetch& fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  int32x4_t sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[r][v] = vdupq_n_s32(0);
  for (int64_t s = 0; s < steps; ++s, x += kStep, w += 4 * kTile)
    for (int64_t i = 0; i < kBytes; i += 256) {
      fetch.round();
      add_sixteen<R, kBits, false>(sums, x + i / 16, x_stride, w + i);
      if constexpr (kBits == 4) add_sixteen<R, kBits, true>(sums, x + i / 16 + 32, x_stride, w + i);
    }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) vst1q_s32(to + r * kPanel + v * 4, sums[r][v]);
}
#endif

// sums[r][n] = sum_k x[r][k] w[k][n] for R rows and `steps` steps of a panel.
template <int R, int kBits, bool>
static void integer_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                         Fetch fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  if constexpr (R == 1) return one_integer_row<kBits>(x, w, steps, to, fetch);
  for (int t = 0; t < 4; ++t) tile_of_rows<R, kBits>(x, x_stride, w + t * kTile, steps, to + t * 16, fetch);
}
