// Weights as quantized checkpoints store them, rows of codes with scales: laid out in panels (see panels.h; the Python
// twin is `pack_stored` in quantized_weight.py), or as the floats that they mean (`dense` in stored_weight.py).

#include <algorithm>
#include <cmath>

#include "int8_rows.h"
#include "panels.h"
#include "rows.h"

struct StoredWeightArguments {
  const uint8_t* codes;  // [outputs][inputs], or two in a byte, the first in the low half
  const char* scales;    // [outputs][groups]
  const char* zeros;     // likewise: bytes, floats where the codes are affine, or none
  const int32_t* order;  // [inputs], of unpacked columns; or none
  char* out;
  int64_t inputs, outputs;
  int64_t code_stride, scale_stride, zero_stride;  // between rows, in elements
  int64_t code, bits, group, scale_dtype;          // the format; a group of 0 is a row
  int64_t packed_bits;                             // in panels
  int64_t dtype, input_stride, output_stride;      // of unpacked numbers; strides in elements
  int64_t threads;
};
static_assert(sizeof(StoredWeightArguments) == 19 * 8, "stored_weight.py packs 19 integers");

namespace {

// Every format's numbers by their codes.
struct Meanings {
  float e4m3[256], e2m1[16];
  uint8_t twice[16];  // of e2m1, as integers around 128

  Meanings() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float size = exponent ? std::ldexp(8.f + (float)mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
      e4m3[code] = (code & 127) == 127 ? NAN : code & 128 ? -size : size;
    }
    for (int code = 0; code < 16; ++code) {
      const int exponent = code >> 1 & 3, mantissa = code & 1;
      const float size = exponent ? std::ldexp(2.f + (float)mantissa, exponent - 2) : (float)mantissa / 2;
      e2m1[code] = code & 8 ? -size : size;
      twice[code] = (uint8_t)(128 + 2 * e2m1[code]);
    }
  }
};
const Meanings kMeanings;

typedef uint8_t bytes16 __attribute__((vector_size(16)));

// n codes of a row, one in a byte, from an even input on.
inline void read_codes(const StoredWeightArguments& a, int64_t output, int64_t input, int64_t n, uint8_t* codes) {
  const uint8_t* row = a.codes + output * a.code_stride;
  if (a.bits == 8) {
    std::memcpy(codes, row + input, n);
    return;
  }
  row += input / 2;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    bytes16 pairs;
    std::memcpy(&pairs, row + i / 2, 16);
    const bytes16 low = pairs & 15, high = pairs >> 4;
    const bytes16 first = __builtin_shuffle(low, high, bytes16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    const bytes16 last =
        __builtin_shuffle(low, high, bytes16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    std::memcpy(codes + i, &first, 16);
    std::memcpy(codes + i + 16, &last, 16);
  }
  for (; i < n; ++i) codes[i] = i % 2 ? row[i / 2] >> 4 : row[i / 2] & 15;
}

inline float scale_at(const StoredWeightArguments& a, int64_t output, int64_t group) {
  float scale;
  load_floats(&scale, a.scales + (output * a.scale_stride + group) * bytes_of(a.scale_dtype), a.scale_dtype, 1, 1);
  return scale;
}

inline float zero_at(const StoredWeightArguments& a, int64_t output, int64_t group) {
  const int64_t at = output * a.zero_stride + group;
  if (a.code == kAffine) return ((const float*)a.zeros)[at];
  return a.zeros ? (float)((const uint8_t*)a.zeros)[at] : (float)(1 << (a.bits - 1));
}

// Whether one of n codes of e4m3 is a NaN.
inline bool any_nan(const uint8_t* codes, int64_t n) {
  bool found = false;
  for (int64_t i = 0; i < n; ++i) found |= (codes[i] & 127) == 127;
  return found;
}

void write_heads(const StoredWeightArguments& a, const Layout& layout, int64_t panel, char* to) {
  const int64_t size = a.group ? a.group : a.inputs, groups = (a.inputs + size - 1) / size;
  const int64_t zero_bytes = a.code == kAffine ? 4 : a.zeros ? 1 : 0, count = std::min(kPanel, a.outputs - panel * kPanel);
  for (int64_t g = 0; g < groups; ++g) {
    char* head = to + layout.offset_of(g / layout.heads) + g % layout.heads * layout.head_bytes;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t output = panel * kPanel + n;
      float scale = scale_at(a, output, g);
      if (a.code == kFloat4) scale /= 2;  // the kernel multiplies with twice the floats
      if (a.code == kFloat8 &&
          any_nan(a.codes + output * a.code_stride + g * size, std::min(size, a.inputs - g * size)))
        scale = NAN;
      ((float*)head)[n] = scale;
      if (zero_bytes == 4) ((float*)(head + kScaleBytes))[n] = zero_at(a, output, g);
      if (zero_bytes == 1) ((uint8_t*)(head + kScaleBytes))[n] = (uint8_t)zero_at(a, output, g);
    }
  }
}

