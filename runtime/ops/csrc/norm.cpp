// CPU kernels of pagoda::rms_norm, layer_norm and their forms with a residual addition. The struct's Python twins
// are in rms_norm.py and layer_norm.py.

#include <cmath>

#include "row_lanes.h"

struct NormArguments {
  Rows input;
  Rows residual;       // or null
  const char* weight;  // or null, like bias; contiguous
  const char* bias;
  char* out;  // contiguous
  char* sum;  // input + residual, contiguous; null without a residual
  int64_t dtype, parameter_dtype;
  int64_t sizes[3], dim;
  int64_t is_layer_norm, round_before_scale, threads;
  double eps, weight_offset;
};
static_assert(sizeof(NormArguments) == 25 * 8, "rms_norm.py and layer_norm.py pack 23 integers and 2 doubles");

namespace {

template <class Format, class Parameter>
struct Norm {
  typedef typename Format::element Element;
  typedef typename Parameter::element ParameterElement;
  const NormArguments& a;
  const ParameterElement* weight;
  const ParameterElement* bias;

  explicit Norm(const NormArguments& a)
      : a(a), weight((const ParameterElement*)a.weight), bias((const ParameterElement*)a.bias) {}

  // `read` is called once for every element, in order; what it gave can be read again from `x`.
  template <class Read>
  void rms(const Element* x, const Read& read, Element* out) const {
    const float squares = sum_over(a.dim, read, [](vfloat v, int64_t) { return v * v; });
    const float factor = 1.f / std::sqrt(squares / (float)a.dim + (float)a.eps), offset = (float)a.weight_offset;
    if (!weight) {
      over_lanes(a.dim, [&](int64_t i, int64_t n) {
        write_lanes<Format>(out + i, read_lanes<Format>(x + i, n) * factor, n);
      });
    } else if (a.round_before_scale) {
      over_lanes(a.dim, [&](int64_t i, int64_t n) {
        const vfloat scale = Format::rounded(read_lanes<Parameter>(weight + i, n) + offset);
        const vfloat normed = Format::rounded(read_lanes<Format>(x + i, n) * factor);
        write_lanes<Format>(out + i, normed * scale, n);
      });
    } else {
      over_lanes(a.dim, [&](int64_t i, int64_t n) {
        const vfloat scale = read_lanes<Parameter>(weight + i, n) + offset;
        write_lanes<Format>(out + i, read_lanes<Format>(x + i, n) * factor * scale, n);
      });
    }
  }

  template <class Read>
  void layer(const Element* x, const Read& read, Element* out) const {
    const float mean = sum_over(a.dim, read, [](vfloat v, int64_t) { return v; }) / (float)a.dim;
    const vfloat lane = iota();
    const auto again = [x](int64_t i, int64_t n) { return read_lanes<Format>(x + i, n); };
    const float squares = sum_over(a.dim, again, [mean, lane](vfloat v, int64_t n) {
      const vfloat d = v - mean, square = d * d;
      return n == kLanes ? square : lane < splat((float)n) ? square : vfloat{};
    });
    const float factor = 1.f / std::sqrt(squares / (float)a.dim + (float)a.eps);
    over_lanes(a.dim, [&](int64_t i, int64_t n) {
      vfloat y = (read_lanes<Format>(x + i, n) - mean) * factor;
      if (weight) y *= read_lanes<Parameter>(weight + i, n);
      if (bias) y += read_lanes<Parameter>(bias + i, n);
      write_lanes<Format>(out + i, y, n);
    });
  }

  void row(const Element* x, const Element* residual, Element* sum, Element* out) const {
    const auto normalize = [&](const Element* again, const auto& read) {
      if (a.is_layer_norm) layer(again, read, out);
      else rms(again, read, out);
    };
    if (!residual) {
      normalize(x, [x](int64_t i, int64_t n) { return read_lanes<Format>(x + i, n); });
      return;
    }
    normalize(sum, [x, residual, sum](int64_t i, int64_t n) {
      const vfloat s = Format::rounded(read_lanes<Format>(x + i, n) + read_lanes<Format>(residual + i, n));
      write_lanes<Format>(sum + i, s, n);
      return s;
    });
  }

  void rows(int64_t begin, int64_t end) const {
    static thread_local std::vector<Element> copies;
    const bool strided = a.input.step != 1 || (a.residual.data && a.residual.step != 1);
    if (strided) copies.resize(2 * a.dim);
    RowIndex index(a.sizes, begin);
    for (int64_t r = begin; r < end; ++r, index.next()) {
      const Element* x = straightened(row_at<Element>(a.input, index.at), a.input.step, a.dim, copies.data());
      const Element* residual = nullptr;
      if (a.residual.data)
        residual = straightened(row_at<Element>(a.residual, index.at), a.residual.step, a.dim,
                                copies.data() + (strided ? a.dim : 0));
      row(x, residual, (Element*)a.sum + r * a.dim, (Element*)a.out + r * a.dim);
    }
  }
};

}  // namespace

extern "C" int64_t pagoda_norm(const NormArguments* arguments) {
  const NormArguments& a = *arguments;
  const int64_t rows = a.sizes[0] * a.sizes[1] * a.sizes[2];
  if (rows == 0 || a.dim == 0) return 0;
  with_format(a.dtype, [&](auto format) {
    typedef decltype(format) Format;
    const auto run = [&](auto parameter) {
      const Norm<Format, decltype(parameter)> norm(a);
      share(rows, rows * a.dim, a.threads,
            [&norm](int64_t begin, int64_t end) { norm.rows(begin, end); });
    };
    if (a.parameter_dtype == kFloat32) run(Single{});
    else run(format);
  });
  return 0;
}
