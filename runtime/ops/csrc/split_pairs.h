// Products of rows of 16 bits with the int4 or fp4 weights of a panel whose groups of 16 inputs share a step, on AMX
// tiles. An input is a pair of bf16, 256 times its upper byte and its lower one, and a weight twice the same bf16: sums
// of a group are integers below 2 ** 24, which float holds, so that they are exact in any order, and those of
// split_groups.h. While the tiles multiply, the sums before are scaled and added to the totals.
#pragma once

#include "multiply.h"
#include "panels.h"

constexpr int64_t kPairBytes = kPanel * kStep * 4;  // of a step's weights
constexpr int64_t kPairGroups = 4;                  // that share a step
constexpr int64_t kLeastPairs = 16;                 // rows; for fewer the tiles of split_groups.h take less time

// Rows of pairs that are kept for so many, from any of which tiles read 16: an odd number, so that the parts of a row do
// not meet in the same lines of the first cache. 0: none are multiplied.
static inline int64_t rows_of_pairs(int64_t rows) {
#if defined(PAGODA_TILES)
  if (rows >= kLeastPairs && tiles_allowed()) return (rows + kTileRows) | 1;
#endif
  return 0;
}

#if defined(PAGODA_TILES)
constexpr int64_t kTileInputs = 16;  // of a tile of pairs

// to[quarter of 16 inputs][input][output], 16 outputs after the other, of a step of 4 bits; `pairs` has what each code
// stands for.
static inline void widen_to_pairs(uint32_t* to, const uint8_t* from, const uint32_t* pairs) {
  const __m512i table = _mm512_loadu_si512(pairs);
  for (int64_t t = 0; t < 4; ++t, to += 64 * 16)
    for (int64_t i = 0; i < 8; ++i, from += 64) {
      const __m512i codes = _mm512_loadu_si512(from);
      __builtin_prefetch(from + kAhead, 0, 2);
      for (int j = 0; j < 4; ++j) {  // an index has 4 bits
        const __m512i low = _mm512_srli_epi32(codes, 8 * j), high = _mm512_srli_epi32(codes, 8 * j + 4);
        _mm512_storeu_si512(to + (4 * i + j) * 16, _mm512_permutexvar_epi32(low, table));
        _mm512_storeu_si512(to + (4 * i + j + 32) * 16, _mm512_permutexvar_epi32(high, table));
      }
    }
}

// Two numbers as bf16, which holds them.
static inline uint32_t pair_of(float first, float second) {
  uint32_t a, b;
  std::memcpy(&a, &first, 4);
  std::memcpy(&b, &second, 4);
  return a >> 16 | (b & 0xFFFF0000u);
}

// A step of a panel for at most 16 rows.
template <bool kZeros>
struct PairStep {
  const uint32_t* x;  // [rows][16] of the step's first 16 inputs; the next ones are `x_stride` pairs further
  int64_t x_stride;
  const uint32_t* w;  // as `widen_to_pairs` has written them
  const char* heads;
  int64_t head_bytes;
  const float* zeros;       // [kPairGroups][kPanel], times their scales
  const float* row_scales;  // `groups` from one row to the next
  const int32_t* sums;      // of the inputs: kPairGroups, `groups` times as many from one row to the next
  int64_t groups;
  float* totals;  // [rows][kPanel]
  int64_t rows;
};

// Of two sixteens of outputs and their groups, in 16 rows of 16.
typedef float PairSums[2][kPairGroups][16][16];

// Adds what rows [begin, begin + 8) of 16 outputs have to the totals, as `add_step` does it.
template <bool kZeros>
static inline void add_pair_rows(const PairStep<kZeros>& a, const PairSums& from, int which, int64_t begin,
                                 int64_t output) {
  const float* row_scales = a.row_scales + begin * a.groups;
  const int32_t* sums = a.sums + begin * a.groups * kPairGroups;
  float* total = a.totals + begin * kPanel + output;
  const int64_t groups = a.groups;
  vfloat scales[kPairGroups];
#pragma GCC unroll 4
  for (int h = 0; h < kPairGroups; ++h) scales[h] = load((const float*)(a.heads + h * a.head_bytes) + output);
  const auto add = [&](int64_t r) {
    vfloat number{};
#pragma GCC unroll 4
    for (int h = 0; h < kPairGroups; ++h) {
      const vfloat whole = load(from[which][h][begin + r]);
      number = h ? multiply_add(number, whole, scales[h]) : whole * scales[h];
      if constexpr (kZeros) {
        const vint sum = sums[h] - vint{};
        number = multiply_add(number, -__builtin_convertvector(sum, vfloat), load(a.zeros + h * kPanel + output));
      }
    }
    store(total, multiply_add(load(total), number, splat(*row_scales)));
    row_scales += groups;
    sums += groups * kPairGroups;
    total += kPanel;
  };
  if (a.rows - begin >= 8) {
#pragma GCC unroll 8
    for (int64_t r = 0; r < 8; ++r) add(r);
  } else {
    for (int64_t r = 0; r < a.rows - begin; ++r) add(r);
  }
}

