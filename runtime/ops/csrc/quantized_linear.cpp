// CPU kernel of pagoda::quantized_linear (its Python twin is in quantized_linear.py; keep them in step): weights are
// whole numbers of 8 or 4 bits, or floats of 8, with a scale per output and group of inputs, laid out in panels (see
// panels.h).
//
// The columns of a weight may be stored in another order, in which the inputs are read then. Inputs are rounded to 8 or 16
// bits with a scale per row and group, those of 16 as two rows of 8; of groups of 32, which share
// the steps of a panel, each has rows of its own, with zeros for its neighbour. Products and their sums within a group are
// exact then, and groups are added in their order: a row's result depends neither on how many rows there are nor on the
// instructions at hand. Inputs of weights that are floats are not rounded (see float8.h).

#include "fetch.h"
#include "float8.h"
#include "int8.h"
#include "integers.h"
#include "rows.h"
#include "scratch.h"
#include "shares.h"

#include <vector>

// What the codes of weights are: whole numbers, or floats (e4m3).
enum Code : int64_t { kWhole = 0, kFloat8 = 1 };

struct QuantizedLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;      // or null
  const int32_t* order;  // or null: of the stored columns
  char* out;
  int64_t dtype, bias_dtype;
  int64_t rows, inputs, outputs, input_row;
  int64_t bits, group, input_bits, zeros, threads;
  int64_t code;  // kWhole, …
  // Of several weights, one after the other: the first row that each is for, and at last `rows`; null for one weight.
  // Each has `outputs` of the bias.
  const int64_t* starts;
  int64_t weights;
};
static_assert(sizeof(QuantizedLinearArguments) == 19 * 8, "quantized_linear.py packs 19 integers");

namespace {

struct Group {
  const char* heads;
  const uint8_t* weights;
  int64_t steps;
};

static Group group_at(const char* panel, const Layout& layout, int64_t group) {
  const char* at = panel + layout.offset_of(group);
  return {at, (const uint8_t*)at + layout.heads * layout.head_bytes, layout.steps_of(group)};
}

// zeros[n]: what the products take the zero of an output's weights for, of a head that holds zeros.
static void zeros_of(int32_t* zeros, const QuantizedLinearArguments& a, const char* head) {
  const uint8_t* own = (const uint8_t*)head + kScaleBytes;
  for (int64_t n = 0; n < kPanel; ++n) zeros[n] = own[n] - (a.bits == 8 ? kFlip : 0);
}

// The input as whole numbers, beyond its end zeros. A number of 16 bits is 256 times one of a row and one of the next.
struct Inputs {
  int64_t columns;  // a multiple of kStep
  int64_t parts;    // of each number
  int64_t halves;   // groups that share a step: each has `parts` rows of int8 for each row of the input
  int8_t* integers;
  float* scales;  // [rows][halves][groups]
  int32_t* sums;  // [rows][halves][parts][groups]: of the whole numbers, times the zero where all weights have the same

