// Few query rows with vectors: keys are never packed.
//
// A packed block of keys serves 16 lanes of keys at once, but costs four shuffles a vector and a trip through memory.
// Here four keys are transposed in registers, within the quarters of their vectors only: each quarter then holds one
// pair of numbers of every key, and the quarters are added up at the end. Values are paired in registers, too.
#pragma once

#include "pack.h"
#include "scratch.h"
#include "softmax.h"

#if defined(PAGODA_BF16)

class FewRowsOnVectors {
 public:
  static constexpr int kMost = 16;  // where packed keys have caught up
  static constexpr int kPiece = 8;  // rows at a time: their sums fill the registers
  static constexpr int kNearValues = 8;  // values that are brought from the second cache into the first ahead of use

  // Of scratch memory.
  static int64_t bytes(const Problem& p) {
    return (p.dim / 2 * 4 * kMost + kPiece * kBlockKeys + kPiece * kBlockKeys / 2) * 4 + 1024;
  }

  // Whether rows of a call with nothing but a positive scale to apply can go this way.
  static bool fits(const Problem& p, int rows) {
    return rows <= kMost && p.query_dtype == kBFloat16 && p.key_dtype == kBFloat16 && p.key_dim == 1 &&
           p.value_dim_stride == 1 && p.dim % 32 == 0 && p.value_dim % 32 == 0;
  }

  // `query`: [rows][dim / 2] pairs.
  FewRowsOnVectors(const Problem& p, Row* row, int rows, const uint32_t* query, Scratch& scratch)
      : scale_(p.scale * kLog2E), row_(row), rows_(rows), chunks_(p.dim / 32), columns_(p.columns) {
    query_ = scratch.take<uint32_t>(rows * chunks_ * 64);
    scores_ = scratch.take<float>(kPiece * kBlockKeys);
    weights_ = scratch.take<uint32_t>(kPiece * kBlockKeys / 2);
    for (int r = 0, count; r < rows; r += count) {
      count = piece(r);
      for (int i = 0; i < count; ++i)
        for (int64_t c = 0; c < chunks_; ++c) {
          const __m512i x = _mm512_loadu_si512(query + ((r + i) * chunks_ + c) * 16);
          uint32_t* to = query_ + (r * chunks_ * 4 + c * 4 * count + i) * 16;
          _mm512_store_si512(to, _mm512_shuffle_epi32(x, _MM_PERM_AAAA));
          _mm512_store_si512(to + count * 16, _mm512_shuffle_epi32(x, _MM_PERM_BBBB));
          _mm512_store_si512(to + 2 * count * 16, _mm512_shuffle_epi32(x, _MM_PERM_CCCC));
          _mm512_store_si512(to + 3 * count * 16, _mm512_shuffle_epi32(x, _MM_PERM_DDDD));
        }
    }
  }

  // Of `ahead`, in `add`.
  int64_t steps() const {
    const int64_t pieces = pieces_of(rows_, kPiece), count = equal_piece(rows_, kPiece);
    const int64_t wide = count <= 2 ? 128 : count <= 4 ? 64 : 32;
    return pieces * (kBlockKeys / 8 * chunks_ + kBlockKeys / 4 * ((columns_ + wide - 1) / wide));
  }

  // Adds keys [first, first + n) and their values to `result` [rows][columns].
  void add(const char* const* keys, const char* const* values, int64_t first, int n, float* result,
           Prefetcher& ahead) {
    for (int r = 0, count; r < rows_; r += count) {
      count = piece(r);
      float* to = result + r * columns_;
      switch (count) {
        case 1: add_rows<1>(r, keys, values, first, n, to, ahead); break;
        case 2: add_rows<2>(r, keys, values, first, n, to, ahead); break;
        case 3: add_rows<3>(r, keys, values, first, n, to, ahead); break;
        case 4: add_rows<4>(r, keys, values, first, n, to, ahead); break;
        case 5: add_rows<5>(r, keys, values, first, n, to, ahead); break;
        case 6: add_rows<6>(r, keys, values, first, n, to, ahead); break;
        case 7: add_rows<7>(r, keys, values, first, n, to, ahead); break;
        case 8: add_rows<8>(r, keys, values, first, n, to, ahead); break;
      }
    }
  }

