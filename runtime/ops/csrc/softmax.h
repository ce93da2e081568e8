// From scores to softmax weights: which keys a position sees, what its scores get added, the running maximum.
#pragma once

#include <cmath>

#include "multiply.h"

constexpr int kBlockKeys = 64;  // keys per block
constexpr int64_t kSplitKeys = 1024;  // of one piece of an invariant call

// What holds for the whole call. Strides are in elements.
struct Problem {
  const char* query;
  int64_t query_dtype, query_batch, query_head, query_token, query_dim;
  char* out;
  int64_t out_batch;  // one token of the result is heads * value_dim contiguous elements
  const char* key;
  const char* value;
  int64_t key_dtype, key_block, key_row, key_head, key_dim;
  int64_t value_block, value_row, value_head, value_dim_stride;
  const float* key_scales;  // of int8 keys and values, one per row; else null
  const float* value_scales;
  int64_t key_scale_block, key_scale_row, key_scale_head;
  int64_t value_scale_block, value_scale_row, value_scale_head;
  int64_t block_size;
  int64_t heads, kv_heads, group, dim, value_dim, columns;
  const char* mask;
  int64_t mask_dtype, mask_batch, mask_head, mask_query, mask_key;
  const char* relative;  // a bias by distance, or null; not together with a mask
  int64_t relative_dtype, relative_head, relative_token, relative_distance, relative_extent;
  const char* sinks;
  int64_t sinks_dtype, sinks_stride;
  const char* slopes;
  int64_t slopes_dtype, slopes_stride;
  float scale, softcap;
  int64_t is_causal, window, chunk;
  // A row's result depends neither on the other rows of the call nor on the threads: blocks of keys begin at multiples
  // of kBlockKeys, keys are split at multiples of kSplitKeys, and all rows go the same way.
  int64_t invariant;
};

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys that a position sees are one interval, whatever the combination of causal, window and chunk.
static inline void seen_keys(const Problem& p, int64_t position, int64_t keys, int64_t* low, int64_t* high) {
  *low = p.window > 0 ? greater(0, position - p.window + 1) : 0;
  *high = p.is_causal ? lesser(keys, position + 1) : keys;
  if (p.chunk > 0) {
    const int64_t start = position / p.chunk * p.chunk;
    *low = greater(*low, start);
    *high = lesser(*high, start + p.chunk);
  }
}

// What the mask adds to n scores, -inf where it hides the key; true if it hides all.
static bool load_mask(const Problem& p, const char* row, int64_t first, int n, float* to) {
  const int64_t size = bytes_of(p.mask_dtype), stride = p.mask_key;
  const char* from = row + first * stride * size;
  bool hidden = true;
  if (p.mask_dtype == kBool) {
    for (int i = 0; i < n; ++i) {
      const bool seen = from[i * stride] != 0;
      to[i] = seen ? 0.f : -INFINITY;
      hidden &= !seen;
    }
    return hidden;
  }
  // The lowest finite value of the mask's type means "hidden", as in transformers.
  const float lowest = p.mask_dtype == kFloat32 ? -3.4028234663852886e38f
                       : p.mask_dtype == kBFloat16 ? bf16_to_float(0xFF7F) : -65504.f;
  load_floats(to, from, p.mask_dtype, n, stride);
  for (int i = 0; i < n; ++i) {
    const bool unseen = to[i] <= lowest;
    to[i] = unseen ? -INFINITY : to[i];
    hidden &= unseen;
  }
  return hidden;
}

// Turns 2^(score - maximum) of up to 64 keys into what `multiply` reads.
static inline void store_weights(Float, float* to, const vfloat* weights, int vectors) {
  for (int v = 0; v < vectors; ++v) store(to + v * kLanes, weights[v]);
}
#if defined(PAGODA_BF16)
static inline void store_weights(Bf16, uint32_t* to, const vfloat* weights, int vectors) {
  for (int v = 0; v < vectors; v += 2) {
    const __m512 high = v + 1 < vectors ? (__m512)weights[v + 1] : _mm512_setzero_ps();
    _mm512_storeu_si512(to + v * 8, (__m512i)_mm512_cvtne2ps_pbh(high, (__m512)weights[v]));
  }
}
#endif

#if defined(PAGODA_BF16)
// Powers of two of N vectors, x <= 0 or hardly above, as floats whose upper halves are the bf16 to use. The polynomial
// is 7.5e-5 of 2^x off, 1/26 of what rounding to bf16 may change, so that three terms do. It counts half a unit of bf16
// too much, so that dropping the lower half rounds. NaN stays NaN, -inf gives 0.
template <int N>
static inline void powers_for_bf16(vfloat* x) {
  constexpr float kTerms[] = {7.8024521470069885e-2f, 2.2606715559959412e-1f, 6.958335638046265e-1f,
                              0.99992519617080688f + 1.f / 256};
  vfloat r[N], p[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    r[i] = (vfloat)_mm512_reduce_ps((__m512)x[i], 9);  // x - floor(x)
    p[i] = splat(kTerms[0]);
  }
#pragma GCC unroll 8
  for (int k = 1; k < 4; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + kTerms[k];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = (vfloat)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);  // times 2^floor(x)
}