  int64_t rows_each() const { return halves * parts; }
};

void round_row(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, int64_t row, float* floats) {
  const char* from = a.input + row * a.input_row * bytes_of(a.dtype);
  if (a.order) {
    float* plain = floats + a.inputs;
    load_floats(plain, from, a.dtype, a.inputs, 1);
    for (int64_t k = 0; k < a.inputs; ++k) floats[k] = plain[a.order[k]];
  } else {
    load_floats(floats, from, a.dtype, a.inputs, 1);
  }
  int8_t* to = x.integers + row * x.rows_each() * x.columns;
  const bool shared = x.halves > 1;  // a row is zero but for its own half of each step
  for (int64_t part = 0; part < x.rows_each(); ++part)
    std::memset(to + part * x.columns + (shared ? 0 : a.inputs), 0, x.columns - (shared ? 0 : a.inputs));
  for (int64_t h = 0; h < x.halves; ++h, to += x.parts * x.columns)
    for (int64_t g = 0; g < layout.groups; ++g) {
      const int64_t begin = g * layout.group_steps * kStep + h * kStep / 2;
      const int64_t length = shared ? kStep / 2 : layout.steps_of(g) * kStep;
      const int64_t count = std::clamp(a.inputs - begin, (int64_t)0, length), at = (row * x.halves + h) * layout.groups + g;
      x.scales[at] = x.parts == 1 ? quantise_row(to + begin, floats + begin, count)
                                  : quantise_row_in_two(to + begin, to + x.columns + begin, floats + begin, count);
      for (int64_t part = 0; part < x.parts; ++part) {
        int32_t sum = 0;
        for (int64_t i = begin; i < begin + count; ++i) sum += to[part * x.columns + i];
        x.sums[((row * x.halves + h) * x.parts + part) * layout.groups + g] = a.zeros ? sum : sum * zero_of(a.bits);
      }
    }
}

// total[r][n] = (total[r][n] if `more`) + the number that the products of row r stand for, times both scales. kZeros: the
// outputs have zeros of their own.
template <int kParts, bool kZeros>
void add_group(float* total, const int32_t* products, const int32_t* sums, const float* row_scales, int64_t groups,
               int64_t halves, const float* scales, const int32_t* zeros, int64_t rows, bool more) {
  for (int64_t r = 0; r < rows; ++r, total += kPanel)
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const auto part = [&](int64_t i) {
        const int64_t at = r * halves * kParts + i;
        vint whole, zero;
        std::memcpy(&whole, products + at * kPanel + n, sizeof whole);
        if (!kZeros) return __builtin_convertvector(whole - sums[at * groups], vfloat);
        std::memcpy(&zero, zeros + n, sizeof zero);
        return __builtin_convertvector(whole - zero * sums[at * groups], vfloat);
      };
      vfloat number = part(0);
      if (kParts == 2) number = number * 256.f + part(1);
      number = number * row_scales[r * halves * groups] * load(scales + n);
      store(total + n, more ? load(total + n) + number : number);
    }
}

// What a thread works on.
struct Workspace {
  float* row;        // of the input, and once more in its own order
  int32_t* products; // of a few rows and a panel
  float* totals;     // of all rows of a task
  uint8_t* widened;  // weights of a group, a byte each

  Workspace(Scratch& scratch, const QuantizedLinearArguments& a, const Layout& layout, int64_t rows) {
    const int64_t group_bytes = a.bits == 8 ? 0 : layout.group_steps * kStepBytes;
    const int64_t few = kTiledRows * kPanel, all = rows * kPanel;
    scratch.reserve((2 * a.inputs + few + all) * 4 + group_bytes + 4 * 64);
    row = scratch.take<float>(2 * a.inputs);
    products = scratch.take<int32_t>(few);
    totals = scratch.take<float>(all);
    widened = scratch.take<uint8_t>(group_bytes);
  }
};

// Rows that are multiplied with a panel together, and by which weight's.
struct Block {
  int64_t first, rows, weight;
};

// All rows, in blocks of at most `most`.
void divide(std::vector<Block>& blocks, const QuantizedLinearArguments& a, int64_t most) {
  blocks.clear();
  for (int64_t weight = 0; weight < a.weights; ++weight) {
    const int64_t end = a.starts ? a.starts[weight + 1] : a.rows;
    for (int64_t first = a.starts ? a.starts[weight] : 0; first < end; first += most)
      blocks.push_back({first, std::min(most, end - first), weight});
  }
}

// A panel of a block's weight.
const char* panel_at(const QuantizedLinearArguments& a, const Layout& layout, const Block& block, int64_t panel) {
  return a.weight + (block.weight * layout.panels + panel) * layout.panel_bytes;
}