  void finish() const {}

 private:
  // Of fewer rows the arithmetic leaves the processor time to do so by itself.
  template <int R>
  static constexpr bool brings_near = R >= 3;
  static inline void bring_near(const char* line) { __builtin_prefetch(line, 0, 3); }

  // Rows to take at once from `row` on.
  int piece(int row) const { return (int)equal_piece(rows_ - row, kPiece); }

  template <int R>
  void add_rows(int row, const char* const* keys, const char* const* values, int64_t first, int n, float* result,
                Prefetcher& ahead) {
    score<R>(query_ + row * chunks_ * 64, keys, n, ahead);
    float decay[R];
    for (int r = 0; r < R; ++r) decay[r] = weigh(row_[row + r], scores_ + r * kBlockKeys, weights_ + r * 32, first, n);
    constexpr int kWide = R <= 2 ? 4 : R <= 4 ? 2 : 1;
    int64_t d = 0;
    for (int i = 0; brings_near<R> && i < lesser(n, kNearValues); ++i)
      for (int64_t at = 0; at < columns_; at += 32) bring_near(values[i] + at * 2);
    for (; d + 32 * kWide <= columns_; d += 32 * kWide) add_values<R, kWide>(values, n, d, decay, result, ahead);
    for (; d < columns_; d += 32) add_values<R, 1>(values, n, d, decay, result, ahead);
  }

