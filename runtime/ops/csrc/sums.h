// Sums over the lanes of several vectors at a time.
#pragma once

#include "vector.h"

#if defined(__AVX__) && defined(__FMA__)
static inline __m256 half_sums(vfloat v) {
#if defined(PAGODA_AVX512)
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  return (__m256)v;
#endif
}
#endif

// out[i] becomes the sum of the lanes of v[i], for four vectors.
static inline void sum_lanes_of_four(const vfloat* v, float* out) {
#if defined(__AVX__) && defined(__FMA__)
  const __m256 a = _mm256_hadd_ps(half_sums(v[0]), half_sums(v[1]));
  const __m256 b = _mm256_hadd_ps(half_sums(v[2]), half_sums(v[3]));
  const __m256 sums = _mm256_hadd_ps(a, b);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#elif defined(__aarch64__)
  const float32x4_t a = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
  vst1q_f32(out, vpaddq_f32(a, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes(v[i]);
#endif
}
