// Products of rows of floats with panels of weights in fp8, e4m3 (OCP FP8: a sign, 4 bits of exponent around 7, 3 of
// mantissa) whose steps are [32 (input / 2)][64 (output)][2 (input % 2)]. Each is a number of bf16, too.
//
// Rows of bf16 are multiplied as bf16 where the processor does that and has tables of 128 bytes, else all as floats.
// A few rows read weights as they are stored; for more those of a step or two are widened once. Sums of what shares a
// scale, or of 128 inputs of it, are taken in float, in the same order for any number of rows, and added up times the
// scale.
// NaN (0x7F, 0xFF) is not told from 480: groups that hold one have NaN for a scale.
#pragma once

#include "fetch.h"
#include "multiply.h"
#include "panels.h"
#include "rows.h"

#if defined(PAGODA_BF16) && defined(__AVX512VBMI__)
#define PAGODA_FLOAT8_PAIRS 1
#endif

// Rows whose sums stay in the first cache.
constexpr int64_t kFloat8Rows = 48;

// totals[r][n] += sums[r][n] * scales[n], in place of that where there is nothing `more`.
static inline void add_scaled(float* totals, const float* sums, const float* scales, int64_t rows, bool more) {
  for (int64_t i = 0; i < rows * kPanel; i += kPanel)
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const vfloat sum = load(sums + i + n), scale = load(scales + n);
      store(totals + i + n, more ? multiply_add(load(totals + i + n), sum, scale) : sum * scale);
    }
}

#if defined(PAGODA_FLOAT8_PAIRS)
struct Float8Table {
  alignas(64) uint8_t low[128], high[128];  // halves of a bf16, of codes without their sign

  constexpr Float8Table() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (!exponent && mantissa) {  // normal in bf16
        for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
        mantissa -= 8;
      }
      const int bits = code ? (exponent + 120) << 7 | mantissa << 4 : 0;
      low[code] = (uint8_t)bits;
      high[code] = (uint8_t)(bits >> 8);
    }
  }
};
static constexpr Float8Table kFloat8Table;

struct Float8Tables {
  __m512i low[2], high[2], order, sign;

  Float8Tables() {
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(kFloat8Table.low + 64 * half);
      high[half] = _mm512_load_si512(kFloat8Table.high + 64 * half);
    }
    // Bytes are interleaved within lanes of 16: outputs 0 to 3 and 16 to 19 come into the first, and so on.
    order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    sign = _mm512_set1_epi8((char)128);
  }
  // The pairs of 32 outputs.
  inline void widen(__m512i* pairs, const uint8_t* from) const {
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    upper = _mm512_ternarylogic_epi32(upper, codes, sign, 0xF8);  // upper | codes & sign
    pairs[0] = _mm512_unpacklo_epi8(lower, upper);
    pairs[1] = _mm512_unpackhi_epi8(lower, upper);
  }
};

// totals[r][n] += scales[n] * sum_k x[r][k] w[k][n] for R rows and so many pairs of inputs of a panel, in place of that
// where there is nothing `more`. kDirect: w is read as it is stored, from memory.
template <int R, bool kDirect>
static void float8_rows(const uint32_t* x, int64_t x_stride, const void* w, int64_t pairs, const float* scales,
                        float* totals, bool more) {
  __m512 sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
  const Float8Tables tables;
  const uint32_t* wide = (const uint32_t*)w;
  const uint8_t* codes = (const uint8_t*)w;
  for (int64_t k = 0; k < pairs; ++k, wide += kPanel, codes += 2 * kPanel) {
    __m512i weights[4];
    if constexpr (kDirect) {
      __builtin_prefetch(codes + kAheadInOrder, 0, 2);
      __builtin_prefetch(codes + kAheadInOrder + kLine, 0, 2);
      tables.widen(weights, codes);
      tables.widen(weights + 2, codes + 64);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) weights[v] = _mm512_load_si512(wide + 16 * v);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[r * x_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], pair, (__m512bh)weights[v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      float* to = totals + r * kPanel + 16 * v;
      const __m512 scale = _mm512_loadu_ps(scales + 16 * v);
      const __m512 sum = sums[r][v];
      _mm512_storeu_ps(to, more ? _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(to)) : _mm512_mul_ps(sum, scale));
    }
}

// Pairs of bf16 as `Bf16` of multiply.h reads them.
struct Float8Pairs : Bf16 {
  static constexpr int64_t kSteps = 2;  // widened at once

  // Whether so many rows are multiplied with weights as they are stored: converting them again for each row takes less
  // time than memory does.
  static bool direct(int64_t rows) {
#if defined(PAGODA_TILES)
    if (tiles_allowed()) return false;
#endif
    return rows <= kDirectRows;
  }

  static void widen(uint32_t* to, const uint8_t* from, int64_t steps) {
    const Float8Tables tables;
    for (int64_t i = 0; i < steps * kStepBytes; i += 64, to += 32) {
      __builtin_prefetch(from + i + kAhead, 0, 2);
      __m512i pairs[2];
      tables.widen(pairs, from + i);
      _mm512_store_si512(to, pairs[0]);
      _mm512_store_si512(to + 16, pairs[1]);
    }
  }