// What `store_weights` stores of the powers of two of 64 keys, which `total` gets added.
static inline vfloat store_powers(uint32_t* to, vfloat* x, vfloat total) {
  alignas(64) static const uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(kUpper), ones = _mm512_set1_epi32(0x3F803F80);
  powers_for_bf16<kBlockKeys / kLanes>(x);
#pragma GCC unroll 8
  for (int v = 0; v < kBlockKeys / kLanes; v += 2) {
    const __m512i pairs = _mm512_permutex2var_epi16((__m512i)x[v], upper, (__m512i)x[v + 1]);
    _mm512_storeu_si512(to + v * 8, pairs);
    total = Bf16::fma(total, pairs, ones);
  }
  return total;
}
#endif

// What the numbers of a block of int8 keys and values count in; 0 behind the last key. The products are taken of
// the stored integers, which bf16 holds exactly: a key's scale is applied to its scores, a value's to its weights.
struct alignas(64) BlockScales {
  float keys[kBlockKeys];
  float values[kBlockKeys];
};

// Everything that the softmax knows about one row of the tile. Scores are held as multiples of ln 2, so that
// weights are powers of two: `maximum` is log2 of e^(highest score).
struct Row {
  int64_t token, head, position, low, high;
  float maximum, slope;
  const float* mask;
  vfloat sum;  // of the weights, not yet added up over the lanes
};

// What to subtract from the scores. A row that saw nothing yet has the maximum -inf, and -inf - -inf is no
// number; weights are computed even then, because a NaN among the scores must reach the result.
static inline float finite_maximum(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// The largest lane of each of kLanes vectors.
static inline vfloat largest_lanes(const vfloat* v) {
#if defined(PAGODA_AVX512)
  // Halves of two vectors at a time, then of four; lane 4 i + j is that of vector 4 i + j.
  vfloat quarter[4];
  for (int j = 0; j < 4; ++j) {
    __m512 pair[2];
    for (int i = 0; i < 2; ++i) {
      const __m512 a = (__m512)v[8 * i + j], b = (__m512)v[8 * i + 4 + j];
      pair[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    quarter[j] = (vfloat)_mm512_max_ps(_mm512_shuffle_f32x4(pair[0], pair[1], 0x88),
                                       _mm512_shuffle_f32x4(pair[0], pair[1], 0xDD));
  }
  __m512d half[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = (__m512)quarter[2 * i], b = (__m512)quarter[2 * i + 1];
    half[i] = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  }
  return (vfloat)_mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(half[0], half[1])),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(half[0], half[1])));
#else
  vfloat best;
  for (int i = 0; i < kLanes; ++i) best[i] = largest_lane(v[i]);
  return best;
#endif
}

// What keys count in, before any is hidden: a scale of 0 would make NaN of it.
static inline void scale_scores(float* scores, const BlockScales& scales) {
  for (int v = 0; v < kBlockKeys; v += kLanes) store(scores + v, load(scores + v) * load(scales.keys + v));
}

// Hides the keys outside [begin, end) of a block from the scores of a row.
static inline void hide_scores(float* scores, int64_t begin, int64_t end) {
  for (int v = 0; v < kBlockKeys; v += kLanes) {
    if (begin <= v && end >= v + kLanes) continue;
    const vfloat key = iota() + (float)v, unseen = splat(-INFINITY);
    vfloat s = key < splat((float)begin) ? unseen : load(scores + v);
    store(scores + v, key < splat((float)end) ? s : unseen);
  }
}

