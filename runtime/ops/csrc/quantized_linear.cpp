// CPU kernel of pagoda::quantized_linear (its Python twin is in quantized_linear.py; keep them in step): weights are
// whole numbers of 8 or 4 bits with a scale per output and group of inputs, laid out in panels (see panels.h).
//
// With rounded inputs (int8, a scale per row and group) all products and sums within a group are exact, and groups are added
// in their order: a row's result depends neither on how many rows there are nor on the instructions at hand.

#include <atomic>

#include "int8.h"
#include "integers.h"
#include "multiply.h"
#include "rows.h"

struct QuantizedLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;  // or null
  char* out;
  int64_t dtype, bias_dtype;
  int64_t rows, inputs, outputs, input_row;
  int64_t bits, group, rounds_input, threads;
};
static_assert(sizeof(QuantizedLinearArguments) == 14 * 8, "quantized_linear.py packs 14 integers");

namespace {

struct Group {
  const float* scales;
  const uint8_t* weights;
  int64_t steps;
};

static Group group_at(const QuantizedLinearArguments& a, const Layout& layout, int64_t panel, int64_t group) {
  const char* at = a.weight + panel * layout.panel_bytes + layout.offset_of(group);
  return {(const float*)at, (const uint8_t*)at + kScaleBytes, layout.steps_of(group)};
}

// The input, row by row as the products read it; beyond its end zeros.
struct Inputs {
  int64_t columns;     // a multiple of kStep
  int8_t* integers;    // of rounded rows
  float* scales;       // [rows][groups]
  int32_t* zeros;      // [rows][groups]: what the zero of the weights adds to each sum
  uint32_t* pairs;     // of bf16
  float* floats;
};

void round_row(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, int64_t row, Buffer& scratch) {
  float* floats = scratch.reserve<float>(a.inputs);
  load_floats(floats, a.input + row * a.input_row * bytes_of(a.dtype), a.dtype, a.inputs, 1);
  int8_t* to = x.integers + row * x.columns;
  std::memset(to + a.inputs, 0, x.columns - a.inputs);
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t begin = g * layout.group_steps * kStep;
    const int64_t count = std::min(layout.steps_of(g) * kStep, a.inputs - begin);
    x.scales[row * layout.groups + g] = quantise_row(to + begin, floats + begin, count);
    int32_t sum = 0;
    for (int64_t i = begin; i < begin + count; ++i) sum += to[i];
    x.zeros[row * layout.groups + g] = sum << (a.bits - 1);
  }
}

void copy_row(const QuantizedLinearArguments& a, const Inputs& x, int64_t row) {
  const char* from = a.input + row * a.input_row * bytes_of(a.dtype);
  if (x.pairs) {
    char* to = (char*)(x.pairs + row * x.columns / 2);
    std::memcpy(to, from, a.inputs * 2);
    std::memset(to + a.inputs * 2, 0, (x.columns - a.inputs) * 2);
  } else {
    float* to = x.floats + row * x.columns;
    load_floats(to, from, a.dtype, a.inputs, 1);
    std::memset(to + a.inputs, 0, (x.columns - a.inputs) * sizeof *to);
  }
}

// total[r][n] = (total[r][n] if `more`) + (sums[r][n] - zeros[r]) * row_scales[r] * scales[n]
void add_group(float* total, const int32_t* sums, const int32_t* zeros, const float* row_scales, int64_t stride,
               const float* scales, int64_t rows, bool more) {
  for (int64_t r = 0; r < rows; ++r, total += kPanel, sums += kPanel)
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      vint whole;
      std::memcpy(&whole, sums + n, sizeof whole);
      const vfloat number = __builtin_convertvector(whole - zeros[r * stride], vfloat) * row_scales[r * stride];
      store(total + n, more ? load(total + n) + number * load(scales + n) : number * load(scales + n));
    }
}

struct Scratch {
  Buffer sums, totals, weights;
};

