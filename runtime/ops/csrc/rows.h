// Number formats as types, for kernels that read and write rows a vector at a time; rows of strided tensors;
// rows shared out among threads.
#pragma once

#include <omp.h>

#include <vector>

#include "vector.h"

typedef uint16_t vshort __attribute__((vector_size(kLanes * 2)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));

// Each format reads and writes kLanes contiguous elements, or the first n of them (the others read as 0), and
// says what a float becomes when it is stored. Rounding is to nearest even.
struct Single {
  typedef float element;
  static inline vfloat read(const float* p) { return load(p); }
  static inline void write(float* p, vfloat v) { store(p, v); }
  static inline vfloat rounded(vfloat v) { return v; }
};

// What the formats of 16 bits make of their `widened` and `narrowed`.
template <class Format>
struct SixteenBits {
  typedef uint16_t element;
  static inline vfloat read(const uint16_t* p) {
    vshort h;
    std::memcpy(&h, p, sizeof h);
    return Format::widened(h);
  }
  static inline void write(uint16_t* p, vfloat v) {
    const vshort h = Format::narrowed(v);
    std::memcpy(p, &h, sizeof h);
  }
  static inline vfloat rounded(vfloat v) { return Format::widened(Format::narrowed(v)); }
};

struct BrainHalf : SixteenBits<BrainHalf> {
  static inline vfloat widened(vshort h) {
#if defined(PAGODA_AVX512)  // the compiler makes two halves of a conversion
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    const vuint bits = __builtin_convertvector(h, vuint) << 16;
    return (vfloat)bits;
#endif
  }
  static inline vshort narrowed(vfloat v) {
#if defined(PAGODA_BF16)
    return (vshort)_mm512_cvtneps_pbh((__m512)v);
#elif defined(PAGODA_ARM_BF16)
    return (vshort)vcvt_bf16_f32((float32x4_t)v);
#else
    return __builtin_convertvector(rounded_bits(v) >> 16, vshort);
#endif
  }
#if !defined(PAGODA_BF16) && !defined(PAGODA_ARM_BF16)
  static inline vfloat rounded(vfloat v) { return (vfloat)(rounded_bits(v) & 0xFFFF0000u); }

 private:
  static inline vuint rounded_bits(vfloat v) {
    const vuint bits = (vuint)v, number = (vuint)(v == v);
    return ((bits + 0x7FFFu + ((bits >> 16) & 1u)) & number) | (0x7FC00000u & ~number);
  }
#endif
};

struct Half : SixteenBits<Half> {
  static inline vfloat widened(vshort h) {
#if defined(PAGODA_AVX512)
    return (vfloat)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__) && defined(__AVX__)
    return (vfloat)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (vfloat)vcvt_f32_f16((float16x4_t)h);
#else
    vfloat v;
    for (int i = 0; i < kLanes; ++i) v[i] = f16_to_float(h[i]);
    return v;
#endif
  }
  static inline vshort narrowed(vfloat v) {
#if defined(PAGODA_AVX512)
    return (vshort)_mm512_cvtps_ph((__m512)v, 0);
#elif defined(__F16C__) && defined(__AVX__)
    return (vshort)_mm256_cvtps_ph((__m256)v, 0);
#elif defined(__aarch64__)
    return (vshort)vcvt_f16_f32((float32x4_t)v);
#else
    vshort h;
    for (int i = 0; i < kLanes; ++i) h[i] = float_to_f16(v[i]);
    return h;
#endif
  }
};

template <class Format>
static inline vfloat read_part(const typename Format::element* p, int64_t n) {
  typename Format::element whole[kLanes];
#if defined(PAGODA_AVX512)
  if constexpr (sizeof(whole[0]) == 2) {
    _mm256_storeu_si256((__m256i*)whole, _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
    return Format::read(whole);
  } else {
    return (vfloat)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
  }
#else
  std::memset(whole, 0, sizeof whole);
  std::memcpy(whole, p, n * sizeof whole[0]);
  return Format::read(whole);
#endif
}

template <class Format>
static inline void write_part(typename Format::element* p, vfloat v, int64_t n) {
#if defined(PAGODA_AVX512)
  if constexpr (sizeof(*p) == 2)
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)Format::narrowed(v));
  else
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  typename Format::element whole[kLanes];
  Format::write(whole, v);
  std::memcpy(p, whole, n * sizeof whole[0]);
#endif
}

// Calls `act` with the format of a dtype.
template <class Act>
static inline void with_format(int64_t dtype, const Act& act) {
  if (dtype == kFloat32) act(Single{});
  else if (dtype == kBFloat16) act(BrainHalf{});
  else act(Half{});
}

// The rows of a tensor, up to three dims of them; strides in elements. A null pointer has no rows.
struct Rows {
  const char* data;
  int64_t strides[3];
  int64_t step;  // from one element of a row to the next
};

template <class Element>
static inline const Element* row_at(const Rows& rows, const int64_t* index) {
  return (const Element*)rows.data + index[0] * rows.strides[0] + index[1] * rows.strides[1] +
         index[2] * rows.strides[2];
}

// n elements, `step` apart, next to each other.
template <class Element>
__attribute__((noinline)) static void copy_strided(Element* to, const Element* from, int64_t step, int64_t n) {
  if (step == 2) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[2 * i];
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = from[step * i];
  }
}

// The row itself if its elements lie next to each other, else a copy in `copy`.
template <class Element>
static inline const Element* straightened(const Element* row, int64_t step, int64_t n, Element* copy) {
  if (step == 1) return row;
  copy_strided(copy, row, step, n);
  return copy;
}

// Counts through up to three dims from the `flat`-th row on.
struct RowIndex {
  const int64_t* sizes;
  int64_t at[3];
  RowIndex(const int64_t* sizes, int64_t flat) : sizes(sizes) {
    at[2] = flat % sizes[2];
    at[1] = flat / sizes[2] % sizes[1];
    at[0] = flat / sizes[2] / sizes[1];
  }
  void next() {
    if (++at[2] < sizes[2]) return;
    at[2] = 0;
    if (++at[1] < sizes[1]) return;
    at[1] = 0;
    ++at[0];
  }
};

// Fewer elements than this are done in about the time that it takes to wake the other threads.
constexpr int64_t kFewElements = 1 << 15;

// Calls body(begin, end) for parts of 0 .. n, which stand for `elements` elements. The team is all the threads
// or one: OpenMP ends the threads that a smaller team leaves out and starts them anew for the next.
template <class Body>
static inline void share(int64_t n, int64_t elements, int64_t threads, const Body& body) {
  if (elements < kFewElements || threads == 1 || n == 1) {
    body((int64_t)0, n);
    return;
  }
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t team = omp_get_num_threads(), mine = omp_get_thread_num();
    body(n * mine / team, n * (mine + 1) / team);
  }
}
