// Fixed-width float vectors on top of the compiler's vector extensions, number formats, exp and tanh.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGODA_AVX512 1
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define PAGODA_BF16 1
#endif
#elif defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)
#define PAGODA_ARM_DOT 1
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PAGODA_ARM_I8MM 1
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAGODA_ARM_BF16 1
#endif
#endif

#if defined(PAGODA_AVX512)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(PAGODA_AVX512) || defined(__aarch64__)
constexpr int kRegisters = 32;  // of vectors
#else
constexpr int kRegisters = 16;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));

// Nothing is read before it that stands after it: where sums fill the registers, a reading ahead would push some out.
static inline void read_no_earlier() { asm volatile("" ::: "memory"); }

static inline vfloat load(const float* p) {
  vfloat v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }
static inline vfloat splat(float x) { return x - vfloat{}; }
static inline vfloat iota() {
  vfloat v;
  for (int i = 0; i < kLanes; ++i) v[i] = (float)i;
  return v;
}
// sum + a * b, rounded once where the processor can. Said to the compiler it is its choice, which differs from one
// place to the next: GCC keeps single chains of sums for Zen in two steps.
static inline vfloat multiply_add(vfloat sum, vfloat a, vfloat b) {
#if defined(PAGODA_AVX512)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (vfloat)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}
// A NaN in `a` is not dropped: clamping must not turn a bad score into a good weight.
static inline vfloat at_least(vfloat a, float floor) { return a < splat(floor) ? splat(floor) : a; }
static inline vfloat larger(vfloat a, vfloat b) { return a > b ? a : b; }

static inline float largest_lane(vfloat v) {
#if defined(PAGODA_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
static inline float sum_lanes(vfloat v) {
#if defined(PAGODA_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0.f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// Powers of two of N vectors, to 1.5 ulp for x <= 127, where the softmax lives; below -126 the weight of a masked key,
// exactly 0 from -150 on. NaN stays NaN. Step by step for all, because one alone is a chain of waiting.
template <int N>
static inline void powers_of_two(vfloat* x) {
  vfloat r[N], p[N];
#if defined(PAGODA_AVX512)
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    x[i] = (vfloat)_mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x[i]);  // its second operand when one is NaN
    r[i] = (vfloat)_mm512_reduce_ps((__m512)x[i], 9);                    // x - floor(x)
  }
  // Relative error at most 8.3e-8 for 0 <= r < 1 (Lawson's algorithm, constant term fixed at 1).
  constexpr float kTerms[] = {1.8671316816472787e-3f, 9.017026911633846e-3f, 5.579991553952672e-2f,
                              2.4016444948861512e-1f, 6.93151311859125e-1f};
#else
  const float rounder = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  vfloat shifted[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const vfloat bounded = at_least(x[i], -127.f);
    shifted[i] = bounded + rounder;
    r[i] = bounded - (shifted[i] - rounder);
  }
  // Relative error at most 9.2e-8 for |r| <= 0.5.
  constexpr float kTerms[] = {1.326472731307149e-3f, 9.671512991189957e-3f, 5.550733581185341e-2f,
                              2.4022242426872253e-1f, 6.931470036506653e-1f};
#endif
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = splat(kTerms[0]);
#pragma GCC unroll 8
  for (int k = 1; k < 5; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + kTerms[k];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + 1.f;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
#if defined(PAGODA_AVX512)
    x[i] = (vfloat)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);  // times 2^floor(x)
#else
    vint exponent;
    std::memcpy(&exponent, &shifted[i], sizeof exponent);
    exponent = (exponent + (127 - 0x4B400000)) << 23;
    vfloat power;
    std::memcpy(&power, &exponent, sizeof power);
    x[i] = x[i] < splat(-126.f) ? vfloat{} : p[i] * power;
#endif
  }
}

static inline vfloat power_of_two(vfloat x) {
  powers_of_two<1>(&x);
  return x;
}

static inline float power_of_two(float x) { return power_of_two(splat(x))[0]; }

constexpr float kLog2E = 1.44269504088896341f;

// e^x to an ulp, its errors on both sides alike, so that thousands of factors keep to their product (Cephes' expf);
// 0 below -104, infinite above 88.8. NaN stays NaN.
static inline vfloat exponential(vfloat x) {
  const float rounder = 12582912.f;  // as above
  const vfloat low = x < splat(-104.f) ? splat(-104.f) : x, bounded = low > splat(89.f) ? splat(89.f) : low;
  const vfloat shifted = multiply_add(splat(rounder), bounded, splat(kLog2E));
  const vfloat whole = shifted - rounder;
  vfloat r = multiply_add(bounded, whole, splat(-0.693359375f));
  r = multiply_add(r, whole, splat(2.12194440e-4f));
  vfloat p = splat(1.9875691500e-4f);
  p = multiply_add(splat(1.3981999507e-3f), p, r);
  p = multiply_add(splat(8.3334519073e-3f), p, r);
  p = multiply_add(splat(4.1665795894e-2f), p, r);
  p = multiply_add(splat(1.6666665459e-1f), p, r);
  p = multiply_add(splat(5.0000001201e-1f), p, r);
  p = multiply_add(r, p, r * r) + 1.f;
#if defined(PAGODA_AVX512)
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  vint exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent -= 0x4B400000;
  const vint half = exponent >> 1;  // in two steps, for both ends of the range
  const vint bits[2] = {(half + 127) << 23, (exponent - half + 127) << 23};
  vfloat powers[2];
  std::memcpy(powers, bits, sizeof powers);
  return p * powers[0] * powers[1];
#endif
}

