// Exact products of rows of int8 with the int8 or int4 weights of a panel whose groups of 32 or 16 inputs share a
// step: as those of weight_integers.h, with sums of their own for each group of a step. Numbers of 16 bits times
// weights of 32 inputs or fewer fit into 32 bits, so that the sums of their two rows of int8 are put together here.
#pragma once

#include "weight_integers.h"

constexpr int64_t kSplitSteps = 2;  // whose sums stay in the first cache

// What the functions below take: rows of kParts rows of int8 each, `x_stride` bytes apart, and steps `w_stride` bytes
// apart; they yield to[s][h][r][n] = start[r][s][h] + the sum of group h of step s, or its parts without the start.
struct Split {
  const int8_t* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t w_stride, steps;
  const int32_t* start;
  int64_t start_stride;  // from one row to the next
  int32_t* to;
};

#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
// int4 numbers as bytes: themselves, or what a table of 16 says.
template <bool kTable>
static inline __m512i looked_up(__m512i numbers, __m512i table) {
  return kTable ? _mm512_shuffle_epi8(table, numbers) : numbers;
}

// The number of a row's parts.
template <int kParts>
static inline __m512i whole(const __m512i* parts, int64_t stride) {
  return kParts == 1 ? parts[0] : _mm512_add_epi32(_mm512_slli_epi32(parts[0], 8), parts[stride]);
}

// Of int4 weights, read in the order in which they lie, but for the heads between them: processors that fetch ahead
// by themselves lose the track there, so that this does it.
template <int R, int kParts, int kHeads, bool kTable>
static void split_rows_in_order(const Split& a, const uint8_t* table) {
  constexpr int kRun = 16 / kHeads, kAll = R * kParts;  // rows of a tile that a group has; rows of int8
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  const int64_t x_stride = a.x_stride, gap = a.w_stride - kStepBytes / 2;
  const int8_t* x = a.x;
  const uint8_t* w = a.w;
  int32_t* to = a.to;
  for (int64_t s = 0; s < a.steps; ++s, x += kStep, w += gap, to += kHeads * R * kPanel) {
    for (int64_t i = 0; i < gap; i += kLine) __builtin_prefetch(w + kAhead - gap + i, 0, 2);
    for (int t = 0; t < 4; ++t) {
      __m512i sums[kHeads][kAll];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
        for (int r = 0; r < kAll; ++r)
          sums[h][r] = (r + 1) % kParts ? _mm512_setzero_si512()
                                        : _mm512_set1_epi32(a.start[r / kParts * a.start_stride + s * kHeads + h]);
      const int8_t* at = x;
#pragma GCC unroll 2
      for (int h = 0; h < kHeads / 2; ++h)
#pragma GCC unroll 1
        for (int i = 0; i < kRun; ++i, at += 4, w += 64) {
          const __m512i stored = _mm512_loadu_si512(w);
          __builtin_prefetch(w + kAhead, 0, 2);
          const __m512i first = looked_up<kTable>(_mm512_and_si512(stored, low), values);
          const __m512i second = looked_up<kTable>(_mm512_and_si512(_mm512_srli_epi16(stored, 4), low), values);
#pragma GCC unroll 4
          for (int r = 0; r < kAll; ++r) {
            int32_t four[2];
            std::memcpy(four, at + r * x_stride, 4);
            std::memcpy(four + 1, at + r * x_stride + 32, 4);
            sums[h][r] = _mm512_dpbusd_epi32(sums[h][r], first, _mm512_set1_epi32(four[0]));
            __m512i& other = sums[h + kHeads / 2][r];
            other = _mm512_dpbusd_epi32(other, second, _mm512_set1_epi32(four[1]));
          }
        }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          _mm512_storeu_si512(to + (h * R + r) * kPanel + t * 16, whole<kParts>(&sums[h][r * kParts], 1));
    }
  }
}