  static void products(const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t pairs, int64_t rows,
                       const float* scales, float* sums, float* totals, bool more) {
#if defined(PAGODA_TILES)
    if (tiles_allowed()) {
      Prefetcher none;
      none.clear();
      for (int64_t r = 0, piece; r < rows; r += piece) {
        piece = std::min(kFloat8Rows, rows - r);
        multiply_on_tiles(x + r * x_stride, x_stride, w, kPanel, sums, kPanel, pairs, nullptr, (int)piece, kPanel,
                          none);
        add_scaled(totals + r * kPanel, sums, scales, piece, more);
      }
      return;
    }
#endif
    (void)sums;
    static constexpr decltype(&float8_rows<1, false>) by_rows[kMaxRows] = {
        float8_rows<1, false>, float8_rows<2, false>, float8_rows<3, false>,
        float8_rows<4, false>, float8_rows<5, false>, float8_rows<6, false>};
    for (int64_t r = 0, piece; r < rows; r += piece) {
      piece = equal_piece(rows - r, kMaxRows);
      by_rows[piece - 1](x + r * x_stride, x_stride, w, pairs, scales, totals + r * kPanel, more);
    }
  }

  static void direct_products(const uint32_t* x, int64_t x_stride, const uint8_t* w, int64_t pairs, int64_t rows,
                              const float* scales, float* totals, bool more) {
    static constexpr decltype(&float8_rows<1, true>) by_rows[kDirectRows] = {
        float8_rows<1, true>, float8_rows<2, true>, float8_rows<3, true>, float8_rows<4, true>};
    by_rows[rows - 1](x, x_stride, w, pairs, scales, totals, more);
  }

 private:
  static constexpr int64_t kDirectRows = 4;
};
#endif

struct Float8Floats : Float {
  static constexpr int64_t kSteps = 1;

  static void widen(float* to, const uint8_t* from, int64_t steps) {
    for (int64_t i = 0; i < steps * kStep / 2; ++i, from += 2 * kPanel, to += 2 * kPanel) {
      __builtin_prefetch(from + kAhead, 0, 2);
      __builtin_prefetch(from + kAhead + kLine, 0, 2);
      for (int64_t n = 0; n < kPanel; n += kLanes) {
        vshort pairs;
        std::memcpy(&pairs, from + 2 * n, sizeof pairs);
        // As numbers of f16, whose exponent is around 15, and which are widened exactly, denormals too.
        const vshort first = (pairs & 0x7F) << 7 | (pairs & 0x80) << 8;
        const vshort second = (pairs >> 1 & 0x3F80) | (pairs & 0x8000);
        store(to + n, Half::widened(first) * 256.f);
        store(to + kPanel + n, Half::widened(second) * 256.f);
      }
    }
  }

  static void products(const float* x, int64_t x_stride, const float* w, int64_t inputs, int64_t rows,
                       const float* scales, float* sums, float* totals, bool more) {
    Prefetcher none;
    none.clear();
    for (int64_t r = 0, piece; r < rows; r += piece) {
      piece = std::min(kFloat8Rows, rows - r);
      multiply_on_vectors<Float>(x + r * x_stride, x_stride, w, kPanel, sums, kPanel, inputs, nullptr, (int)piece,
                                 kPanel, none);
      add_scaled(totals + r * kPanel, sums, scales, piece, more);
    }
  }
  static bool direct(int64_t) { return false; }
  static void direct_products(const float*, int64_t, const uint8_t*, int64_t, int64_t, const float*, float*, bool) {}
};

// The rows of an input: [columns / chunk][rows][chunk], so that those of a chunk of inputs lie together.
template <class Kind>
struct Float8Inputs {
  typedef typename Kind::element Element;
  Element* memory;
  int64_t rows, chunk;  // inputs

  Float8Inputs(const Layout& layout, int64_t rows) : memory(nullptr), rows(rows) {
    const bool whole = layout.heads == 1 && (layout.groups == 1 || layout.group_steps % Kind::kSteps == 0);
    chunk = whole ? Kind::kSteps * kStep : kStep;
  }
  int64_t stride() const { return chunk / Kind::kPerElement; }
  int64_t elements(const Layout& layout) const {
    return round_up(layout.steps * kStep, chunk) / Kind::kPerElement * rows;
  }
  // From an input on.
  Element* at(int64_t row, int64_t input) const {
    return memory + (input / chunk * rows + row) * stride() + input % chunk / Kind::kPerElement;
  }
};

// Elements of memory for a chunk of weights, and floats for sums of a few rows.
template <class Kind>
constexpr int64_t kFloat8Widened = Kind::kSteps * kStep / Kind::kPerElement * kPanel;
constexpr int64_t kFloat8Sums = kFloat8Rows * kPanel;

// totals[r][n] = sum_k x[first + r][k] w[k][n] for `rows` rows and a panel.
template <class Kind>
static void float8_panel(const Float8Inputs<Kind>& x, int64_t first, int64_t rows, const char* panel,
                         const Layout& layout, typename Kind::element* widened, float* sums, float* totals) {
  const bool direct = Kind::direct(rows);
  for (int64_t g = 0; g < layout.groups; ++g) {
    const char* heads = panel + layout.offset_of(g);
    const auto* weights = (const uint8_t*)heads + layout.heads * layout.head_bytes;
    const int64_t begin = g * layout.group_steps, all = layout.steps_of(g);
    for (int64_t s = 0, steps; s < all; s += steps) {
      steps = std::min(x.chunk / kStep, all - s);
      if (!direct) Kind::widen(widened, weights + s * kStepBytes, steps);
      const int64_t inputs = steps * kStep / layout.heads, width = inputs / Kind::kPerElement;
      for (int64_t h = 0; h < layout.heads; ++h) {
        const auto* scales = (const float*)(heads + h * layout.head_bytes);
        const auto* from = x.at(first, (begin + s) * kStep + h * inputs);
        const bool more = begin + s + h > 0;
        if (direct) {
          const uint8_t* w = weights + s * kStepBytes + h * inputs * kPanel;
          Kind::direct_products(from, x.stride(), w, width, rows, scales, totals, more);
        } else {
          Kind::products(from, x.stride(), widened + h * width * kPanel, width, rows, scales, sums, totals, more);
        }
      }
    }
  }
}
