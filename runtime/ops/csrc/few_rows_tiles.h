// Few query rows with tiles, 4 to 16: what a decoding sequence has whose query heads share keys.
//
// Packing keys for `multiply` would cost more than the products. So the keys are the left operand of their product
// here, read from where they lie: scores come out as [key][query row], maxima are found lane by lane, and only the
// weights are transposed, which are a quarter as many as the numbers of 64-wide keys or fewer. Up to 8 rows take half a
// vector: the other half holds the scores of the keys 32 further on.
#pragma once

#include <algorithm>

#include "pack.h"
#include "scratch.h"
#include "softmax.h"

#if defined(PAGODA_TILES)

class FewRowsOnTiles {
 public:
  static constexpr int kMost = 16;

  // Of scratch memory.
  static int64_t bytes(const Problem& p) {
    return (p.dim / 2 * kMost + kBlockKeys * kMost + kMost * kBlockKeys / 2 + kBlockKeys / 2 * p.columns) * 4 +
           32 * p.dim * 2 + 1024;
  }

  // Whether rows of a call with nothing but a positive scale to apply can go this way.
  static bool fits(const Problem& p, int rows) {
    return rows >= 4 && rows <= kMost && p.query_dtype == kBFloat16 && p.key_dtype == kBFloat16 && p.key_dim == 1 &&
           p.dim % 32 == 0 && tiles_allowed();
  }

