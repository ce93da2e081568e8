// Register-blocked products of a few query rows with a packed block of keys or values, accumulated in fp32.
//
// Two kinds of arithmetic share one shape. Float: A is [rows][K] floats, B is [K][N] floats. Bf16: A is
// [rows][K/2] pairs and B is [K/2][N] pairs of bf16 that lie in one 32-bit lane, as vdpbf16ps wants them.
#pragma once

#include "tiles.h"
#include "vector.h"

struct Float {
  typedef float element;  // what one step of the inner dimension reads
  static constexpr int kPerElement = 1;
  typedef vfloat vector;
  static inline vector read(const element* p) { return load(p); }
  static inline vector spread(const element* p) { return splat(*p); }
  static inline vfloat fma(vfloat sum, vector a, vector b) { return multiply_add(sum, a, b); }
};

#if defined(PAGODA_BF16)
struct Bf16 {
  typedef uint32_t element;
  static constexpr int kPerElement = 2;
  typedef __m512i vector;
  static inline vector read(const element* p) { return _mm512_loadu_si512(p); }
  static inline vector spread(const element* p) { return _mm512_set1_epi32((int)*p); }
  static inline vfloat fma(vfloat sum, vector a, vector b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

constexpr int kMaxRows = 6;                          // rows x vectors of accumulators fill the register file
constexpr int kMaxVectors = kRegisters == 32 ? 4 : 2;

template <class Kind, int R, int V>
static void multiply_block(const typename Kind::element* a, int64_t a_stride, const typename Kind::element* b,
                           int64_t b_stride, float* c, int64_t c_stride, int64_t steps, const float* decay,
                           Prefetcher& ahead) {
  vfloat sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = vfloat{};
  // Copies, because the compiler would write the members back at every step.
  Prefetcher::Run lines = ahead.current;
  const int lines_per_step = ahead.lines_per_step;
  for (int64_t k = 0; k < steps; ++k) {
    if (lines.at != lines.end) {
      for (int i = 0; i < lines_per_step; ++i) __builtin_prefetch(lines.at + i * 64, 0, 2);
      lines.at += lines_per_step * 64;
      if (lines.at >= lines.end) lines = ahead.next();
    }
    typename Kind::vector row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = Kind::read(b + k * b_stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename Kind::vector x = Kind::spread(a + r * a_stride + k);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = Kind::fma(sum[r][v], x, row[v]);
    }
  }
  ahead.current = lines;
  // What was there is added last: a long chain of additions would gather rounding errors.
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = c + r * c_stride + v * kLanes;
      store(to, decay ? multiply_add(sum[r][v], load(to), splat(decay[r])) : sum[r][v]);
    }
}

template <class Kind, int R>
static void multiply_rows(const typename Kind::element* a, int64_t a_stride, const typename Kind::element* b,
                          int64_t b_stride, float* c, int64_t c_stride, int64_t steps, const float* decay,
                          int vectors, Prefetcher& ahead) {
  switch (vectors) {
    case 1: return multiply_block<Kind, R, 1>(a, a_stride, b, b_stride, c, c_stride, steps, decay, ahead);
    case 2: return multiply_block<Kind, R, 2>(a, a_stride, b, b_stride, c, c_stride, steps, decay, ahead);
#if defined(PAGODA_AVX512) || defined(__aarch64__)
    case 3: return multiply_block<Kind, R, 3>(a, a_stride, b, b_stride, c, c_stride, steps, decay, ahead);
    case 4: return multiply_block<Kind, R, 4>(a, a_stride, b, b_stride, c, c_stride, steps, decay, ahead);
#endif
  }
}

static inline int64_t pieces_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

// How many of `left` rows to take at once, at most `most`. Pieces are equal: 8 rows as 4 + 4, not 6 + 2, which would
// leave the multipliers waiting for each other.
static inline int64_t equal_piece(int64_t left, int64_t most) { return pieces_of(left, pieces_of(left, most)); }

// Whether a product goes to the tiles. One or two rows leave them idle.
template <class Kind>
static inline bool on_tiles(int rows, int64_t steps) {
#if defined(PAGODA_TILES)
  return Kind::kPerElement == 2 && rows >= 4 && steps >= kTilePairs && tiles_allowed();
#else
  return false;
#endif
}

// Steps of the inner loops that `multiply` takes.
template <class Kind>
static inline int64_t multiply_steps(int rows, int64_t columns, int64_t steps) {
  const int64_t vector_steps = pieces_of(rows, kMaxRows) * ((columns + kMaxVectors * kLanes - 1) / (kMaxVectors * kLanes));
#if defined(PAGODA_TILES)
  if (on_tiles<Kind>(rows, steps)) {
    const int64_t blocks = (int64_t)((rows + kTileRows - 1) / kTileRows) * ((columns + 63) / 64);
    return blocks * (steps / kTilePairs) + vector_steps * (steps % kTilePairs);
  }
#endif
  return vector_steps * steps;
}

// c[r][n] = (decay ? decay[r] * c[r][n] : 0) + sum_k a[r][k] b[k][n] for n < columns, a multiple of 16.
template <class Kind>
static void multiply_on_vectors(const typename Kind::element* a, int64_t a_stride, const typename Kind::element* b,
                     int64_t b_stride, float* c, int64_t c_stride, int64_t steps, const float* decay,
                     int rows, int columns, Prefetcher& ahead) {
  static constexpr decltype(&multiply_rows<Kind, 1>) by_rows[kMaxRows] = {
      multiply_rows<Kind, 1>, multiply_rows<Kind, 2>, multiply_rows<Kind, 3>,
      multiply_rows<Kind, 4>, multiply_rows<Kind, 5>, multiply_rows<Kind, 6>};
  for (int n = 0; n < columns; n += kMaxVectors * kLanes) {
    const int left = (columns - n) / kLanes;
    const int vectors = left < kMaxVectors ? left : kMaxVectors;
    for (int r = 0, count; r < rows; r += count) {
      count = (int)equal_piece(rows - r, kMaxRows);
      const auto* a_r = a + r * a_stride;
      const auto* b_n = b + n;
      float* c_r = c + r * c_stride + n;
      const float* decay_r = decay ? decay + r : nullptr;
      by_rows[count - 1](a_r, a_stride, b_n, b_stride, c_r, c_stride, steps, decay_r, vectors, ahead);
    }
  }
}

#if defined(PAGODA_TILES)
// The same; the pairs beyond a multiple of 16 go to the vectors.
static void multiply_on_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                              int64_t c_stride, int64_t steps, const float* decay, int rows, int columns,
                              Prefetcher& ahead) {
  static constexpr decltype(&multiply_tiles<1, false>) by_vectors[2][4] = {
      {multiply_tiles<1, false>, multiply_tiles<2, false>, multiply_tiles<3, false>, multiply_tiles<4, false>},
      {multiply_tiles<1, true>, multiply_tiles<2, true>, multiply_tiles<3, true>, multiply_tiles<4, true>}};
  static constexpr float kKept[kTileRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const int64_t chunks = steps / kTilePairs, done = chunks * kTilePairs;
  for (int r = 0; r < rows; r += kTileRows) {
    const int count = rows - r < kTileRows ? rows - r : kTileRows;
    configure_tiles(count);
    for (int i = r; decay && i < r + count; ++i) {  // few rows: a maximum seldom moves
      if (decay[i] == 1.f) continue;
      for (int n = 0; n < columns; n += kLanes) store(c + i * c_stride + n, load(c + i * c_stride + n) * decay[i]);
    }
    for (int n = 0; n < columns; n += 64) {
      const int vectors = columns - n < 64 ? (columns - n) / kLanes : 4;
      by_vectors[decay != nullptr][vectors - 1](a + r * a_stride, a_stride, b + n, b_stride, c + r * c_stride + n,
                                                c_stride, chunks, ahead);
    }
    if (done == steps) continue;
    multiply_on_vectors<Bf16>(a + r * a_stride + done, a_stride, b + done * b_stride, b_stride, c + r * c_stride,
                              c_stride, steps - done, kKept, count, columns, ahead);
  }
}
#endif

// `invariant`: by the same instructions for any number of rows.
template <class Kind>
static void multiply(const typename Kind::element* a, int64_t a_stride, const typename Kind::element* b,
                     int64_t b_stride, float* c, int64_t c_stride, int64_t steps, const float* decay,
                     int rows, int columns, bool invariant, Prefetcher& ahead) {
#if defined(PAGODA_TILES)
  if constexpr (Kind::kPerElement == 2)
    if (!invariant && on_tiles<Kind>(rows, steps)) {
      multiply_on_tiles(a, a_stride, b, b_stride, c, c_stride, steps, decay, rows, columns, ahead);
      return;
    }
#else
  (void)invariant;
#endif
  multiply_on_vectors<Kind>(a, a_stride, b, b_stride, c, c_stride, steps, decay, rows, columns, ahead);
}