// One group of int8 weights, whose four tiles share each broadcast of the input. A function of its own and all
// unrolled, because inside of loops the compiler keeps some of the sums in memory.
template <int R, int kParts, int64_t kRun>
__attribute__((noinline)) static void group_rows(const int8_t* x, int64_t x_stride, const uint8_t* w,
                                                 const int32_t* start, int64_t start_stride, int32_t* to) {
  constexpr int64_t kTile = kStepBytes / 4;
  __m512i sums[R * kParts][4];
#pragma GCC unroll 8
  for (int r = 0; r < R * kParts; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t)
      sums[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRun; i += 64, w += 64, x += 4) {
    __m512i weights[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) weights[t] = _mm512_loadu_si512(w + t * kTile);
    dot<R * kParts>(sums, weights, x, x_stride);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512i begin = _mm512_set1_epi32(start[r * start_stride]);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      _mm512_storeu_si512(to + r * kPanel + t * 16, _mm512_add_epi32(begin, whole<kParts>(&sums[r * kParts][t], 4)));
    }
  }
}

template <int R, int kParts, int kHeads>
static void split_rows(const Split& a) {
  constexpr int64_t kRun = kStepBytes / 4 / kHeads;
  for (int64_t i = 0; i < a.steps * kHeads; ++i)
    group_rows<R, kParts, kRun>(a.x + i * (kStep / kHeads), a.x_stride,
                                a.w + i / kHeads * a.w_stride + i % kHeads * kRun, a.start + i, a.start_stride,
                                a.to + i * R * kPanel);
}
#else
// Sums of R rows of int8, without what they begin with.
template <int R, int kHeads>
static void split_parts(const Split& a) {
  constexpr int64_t kTile = kStepBytes / 4, kRun = kTile / kHeads;
  const int8_t* x = a.x;
  int32_t* to = a.to;
  for (int64_t s = 0; s < a.steps; ++s)
    for (int h = 0; h < kHeads; ++h, x += kStep / kHeads, to += R * kPanel) {
      const uint8_t* w = a.w + s * a.w_stride + h * kRun;
#if defined(PAGODA_ARM_DOT)
      Fetch none{nullptr, 0};
      for (int t = 0; t < 4; ++t)
        tile_of_rows<R, 8, kRun>(x, a.x_stride, w + t * kTile, 1, to + t * 16, none);
#elif defined(__AVXVNNI__)
      for (int t = 0; t < 4; ++t) {
        __m256i sums[R][2] = {};
        add_tile_run<R, 8, kRun>(sums, x, a.x_stride, w + t * kTile);
        store_sums<R>(to + t * 16, sums);
      }
#else
      std::memset(to, 0, R * kPanel * sizeof *to);
      for (int t = 0; t < 4; ++t)
        for (int64_t i = 0; i < kRun; i += 64)
          for (int r = 0; r < R; ++r) {
            const uint8_t* weights = w + t * kTile + i;
            const int8_t* four = x + r * a.x_stride + i / 16;
            int32_t* sums = to + r * kPanel + t * 16;
            for (int n = 0; n < 16; ++n)
              for (int k = 0; k < 4; ++k) sums[n] += (int32_t)weights[4 * n + k] * four[k];
          }
#endif
    }
}
#endif

#if defined(PAGODA_INT8_TILES)
// The same for 16 or 32 rows of int8.
template <int kHeads>
static void split_tiles(const Split& a, bool two) {
  constexpr int64_t kTile = kStepBytes / 4, kRun = kTile / kHeads;
  configure_tiles(16, kTilePairs / kHeads);
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  const int8_t* x = a.x;
  int32_t* to = a.to;
  for (int64_t s = 0; s < a.steps; ++s)
    for (int h = 0; h < kHeads; ++h, x += kStep / kHeads, to += (two ? 32 : 16) * kPanel)
      for (int half = 0; half < 2; ++half) {
        const uint8_t* at = a.w + s * a.w_stride + 2 * half * kTile + h * kRun;
        int32_t* out = to + 32 * half;
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, x, a.x_stride);
        _tile_loadd(6, at, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, at + kTile, 64);
        _tile_dpbsud(1, 4, 7);
        _tile_stored(0, out, kPanel * 4);
        _tile_stored(1, out + 16, kPanel * 4);
        if (!two) continue;
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, x + 16 * a.x_stride, a.x_stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(2, out + 16 * kPanel, kPanel * 4);
        _tile_stored(3, out + 16 * kPanel + 16, kPanel * 4);
      }
  asm volatile("" ::: "memory");
}
#endif