// space.totals[r][n]: the panel's results for the rows of a block.
template <int kBits, int kParts>
void multiply_panel(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, const Block& block,
                    int64_t panel, const Workspace& space) {
  const int64_t first = block.first, rows = block.rows;
  const char* weights = panel_at(a, layout, block, panel);
  const int64_t each = x.rows_each(), groups = layout.groups;
  const bool tiles = integers_on_tiles(rows * each), widens = kBits == 4 && rows * each > kMaxIntegerRows;
  const auto add = a.zeros ? add_group<kParts, true> : add_group<kParts, false>;
  alignas(64) int32_t zeros[2][kPanel];
  for (int64_t g = 0; g < groups; ++g) {
    const Group stored = group_at(weights, layout, g);
    Group group = stored;
    if (widens) {
      widen_steps(space.widened, group.weights, group.steps);
      group.weights = space.widened;
    }
    for (int64_t h = 0; a.zeros && h < x.halves; ++h) zeros_of(zeros[h], a, group.heads + h * layout.head_bytes);
    // The next group's weights, or the next panel's, follow the heads after this one's.
    const uint8_t* next = stored.weights + stored.steps * layout.step_bytes + layout.heads * layout.head_bytes;
    const int64_t lines = widens ? 2 : 4, rounds = stored.steps * layout.step_bytes / (lines * kLine);
    const int64_t pieces = pieces_of(rows, kMaxIntegerRows / each);
    for (int64_t r = 0, piece, i = 0; r < rows; r += piece, ++i) {
      piece = integer_piece(rows - r, each, tiles);
      const bool once = piece == rows && !widens;
      const Fetch fetch = fetch_of_piece(stored.weights, next, rounds, lines, pieces, i);
      const int64_t row = first + r;
      const int8_t* from = x.integers + row * each * x.columns + g * layout.group_steps * kStep;
      const auto multiply = kBits == 8 || widens ? integer_products<8> : integer_products<4>;
      multiply(from, x.columns, group.weights, group.steps, space.products, piece * each, tiles, once, fetch);
      for (int64_t h = 0; h < x.halves; ++h) {
        const int64_t half = row * x.halves + h;
        add(space.totals + r * kPanel, space.products + h * kParts * kPanel, x.sums + half * kParts * groups + g,
            x.scales + half * groups + g, groups, x.halves, (const float*)(group.heads + h * layout.head_bytes),
            zeros[h], piece, g + h > 0);
      }
    }
  }
}

template <class Format>
void write_panel(const QuantizedLinearArguments& a, const Block& block, int64_t panel, const float* totals) {
  const int64_t begin = panel * kPanel, count = std::min(kPanel, a.outputs - begin);
  alignas(64) float bias[kPanel];
  if (a.bias) {
    const int64_t at = block.weight * a.outputs + begin;
    load_floats(bias, a.bias + at * bytes_of(a.bias_dtype), a.bias_dtype, count, 1);
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    auto* to = (typename Format::element*)a.out + (block.first + r) * a.outputs + begin;
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
  const Layout layout(a.inputs, a.outputs, a.bits, a.group, a.zeros);
  const int64_t columns = layout.steps * kStep, each = kParts * layout.heads;
  const int64_t padded = round_up(a.rows * each, kTiledRows), scales = padded * layout.groups;
  inputs.reserve(padded * columns + scales * 8 + 3 * 64);
  const Inputs x{columns, kParts, layout.heads, inputs.take<int8_t>(padded * columns), inputs.take<float>(scales),
                 inputs.take<int32_t>(scales)};
  // As many rows at a time as stay in the second cache together.
  const int64_t most =
      std::clamp((1 << 20) / (columns * each) / kTiledRows, (int64_t)1, (int64_t)16) * kTiledRows;
  static thread_local std::vector<Block> found;
  divide(found, a, most);
  const std::vector<Block>& blocks = found;  // the caller's, for all threads
  const bool alone = a.rows * a.inputs < kFewElements;
  if (alone) {
    const Workspace space(own, a, layout, 0);
    for (int64_t r = 0; r < a.rows; ++r) round_row(a, layout, x, r, space.row);
  }
  Shares shares((int64_t)blocks.size() * layout.panels, a.threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    const Workspace space(own, a, layout, std::min(most, a.rows));
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; ++r) round_row(a, layout, x, r, space.row);
    }
    shares.take(omp_get_thread_num(), [&](int64_t task) {
      const Block& block = blocks[task / layout.panels];
      const int64_t panel = task % layout.panels;
      multiply_panel<kBits, kParts>(a, layout, x, block, panel, space);
      with_format(a.dtype, [&](auto format) { write_panel<decltype(format)>(a, block, panel, space.totals); });
    });
#if defined(PAGODA_TILES)
    release_tiles();
#endif
  }
}

