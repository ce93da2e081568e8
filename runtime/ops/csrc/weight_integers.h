// Exact products of rows of int8 with the int8 weights of a panel; int4 weights are widened to a byte each for them.
#pragma once

#include "fetch.h"
#include "multiply.h"
#include "panels.h"

#if defined(PAGODA_TILES) && defined(__AMX_INT8__)
#define PAGODA_INT8_TILES 1
#endif

constexpr int kMaxIntegerRows = 6;   // rows x 4 vectors of sums fill the register file
constexpr int kRowsInOrder = 4;      // of more the arithmetic takes longer than memory
constexpr int kTiledRows = 32;

static inline bool integers_on_tiles(int64_t rows) {
#if defined(PAGODA_INT8_TILES)
  return rows > kMaxIntegerRows && tiles_allowed();
#else
  return false;
#endif
}

#if defined(PAGODA_AVX512) && defined(__AVX512VNNI__)

template <int R>
static inline void dot(__m512i (*sums)[4], const __m512i* weights, const int8_t* x, int64_t x_stride) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    int32_t four;
    std::memcpy(&four, x + r * x_stride, 4);
    const __m512i spread = _mm512_set1_epi32(four);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], weights[t], spread);
  }
}

// sums += rows of x times a step of a panel, whose four tiles share each broadcast of the input: the fewest
// instructions.
template <int R, int kBits>
static inline void add_step(__m512i (*sums)[4], const int8_t* x, int64_t x_stride, const uint8_t* w, Fetch& fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t i = 0; i < kTile; i += 64) {
    __m512i weights[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      weights[t] = _mm512_loadu_si512(w + t * kTile + i);
      if constexpr (kBits == 4) weights[t] = _mm512_and_si512(weights[t], low);
    }
    fetch.round();
    dot<R>(sums, weights, x + i / 16, x_stride);
    if constexpr (kBits == 4) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)  // read once more: registers are full of sums
        weights[t] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + t * kTile + i), 4), low);
      dot<R>(sums, weights, x + i / 16 + 32, x_stride);
    }
  }
}

// The same reading weights in the order in which they lie: the fastest while they come from memory. Zen 4 fetches ahead
// of a load instruction that walks through memory; unrolled, each copy of it would leap.
template <int R, int kBits>
static inline void add_step_in_order(__m512i (*sums)[4], const int8_t* x, int64_t x_stride, const uint8_t* w) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  const __m512i low = _mm512_set1_epi8(15);
  const auto add = [&](int t, __m512i weights, const int8_t* at) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, at + r * x_stride, 4);
      sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], weights, _mm512_set1_epi32(four));
    }
  };
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t)
#pragma GCC unroll 1
    for (int64_t i = 0; i < kTile; i += 64, w += 64) {
      const __m512i weights = _mm512_loadu_si512(w);
      __builtin_prefetch(w + kAheadInOrder, 0, 2);
      if constexpr (kBits == 4) {
        add(t, _mm512_and_si512(weights, low), x + i / 16);
        add(t, _mm512_and_si512(_mm512_srli_epi16(weights, 4), low), x + i / 16 + 32);
      } else {
        add(t, weights, x + i / 16);
      }
    }
}

// sums[r][n] = sum_k x[r][k] w[k][n] for R rows and `steps` steps of a panel. kInOrder: the weights come from memory.
template <int R, int kBits, bool kInOrder>
static void integer_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                         Fetch fetch) {
  __m512i sums[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) sums[r][t] = _mm512_setzero_si512();
  for (int64_t s = 0; s < steps; ++s, x += kStep, w += kStepBytes * kBits / 8) {
    if constexpr (kInOrder) add_step_in_order<R, kBits>(sums, x, x_stride, w);
    else add_step<R, kBits>(sums, x, x_stride, w, fetch);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) _mm512_storeu_si512(to + r * kPanel + t * 16, sums[r][t]);
}
#elif defined(PAGODA_ARM_DOT)
#include "weight_integers_arm.h"
#elif defined(__AVXVNNI__)

