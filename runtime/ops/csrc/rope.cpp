// CPU kernel of pagoda::rope. The structs' Python twin is in rope.py.

// Every product is rounded by itself, as torch does: the results in fp32 are then torch's to the last bit.
#pragma GCC optimize("fp-contract=off")

#include "rows.h"

struct RopeInput {
  const char* data;
  char* out;  // [batch, tokens, heads, dim], contiguous
  int64_t heads, dim;
  int64_t batch_stride, head_stride, token_stride, step;
};

struct RopeArguments {
  Rows cos, sin;  // by batch entry and token; the third stride is unused
  int64_t dtype, table_dtype;
  int64_t batch, tokens, rotary, start, mode, round_products, threads, inputs;
  RopeInput input[];
};
static_assert(sizeof(RopeInput) == 8 * 8 && sizeof(RopeArguments) == 20 * 8,
              "rope.py packs 20 integers, and 8 for each input");

namespace {

enum Mode : int64_t { kHalf = 0, kInterleaved = 1, kInterleavedToHalf = 2 };

typedef int32_t vindex __attribute__((vector_size(kLanes * 4)));

inline vindex lane_indices(int scale, int offset, int flip) {
  vindex v;
  for (int i = 0; i < kLanes; ++i) v[i] = (i * scale + offset) ^ flip;
  return v;
}

template <class Format, bool kRound>
inline vfloat turned(vfloat x, vfloat cos, vfloat other, vfloat sin) {
  const vfloat a = x * cos, b = other * sin;
  return kRound ? Format::rounded(a) + Format::rounded(b) : a + b;
}

// One head's rotary dims. `sin` has the sign of the other dim that it is multiplied with.
template <class Format, bool kRound>
inline void turn_halves(const typename Format::element* x, typename Format::element* out, const float* cos,
                        const float* sin, int64_t half, bool interleaved) {
  const vindex evens = lane_indices(2, 0, 0), odds = lane_indices(2, 1, 0);
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i < kLanes ? half - i : kLanes;
    vfloat first, second;
    if (interleaved) {
      const int64_t low = 2 * n < kLanes ? 2 * n : kLanes, high = 2 * n - low;
      const vfloat a = low == kLanes ? Format::read(x + 2 * i) : read_part<Format>(x + 2 * i, low);
      const vfloat b = high == kLanes ? Format::read(x + 2 * i + kLanes)
                       : high > 0     ? read_part<Format>(x + 2 * i + kLanes, high) : vfloat{};
      first = __builtin_shuffle(a, b, evens);
      second = __builtin_shuffle(a, b, odds);
    } else if (n == kLanes) {
      first = Format::read(x + i);
      second = Format::read(x + half + i);
    } else {
      first = read_part<Format>(x + i, n);
      second = read_part<Format>(x + half + i, n);
    }
    const vfloat one = turned<Format, kRound>(first, load(cos + i), second, load(sin + i));
    const vfloat two = turned<Format, kRound>(second, load(cos + half + i), first, load(sin + half + i));
    if (n == kLanes) {
      Format::write(out + i, one);
      Format::write(out + half + i, two);
    } else {
      write_part<Format>(out + i, one, n);
      write_part<Format>(out + half + i, two, n);
    }
  }
}

template <class Format, bool kRound>
inline void turn_pairs(const typename Format::element* x, typename Format::element* out, const float* cos,
                       const float* sin, int64_t rotary) {
  const vindex swap = lane_indices(1, 0, 1);
  for (int64_t i = 0; i < rotary; i += kLanes) {
    const int64_t n = rotary - i < kLanes ? rotary - i : kLanes;
    const vfloat v = n == kLanes ? Format::read(x + i) : read_part<Format>(x + i, n);
    const vfloat y = turned<Format, kRound>(v, load(cos + i), __builtin_shuffle(v, swap), load(sin + i));
    if (n == kLanes) Format::write(out + i, y);
    else write_part<Format>(out + i, y, n);
  }
}

template <class Format, bool kRound>
void rotate_tokens(const RopeArguments& a, int64_t begin, int64_t end) {
  typedef typename Format::element Element;
  static thread_local std::vector<float> tables;
  static thread_local std::vector<Element> copy;
  // Vectors are read whole from the tables; what lies beyond their ends meets lanes that are never written.
  const int64_t room = round_up(a.rotary, kLanes) + kLanes;
  tables.resize(2 * room);
  float *cos = tables.data(), *sin = cos + room;
  const int64_t half = a.rotary / 2, table_size = bytes_of(a.table_dtype), last = a.start + a.rotary;
  for (int64_t flat = begin; flat < end; ++flat) {
    const int64_t b = flat / a.tokens, t = flat % a.tokens;
    load_floats(cos, a.cos.data + (b * a.cos.strides[0] + t * a.cos.strides[1]) * table_size, a.table_dtype,
                a.rotary, a.cos.step);
    load_floats(sin, a.sin.data + (b * a.sin.strides[0] + t * a.sin.strides[1]) * table_size, a.table_dtype,
                a.rotary, a.sin.step);
    if (a.mode == kInterleaved)
      for (int64_t i = 0; i < a.rotary; i += 2) sin[i] = -sin[i];
    else
      for (int64_t i = 0; i < half; ++i) sin[i] = -sin[i];

    for (int64_t input = 0; input < a.inputs; ++input) {
      const RopeInput& in = a.input[input];
      if (in.step != 1) copy.resize(in.dim);
      Element* out = (Element*)in.out + flat * in.heads * in.dim;
      const Element* head = (const Element*)in.data + b * in.batch_stride + t * in.token_stride;
      for (int64_t h = 0; h < in.heads; ++h, out += in.dim, head += in.head_stride) {
        const Element* x = straightened(head, in.step, in.dim, copy.data());
        if (a.start > 0) std::memcpy(out, x, a.start * sizeof(Element));
        if (in.dim > last) std::memcpy(out + last, x + last, (in.dim - last) * sizeof(Element));
        if (a.mode == kInterleaved) turn_pairs<Format, kRound>(x + a.start, out + a.start, cos, sin, a.rotary);
        else
          turn_halves<Format, kRound>(x + a.start, out + a.start, cos, sin, half,
                                      a.mode == kInterleavedToHalf);
      }
    }
  }
}

}  // namespace

extern "C" int64_t pagoda_rope(const RopeArguments* arguments) {
  const RopeArguments& a = *arguments;
  int64_t elements = 0;
  for (int64_t i = 0; i < a.inputs; ++i) elements += a.input[i].heads * a.input[i].dim;
  elements *= a.batch * a.tokens;
  if (elements == 0) return 0;
  with_format(a.dtype, [&](auto format) {
    typedef decltype(format) Format;
    share(a.batch * a.tokens, elements, a.threads, [&a](int64_t begin, int64_t end) {
      if (a.round_products) rotate_tokens<Format, true>(a, begin, end);
      else rotate_tokens<Format, false>(a, begin, end);
    });
  });
  return 0;
}