// A step's codes of output n of a panel.
inline void write_step(const StoredWeightArguments& a, const uint8_t* codes, int64_t n, char* step, int64_t step_bytes) {
  uint8_t* to = (uint8_t*)step;
  if (a.code == kFloat8) {
    for (int64_t i = 0; i < kStep; i += 2) std::memcpy(to + i * kPanel + 2 * n, codes + i, 2);
    return;
  }
  to += n / 16 * (step_bytes / 4) + n % 16 * 4;
  if (a.packed_bits == 8) {
    for (int64_t i = 0; i < 16; ++i) std::memcpy(to + i * 64, codes + 4 * i, 4);
    return;
  }
  uint8_t pairs[kStep / 2];
  for (int64_t i = 0; i < kStep / 2; ++i) pairs[i] = (uint8_t)(codes[i] | codes[i + kStep / 2] << 4);
  for (int64_t i = 0; i < 8; ++i) std::memcpy(to + i * 64, pairs + 4 * i, 4);
}

void pack_panel(const StoredWeightArguments& a, const Layout& layout, int64_t panel, char* to) {
  const int64_t count = std::min(kPanel, a.outputs - panel * kPanel);
  if (count < kPanel || a.inputs % kStep) std::memset(to, 0, layout.panel_bytes);
  write_heads(a, layout, panel, to);
  // A tile of outputs at a time: as many rows as are fetched ahead.
  for (int64_t first = 0; first < count; first += 16)
    for (int64_t g = 0; g < layout.groups; ++g) {
      char* step = to + layout.offset_of(g) + layout.heads * layout.head_bytes;
      for (int64_t s = 0; s < layout.steps_of(g); ++s, step += layout.step_bytes) {
        const int64_t input = (g * layout.group_steps + s) * kStep, inputs = std::min(kStep, a.inputs - input);
        for (int64_t n = first; n < std::min(first + 16, count); ++n) {
          uint8_t codes[kStep];
          if (inputs < kStep) std::memset(codes, 0, kStep);
          read_codes(a, panel * kPanel + n, input, inputs, codes);
          if (a.code == kFloat4 && a.packed_bits == 8)
            for (int64_t i = 0; i < inputs; ++i) codes[i] = kMeanings.twice[codes[i]];
          write_step(a, codes, n, step, layout.step_bytes);
        }
      }
    }
}

constexpr int64_t kUnpackedInputs = 512;  // inputs that are unpacked at a time
constexpr int64_t kUnpackedRows = 32;   // rows, where they become columns