  // Four keys from number `at` of a row of 16 pairs on, transposed within quarters: quarter i of the j-th vector holds
  // pair 4 i + j of each key.
  static inline void transpose_quarters(const char* const* key, int64_t at, __m512i* pair) {
    const __m512i a = _mm512_loadu_si512(key[0] + at), b = _mm512_loadu_si512(key[1] + at);
    const __m512i c = _mm512_loadu_si512(key[2] + at), d = _mm512_loadu_si512(key[3] + at);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), ab2 = _mm512_unpackhi_epi32(a, b);
    const __m512i cd = _mm512_unpacklo_epi32(c, d), cd2 = _mm512_unpackhi_epi32(c, d);
    pair[0] = _mm512_unpacklo_epi64(ab, cd), pair[1] = _mm512_unpackhi_epi64(ab, cd);
    pair[2] = _mm512_unpacklo_epi64(ab2, cd2), pair[3] = _mm512_unpackhi_epi64(ab2, cd2);
  }

  // scores_[r][key] of n keys, which are padded to full groups of 16. Eight at a time share a vector of the query.
  template <int R>
  void score(const uint32_t* query, const char* const* keys, int n, Prefetcher& ahead) {
    for (int at = 0; at < n; at += 16) {
      float* to = scores_ + at;
      vfloat eight[R];
      score_eight<R>(query, keys + at, at + 16 < n, eight, ahead);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store(to + r * kBlockKeys, eight[r]);
      score_eight<R>(query, keys + at + 8, at + 16 < n, eight, ahead);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store(to + r * kBlockKeys, add_halves(load(to + r * kBlockKeys), eight[r]));
    }
  }

  // The halves of a result add up to the scores of eight keys. `more`: another 16 keys follow.
  template <int R>
  __attribute__((always_inline)) void score_eight(const uint32_t* q, const char* const* key, bool more,
                                                  vfloat* result, Prefetcher& ahead) const {
    vfloat sum[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[0][r] = sum[1][r] = vfloat{};
    for (int64_t c = 0; c < chunks_; ++c, q += 4 * R * 16) {
      ahead.step();
      __m512i pair[2][4];
      transpose_quarters(key, c * 64, pair[0]);
      transpose_quarters(key + 4, c * 64, pair[1]);
      if (brings_near<R> && more)
        for (int i = 16; i < 24; ++i) bring_near(key[i] + c * 64);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i x = Bf16::read(q + (j * R + r) * 16);
          sum[0][r] = Bf16::fma(sum[0][r], pair[0][j], x);
          sum[1][r] = Bf16::fma(sum[1][r], pair[1][j], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) result[r] = add_quarters(sum[0][r], sum[1][r]);
  }

  // Sums come of a blend and one shuffle, not of two shuffles: these take a port of the multiplier.
  // Quarters 0 + 1 of a, 0 + 1 of b, 2 + 3 of a, 2 + 3 of b.
  static inline vfloat add_quarters(vfloat a, vfloat b) {
    const __m512i crossed = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return (vfloat)_mm512_mask_blend_ps(0xF0F0, (__m512)a, (__m512)b) +
           (vfloat)_mm512_permutex2var_ps((__m512)a, crossed, (__m512)b);
  }

  // The sum of a's halves, then of b's.
  static inline vfloat add_halves(vfloat a, vfloat b) {
    return (vfloat)_mm512_mask_blend_ps(0xFF00, (__m512)a, (__m512)b) +
           (vfloat)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4E);
  }

  // Scores to weights of keys [first, first + n); the factor that the row's earlier results decay by.
  float weigh(Row& row, float* scores, uint32_t* weights, int64_t first, int n) const {
    const int64_t begin = row.low - first, end = lesser(row.high - first, n);
    if (begin > 0 || end < kBlockKeys) hide_scores(scores, begin, end);
    vfloat x[4], top = load(scores);
    for (int v = 1; v < 4; ++v) top = larger(top, load(scores + v * kLanes));
    top *= scale_;
    float decay = 1.f;
    if (_mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(row.maximum), _CMP_GT_OQ)) {  // seldom
      const float highest = largest_lane(top);
      decay = power_of_two(row.maximum - highest);
      row.maximum = highest;
    }
    const float low = finite_maximum(row.maximum);
    for (int v = 0; v < 4; ++v) x[v] = load(scores + v * kLanes) * scale_ - low;
    row.sum = store_powers(weights, x, row.sum * decay);
    return decay;
  }

  // 32 * kWide columns from d on.
  template <int R, int kWide>
  void add_values(const char* const* values, int n, int64_t d, const float* decay, float* result,
                  Prefetcher& ahead) const {
    const __m512i low = _mm512_load_si512(kFirstHalves), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    vfloat sum[R][2 * kWide];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kWide; ++v) sum[r][v] = vfloat{};
    for (int key = 0; key < n; key += 2) {
      if (key % 4 == 0) ahead.step();
      const char *first = values[key] + d * 2, *second = values[key + 1] + d * 2;
      if (brings_near<R> && key + kNearValues < n)
        for (int v = 0; v < kWide; ++v) {
          bring_near(values[key + kNearValues] + d * 2 + v * 64);
          bring_near(values[key + kNearValues + 1] + d * 2 + v * 64);
        }
      __m512i pair[2 * kWide];
#pragma GCC unroll 8
      for (int v = 0; v < kWide; ++v) {
        const __m512i x = _mm512_loadu_si512(first + v * 64), y = _mm512_loadu_si512(second + v * 64);
        pair[2 * v] = _mm512_permutex2var_epi16(x, low, y);
        pair[2 * v + 1] = _mm512_permutex2var_epi16(x, high, y);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i weight = Bf16::spread(weights_ + r * 32 + key / 2);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kWide; ++v) sum[r][v] = Bf16::fma(sum[r][v], weight, pair[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kWide; ++v) {
        float* to = result + r * columns_ + d + v * kLanes;
        store(to, load(to) * decay[r] + sum[r][v]);
      }
  }

  const float scale_;
  Row* row_;
  const int rows_;
  const int64_t chunks_, columns_;
  uint32_t *query_, *weights_;  // [piece][chunk][4][row][16] pairs, each four times; [row][32] pairs
  float* scores_;               // [row][key]
};
#endif
