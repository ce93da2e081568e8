// Rows of int8 with one scale each: x[i] = stored[i] * scale, scale = max |x| / 127.
#pragma once

#include <cmath>

#include "vector.h"

// Adding it rounds a float to the nearest integer, ties to even: 1.5 * 2^23.
constexpr float kRounder = 12582912.f;

// The scale of a row whose largest number becomes `most`. Of rows whose scale would not be a normal float it is 0, of
// rows that hold a NaN or an infinity NaN: all of them is to read as that, and is stored as zeros.
static inline float row_scale(const float* from, int64_t n, float most) {
  uint32_t largest = 0;  // as bits, which order sizes like numbers and let NaN win
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = to_bits(from[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7F800000u) return NAN;
  const float scale = from_bits(largest) / most;
  return scale < 1.17549435e-38f ? 0.f : scale;
}

// Stores n floats in int8 and returns their scale.
static inline float quantize_row(int8_t* to, const float* from, int64_t n) {
  const float scale = row_scale(from, n, 127.f);
  if (!(scale > 0.f)) {
    std::memset(to, 0, n);
    return scale;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float whole = from[i] / scale + kRounder - kRounder;
    to[i] = (int8_t)(int32_t)(whole > 127.f ? 127.f : whole < -127.f ? -127.f : whole);
  }
  return scale;
}

// Stores n floats in 16 bits, x = (256 * upper + lower) * scale, and returns their scale, max |x| / 32512.
static inline float quantize_row_in_two(int8_t* upper, int8_t* lower, const float* from, int64_t n) {
  const float scale = row_scale(from, n, 32512.f);
  if (!(scale > 0.f)) {
    std::memset(upper, 0, n);
    std::memset(lower, 0, n);
    return scale;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float whole = from[i] / scale + kRounder - kRounder;
    const int32_t bounded = (int32_t)(whole > 32512.f ? 32512.f : whole < -32512.f ? -32512.f : whole);
    const int32_t high = (bounded + 128) >> 8;
    upper[i] = (int8_t)high;
    lower[i] = (int8_t)(bounded - 256 * high);
  }
  return scale;
}

// Stores n floats by a scale and an offset that are given, x = (number - offset) * scale with numbers from -128 to 127,
// in `upper`; in two, as above, where `lower` is not null, else the offset is 0. Returns the scale, NaN for rows that
// hold a NaN, which are stored as zeros.
static inline float quantize_row_by(int8_t* upper, int8_t* lower, const float* from, int64_t n, float scale,
                                    float offset) {
  bool is_nan = false;
  for (int64_t i = 0; i < n; ++i) is_nan |= from[i] != from[i];
  if (is_nan) {
    std::memset(upper, 0, n);
    if (lower) std::memset(lower, 0, n);
    return NAN;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float whole = from[i] / scale + offset + kRounder - kRounder;
    const int32_t number = (int32_t)((whole > 127.f ? 127.f : whole < -128.f ? -128.f : whole) - offset);
    const int32_t high = lower ? (number + 128) >> 8 : number;
    upper[i] = (int8_t)high;
    if (lower) lower[i] = (int8_t)(number - 256 * high);
  }
  return scale;
}