// What n codes of a row mean, from an even input on. Each operation is rounded, as torch's are.
void read_numbers(const StoredWeightArguments& a, int64_t output, int64_t input, int64_t n, float* numbers) {
  uint8_t codes[kUnpackedInputs];
  float products[kUnpackedInputs];
  read_codes(a, output, input, n, codes);
  if (a.code == kFloat8)
    for (int64_t i = 0; i < n; ++i) products[i] = kMeanings.e4m3[codes[i]];
  else if (a.code == kFloat4)
    for (int64_t i = 0; i < n; ++i) products[i] = kMeanings.e2m1[codes[i]];
  else
    for (int64_t i = 0; i < n; ++i) products[i] = (float)codes[i];
  const int64_t size = a.group ? a.group : a.inputs;
  for (int64_t i = 0; i < n;) {
    const int64_t group = (input + i) / size, end = std::min(n, (group + 1) * size - input);
    const float scale = scale_at(a, output, group), center = a.code == kWhole ? zero_at(a, output, group) : 0.f;
    for (; i < end; ++i) products[i] = (products[i] - center) * scale;
  }
  if (a.code != kAffine) {
    std::memcpy(numbers, products, n * sizeof(float));
    return;
  }
  read_no_earlier();  // the compiler would make one operation of the product and the difference
  for (int64_t i = 0; i < n;) {
    const int64_t group = (input + i) / size, end = std::min(n, (group + 1) * size - input);
    const float offset = zero_at(a, output, group);
    for (; i < end; ++i) numbers[i] = products[i] - offset;
  }
}

// To nearest even, like torch: the processor's own instruction takes small numbers for zeros.
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class Element>
void convert(const float* from, int64_t n, int64_t dtype, Element* to) {
  if constexpr (sizeof(Element) == 4) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (dtype == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = bf16_of(from[i]);
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Half::write(to + i, load(from + i));
    if (i < n) write_part<Half>(to + i, read_part<Single>(from + i, n - i), n - i);
  }
}

// Rows begin to end, at most kUnpackedRows.
template <class Element>
void unpack_rows(const StoredWeightArguments& a, int64_t begin, int64_t end) {
  const bool columns = a.input_stride != 1;  // each row becomes a column
  std::vector<Element> block(kUnpackedRows * kUnpackedInputs);
  float numbers[kUnpackedInputs];
  for (int64_t input = 0; input < a.inputs; input += kUnpackedInputs) {
    const int64_t n = std::min(kUnpackedInputs, a.inputs - input);
    for (int64_t output = begin; output < end; ++output) {
      Element* row = (Element*)a.out + output * a.output_stride;
      Element* converted = columns ? block.data() + (output - begin) * kUnpackedInputs
                           : a.order ? block.data() : row + input;
      read_numbers(a, output, input, n, numbers);
      convert(numbers, n, a.dtype, converted);
      if (a.order && !columns)
        for (int64_t i = 0; i < n; ++i) row[a.order[input + i]] = converted[i];
    }
    for (int64_t i = 0; columns && i < n; ++i) {
      Element* column = (Element*)a.out + (a.order ? a.order[input + i] : input + i) * a.input_stride;
      for (int64_t output = begin; output < end; ++output)
        column[output * a.output_stride] = block[(output - begin) * kUnpackedInputs + i];
    }
  }
}

}  // namespace

extern "C" int64_t pagoda_pack_stored(const StoredWeightArguments* arguments) {
  const StoredWeightArguments& a = *arguments;
  const Layout layout(a.inputs, a.outputs, a.packed_bits, a.group, a.code == kAffine ? 4 : a.zeros ? 1 : 0);
  share(layout.panels, a.outputs * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) pack_panel(a, layout, panel, a.out + panel * layout.panel_bytes);
  });
  return 0;
}

extern "C" int64_t pagoda_unpack_stored(const StoredWeightArguments* arguments) {
  const StoredWeightArguments& a = *arguments;
  const int64_t blocks = (a.outputs + kUnpackedRows - 1) / kUnpackedRows;
  share(blocks, a.outputs * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kUnpackedRows, last = std::min(a.outputs, first + kUnpackedRows);
      if (a.dtype == kFloat32) unpack_rows<float>(a, first, last);
      else unpack_rows<uint16_t>(a, first, last);
    }
  });
  return 0;
}
