// Brings a block of keys or values, given as one pointer per key, into the layout that `multiply` reads.
#pragma once

#include "softmax.h"

constexpr int kValueKeys = 8;  // values that are packed between two requests

#if defined(PAGODA_AVX512)

// 16 lanes of 32 bits from element offset `at` of a row of `size` lanes; lanes past its end are 0.
struct LoadWords {  // floats, or pairs of bf16
  static inline __m512i read(const char* row, int64_t at, int64_t size) {
    const int64_t left = size - at;
    if (left >= 16) return _mm512_loadu_si512(row + at * 4);
    return _mm512_maskz_loadu_epi32((__mmask16)((1u << left) - 1), row + at * 4);
  }
};
struct LoadBf16 {  // bf16, widened to float
  static inline __m512i read(const char* row, int64_t at, int64_t size) {
    const int64_t left = size - at;
    const __mmask16 mask = left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + at * 2)), 16);
  }
};
struct LoadF16 {  // fp16, widened to float
  static inline __m512i read(const char* row, int64_t at, int64_t size) {
    const int64_t left = size - at;
    const __mmask16 mask = left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row + at * 2)));
  }
};

struct LoadInt8 {  // int8, as float
  static inline __m512i read(const char* row, int64_t at, int64_t size) {
    const int64_t left = size - at;
    const __mmask16 mask = left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, row + at))));
  }
};

static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// keys[0:16 * groups] of `size` lanes each become packed[lane][key].
template <class Load>
static void transpose_keys(uint32_t* packed, const char* const* keys, int groups, int64_t size) {
  for (int group = 0; group < groups; ++group) {
    const char* const* row = keys + group * 16;
    for (int64_t at = 0; at < size; at += 16) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = Load::read(row[i], at, size);
      transpose16(r);
      uint32_t* to = packed + at * kBlockKeys + group * 16;
      const int64_t left = size - at;
      if (left >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * kBlockKeys, r[i]);
      } else {
        for (int i = 0; i < left; ++i) _mm512_storeu_si512(to + i * kBlockKeys, r[i]);
      }
    }
  }
}
#endif

// Keys as [dim][key] floats, one 16-key group after the other; groups are full (callers pad with a zero row).
static inline void pack_keys(Float, float* packed, const char* const* keys, int groups, int64_t dim,
                             int64_t dtype, float* spare) {
#if defined(PAGODA_AVX512)
  (void)spare;
  uint32_t* words = (uint32_t*)packed;
  if (dtype == kFloat32) transpose_keys<LoadWords>(words, keys, groups, dim);
  else if (dtype == kBFloat16) transpose_keys<LoadBf16>(words, keys, groups, dim);
  else if (dtype == kInt8) transpose_keys<LoadInt8>(words, keys, groups, dim);
  else transpose_keys<LoadF16>(words, keys, groups, dim);
#else
  typedef float quad __attribute__((vector_size(16)));
  typedef int32_t order __attribute__((vector_size(16)));
  const int64_t padded = round_up(dim, 4);
  for (int key = 0; key < groups * 16; key += 4) {
    for (int i = 0; i < 4; ++i) {
      load_floats(spare + i * padded, keys[key + i], dtype, dim, 1);
      for (int64_t d = dim; d < padded; ++d) spare[i * padded + d] = 0.f;
    }
    for (int64_t d = 0; d < padded; d += 4) {
      quad r[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&r[i], spare + i * padded + d, 16);
      const quad a = __builtin_shuffle(r[0], r[1], order{0, 4, 1, 5});
      const quad b = __builtin_shuffle(r[0], r[1], order{2, 6, 3, 7});
      const quad c = __builtin_shuffle(r[2], r[3], order{0, 4, 1, 5});
      const quad e = __builtin_shuffle(r[2], r[3], order{2, 6, 3, 7});
      const quad column[4] = {
          __builtin_shuffle(a, c, order{0, 1, 4, 5}), __builtin_shuffle(a, c, order{2, 3, 6, 7}),
          __builtin_shuffle(b, e, order{0, 1, 4, 5}), __builtin_shuffle(b, e, order{2, 3, 6, 7})};
      for (int i = 0; i < 4 && d + i < dim; ++i)
        std::memcpy(packed + (d + i) * kBlockKeys + key, &column[i], 16);
    }
  }
#endif
}

