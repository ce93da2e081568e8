// CPU kernel of pagoda::quantized_linear (its Python twin is in quantized_linear.py; keep them in step): weights are
// whole numbers of 8 or 4 bits with a scale per output and group of inputs, laid out in panels (see panels.h).
//
// Inputs are rounded to 8 or 16 bits with a scale per row and group, those of 16 as two rows of 8. Products and their
// sums within a group are exact then, and groups are added in their order: a row's result depends neither on how many
// rows there are nor on the instructions at hand.

#include "fetch.h"
#include "int8.h"
#include "integers.h"
#include "rows.h"
#include "scratch.h"
#include "shares.h"

struct QuantizedLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;  // or null
  char* out;
  int64_t dtype, bias_dtype;
  int64_t rows, inputs, outputs, input_row;
  int64_t bits, group, input_bits, threads;
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

// The input as whole numbers, beyond its end zeros. A number of 16 bits is 256 times one of a row and one of the next.
struct Inputs {
  int64_t columns;  // a multiple of kStep
  int64_t parts;    // rows of int8 for each row of the input
  int8_t* integers;
  float* scales;   // [rows][groups]
  int32_t* zeros;  // [rows * parts][groups]: what the zero of the weights adds to each sum
};

void round_row(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, int64_t row, float* floats) {
  load_floats(floats, a.input + row * a.input_row * bytes_of(a.dtype), a.dtype, a.inputs, 1);
  int8_t* to = x.integers + row * x.parts * x.columns;
  for (int64_t part = 0; part < x.parts; ++part)
    std::memset(to + part * x.columns + a.inputs, 0, x.columns - a.inputs);
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t begin = g * layout.group_steps * kStep;
    const int64_t count = std::min(layout.steps_of(g) * kStep, a.inputs - begin);
    x.scales[row * layout.groups + g] =
        x.parts == 1 ? quantise_row(to + begin, floats + begin, count)
                     : quantise_row_in_two(to + begin, to + x.columns + begin, floats + begin, count);
    for (int64_t part = 0; part < x.parts; ++part) {
      int32_t sum = 0;
      for (int64_t i = begin; i < begin + count; ++i) sum += to[part * x.columns + i];
      x.zeros[(row * x.parts + part) * layout.groups + g] = sum * zero_of(a.bits);
    }
  }
}

// total[r][n] = (total[r][n] if `more`) + the number that the sums of row r stand for, times both scales
template <int kParts>
void add_group(float* total, const int32_t* sums, const int32_t* zeros, const float* row_scales, int64_t groups,
               const float* scales, int64_t rows, bool more) {
  for (int64_t r = 0; r < rows; ++r, total += kPanel, sums += kParts * kPanel, zeros += kParts * groups)
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const auto part = [&](int64_t i) {
        vint whole;
        std::memcpy(&whole, sums + i * kPanel + n, sizeof whole);
        return __builtin_convertvector(whole - zeros[i * groups], vfloat);
      };
      vfloat number = part(0);
      if (kParts == 2) number = number * 256.f + part(1);
      number = number * row_scales[r * groups] * load(scales + n);
      store(total + n, more ? load(total + n) + number : number);
    }
}

// What a thread works on.
struct Workspace {
  float* row;        // of the input
  int32_t* sums;     // of a few rows and a panel
  float* totals;     // of all rows of a task
  uint8_t* widened;  // weights of a group, a byte each

  Workspace(Scratch& scratch, const QuantizedLinearArguments& a, const Layout& layout, int64_t rows) {
    const int64_t group_bytes = a.bits == 8 ? 0 : layout.group_steps * kStepBytes;
    const int64_t few = kTiledRows * kPanel, all = rows * kPanel;
    scratch.reserve((a.inputs + few + all) * 4 + group_bytes + 4 * 64);
    row = scratch.take<float>(a.inputs);
    sums = scratch.take<int32_t>(few);
    totals = scratch.take<float>(all);
    widened = scratch.take<uint8_t>(group_bytes);
  }
};

