// Rows of int8 with one scale each: x[i] = stored[i] * scale, scale = max |x| / 127.
#pragma once

#include <cmath>

#include "vector.h"

// Stores n floats in int8 and returns their scale. Rows whose scale would not be a normal float are zeros with
// scale 0; a row that holds a NaN or an infinity is zeros with scale NaN, so that all of it reads as NaN.
static inline float quantise_row(int8_t* to, const float* from, int64_t n) {
  uint32_t largest = 0;  // as bits, which order sizes like numbers and let NaN win
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = to_bits(from[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  const bool finite = largest < 0x7F800000u;
  const float scale = from_bits(largest) / 127.f;
  if (!finite || scale < 1.17549435e-38f) {
    std::memset(to, 0, n);
    return finite ? 0.f : NAN;
  }
  const float rounder = 12582912.f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
  for (int64_t i = 0; i < n; ++i) {
    const float whole = from[i] / scale + rounder - rounder;
    to[i] = (int8_t)(int32_t)(whole > 127.f ? 127.f : whole < -127.f ? -127.f : whole);
  }
  return scale;
}