// Values as [key][columns] floats; columns past `dim` are 0.
static inline void pack_values(Float, float* packed, const char* const* values, int keys, int64_t dim,
                               int64_t columns, int64_t dtype) {
  for (int key = 0; key < keys; ++key) {
    float* to = packed + key * columns;
    load_floats(to, values[key], dtype, dim, 1);
    for (int64_t d = dim; d < columns; ++d) to[d] = 0.f;
  }
}

// Query rows as they are, in float.
static inline void pack_query(Float, float* packed, const char* row, int64_t dim, int64_t dtype,
                              int64_t stride) {
  load_floats(packed, row, dtype, dim, stride);
}

#if defined(PAGODA_BF16)

// Two vectors of floats that bf16 holds exactly as pairs: the first one's in the low halves.
static inline __m512i pair_halves(__m512 low, __m512 high) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                 _mm512_castps_si512(high));
}

// Byte `kByte` of every lane, signed, as a float.
template <int kByte>
static inline __m512 byte_of(__m512i x) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * kByte), 24));
}

// int8 keys[0:16 * groups] become pairs of bf16, packed[dim / 2][key]: four dims are transposed as one lane.
static void transpose_int8_keys(uint32_t* packed, const char* const* keys, int groups, int64_t dim) {
  for (int group = 0; group < groups; ++group) {
    const char* const* row = keys + group * 16;
    for (int64_t at = 0; at < dim; at += 64) {
      const int64_t left = dim - at;
      const __mmask64 mask = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi8(mask, row[i] + at);
      transpose16(r);
      uint32_t* to = packed + at / 2 * kBlockKeys + group * 16;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if (4 * i < left)
          _mm512_storeu_si512(to + 2 * i * kBlockKeys, pair_halves(byte_of<0>(r[i]), byte_of<1>(r[i])));
        if (4 * i + 2 < left)
          _mm512_storeu_si512(to + (2 * i + 1) * kBlockKeys, pair_halves(byte_of<2>(r[i]), byte_of<3>(r[i])));
      }
    }
  }
}

// The kind Bf16 reads bf16 and int8. Keys as [dim / 2][key] pairs; `dim` is even.
static inline void pack_keys(Bf16, uint32_t* packed, const char* const* keys, int groups, int64_t dim,
                             int64_t dtype, float*) {
  if (dtype == kInt8) transpose_int8_keys(packed, keys, groups, dim);
  else transpose_keys<LoadWords>(packed, keys, groups, dim / 2);
}

static inline void pair_int8_values(uint32_t* packed, const char* const* values, int keys, int64_t dim,
                                    int64_t columns) {
  for (int key = 0; key < keys; key += 2) {
    const char* first = values[key];
    const char* second = key + 1 < keys ? values[key + 1] : nullptr;
    uint32_t* to = packed + key / 2 * columns;
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512i x = LoadInt8::read(first, d, dim);
      const __m512i y = second ? LoadInt8::read(second, d, dim) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d, pair_halves(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y)));
    }
  }
}

// Which numbers of two vectors of bf16 make pairs of the first 16 of each.
alignas(64) static const uint16_t kFirstHalves[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

// Values as [key / 2][columns] pairs; columns past `dim` and the key after an odd last one are 0.
static inline void pack_values(Bf16, uint32_t* packed, const char* const* values, int keys, int64_t dim,
                               int64_t columns, int64_t dtype) {
  if (dtype == kInt8) return pair_int8_values(packed, values, keys, dim, columns);
  const __m512i low = _mm512_load_si512(kFirstHalves);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int key = 0; key < keys; key += 2) {
    const char* first = values[key];
    const char* second = key + 1 < keys ? values[key + 1] : nullptr;
    uint32_t* to = packed + key / 2 * columns;
    for (int64_t d = 0; d < dim; d += 32) {
      const int64_t left = dim - d;
      const __mmask32 mask = left >= 32 ? 0xFFFFFFFFu : (__mmask32)((1u << left) - 1);
      const __m512i x = _mm512_maskz_loadu_epi16(mask, first + d * 2);
      const __m512i y = second ? _mm512_maskz_loadu_epi16(mask, second + d * 2) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(x, low, y));
      if (left > 16) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

// `dim` is even.
static inline void pack_query(Bf16, uint32_t* packed, const char* row, int64_t dim, int64_t, int64_t stride) {
  const uint16_t* from = (const uint16_t*)row;
  uint16_t* to = (uint16_t*)packed;
  if (stride == 1) std::memcpy(to, from, dim * 2);
  else for (int64_t d = 0; d < dim; ++d) to[d] = from[d * stride];
}
#endif