// sums[r] += rows of x times kRun bytes of a tile.
template <int R, int kBits, int64_t kRun>
static inline void add_tile_run(__m256i (*sums)[2], const int8_t* x, int64_t x_stride, const uint8_t* w) {
  const __m256i low = _mm256_set1_epi8(15);
  const auto add = [&](const __m256i* weights, const int8_t* at) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, at + r * x_stride, 4);
      const __m256i spread = _mm256_set1_epi32(four);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sums[r][v] = _mm256_dpbusd_avx_epi32(sums[r][v], weights[v], spread);
    }
  };
#pragma GCC unroll 1
  for (int64_t i = 0; i < kRun; i += 64, x += 4) {
    __m256i weights[2], upper[2];
    __builtin_prefetch(w + i + kAhead, 0, 2);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      weights[v] = _mm256_loadu_si256((const __m256i*)(w + i + v * 32));
      if constexpr (kBits == 4) {
        upper[v] = _mm256_and_si256(_mm256_srli_epi16(weights[v], 4), low);
        weights[v] = _mm256_and_si256(weights[v], low);
      }
    }
    add(weights, x);
    if constexpr (kBits == 4) add(upper, x + 32);
  }
}

template <int R>
static inline void store_sums(int32_t* to, __m256i (*sums)[2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) _mm256_storeu_si256((__m256i*)(to + r * kPanel + v * 8), sums[r][v]);
}

template <int R, int kBits, bool>
static void integer_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to, Fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  if constexpr (R == 1) {  // reads weights in the order in which they lie: the fastest while they come from memory
    __m256i sums[4][1][2] = {};
    for (int64_t s = 0; s < steps; ++s)
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t, w += kTile) add_tile_run<R, kBits, kTile>(sums[t], x + s * kStep, x_stride, w);
    for (int t = 0; t < 4; ++t) store_sums<R>(to + t * 16, sums[t]);
    return;
  }
  for (int t = 0; t < 4; ++t) {
    __m256i sums[R][2] = {};
    for (int64_t s = 0; s < steps; ++s)
      add_tile_run<R, kBits, kTile>(sums, x + s * kStep, x_stride, w + (s * 4 + t) * kTile);
    store_sums<R>(to + t * 16, sums);
  }
}
#else
template <int R, int kBits, bool>
static void integer_rows(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to, Fetch) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  std::memset(to, 0, R * kPanel * sizeof *to);
  for (int64_t s = 0; s < steps; ++s, x += kStep, w += 4 * kTile)
    for (int t = 0; t < 4; ++t)
      for (int64_t row = 0; row < 16; ++row) {
        const uint8_t* stored = w + t * kTile + row % (kTile / 64) * 64;
        const int shift = kBits == 4 && row >= 8 ? 4 : 0, mask = kBits == 4 ? 15 : 255;
        for (int r = 0; r < R; ++r) {
          const int8_t* four = x + r * x_stride + 4 * row;
          int32_t* sums = to + r * kPanel + t * 16;
          for (int n = 0; n < 16; ++n) {
            int32_t sum = 0;
            for (int k = 0; k < 4; ++k) sum += (int32_t)((stored[4 * n + k] >> shift) & mask) * four[k];
            sums[n] += sum;
          }
        }
      }
}
#endif