// Whether `split_products` leaves the parts of a row as rows of their own, without what sums begin with: `add_step`
// puts them together.
static inline bool splits_leave_parts(bool tiles) {
#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
  return tiles;
#else
  return true;
#endif
}

// Rows of int8 that read int4 weights as they are stored; for more they are widened.
static inline bool splits_in_order(int64_t bits, int64_t rows) {
#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
  return bits == 4 && rows <= kRowsInOrder;
#else
  return false;
#endif
}

// Of at most `integer_piece` rows; returns how many rows of `to` each group has. Weights are int8 but where
// `in_order`, which reads int4 ones with a table of what their numbers are, or null.
template <int kParts, int kHeads>
static int64_t split_products(const Split& a, int64_t rows, bool tiles, bool in_order, const uint8_t* table) {
  constexpr int kMost = kMaxIntegerRows / kParts;
#if defined(PAGODA_INT8_TILES)
  if (tiles) {
    const int64_t each = rows * kParts > 16 ? 32 : 16;
    split_tiles<kHeads>(a, each == 32);
    return each;
  }
#endif
#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)
  if (in_order) {
    typedef decltype(&split_rows_in_order<1, kParts, kHeads, false>) InOrder;
    static constexpr uint8_t none[16] = {};
    if constexpr (kParts == 2) {
      static constexpr InOrder plain[2] = {split_rows_in_order<1, 2, kHeads, false>,
                                           split_rows_in_order<2, 2, kHeads, false>};
      static constexpr InOrder by_table[2] = {split_rows_in_order<1, 2, kHeads, true>,
                                              split_rows_in_order<2, 2, kHeads, true>};
      (table ? by_table : plain)[rows - 1](a, table ? table : none);
    } else {
      static constexpr InOrder plain[4] = {
          split_rows_in_order<1, 1, kHeads, false>, split_rows_in_order<2, 1, kHeads, false>,
          split_rows_in_order<3, 1, kHeads, false>, split_rows_in_order<4, 1, kHeads, false>};
      static constexpr InOrder by_table[4] = {
          split_rows_in_order<1, 1, kHeads, true>, split_rows_in_order<2, 1, kHeads, true>,
          split_rows_in_order<3, 1, kHeads, true>, split_rows_in_order<4, 1, kHeads, true>};
      (table ? by_table : plain)[rows - 1](a, table ? table : none);
    }
    return rows;
  }
  typedef decltype(&split_rows<1, kParts, kHeads>) Rows;
  if constexpr (kParts == 2) {
    static constexpr Rows by_rows[kMost] = {split_rows<1, 2, kHeads>, split_rows<2, 2, kHeads>,
                                            split_rows<3, 2, kHeads>};
    by_rows[rows - 1](a);
  } else {
    static constexpr Rows by_rows[kMost] = {split_rows<1, 1, kHeads>, split_rows<2, 1, kHeads>,
                                            split_rows<3, 1, kHeads>, split_rows<4, 1, kHeads>,
                                            split_rows<5, 1, kHeads>, split_rows<6, 1, kHeads>};
    by_rows[rows - 1](a);
  }
  return rows;
#else
  static constexpr decltype(&split_parts<1, kHeads>) by_rows[kMaxIntegerRows] = {
      split_parts<1, kHeads>, split_parts<2, kHeads>, split_parts<3, kHeads>,
      split_parts<4, kHeads>, split_parts<5, kHeads>, split_parts<6, kHeads>};
  by_rows[rows * kParts - 1](a);
  return rows * kParts;
#endif
}
