// Exact products of rows of 16-bit integers with the int8 or int4 weights of a panel, for processors with AVX2 that do
// not multiply bytes. A number of 16 bits is one there, not two rows of int8: sums of 256 of them, times weights of
// bytes, fit into 32 bits.
//
// Of four inputs the rows hold 0, 2, 1, 3: bytes 0 and 2 of an output are what is left of its two words when their
// upper halves are masked, bytes 1 and 3 when these are shifted down.
#pragma once

#include "fetch.h"
#include "multiply.h"
#include "panels.h"

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define PAGODA_WORDS 1

constexpr int kMaxWordRows = 4;           // x 2 vectors of sums and 6 of operands fill the register file
constexpr int64_t kMostJoinedInputs = 256;  // of a group whose sums fit into 32 bits

// One row of numbers, each `parts[0] * 256 + parts[1]` or, without parts[1], parts[0].
static inline void write_words(int16_t* to, const int8_t* upper, const int8_t* lower, int64_t n) {
  for (int64_t i = 0; i < n; i += 4)
    for (int k = 0; k < 4; ++k) {
      const int from = k == 1 ? 2 : k == 2 ? 1 : k;
      to[i + k] = (int16_t)(lower ? upper[i + from] * 256 + lower[i + from] : upper[i + from]);
    }
}

// sums[r] += rows of x times even and odd bytes of 16 outputs.
template <int R>
static inline void add_words(__m256i (*sums)[2], const int16_t* x, int64_t x_stride, const __m256i* even,
                             const __m256i* odd) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    int32_t pairs[2];
    std::memcpy(pairs, x + r * x_stride, 8);
    const __m256i first = _mm256_set1_epi32(pairs[0]), second = _mm256_set1_epi32(pairs[1]);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(even[v], first));
      sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(odd[v], second));
    }
  }
}

// sums[r] += rows of x times kRun bytes of a tile.
template <int R, int kBits, int64_t kRun>
static inline void add_tile(__m256i (*sums)[2], const int16_t* x, int64_t x_stride, const uint8_t* w) {
  const __m256i low = _mm256_set1_epi16(15), byte = _mm256_set1_epi16(255);
#pragma GCC unroll 1
  for (int64_t i = 0; i < kRun; i += 64, x += 4) {
    __m256i even[2], odd[2];
    __builtin_prefetch(w + i + kAhead, 0, 2);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i stored = _mm256_loadu_si256((const __m256i*)(w + i + v * 32));
      even[v] = _mm256_and_si256(stored, kBits == 4 ? low : byte);
      odd[v] = _mm256_srli_epi16(stored, 8);
      if (kBits == 4) odd[v] = _mm256_and_si256(odd[v], low);
    }
    add_words<R>(sums, x, x_stride, even, odd);
    if (kBits == 8) continue;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i stored = _mm256_loadu_si256((const __m256i*)(w + i + v * 32));
      even[v] = _mm256_and_si256(_mm256_srli_epi16(stored, 4), low);
      odd[v] = _mm256_srli_epi16(stored, 12);
    }
    add_words<R>(sums, x + 32, x_stride, even, odd);
  }
}

template <int R>
static inline void store_words(int32_t* to, __m256i (*sums)[2], const int32_t* start, int64_t start_stride) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i begin = start ? _mm256_set1_epi32(start[r * start_stride]) : _mm256_setzero_si256();
      _mm256_storeu_si256((__m256i*)(to + r * kPanel + v * 8), _mm256_add_epi32(begin, sums[r][v]));
    }
}

// to[r][n] = sum_k x[r][k] w[k][n] of R rows and `steps` steps of a panel.
template <int R, int kBits>
static void word_rows(const int16_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  if constexpr (R == 1) {  // reads weights in the order in which they lie: the fastest while they come from memory
    __m256i sums[4][1][2] = {};
    for (int64_t s = 0; s < steps; ++s)
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t, w += kTile)
        add_tile<R, kBits, kTile>(sums[t], x + s * kStep, x_stride, w);
    for (int t = 0; t < 4; ++t) store_words<R>(to + t * 16, sums[t], nullptr, 0);
    return;
  }
  for (int t = 0; t < 4; ++t) {
    __m256i sums[R][2] = {};
    for (int64_t s = 0; s < steps; ++s)
      add_tile<R, kBits, kTile>(sums, x + s * kStep, x_stride, w + (s * 4 + t) * kTile);
    store_words<R>(to + t * 16, sums, nullptr, 0);
  }
}

template <int kBits>
static void word_products(const int16_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                          int64_t rows) {
  static constexpr decltype(&word_rows<1, kBits>) by_rows[kMaxWordRows] = {
      word_rows<1, kBits>, word_rows<2, kBits>, word_rows<3, kBits>, word_rows<4, kBits>};
  for (int64_t r = 0, piece; r < rows; r += piece) {
    piece = equal_piece(rows - r, kMaxWordRows);
    by_rows[piece - 1](x + r * x_stride, x_stride, w, steps, to + r * kPanel);
  }
}

// The same of int8 weights whose kHeads groups share a step: to[s][h][r][n] begins with start[r][s][h].
template <int R, int kHeads>
static void split_word_rows(const int16_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int64_t steps,
                            const int32_t* start, int64_t start_stride, int32_t* to) {
  constexpr int64_t kTile = kStepBytes / 4, kRun = kTile / kHeads;
  for (int64_t i = 0; i < steps * kHeads; ++i, to += R * kPanel)
    for (int t = 0; t < 4; ++t) {
      __m256i sums[R][2] = {};
      add_tile<R, 8, kRun>(sums, x + i * (kStep / kHeads), x_stride,
                           w + i / kHeads * w_stride + t * kTile + i % kHeads * kRun);
      store_words<R>(to + t * 16, sums, start + i, start_stride);
    }
}

// Of at most kMaxWordRows rows.
template <int kHeads>
static void split_words(const int16_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int64_t steps,
                        const int32_t* start, int64_t start_stride, int32_t* to, int64_t rows) {
  static constexpr decltype(&split_word_rows<1, kHeads>) by_rows[kMaxWordRows] = {
      split_word_rows<1, kHeads>, split_word_rows<2, kHeads>, split_word_rows<3, kHeads>, split_word_rows<4, kHeads>};
  by_rows[rows - 1](x, x_stride, w, w_stride, steps, start, start_stride, to);
}
#endif
