// CPU kernel of pagoda::elementwise (its Python twin is in elementwise.py; keep them in step): functions of one number
// that come out alike wherever it stands. Operators of torch take vectors of neighbors and single numbers at the ends
// of what each thread gets, by other formulas.

#include <cmath>

#include "rows.h"

struct ElementwiseArguments {
  const char* input;
  char* out;
  int64_t dtype, count, function, threads;
};
static_assert(sizeof(ElementwiseArguments) == 6 * 8, "elementwise.py packs 6 integers");

namespace {

enum Function : int64_t { kCos, kSin, kTanh, kExp, kSigmoidal };

template <class F>
void apply(const ElementwiseArguments& a, const F& f) {
  const int64_t size = bytes_of(a.dtype);
  share(a.count, a.count, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) store_scalar(a.out + i * size, a.dtype, f(load_entry(a.input, i, a.dtype)));
  });
}

}  // namespace

extern "C" int64_t pagoda_elementwise(const ElementwiseArguments* arguments) {
  const ElementwiseArguments& a = *arguments;
  switch (a.function) {
    case kCos: apply(a, [](float x) { return std::cos(x); }); return 0;
    case kSin: apply(a, [](float x) { return std::sin(x); }); return 0;
    case kTanh: apply(a, [](float x) { return std::tanh(x); }); return 0;
    case kExp: apply(a, [](float x) { return std::exp(x); }); return 0;
    case kSigmoidal: apply(a, [](float x) { return 1.f / (1.f + std::exp(-x)); }); return 0;
    default: return 1;
  }
}