// space.totals[r][n]: the panel's results for `rows` rows from `first` on.
template <int kBits, int kParts>
void multiply_panel(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, int64_t first,
                    int64_t rows, int64_t panel, const Workspace& space) {
  const bool tiles = integers_on_tiles(rows * kParts), widens = kBits == 4 && rows * kParts > kMaxIntegerRows;
  for (int64_t g = 0; g < layout.groups; ++g) {
    const Group stored = group_at(a, layout, panel, g);
    Group group = stored;
    if (widens) {
      widen_steps(space.widened, group.weights, group.steps);
      group.weights = space.widened;
    }
    // The next group's weights, or the next panel's, follow the scales after this one's.
    const uint8_t* next = stored.weights + stored.steps * layout.step_bytes + kScaleBytes;
    const int64_t lines = widens ? 2 : 4, rounds = stored.steps * layout.step_bytes / (lines * kLine);
    const int64_t pieces = pieces_of(rows, kMaxIntegerRows / kParts);
    for (int64_t r = 0, piece, i = 0; r < rows; r += piece, ++i) {
      piece = integer_piece(rows - r, kParts, tiles);
      const bool once = piece == rows && !widens;
      const Fetch fetch = fetch_of_piece(stored.weights, next, rounds, lines, pieces, i);
      const int64_t row = first + r;
      const int8_t* from = x.integers + row * kParts * x.columns + g * layout.group_steps * kStep;
      const auto multiply = kBits == 8 || widens ? integer_products<8> : integer_products<4>;
      multiply(from, x.columns, group.weights, group.steps, space.sums, piece * kParts, tiles, once, fetch);
      add_group<kParts>(space.totals + r * kPanel, space.sums, x.zeros + row * kParts * layout.groups + g,
                        x.scales + row * layout.groups + g, layout.groups, group.scales, piece, g > 0);
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

template <int kBits, int kParts>
void run(const QuantizedLinearArguments& a) {
  static thread_local Scratch inputs, own;
  const Layout layout(a.inputs, a.outputs, a.bits, a.group);
  const int64_t columns = layout.steps * kStep, padded = round_up(a.rows * kParts, kTiledRows);
  const int64_t scales = padded * layout.groups;
  inputs.reserve(padded * columns + scales * 8 + 3 * 64);
  const Inputs x{columns, kParts, inputs.take<int8_t>(padded * columns), inputs.take<float>(scales),
                 inputs.take<int32_t>(scales)};
  // As many rows at a time as stay in the second cache together.
  const int64_t most =
      std::clamp((1 << 20) / (columns * kParts) / kTiledRows, (int64_t)1, (int64_t)16) * kTiledRows;
  const int64_t blocks = (a.rows + most - 1) / most;
  const bool alone = a.rows * a.inputs < kFewElements;
  if (alone) {
    const Workspace space(own, a, layout, 0);
    for (int64_t r = 0; r < a.rows; ++r) round_row(a, layout, x, r, space.row);
  }
  Shares shares(blocks * layout.panels, a.threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    const Workspace space(own, a, layout, std::min(most, a.rows));
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; ++r) round_row(a, layout, x, r, space.row);
    }
    shares.take(omp_get_thread_num(), [&](int64_t task) {
      const int64_t first = task / layout.panels * most, panel = task % layout.panels;
      const int64_t rows = std::min(most, a.rows - first);
      multiply_panel<kBits, kParts>(a, layout, x, first, rows, panel, space);
      with_format(a.dtype, [&](auto format) { write_panel<decltype(format)>(a, first, rows, panel, space.totals); });
    });
#if defined(PAGODA_TILES)
    release_tiles();
#endif
  }
}

}  // namespace

extern "C" int64_t pagoda_quantized_linear(const QuantizedLinearArguments* arguments) {
  const QuantizedLinearArguments& a = *arguments;
  if (a.rows == 0 || a.outputs == 0) return 0;
  if (a.bits == 8) a.input_bits == 8 ? run<8, 1>(a) : run<8, 2>(a);
  else a.input_bits == 8 ? run<4, 1>(a) : run<4, 2>(a);
  return 0;
}
