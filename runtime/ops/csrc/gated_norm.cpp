// CPU kernel of pagoda::gated_rms_norm. The struct's Python twin is in gated_rms_norm.py.

#include <algorithm>
#include <cmath>

#include "logistic.h"
#include "row_lanes.h"
#include "scratch.h"

struct GatedNormArguments {
  Rows input;          // of the gate's type, or float32
  Rows gate;
  const char* weight;  // or null; contiguous
  char* out;           // contiguous, of the gate's type
  int64_t input_dtype, gate_dtype, weight_dtype;
  int64_t sizes[3], dim;
  int64_t group_size, is_silu, gate_first, round_before_scale, threads;
  double eps, weight_offset;
};
static_assert(sizeof(GatedNormArguments) == 26 * 8, "gated_rms_norm.py packs 24 integers and 2 doubles");

namespace {

template <class Input, class Format, bool kSilu>
struct GatedNorm {
  typedef typename Input::element InputElement;
  typedef typename Format::element Element;
  const GatedNormArguments& a;

  // One group of a row, which `scale` multiplies; `wide` takes its floats, whole vectors of them.
  void group(const InputElement* x, const Element* gate, const float* scale, float* wide, Element* out) const {
    const auto opened = [gate](int64_t i, int64_t n) {
      const vfloat g = read_lanes<Format>(gate + i, n);
      return kSilu ? quotient<Format>(g, one_plus_exp(-g)) : logistic<Format>(g);
    };
    const auto read = [&](int64_t i, int64_t n) {
      vfloat v = read_lanes<Input>(x + i, n);
      if (a.gate_first) v *= opened(i, n);
      store(wide + i, v);
      return v;
    };
    const float squares = sum_over(a.group_size, read, [](vfloat v, int64_t) { return v * v; });
    const float factor = 1.f / std::sqrt(squares / (float)a.group_size + (float)a.eps);
    over_lanes(a.group_size, [&](int64_t i, int64_t n) {
      vfloat y = load(wide + i) * factor;
      const vfloat s = load(scale + i);
      y = a.round_before_scale ? Format::rounded(Format::rounded(y) * s) : y * s;
      if (!a.gate_first) y *= opened(i, n);
      write_lanes<Format>(out + i, y, n);
    });
  }

  // What a row is multiplied by, the offset added; ones where there is no weight.
  void read_scale(float* scale) const {
    if (!a.weight) {
      std::fill(scale, scale + a.dim, 1.f);
      return;
    }
    load_floats(scale, a.weight, a.weight_dtype, a.dim, 1);
    const float offset = (float)a.weight_offset;
    for (int64_t i = 0; i < a.dim; i += kLanes) {
      const vfloat s = load(scale + i) + offset;
      store(scale + i, a.round_before_scale ? Format::rounded(s) : s);
    }
  }

  void rows(int64_t begin, int64_t end) const {
    static thread_local Scratch scratch;
    const int64_t padded = round_up(a.dim, kLanes) + kLanes;  // the last vector of a group may go beyond it
    scratch.reserve(2 * round_up(padded * sizeof(float), 64) + round_up(a.dim * sizeof(InputElement), 64) +
                    round_up(a.dim * sizeof(Element), 64));
    float* scale = scratch.take<float>(padded);
    float* wide = scratch.take<float>(padded);
    InputElement* inputs = scratch.take<InputElement>(a.dim);
    Element* gates = scratch.take<Element>(a.dim);
    std::fill(scale + a.dim, scale + padded, 0.f);
    read_scale(scale);
    RowIndex index(a.sizes, begin);
    for (int64_t r = begin; r < end; ++r, index.next()) {
      const InputElement* x = straightened(row_at<InputElement>(a.input, index.at), a.input.step, a.dim, inputs);
      const Element* gate = straightened(row_at<Element>(a.gate, index.at), a.gate.step, a.dim, gates);
      Element* out = (Element*)a.out + r * a.dim;
      for (int64_t i = 0; i < a.dim; i += a.group_size) group(x + i, gate + i, scale + i, wide, out + i);
    }
  }
};

}  // namespace

extern "C" int64_t pagoda_gated_norm(const GatedNormArguments* arguments) {
  const GatedNormArguments& a = *arguments;
  const int64_t rows = a.sizes[0] * a.sizes[1] * a.sizes[2];
  if (rows == 0 || a.dim == 0) return 0;
  with_format(a.gate_dtype, [&](auto format) {
    typedef decltype(format) Format;
    const auto run = [&](const auto& norm) {
      share(rows, rows * a.dim, a.threads, [&norm](int64_t begin, int64_t end) { norm.rows(begin, end); });
    };
    const auto run_on = [&](auto input) {
      typedef decltype(input) Input;
      if (a.is_silu) run(GatedNorm<Input, Format, true>{a});
      else run(GatedNorm<Input, Format, false>{a});
    };
    if (a.input_dtype == kFloat32) run_on(Single{});
    else run_on(format);
  });
  return 0;
}
