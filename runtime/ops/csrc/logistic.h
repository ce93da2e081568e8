// The logistic function, 1 / (1 + e^-x), as activations and gates take it.
#pragma once

#include "rows.h"

static inline vfloat at_most(vfloat a, float ceiling) { return a > splat(ceiling) ? splat(ceiling) : a; }  // keeps NaN

// 1 + e^-x, to 1e-6; infinite for x < -89.
static inline vfloat one_plus_exp(vfloat minus_x) { return power_of_two(at_most(minus_x * kLog2E, 128.f)) + 1.f; }

// a / b for b >= 1.
template <class Format>
static inline vfloat quotient(vfloat a, vfloat b) {
#if defined(PAGODA_AVX512)
  if (sizeof(typename Format::element) == 2) {  // one Newton step is enough for these
    const vfloat guess = (vfloat)_mm512_rcp14_ps((__m512)b);
    return a * (guess * (2.f - at_most(b, 3e38f) * guess));
  }
#endif
  return a / b;
}

template <class Format>
static inline vfloat logistic(vfloat x) {
  return quotient<Format>(splat(1.f), one_plus_exp(-x));
}