// A row of the input in its own dtype or as floats, in the order of the weight's columns, beyond its end zeros.
void order_row(uint16_t* to, const QuantizedLinearArguments& a, int64_t row, int64_t begin, int64_t count) {
  const uint16_t* from = (const uint16_t*)a.input + row * a.input_row;
  if (a.order) for (int64_t k = 0; k < count; ++k) to[k] = from[a.order[begin + k]];
  else std::memcpy(to, from + begin, count * 2);
}
void order_row(float* to, const QuantizedLinearArguments& a, int64_t row, int64_t begin, int64_t count) {
  const char* from = a.input + row * a.input_row * bytes_of(a.dtype);
  if (a.order) for (int64_t k = 0; k < count; ++k) to[k] = load_entry(from, a.order[begin + k], a.dtype);
  else load_floats(to, from + begin * bytes_of(a.dtype), a.dtype, count, 1);
}

// Inputs are not rounded: Kind says what they are multiplied as.
template <class Kind>
void run_float8(const QuantizedLinearArguments& a) {
  typedef std::conditional_t<Kind::kPerElement == 2, uint16_t, float> Number;
  static thread_local Scratch inputs, own;
  const Layout layout(a.inputs, a.outputs, 8, a.group);
  Float8Inputs<Kind> x(layout, a.rows);
  inputs.reserve(x.elements(layout) * sizeof *x.memory + 64);
  x.memory = inputs.take<typename Kind::element>(x.elements(layout));
  const auto pack = [&](int64_t row) {
    for (int64_t k = 0; k < a.inputs; k += x.chunk) {
      const int64_t count = std::min(x.chunk, a.inputs - k);
      Number* to = (Number*)x.at(row, k);
      order_row(to, a, row, k, count);
      std::memset(to + count, 0, (x.chunk - count) * sizeof *to);
    }
  };
  // As many rows at a time as stay in the second cache together.
  const int64_t row_bytes = layout.steps * kStep * (int64_t)sizeof(Number);
  const int64_t most = std::clamp((1 << 20) / row_bytes / kFloat8Rows, (int64_t)1, (int64_t)10) * kFloat8Rows;
  static thread_local std::vector<Block> found;
  divide(found, a, most);
  const std::vector<Block>& blocks = found;  // the caller's, for all threads
  const bool alone = a.rows * a.inputs < kFewElements;
  for (int64_t r = 0; alone && r < a.rows; ++r) pack(r);
  Shares shares((int64_t)blocks.size() * layout.panels, a.threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    const int64_t results = std::min(most, a.rows) * kPanel;
    own.reserve(kFloat8Widened<Kind> * sizeof *x.memory + (kFloat8Sums + results) * 4 + 3 * 64);
    auto* widened = own.take<typename Kind::element>(kFloat8Widened<Kind>);
    float *sums = own.take<float>(kFloat8Sums), *totals = own.take<float>(results);
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; ++r) pack(r);
    }
    shares.take(omp_get_thread_num(), [&](int64_t task) {
      const Block& block = blocks[task / layout.panels];
      const int64_t panel = task % layout.panels;
      const char* weights = panel_at(a, layout, block, panel);
      float8_panel(x, block.first, block.rows, weights, layout, widened, sums, totals);
      with_format(a.dtype, [&](auto format) { write_panel<decltype(format)>(a, block, panel, totals); });
    });
#if defined(PAGODA_TILES)
    release_tiles();
#endif
  }
}

void run_float8(const QuantizedLinearArguments& a) {
#if defined(PAGODA_FLOAT8_PAIRS)
  if (a.dtype == kBFloat16) return run_float8<Float8Pairs>(a);
#endif
  run_float8<Float8Floats>(a);
}

}  // namespace

extern "C" int64_t pagoda_quantized_linear(const QuantizedLinearArguments* arguments) {
  const QuantizedLinearArguments& a = *arguments;
  if (a.rows == 0 || a.outputs == 0) return 0;
  if (a.code == kFloat8) run_float8(a);
  else if (a.bits == 8) a.input_bits == 8 ? run<8, 1>(a) : run<8, 2>(a);
  else a.input_bits == 8 ? run<4, 1>(a) : run<4, 2>(a);
  return 0;
}
