// CPU kernels of pagoda::gated_activation and pagoda::activation. The struct's Python twin is in
// gated_activation.py.

#include "logistic.h"

struct GatedArguments {
  Rows gate;
  Rows up;    // null for a plain activation
  char* out;  // contiguous
  int64_t dtype, activation;
  int64_t sizes[3], dim;
  int64_t threads;
  double alpha, limit;
};
static_assert(sizeof(GatedArguments) == 20 * 8, "gated_activation.py packs 18 integers and 2 doubles");

namespace {

// The order of the names in gated_activation.py.
enum Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kSigmoid, kQuickGelu, kClippedSwiglu };

constexpr int64_t kPart = 2048;  // elements of a row that one thread does at a time

// erf to 4e-7 (odd rational function, minimax on -4 .. 4, as in Eigen).
inline vfloat error_function(vfloat x) {
  x = at_most(at_least(x, -4.f), 4.f);
  const vfloat s = x * x;
  vfloat p = splat(-2.72614225801306e-10f);
  p = p * s + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630326855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  vfloat q = splat(-1.45660718464996e-05f);
  q = q * s - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  return x * p / q;
}

template <class Format, int64_t kActivation>
inline vfloat activated(vfloat x) {
  if (kActivation == kSilu) return quotient<Format>(x, one_plus_exp(-x));
  if (kActivation == kGelu) return x * 0.5f * (error_function(x * 0.70710678118654752f) + 1.f);
  if (kActivation == kGeluTanh) {
    // (1 + tanh u) / 2 is the logistic function of 2 u.
    const vfloat u = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
    return quotient<Format>(x, one_plus_exp(u * -2.f));
  }
  if (kActivation == kRelu) return at_least(x, 0.f);
  if (kActivation == kRelu2) {
    const vfloat y = at_least(x, 0.f);
    return y * y;
  }
  if (kActivation == kSigmoid) return logistic<Format>(x);
  return x * Format::rounded(logistic<Format>(Format::rounded(x * 1.702f)));  // quick_gelu
}

// f of n elements of one or two rows.
template <class Format, class F>
inline void map(const typename Format::element* x, typename Format::element* out, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Format::write(out + i, f(Format::read(x + i)));
  if (i < n) write_part<Format>(out + i, f(read_part<Format>(x + i, n - i)), n - i);
}
template <class Format, class F>
inline void map(const typename Format::element* x, const typename Format::element* y, typename Format::element* out,
                int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Format::write(out + i, f(Format::read(x + i), Format::read(y + i)));
  if (i < n)
    write_part<Format>(out + i, f(read_part<Format>(x + i, n - i), read_part<Format>(y + i, n - i)), n - i);
}

template <class Format, int64_t kActivation>
void act_on_part(const GatedArguments& a, const typename Format::element* gate, const typename Format::element* up,
                 typename Format::element* out, int64_t n) {
  if constexpr (kActivation == kClippedSwiglu) {
    // torch clamps with the limit as a number of the tensor's type.
    const float limit = Format::rounded(splat((float)a.limit))[0], alpha = (float)a.alpha;
    map<Format>(gate, up, out, n, [limit, alpha](vfloat g, vfloat u) {
      g = at_most(g, limit);
      u = at_most(at_least(u, -limit), limit);
      const vfloat sigmoid = Format::rounded(logistic<Format>(Format::rounded(g * alpha)));
      return Format::rounded(u + 1.f) * Format::rounded(g * sigmoid);
    });
  } else if (up) {
    map<Format>(gate, up, out, n,
                [](vfloat g, vfloat u) { return Format::rounded(activated<Format, kActivation>(g)) * u; });
  } else {
    map<Format>(gate, out, n, [](vfloat g) { return activated<Format, kActivation>(g); });
  }
}

template <class Format, int64_t kActivation>
void act(const GatedArguments& a) {
  typedef typename Format::element Element;
  const int64_t rows = a.sizes[0] * a.sizes[1] * a.sizes[2], parts = (a.dim + kPart - 1) / kPart;
  share(rows * parts, rows * a.dim, a.threads, [&a, parts](int64_t begin, int64_t end) {
    Element copies[2][kPart];
    RowIndex index(a.sizes, begin / parts);
    int64_t row = begin / parts, part = begin % parts;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = part * kPart, n = a.dim - first < kPart ? a.dim - first : kPart;
      const Element* gate =
          straightened(row_at<Element>(a.gate, index.at) + first * a.gate.step, a.gate.step, n, copies[0]);
      const Element* up = nullptr;
      if (a.up.data)
        up = straightened(row_at<Element>(a.up, index.at) + first * a.up.step, a.up.step, n, copies[1]);
      act_on_part<Format, kActivation>(a, gate, up, (Element*)a.out + row * a.dim + first, n);
      if (++part == parts) {
        part = 0, ++row;
        index.next();
      }
    }
  });
}

template <class Format>
void act_in(const GatedArguments& a) {
  switch (a.activation) {
    case kSilu: return act<Format, kSilu>(a);
    case kGelu: return act<Format, kGelu>(a);
    case kGeluTanh: return act<Format, kGeluTanh>(a);
    case kRelu: return act<Format, kRelu>(a);
    case kRelu2: return act<Format, kRelu2>(a);
    case kSigmoid: return act<Format, kSigmoid>(a);
    case kQuickGelu: return act<Format, kQuickGelu>(a);
    default: return act<Format, kClippedSwiglu>(a);
  }
}

}  // namespace

extern "C" int64_t pagoda_gated_activation(const GatedArguments* arguments) {
  const GatedArguments& a = *arguments;
  if (a.sizes[0] * a.sizes[1] * a.sizes[2] * a.dim == 0) return 0;
  with_format(a.dtype, [&a](auto format) { act_in<decltype(format)>(a); });
  return 0;
}