// Scores to weights with nothing but a positive scale to apply: up to kLanes rows, whose maxima are found together
// and whose powers do not wait for each other. Writes the factors that the rows' earlier results decay by. kScaled:
// values are int8, and count in `scales`.
template <class Kind, bool kScaled>
static inline void weigh_plain_rows(float scale, Row* row, int rows, const float* scores, const BlockScales* scales,
                                    typename Kind::element* weights, float* decay, Prefetcher& ahead) {
  constexpr int kVectors = kBlockKeys / kLanes;
  vfloat top[kLanes];
  alignas(64) float before[kLanes], shift[kLanes], factor[kLanes], maximum[kLanes];
  for (int r = 0; r < rows; ++r) {
    const float* from = scores + r * kBlockKeys;
    before[r] = row[r].maximum;
    top[r] = load(from);
    for (int v = 1; v < kVectors; ++v) top[r] = larger(top[r], load(from + v * kLanes));
  }
  for (int r = rows; r < kLanes; ++r) before[r] = before[0], top[r] = top[0];
  const vfloat old = load(before), highest = larger(old, largest_lanes(top) * scale);
  const vfloat finite = highest == splat(-INFINITY) ? vfloat{} : highest;
  store(maximum, highest);
  store(shift, finite);
  store(factor, old == highest ? splat(1.f) : power_of_two(old - finite));
  for (int r = 0; r < rows; ++r) {
    const float* from = scores + r * kBlockKeys;
    const vfloat low = splat(shift[r]);
    vfloat x[kVectors], total = row[r].sum * splat(factor[r]);
    for (int v = 0; v < kVectors; ++v) x[v] = load(from + v * kLanes) * scale - low;
    typename Kind::element* to = weights + r * (kBlockKeys / Kind::kPerElement);
    if constexpr (Kind::kPerElement == 2 && !kScaled) {
      total = store_powers(to, x, total);
    } else {
      powers_of_two<kVectors>(x);
      for (int v = 0; v < kVectors; ++v) total += x[v];
      if constexpr (kScaled)
        for (int v = 0; v < kVectors; ++v) x[v] *= load(scales->values + v * kLanes);
      store_weights(Kind{}, to, x, kVectors);
    }
    row[r].sum = total;
    row[r].maximum = maximum[r];
    decay[r] = factor[r];
    ahead.step();
  }
}

// Scores to weights of n keys from `first` on, with everything that can happen to a score. Returns the factor that
// the row's earlier results decay by.
template <class Kind>
static float weigh_row(const Problem& p, Row& row, const float* scores, const BlockScales* scales,
                       typename Kind::element* weights, int64_t first, int n) {
  constexpr int kVectors = kBlockKeys / kLanes;
  const int vectors = (int)round_up(n, 16) / kLanes;
  const int64_t begin = greater(row.low - first, 0), end = lesser(row.high - first, n);
  vfloat x[kVectors];
  float maximum = row.maximum;
  if (begin < end) {
    const vfloat lane = iota();
    vfloat top = splat(-INFINITY);
    for (int v = 0; v < vectors; ++v) {
      const vfloat key = lane + (float)(v * kLanes);
      vfloat s = load(scores + v * kLanes) * p.scale;
      if (scales) s *= load(scales->keys + v * kLanes);
      if (p.softcap > 0.f) s = hyperbolic_tangent(s / p.softcap) * p.softcap;
      if (p.slopes) s += (key + (float)(first - row.position)) * row.slope;
      if (row.mask) s += load(row.mask + v * kLanes);
      s *= kLog2E;
      s = key < splat((float)begin) ? splat(-INFINITY) : s;
      s = key < splat((float)end) ? s : splat(-INFINITY);
      top = larger(top, s);
      x[v] = s;
    }
    const float best = largest_lane(top);
    maximum = maximum > best ? maximum : best;
  }
  if (begin >= end) {
    for (int v = 0; v < vectors; ++v) x[v] = vfloat{};
    store_weights(Kind{}, weights, x, vectors);
    return 1.f;
  }
  const float shift = finite_maximum(maximum);
  const float decay = row.maximum == maximum ? 1.f : power_of_two(row.maximum - maximum);
  vfloat total = row.sum * decay;
  for (int v = 0; v < vectors; ++v) {
    x[v] = power_of_two(x[v] - shift);
    total += x[v];
    if (scales) x[v] *= load(scales->values + v * kLanes);
  }
  store_weights(Kind{}, weights, x, vectors);
  row.sum = total;
  row.maximum = maximum;
  return decay;
}

// Divides by the softmax denominator, the sink included, and writes one head of one token. Inlined, it could be rounded
// here and there differently.
__attribute__((noinline)) static void finish_row(const Problem& p, char* out, int64_t head, float* values, float maximum, float sum) {
  float factor = 1.f;
  if (p.sinks) {
    const float sink = load_entry(p.sinks, head * p.sinks_stride, p.sinks_dtype) * kLog2E;
    const float top = maximum > sink ? maximum : sink;
    factor = maximum == -INFINITY ? 0.f : power_of_two(maximum - top);
    sum = sum * factor + power_of_two(sink - top);
  }
  // Nothing seen: `sum` is 0 and so are the values.
  factor = sum == 0.f ? 0.f : factor / sum;
  for (int64_t d = 0; d < p.columns; d += kLanes) store(values + d, load(values + d) * factor);
  store_floats(out, p.query_dtype, values, p.value_dim);
}