// Multiplies 32 outputs from `output` on, and adds those of `before` meanwhile, from `found`. Sums leave their tiles
// late, when they have long been there: those of the last groups with the next 32 outputs, so that here the ones before
// go to `last`. They are read later still, since what a tile stores can be read only when it is in the cache.
template <bool kZeros>
static inline void half_of_pairs(const PairStep<kZeros>& a, int64_t output, PairSums& to, PairSums& last,
                                 const PairStep<kZeros>* before, const PairSums& found) {
  const uint32_t* w = a.w + output * kStep;
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
#define PAGODA_INPUTS(quarter, tile)                        \
  _tile_loadd(tile, a.x + (quarter) * a.x_stride, 64);       \
  for (int i = 0; output && i < kTileRows; ++i)              \
    __builtin_prefetch(a.x + (quarter) * a.x_stride + (kTileRows + i) * kTileInputs)
#define PAGODA_OUTPUTS(quarter, which, inputs, outputs, sums)                              \
  _tile_loadd(outputs, w + ((which) * 4 + (quarter)) * kTileInputs * 16, 64);              \
  _tile_dpbf16ps(sums, inputs, outputs)
#define PAGODA_LEAVE(sums, to) _tile_stored(sums, to, 64)
#define PAGODA_ADD(which, half) \
  if (before) add_pair_rows(*before, found, which, 8 * (half), output + 16 * (which))
  PAGODA_INPUTS(0, 4);
  _tile_zero(0); PAGODA_OUTPUTS(0, 0, 4, 6, 0); PAGODA_LEAVE(2, last[0][3]);
  _tile_zero(1); PAGODA_OUTPUTS(0, 1, 4, 7, 1); PAGODA_LEAVE(3, last[1][3]);
  PAGODA_INPUTS(1, 5);
  _tile_zero(2); PAGODA_OUTPUTS(1, 0, 5, 6, 2); PAGODA_LEAVE(0, to[0][0]);
  _tile_zero(3); PAGODA_OUTPUTS(1, 1, 5, 7, 3); PAGODA_LEAVE(1, to[1][0]);
  PAGODA_INPUTS(2, 4);
  _tile_zero(0); PAGODA_OUTPUTS(2, 0, 4, 6, 0); PAGODA_LEAVE(2, to[0][1]);
  PAGODA_ADD(0, 0);
  _tile_zero(1); PAGODA_OUTPUTS(2, 1, 4, 7, 1); PAGODA_LEAVE(3, to[1][1]);
  PAGODA_ADD(0, 1);
  PAGODA_INPUTS(3, 5);
  _tile_zero(2); PAGODA_OUTPUTS(3, 0, 5, 6, 2); PAGODA_LEAVE(0, to[0][2]);
  PAGODA_ADD(1, 0);
  _tile_zero(3); PAGODA_OUTPUTS(3, 1, 5, 7, 3); PAGODA_LEAVE(1, to[1][2]);
  PAGODA_ADD(1, 1);
#undef PAGODA_ADD
#undef PAGODA_LEAVE
#undef PAGODA_OUTPUTS
#undef PAGODA_INPUTS
}

// What is left of the last 64 outputs.
template <bool kZeros>
static inline void end_of_pairs(const PairStep<kZeros>& step, const PairSums& first, PairSums& last) {
  _tile_stored(2, last[0][kPairGroups - 1], 64);
  _tile_stored(3, last[1][kPairGroups - 1], 64);
  for (int which = 0; which < 2; ++which)
    for (int64_t begin = 0; begin < 16; begin += 8) {
      add_pair_rows(step, first, which, begin, 16 * which);
      add_pair_rows(step, last, which, begin, 32 + 16 * which);
    }
}
#endif
