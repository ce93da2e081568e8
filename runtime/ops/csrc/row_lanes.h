// Loops over the vectors of a row, whole ones and what is left at its end.
#pragma once

#include "rows.h"

// Adds up f(vector, i) over a row, i counting elements. `read` gives the vector at i, or the first n lanes of it
// and zeros; f must make nothing of these zeros.
template <class Read, class F>
static inline float sum_over(int64_t dim, const Read& read, const F& f) {
  constexpr int kChains = 4;  // additions under way at once
  vfloat sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= dim; i += kChains * kLanes)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) sums[c] += f(read(i + c * kLanes, kLanes), kLanes);
  for (; i < dim; i += kLanes) {
    const int64_t n = dim - i < kLanes ? dim - i : kLanes;
    sums[0] += f(read(i, n), n);
  }
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class Format>
static inline vfloat read_lanes(const typename Format::element* p, int64_t n) {
  return n == kLanes ? Format::read(p) : read_part<Format>(p, n);
}
template <class Format>
static inline void write_lanes(typename Format::element* p, vfloat v, int64_t n) {
  if (n == kLanes) Format::write(p, v);
  else write_part<Format>(p, v, n);
}

// Calls f(i, kLanes) for whole vectors of a row and f(i, n) for what is left.
template <class F>
static inline void over_lanes(int64_t dim, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) f(i, kLanes);
  if (i < dim) f(i, dim - i);
}