// tanh to a few ulp: odd polynomial near 0 (Cephes' tanhf), 1 - 2 / (e^2|x| + 1) elsewhere.
static inline vfloat hyperbolic_tangent(vfloat x) {
  const vfloat size = x < vfloat{} ? -x : x;
  const vfloat square = x * x;
  vfloat p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vfloat near = x + x * square * p;
  const vfloat bounded = size > splat(10.f) ? splat(10.f) : size;
  const vfloat far = 1.f - 2.f / (power_of_two(bounded * (2.f * kLog2E)) + 1.f);
  return size < splat(0.625f) ? near : (x < vfloat{} ? -far : far);
}

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kBool = 3, kInt8 = 4 };

static inline int64_t bytes_of(int64_t dtype) {
  return dtype == kFloat32 ? 4 : dtype == kBool || dtype == kInt8 ? 1 : 2;
}

static inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float bf16_to_float(uint16_t h) { return from_bits((uint32_t)h << 16); }
static inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return x != x ? (uint16_t)0x7FC0 : (uint16_t)rounded;
}
static inline float f16_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 half;
  std::memcpy(&half, &h, 2);
  return half;
#else
  // The exponent is moved by a multiplication, which also takes care of denormals.
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  const uint32_t rest = (uint32_t)(h & 0x7FFFu) << 13;
  const bool special = (h & 0x7C00u) == 0x7C00u;
  const float size = from_bits(rest) * 5.192296858534828e+33f;  // 2^112
  return from_bits(sign | (special ? (rest | 0x7F800000u) : to_bits(size)));
#endif
}
static inline uint16_t float_to_f16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  const __fp16 half = (__fp16)x;
  uint16_t h;
  std::memcpy(&h, &half, 2);
  return h;
#else
  const uint32_t bits = to_bits(x);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return sign | 0x7E00u;
  if (size >= 0x477FF000u) return sign | 0x7C00u;
  if (size < 0x38800000u) {  // denormal: adding 0.5 lines the result up with the lowest mantissa bits
    return sign | (uint16_t)(to_bits(from_bits(size) + 0.5f) - 0x3F000000u);
  }
  return sign | (uint16_t)((size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13);
#endif
}

static inline float load_entry(const char* p, int64_t index, int64_t dtype) {
  p += index * bytes_of(dtype);
  if (dtype == kFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  return dtype == kBFloat16 ? bf16_to_float(h) : f16_to_float(h);
}
static inline void store_scalar(char* p, int64_t dtype, float x) {
  if (dtype == kFloat32) {
    std::memcpy(p, &x, 4);
    return;
  }
  const uint16_t h = dtype == kBFloat16 ? float_to_bf16(x) : float_to_f16(x);
  std::memcpy(p, &h, 2);
}

// n elements, `stride` elements apart, as floats.
static inline void load_floats(float* to, const char* from, int64_t dtype, int64_t n, int64_t stride) {
  if (dtype == kFloat32) {
    const float* p = (const float*)from;
    if (stride == 1) std::memcpy(to, p, n * 4);
    else for (int64_t i = 0; i < n; ++i) to[i] = p[i * stride];
    return;
  }
  if (dtype == kInt8) {
    const int8_t* p = (const int8_t*)from;
    if (stride == 1) for (int64_t i = 0; i < n; ++i) to[i] = (float)p[i];
    else for (int64_t i = 0; i < n; ++i) to[i] = (float)p[i * stride];
    return;
  }
  const uint16_t* p = (const uint16_t*)from;
  int64_t i = 0;
  if (dtype == kBFloat16) {
    if (stride == 1) for (; i < n; ++i) to[i] = bf16_to_float(p[i]);
    else for (; i < n; ++i) to[i] = bf16_to_float(p[i * stride]);
    return;
  }
#if defined(PAGODA_AVX512)
  if (stride == 1)
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + i))));
#elif defined(__aarch64__)
  if (stride == 1)
    for (; i + 4 <= n; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i))));
#endif
  for (; i < n; ++i) to[i] = f16_to_float(p[i * stride]);
}

// n contiguous floats into n contiguous elements of `dtype`, rounded to nearest even.
static inline void store_floats(char* to, int64_t dtype, const float* from, int64_t n) {
  if (dtype == kFloat32) {
    std::memcpy(to, from, n * 4);
    return;
  }
  uint16_t* p = (uint16_t*)to;
  int64_t i = 0;
  if (dtype == kBFloat16) {
    for (; i < n; ++i) p[i] = float_to_bf16(from[i]);
    return;
  }
#if defined(PAGODA_AVX512)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(p + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1_u16(p + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
  for (; i < n; ++i) p[i] = float_to_f16(from[i]);
}