#if defined(PAGODA_INT8_TILES)
// The same for 16 or 32 rows, of int8 weights.
static void integer_tiles(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* to,
                          bool two) {
  constexpr int64_t kTile = kStepBytes / 4;
  configure_tiles(16);
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  for (int half = 0; half < 2; ++half, w += 2 * kTile, to += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s) {
      _tile_loadd(4, x + s * kStep, x_stride);
      _tile_loadd(6, w + s * kStepBytes, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, w + s * kStepBytes + kTile, 64);
      _tile_dpbsud(1, 4, 7);
      if (two) {
        _tile_loadd(5, x + 16 * x_stride + s * kStep, x_stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, to, kPanel * 4);
    _tile_stored(1, to + 16, kPanel * 4);
    if (two) {
      _tile_stored(2, to + 16 * kPanel, kPanel * 4);
      _tile_stored(3, to + 16 * kPanel + 16, kPanel * 4);
    }
  }
  asm volatile("" ::: "memory");
}
#endif

// Of `left` rows of the input, `parts` rows of int8 each: how many `integer_products` takes at once.
static inline int64_t integer_piece(int64_t left, int64_t parts, bool tiles) {
  return tiles ? std::min(left, kTiledRows / parts) : equal_piece(left, kMaxIntegerRows / parts);
}

// sums[r][n] = sum_k x[r][k] w[k][n] of at most `integer_piece` rows. On tiles, whose weights are int8, rows
// of x up to a multiple of 16 are read and as many of `sums` are written. once: nobody reads these weights again.
template <int kBits>
static void integer_products(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, int32_t* sums,
                             int64_t rows, bool tiles, bool once, Fetch fetch) {
#if defined(PAGODA_INT8_TILES)
  if (kBits == 8 && tiles) return integer_tiles(x, x_stride, w, steps, sums, rows > 16);
#endif
  using Rows = decltype(&integer_rows<1, kBits, true>);
  static constexpr Rows in_order[kRowsInOrder] = {integer_rows<1, kBits, true>, integer_rows<2, kBits, true>,
                                                  integer_rows<3, kBits, true>, integer_rows<4, kBits, true>};
  static constexpr Rows by_rows[kMaxIntegerRows] = {integer_rows<1, kBits, false>, integer_rows<2, kBits, false>,
                                                    integer_rows<3, kBits, false>, integer_rows<4, kBits, false>,
                                                    integer_rows<5, kBits, false>, integer_rows<6, kBits, false>};
  (once && rows <= kRowsInOrder ? in_order : by_rows)[rows - 1](x, x_stride, w, steps, sums, fetch);
}

// 64 int4 numbers, a byte each, become what a table says of them.
static inline void look_up(uint8_t* numbers, const uint8_t* table) {
#if defined(PAGODA_AVX512)
  const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  _mm512_storeu_si512(numbers, _mm512_shuffle_epi8(values, _mm512_loadu_si512(numbers)));
#elif defined(__AVX2__)
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  for (int i = 0; i < 64; i += 32) {
    const __m256i found = _mm256_shuffle_epi8(values, _mm256_loadu_si256((const __m256i*)(numbers + i)));
    _mm256_storeu_si256((__m256i*)(numbers + i), found);
  }
#elif defined(__aarch64__)
  for (int i = 0; i < 64; i += 16) vst1q_u8(numbers + i, vqtbl1q_u8(vld1q_u8(table), vld1q_u8(numbers + i)));
#else
  for (int i = 0; i < 64; ++i) numbers[i] = table[numbers[i]];
#endif
}

// int4 weights, a byte each, for the products of int8; with a table (fp4), what it says of them.
static void widen_steps(uint8_t* to, const uint8_t* from, int64_t steps, const uint8_t* table = nullptr) {
  for (int64_t i = 0; i < steps * kStepBytes / 1024; ++i, to += 1024)
    for (int j = 0; j < 512; j += 64, from += 64) {
      __builtin_prefetch(from + kAhead, 0, 2);
      uint8_t low[64], high[64];
      for (int n = 0; n < 64; ++n) {
        low[n] = from[n] & 15;
        high[n] = from[n] >> 4;
      }
      if (table) {
        look_up(low, table);
        look_up(high, table);
      }
      for (int n = 0; n < 64; ++n) {
        to[j + n] = low[n] ^ kFlip;
        to[j + n + 512] = high[n] ^ kFlip;
      }
    }
}