  // `query`: [rows][dim / 2] pairs.
  FewRowsOnTiles(const Problem& p, Row* row, int rows, const uint32_t* query, Scratch& scratch)
      : scale_(p.scale * kLog2E), rows_(rows), lanes_(rows <= 8 ? 8 : 16), chunks_(p.dim / 32), columns_(p.columns),
        value_dim_(p.value_dim), row_bytes_(p.key_row * 2), row_(row) {
    query_ = scratch.take<uint32_t>(p.dim / 2 * lanes_);
    scores_ = scratch.take<float>(kBlockKeys * lanes_);
    weights_ = scratch.take<uint32_t>(kMost * kBlockKeys / 2);
    straight_ = scratch.take<char>(32 * p.dim * 2);
    values_ = scratch.take<uint32_t>(kBlockKeys / 2 * p.columns);
    const int64_t pairs = p.dim / 2;
    for (int64_t k = 0; k < pairs; ++k)
      for (int r = 0; r < lanes_; ++r) query_[k * lanes_ + r] = r < rows ? query[r * pairs + k] : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Row& x = row[lane % lanes_ < rows ? lane % lanes_ : 0];
      low_[lane] = (int32_t)x.low, high_[lane] = (int32_t)x.high;
    }
    all_low_ = row[rows - 1].low, all_high_ = row[0].high;  // later rows see later keys
    maximum_ = splat(-INFINITY);
    sum_ = vfloat{};
  }

  // Of `ahead`, in `add`.
  int64_t steps() const { return (chunks_ + (columns_ + 31) / 32) * (kBlockKeys / 32) + kBlockKeys / kValueKeys; }

  // Adds keys [first, first + n) and their values to `result` [rows][columns].
  void add(const char* const* keys, const char* const* values, int64_t first, int n, float* result,
           Prefetcher& ahead) {
    for (int i = 0; i < n; i += kValueKeys) {
      pack_values(Bf16{}, values_ + i / 2 * columns_, values + i, (int)lesser(kValueKeys, n - i), value_dim_, columns_,
                  kBFloat16);
      ahead.step();
    }
    const int64_t pairs = (n + 1) / 2;
    std::memset(values_ + pairs * columns_, 0, (round_up(pairs, kTilePairs) - pairs) * columns_ * 4);
    configure();
    score(keys, n, ahead);
    alignas(64) float decay[kLanes];
    if (lanes_ == 8) weigh<true>(first, n, decay);
    else weigh<false>(first, n, decay);
    for (int r = 0; r < rows_; ++r) {
      if (decay[r] == 1.f) continue;  // a maximum seldom moves
      for (int64_t d = 0; d < columns_; d += kLanes)
        store(result + r * columns_ + d, load(result + r * columns_ + d) * decay[r]);
    }
    add_values(n, result, ahead);
  }

  void finish() const {
    for (int r = 0; r < rows_; ++r) {
      row_[r].maximum = maximum_[r];
      row_[r].sum = vfloat{};
      row_[r].sum[0] = lanes_ == 8 ? sum_[r] + sum_[r + 8] : sum_[r];
    }
  }

 private:
  // Tiles 0 and 1 hold scores, 2 keys, 3 queries; 4 weights, 5 values, 6 and 7 results.
  void configure() {
    const int kind = -(rows_ + 1);  // not a number of rows of the other configuration
    if (tile_rows == kind) return;
    TileConfig config;
    const auto shape = [&](int tile, int rows, int bytes) {
      config.rows[tile] = (uint8_t)rows;
      config.row_bytes[tile] = (uint16_t)bytes;
    };
    for (int tile : {0, 1, 3}) shape(tile, 16, lanes_ * 4);
    for (int tile : {2, 5}) shape(tile, 16, 64);
    for (int tile : {4, 6, 7}) shape(tile, rows_, 64);
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
    tile_rows = kind;
  }

  struct Lines {
    const char* at;
    int64_t stride;
  };

  // Where 16 keys lie at equal distances: in the cache, or copied to `spare`.
  Lines lined_up(const char* const* keys, int count, char* spare) const {
    bool in_line = count >= 16;
    for (int i = 1; in_line && i < 16; ++i) in_line = keys[i] - keys[i - 1] == row_bytes_;
    if (in_line) return {keys[0], row_bytes_};
    const int64_t bytes = chunks_ * 64;
    for (int i = 0; i < 16; ++i) std::memcpy(spare + i * bytes, keys[lesser(i, count - 1)], bytes);
    return {spare, bytes};
  }

  float* scores_of(int group) const {
    return lanes_ == 8 ? scores_ + group % 2 * 16 * kLanes + group / 2 * 8 : scores_ + group * 16 * kLanes;
  }

  void score(const char* const* keys, int n, Prefetcher& ahead) {
    for (int at = 0; at < n; at += 32) {
      const bool two = at + 16 < n;
      const Lines a = lined_up(keys + at, n - at, straight_);
      const Lines b = two ? lined_up(keys + at + 16, n - at - 16, straight_ + chunks_ * 1024) : a;
      asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < chunks_; ++k) {
        ahead.step();
        _tile_loadd(3, query_ + k * 16 * lanes_, lanes_ * 4);
        _tile_loadd(2, a.at + k * 64, a.stride);
        _tile_dpbf16ps(0, 2, 3);
        if (!two) continue;
        _tile_loadd(2, b.at + k * 64, b.stride);
        _tile_dpbf16ps(1, 2, 3);
      }
      _tile_stored(0, scores_of(at / 16), kLanes * 4);
      if (two) _tile_stored(1, scores_of(at / 16 + 1), kLanes * 4);
      asm volatile("" ::: "memory");
    }
  }

  // Hides what the rows do not see of a block. kHalves: see `scores_of`.
  template <bool kHalves>
  void hide(int64_t first, int n) {
    vint begin, end, key;
    for (int lane = 0; lane < kLanes; ++lane) {
      key[lane] = kHalves && lane >= 8 ? 32 : 0;
      begin[lane] = low_[lane] - (int32_t)first;
      end[lane] = (int32_t)lesser(high_[lane] - first, n);
    }
    for (int v = 0; v < (kHalves ? 32 : 64); ++v, key += 1) {
      const vfloat unseen = splat(-INFINITY);
      const vfloat s = key < begin ? unseen : load(scores_ + v * kLanes);
      store(scores_ + v * kLanes, key < end ? s : unseen);
    }
  }

  template <bool kHalves>
  void weigh(int64_t first, int n, float* decay) {
    constexpr int kVectors = kHalves ? 32 : 64;
    if (first < all_low_ || first + kBlockKeys > all_high_) hide<kHalves>(first, n);
    vfloat top[4];
    for (int v = 0; v < kVectors; ++v)
      top[v % 4] = v < 4 ? load(scores_ + v * kLanes) : larger(top[v % 4], load(scores_ + v * kLanes));
    vfloat best = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    if (kHalves) best = larger(best, (vfloat)_mm512_shuffle_f32x4((__m512)best, (__m512)best, 0x4E));
    const vfloat highest = larger(maximum_, best * scale_);
    const vfloat low = highest == splat(-INFINITY) ? vfloat{} : highest;  // see `finite_maximum`
    const vfloat factor = maximum_ == highest ? splat(1.f) : power_of_two(maximum_ - low);
    store(decay, factor);
    maximum_ = highest;

    alignas(64) static const uint16_t kUpper[32] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                                    17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
    const __m512i upper = _mm512_load_si512(kUpper), ones = _mm512_set1_epi32(0x3F803F80);
    vfloat total[2] = {sum_ * factor, vfloat{}};
    for (int half = 0; half < kVectors; half += 32) {
      __m512i pairs[16];  // of keys, for each lane
#pragma GCC unroll 16
      for (int i = 0; i < 16; i += 2) {
        vfloat x[4];
        for (int v = 0; v < 4; ++v) x[v] = load(scores_ + (half + 2 * i + v) * kLanes) * scale_ - low;
        powers_for_bf16<4>(x);
        for (int j = 0; j < 2; ++j) {
          pairs[i + j] = _mm512_permutex2var_epi16((__m512i)x[2 * j], upper, (__m512i)x[2 * j + 1]);
          total[j] = Bf16::fma(total[j], pairs[i + j], ones);
        }
      }
      transpose16(pairs);
      for (int r = 0; r < rows_; ++r) {
        _mm512_storeu_si512(weights_ + r * 32 + half / 2, pairs[r]);
        if (kHalves) _mm512_storeu_si512(weights_ + r * 32 + 16, pairs[8 + r]);
      }
    }
    sum_ = total[0] + total[1];
  }

  void add_values(int n, float* result, Prefetcher& ahead) const {
    const int64_t stride = columns_ * 4;
    for (int64_t d = 0; d < columns_; d += 32) {
      const bool two = d + 16 < columns_;
      asm volatile("" ::: "memory");
      _tile_loadd(6, result + d, stride);
      if (two) _tile_loadd(7, result + d + 16, stride);
      for (int at = 0; at < n; at += 32) {
        ahead.step();
        const uint32_t* from = values_ + at / 2 * columns_ + d;
        _tile_loadd(4, weights_ + at / 2, 128);
        _tile_loadd(5, from, stride);
        _tile_dpbf16ps(6, 4, 5);
        if (!two) continue;
        _tile_loadd(5, from + 16, stride);
        _tile_dpbf16ps(7, 4, 5);
      }
      _tile_stored(6, result + d, stride);
      if (two) _tile_stored(7, result + d + 16, stride);
      asm volatile("" ::: "memory");
    }
  }

  const float scale_;
  const int rows_, lanes_;
  const int64_t chunks_, columns_, value_dim_, row_bytes_;
  Row* row_;
  uint32_t *query_, *weights_;  // [dim / 2][lane] and [row][32] pairs
  uint32_t* values_;            // [key / 2][columns] pairs
  float* scores_;
  char* straight_;
  int32_t low_[kLanes], high_[kLanes];
  int64_t all_low_, all_high_;
  vfloat maximum_, sum_;  // of each lane's row, as in `Row`
};
#endif