// totals[r][n]: the panel's results for `rows` rows from `first` on.
template <int kBits>
void multiply_integers(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, int64_t first,
                       int64_t rows, int64_t panel, float* totals, Scratch& scratch) {
  const bool tiles = integers_on_tiles(rows);
  int32_t* sums = scratch.sums.reserve<int32_t>(kTiledRows * kPanel);
  for (int64_t g = 0; g < layout.groups; ++g) {
    Group group = group_at(a, layout, panel, g);
    const bool widens = kBits == 4 && rows > kMaxIntegerRows;
    if (widens) {
      uint8_t* bytes = scratch.weights.reserve<uint8_t>(group.steps * kStepBytes);
      widen_steps(bytes, group.weights, group.steps);
      group.weights = bytes;
    }
    const int8_t* from = x.integers + first * x.columns + g * layout.group_steps * kStep;
    const int64_t at = first * layout.groups + g;
    for (int64_t r = 0, piece; r < rows; r += piece) {
      piece = integer_piece(rows - r, tiles);
      if (kBits == 8 || widens)
        integer_products<8>(from + r * x.columns, x.columns, group.weights, group.steps, sums, piece, tiles);
      else
        integer_products<4>(from + r * x.columns, x.columns, group.weights, group.steps, sums, piece, false);
      add_group(totals + r * kPanel, sums, x.zeros + at + r * layout.groups, x.scales + at + r * layout.groups,
                layout.groups, group.scales, piece, g > 0);
    }
  }
}

// What `multiply` reads of a panel's steps: whole numbers around 0.
template <int kBits>
void spread_weights(float* to, const uint8_t* from, int64_t steps) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  for (int64_t s = 0; s < steps; ++s, from += 4 * kTile, to += kStepBytes)
    for (int t = 0; t < 4; ++t)
      for (int row = 0; row < 16; ++row) {
        const uint8_t* stored = from + t * kTile + row % (kTile / 64) * 64;
        const int shift = kBits == 4 && row >= 8 ? 4 : 0, mask = kBits == 4 ? 15 : 255, zero = 1 << (kBits - 1);
        for (int k = 0; k < 4; ++k)
          for (int n = 0; n < 16; ++n)
            to[(4 * row + k) * kPanel + 16 * t + n] = (float)(((stored[4 * n + k] >> shift) & mask) - zero);
      }
}

#if defined(PAGODA_BF16)
template <int kBits>
void spread_weights(uint32_t* to, const uint8_t* from, int64_t steps) {
  constexpr int64_t kTile = kStepBytes / 4 * kBits / 8;
  const __m512i low = _mm512_set1_epi32(kBits == 4 ? 15 : 255), zero = _mm512_set1_epi32(1 << (kBits - 1));
  const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000u);
  // Numbers of 8 bits are the upper halves of their floats.
  const auto number = [&](__m512i stored, int shift) {
    const __m512i whole = _mm512_and_si512(_mm512_srli_epi32(stored, shift), low);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)));
  };
  for (int64_t s = 0; s < steps; ++s, from += 4 * kTile, to += kStepBytes / 2)
    for (int t = 0; t < 4; ++t)
      for (int row = 0; row < 16; ++row) {
        const __m512i stored = _mm512_loadu_si512(from + t * kTile + row % (kTile / 64) * 64);
        const int shift = kBits == 4 && row >= 8 ? 4 : 0;
        for (int pair = 0; pair < 2; ++pair) {
          const __m512i even = number(stored, shift + 16 * pair), odd = number(stored, shift + 16 * pair + 8);
          _mm512_storeu_si512(to + (2 * row + pair) * kPanel + 16 * t,
                              _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, upper)));
        }
      }
}
#endif

// The same with inputs as they are: groups are multiplied a few steps at a time, which stay in the first cache.
template <class Kind, int kBits>
void multiply_numbers(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x,
                      const typename Kind::element* input, int64_t first, int64_t rows, int64_t panel, float* totals,
                      Scratch& scratch) {
  constexpr int64_t kFew = 4, kElements = kStep / Kind::kPerElement;
  typedef typename Kind::element Element;
  Element* weights = scratch.weights.reserve<Element>(kFew * kElements * kPanel);
  float* sums = layout.groups > 1 ? scratch.sums.reserve<float>(rows * kPanel) : totals;
  const std::vector<float> ones(rows, 1.f);
  const int64_t stride = x.columns / Kind::kPerElement;
  Prefetcher ahead;
  ahead.clear();
  for (int64_t g = 0; g < layout.groups; ++g) {
    const Group group = group_at(a, layout, panel, g);
    for (int64_t s = 0, count; s < group.steps; s += count) {
      count = std::min(kFew, group.steps - s);
      spread_weights<kBits>(weights, group.weights + s * layout.step_bytes, count);
      const Element* from = input + first * stride + (g * layout.group_steps + s) * kElements;
      multiply<Kind>(from, stride, weights, kPanel, sums, kPanel, count * kElements, s ? ones.data() : nullptr,
                     (int)rows, (int)kPanel, ahead);
    }
    for (int64_t i = 0; i < rows * kPanel; i += kLanes) {
      const vfloat part = load(sums + i) * load(group.scales + i % kPanel);
      store(totals + i, g > 0 ? load(totals + i) + part : part);
    }
  }
}

template <class Format>
void write_panel(const QuantizedLinearArguments& a, int64_t first, int64_t rows, int64_t panel,
                 const float* totals) {
  const int64_t begin = panel * kPanel, count = std::min(kPanel, a.outputs - begin);
  alignas(64) float bias[kPanel];
  if (a.bias) load_floats(bias, a.bias + begin * bytes_of(a.bias_dtype), a.bias_dtype, count, 1);
  for (int64_t r = 0; r < rows; ++r) {
    auto* to = (typename Format::element*)a.out + (first + r) * a.outputs + begin;
    for (int64_t n = 0; n < count; n += kLanes) {
      vfloat number = load(totals + r * kPanel + n);
      if (a.bias) number = number + load(bias + n);
      if (count - n >= kLanes) Format::write(to + n, number);
      else write_part<Format>(to + n, number, count - n);
    }
  }
}

template <int kBits>
void run(const QuantizedLinearArguments& a) {
  static thread_local Buffer own_inputs, own_scales, own_zeros;
  static thread_local Scratch own;
  const Layout layout(a.inputs, a.outputs, a.bits, a.group);
  const int64_t padded = round_up(a.rows, kTiledRows);
  Inputs x{layout.steps * kStep, nullptr, nullptr, nullptr, nullptr, nullptr};
#if defined(PAGODA_BF16)
  const bool bf16 = a.dtype == kBFloat16;
#else
  const bool bf16 = false;
#endif
  if (a.rounds_input) {
    x.integers = own_inputs.reserve<int8_t>(padded * x.columns);
    x.scales = own_scales.reserve<float>(padded * layout.groups);
    x.zeros = own_zeros.reserve<int32_t>(padded * layout.groups);
  } else if (bf16) {
    x.pairs = own_inputs.reserve<uint32_t>(a.rows * x.columns / 2);
  } else {
    x.floats = own_inputs.reserve<float>(a.rows * x.columns);
  }
  const auto prepare = [&](int64_t row, Scratch& scratch) {
    if (a.rounds_input) round_row(a, layout, x, row, scratch.totals);
    else copy_row(a, x, row);
  };
  // As many rows at a time as stay in the second cache together.
  const int64_t row_bytes = x.columns * (a.rounds_input ? 1 : bf16 ? 2 : 4);
  const int64_t most = std::clamp((1 << 20) / row_bytes / kTiledRows, (int64_t)1, (int64_t)16) * kTiledRows;
  const int64_t blocks = (a.rows + most - 1) / most;
  const bool alone = a.rows * a.inputs < kFewElements;
  for (int64_t r = 0; alone && r < a.rows; ++r) prepare(r, own);
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads((int)a.threads) if (a.threads > 1)
  {
    Scratch& scratch = own;
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; ++r) prepare(r, scratch);
    }
    for (int64_t task; (task = taken.fetch_add(1, std::memory_order_relaxed)) < blocks * layout.panels;) {
      const int64_t first = task / layout.panels * most, panel = task % layout.panels;
      const int64_t rows = std::min(most, a.rows - first);
      float* totals = scratch.totals.reserve<float>(rows * kPanel);
      if (a.rounds_input) multiply_integers<kBits>(a, layout, x, first, rows, panel, totals, scratch);
#if defined(PAGODA_BF16)
      else if (bf16) multiply_numbers<Bf16, kBits>(a, layout, x, x.pairs, first, rows, panel, totals, scratch);
#endif
      else multiply_numbers<Float, kBits>(a, layout, x, x.floats, first, rows, panel, totals, scratch);
      with_format(a.dtype, [&](auto format) { write_panel<decltype(format)>(a, first, rows, panel, totals); });
    }
#if defined(PAGODA_TILES)
    release_tiles();
#endif
  }
}

}  // namespace

extern "C" int64_t pagoda_quantized_linear(const QuantizedLinearArguments* arguments) {
  const QuantizedLinearArguments& a = *arguments;
  if (a.rows == 0 || a.outputs == 0) return 0;
  if (a.bits == 8) run<8>(a);
  else run<4>(a);
  return 0;
}
