// CPU kernel of pagoda::quantized_linear (its Python twin is in quantized_linear.py; keep them in step): weights are
// int8, int4 or fp8 (fp4 is read as int4 by a table) with a scale per output and group of inputs, laid out in panels
// (see panels.h).
//
// The columns of a weight may be stored in another order, in which the inputs are read then. Inputs are rounded to 8 or
// 16 bits with a scale per row and group, or step where groups share these, those of 16 as two rows of 8; or to 8 with
// one per row; or to 8 with a scale and an offset that are given, whose numbers have 9 bits without the offset and are
// two rows, too. Products and their sums within a group are exact then, and groups are added in their order: a row's
// result depends neither on how many rows there are nor on the instructions at hand. Inputs of fp8 weights are not
// rounded (see float8.h).

#include "fetch.h"
#include "float8.h"
#include "int8_rows.h"
#include "rows.h"
#include "scratch.h"
#include "shares.h"
#include "split_groups.h"
#include "split_pairs.h"
#include "weight_integers.h"
#include "weight_words.h"

#include <vector>

// Twice the fp4 numbers, and 12.
static constexpr uint8_t kFloat4Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int32_t kFloat4Zero = 12;

struct QuantizedLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;      // or null
  const int32_t* order;  // or null: of the stored columns
  char* out;
  int64_t dtype, bias_dtype;
  int64_t rows, inputs, outputs, input_row;
  int64_t bits, group, input_bits, zeros, threads;
  int64_t code;  // a Code
  // Of several weights, one after the other: the first row that each is for, and at last `rows`; null for one weight.
  // Each has `outputs` of the bias.
  const int64_t* starts;
  int64_t weights;
  // Of inputs of 8 bits whose rounding is given: x = (number - input_offset) * input_scale. 0 where it follows from
  // them.
  double input_scale;
  int64_t input_offset;
  int64_t whole_rows;  // inputs of 8 bits have one scale for a row, however many groups there are
};
static_assert(sizeof(QuantizedLinearArguments) == 22 * 8, "quantized_linear.py packs 22 numbers");

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

// zeros[n]: what a row's sum of inputs is multiplied with and taken away, in a head of a group that shares a step.
static void scaled_zeros_of(float* zeros, const QuantizedLinearArguments& a, const char* head) {
  const float* scales = (const float*)head;
  if (a.code == kAffine) {
    const float flipped = a.bits == 8 ? kFlip : 0;
    for (int64_t n = 0; n < kPanel; ++n) zeros[n] = scales[kPanel + n] - flipped * scales[n];
    return;
  }
  int32_t own[kPanel];
  zeros_of(own, a, head);
  for (int64_t n = 0; n < kPanel; ++n) zeros[n] = (float)own[n] * scales[n];
}

// The input as integers, beyond its end zeros. A number of 16 bits is 256 times one of a row and one of the next.
struct Inputs {
  int64_t columns;  // a multiple of kStep
  int64_t parts;    // rows of integers of each row that are multiplied
  int8_t* integers;
  // Where these are multiplied as words: the same in 16 bits; if `joined`, a row for both rows of int8, and one part.
  int16_t* words;
  // Where these are multiplied as pairs of bf16 (see split_pairs.h): [columns / 16][pair_rows][16]; or null.
  uint32_t* pairs;
  int64_t pair_rows;
  bool joined;
  float* scales;  // [rows][groups]
  // Of the integers, times the zero where all weights have the same: [rows][parts][groups]. Where groups share a
  // step [rows][groups][heads], of the numbers of 16 bits, and times minus the zero.
  int32_t* sums;
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
  const int64_t parts = x.joined ? 2 : x.parts;
  int8_t* to = x.integers + row * parts * x.columns;
  for (int64_t part = 0; part < parts; ++part)
    std::memset(to + part * x.columns + a.inputs, 0, x.columns - a.inputs);
  const int32_t zero = a.zeros ? 1 : a.code == kFloat4 ? kFloat4Zero : zero_of(a.bits);
  const int64_t heads = layout.heads;
  const float of_row = a.whole_rows ? quantize_row(to, floats, a.inputs) : 0;
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t begin = g * layout.group_steps * kStep;
    const int64_t count = std::min(a.inputs - begin, layout.steps_of(g) * kStep);
    float& scale = x.scales[row * layout.groups + g];
    if (a.whole_rows)
      scale = of_row;
    else if (a.input_scale != 0)
      scale = quantize_row_by(to + begin, parts == 1 ? nullptr : to + x.columns + begin, floats + begin, count,
                              (float)a.input_scale, (float)a.input_offset);
    else
      scale = parts == 1 ? quantize_row(to + begin, floats + begin, count)
                         : quantize_row_in_two(to + begin, to + x.columns + begin, floats + begin, count);
    const auto sum_of = [&](int64_t part, int64_t first, int64_t length) {
      const int8_t* numbers = to + part * x.columns + begin + first;
      int32_t sum = 0;
      for (int64_t i = 0; i < length; ++i) sum += numbers[i];
      return sum * zero;
    };
    if (heads == 1 && x.joined)
      x.sums[row * layout.groups + g] = 256 * sum_of(0, 0, count) + sum_of(1, 0, count);
    for (int64_t part = 0; heads == 1 && !x.joined && part < parts; ++part)
      x.sums[(row * x.parts + part) * layout.groups + g] = sum_of(part, 0, count);
    for (int64_t h = 0; heads > 1 && h < heads; ++h) {
      const int64_t length = kStep / heads;  // beyond the inputs are zeros
      const int32_t first = sum_of(0, h * length, length);
      const int32_t sum = parts == 1 ? first : 256 * first + sum_of(1, h * length, length);
      x.sums[(row * layout.groups + g) * heads + h] = a.zeros ? sum : -sum;
    }
  }
#if defined(PAGODA_WORDS)
  for (int64_t part = 0; part < x.parts; ++part)
    write_words(x.words + (row * x.parts + part) * x.columns, to + part * x.columns,
                x.joined ? to + x.columns : nullptr, x.columns);
#endif
#if defined(PAGODA_TILES)
  for (int64_t k = 0; x.pairs && k < x.columns; k += kTileInputs) {
    uint32_t* pairs = x.pairs + (k * x.pair_rows + row * kTileInputs);
    for (int64_t i = 0; i < kTileInputs; ++i) pairs[i] = pair_of(256.f * to[k + i], to[x.columns + k + i]);
  }
#endif
}

// total[r][n] = (total[r][n] if `more`) + the number that the products of row r stand for, times both scales. kZeros: the
// outputs have zeros of their own.
template <int kParts, bool kZeros>
void add_group(float* total, const int32_t* products, const int32_t* sums, const float* row_scales, int64_t groups,
               const float* scales, const int32_t* zeros, int64_t rows, bool more) {
  for (int64_t r = 0; r < rows; ++r, total += kPanel)
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const auto part = [&](int64_t i) {
        const int64_t at = r * kParts + i;
        vint whole, zero;
        std::memcpy(&whole, products + at * kPanel + n, sizeof whole);
        if (!kZeros) return __builtin_convertvector(whole - sums[at * groups], vfloat);
        std::memcpy(&zero, zeros + n, sizeof zero);
        return __builtin_convertvector(whole - zero * sums[at * groups], vfloat);
      };
      vfloat number = part(0);
      if (kParts == 2) number = number * 256.f + part(1);
      number = number * row_scales[r * groups] * load(scales + n);
      store(total + n, more ? load(total + n) + number : number);
    }
}

// The same of a step that kHeads groups share, whose numbers are whole[kHeads][each][kPanel] and whose scales lie
// `head_bytes` apart. kZeros: sums[kHeads] of a row's inputs are taken away, times zeros[kHeads][kPanel], which have
// their scales already. kApart: the parts that each number is still in, in rows one after the other and without
// `sums`, which are what they begin with unless there are zeros; 0: none.
template <bool kZeros, int kHeads, int kApart>
void add_step(float* total, const int32_t* whole, int64_t each, const int32_t* sums, const float* row_scales,
              int64_t groups, const char* heads, int64_t head_bytes, const float* zeros, int64_t rows, bool more) {
  constexpr int64_t kRows = kApart ? kApart : 1;
  for (int64_t r = 0; r < rows; ++r, total += kPanel, whole += kRows * kPanel, sums += kHeads * groups) {
    const vfloat row_scale = splat(row_scales[r * groups]);
#pragma GCC unroll 4
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      vfloat number{};
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        vint group, second;
        std::memcpy(&group, whole + h * each * kPanel + n, sizeof group);
        if constexpr (kApart == 2) {
          std::memcpy(&second, whole + (h * each + 1) * kPanel + n, sizeof second);
          group = group * 256 + second;
        }
        if (kApart && !kZeros) group = group + sums[h];
        const vfloat floats = __builtin_convertvector(group, vfloat);
        const vfloat scale = load((const float*)(heads + h * head_bytes) + n);
        number = h ? multiply_add(number, floats, scale) : floats * scale;
        if (kZeros) number = multiply_add(number, splat(-(float)sums[h]), load(zeros + h * kPanel + n));
      }
      store(total + n, more ? multiply_add(load(total + n), number, row_scale) : number * row_scale);
    }
  }
}

// What a thread works on.
struct Workspace {
  float* row;        // of the input, and once more in its own order
  int32_t* products; // of a few rows and a panel
  float* totals;     // of all rows of a task
  uint8_t* widened;  // weights of a group, a byte each, or of a step as pairs

  Workspace(Scratch& scratch, const QuantizedLinearArguments& a, const Layout& layout, int64_t rows) {
    int64_t group_bytes = a.bits == 8 ? 0 : std::max(layout.group_steps, kSplitSteps) * kStepBytes;
    if (layout.heads == kPairGroups) group_bytes = std::max(group_bytes, kPairBytes);
    const int64_t few = kTiledRows * kPanel * layout.heads, all = rows * kPanel;
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
  const int64_t groups = layout.groups;
  const bool tiles = integers_on_tiles(rows * kParts), widens = kBits == 4 && rows * kParts > kMaxIntegerRows;
  const auto add = a.zeros ? add_group<kParts, true> : add_group<kParts, false>;
  alignas(64) int32_t zeros[kPanel];
  for (int64_t g = 0; g < groups; ++g) {
    const Group stored = group_at(weights, layout, g);
    Group group = stored;
    if (widens) {
      widen_steps(space.widened, group.weights, group.steps);
      group.weights = space.widened;
    }
    if (a.zeros) zeros_of(zeros, a, group.heads);
    // The next group's weights, or the next panel's, follow the head after this one's.
    const uint8_t* next = stored.weights + stored.steps * layout.step_bytes + layout.head_bytes;
    const int64_t lines = widens ? 2 : 4, rounds = stored.steps * layout.step_bytes / (lines * kLine);
    const int64_t pieces = pieces_of(rows, kMaxIntegerRows / kParts);
    for (int64_t r = 0, piece, i = 0; r < rows; r += piece, ++i) {
      piece = integer_piece(rows - r, kParts, tiles);
      const bool once = piece == rows && !widens;
      const Fetch fetch = fetch_of_piece(stored.weights, next, rounds, lines, pieces, i);
      const int64_t row = first + r, at = row * kParts * x.columns + g * layout.group_steps * kStep;
#if defined(PAGODA_WORDS)
      const auto multiply = kBits == 8 || widens ? word_products<8> : word_products<4>;
      multiply(x.words + at, x.columns, group.weights, group.steps, space.products, piece * kParts);
#else
      const auto multiply = kBits == 8 || widens ? integer_products<8> : integer_products<4>;
      multiply(x.integers + at, x.columns, group.weights, group.steps, space.products, piece * kParts, tiles, once,
               fetch);
#endif
      add(space.totals + r * kPanel, space.products, x.sums + row * kParts * groups + g, x.scales + row * groups + g,
          groups, (const float*)group.heads, zeros, piece, g > 0);
    }
  }
}

#if defined(PAGODA_TILES)
// The same where four groups of 4 bits share a step and inputs are pairs of bf16.
template <bool kZeros>
void multiply_pairs_panel(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x, const Block& block,
                          int64_t panel, const Workspace& space) {
  const char* codes = panel_at(a, layout, block, panel);
  const int64_t groups = layout.groups;
  alignas(64) uint32_t numbers[16];
  for (int i = 0; i < 16; ++i) {
    const int number = a.code == kFloat4 ? kFloat4Numbers[i] - kFloat4Zero : kZeros ? i : i - zero_of(4);
    numbers[i] = pair_of(number, number);
  }
  uint32_t* widened = (uint32_t*)space.widened;
  alignas(64) float zeros[2][kPairGroups][kPanel];
  alignas(64) PairSums sums[3];
  int64_t turn = 0;  // of the three
  PairStep<kZeros> before{};
  configure_tiles(kTileRows);
  std::fill_n(space.totals, block.rows * kPanel, -0.f);  // what a sum can begin with and not show
  for (int64_t g = 0; g < groups; ++g) {
    const Group stored = group_at(codes, layout, g);
    for (int64_t i = 0; i < kPairGroups * layout.head_bytes; i += kLine)
      __builtin_prefetch(stored.heads + kAhead + i, 0, 2);
    widen_to_pairs(widened, stored.weights, numbers);
    for (int h = 0; kZeros && h < kPairGroups; ++h)
      scaled_zeros_of(zeros[g % 2][h], a, stored.heads + h * layout.head_bytes);
    for (int64_t r = 0; r < block.rows; r += kTileRows) {
      const int64_t row = block.first + r, at = row * groups + g;
      const PairStep<kZeros> step{
          x.pairs + g * kStep * x.pair_rows + row * kTileInputs, x.pair_rows * kTileInputs, widened, stored.heads,
          layout.head_bytes, zeros[g % 2][0], x.scales + at, x.sums + at * kPairGroups, groups, space.totals + r * kPanel,
          std::min<int64_t>(kTileRows, block.rows - r)};
      for (int64_t output = 0; output < kPanel; output += 32, turn = (turn + 1) % 3)
        half_of_pairs(step, output, sums[turn], sums[(turn + 2) % 3], before.x ? &before : nullptr,
                      sums[(turn + 1) % 3]);
      before = step;
    }
  }
  end_of_pairs(before, sums[(turn + 1) % 3], sums[(turn + 2) % 3]);
}
#endif

// The same where kHeads groups share a step.
template <int kBits, int kParts, int kHeads>
void multiply_split_panel(const QuantizedLinearArguments& a, const Layout& layout, const Inputs& x,
                          const Block& block, int64_t panel, const Workspace& space) {
  const int64_t first = block.first, rows = block.rows;
#if defined(PAGODA_TILES)
  if constexpr (kBits == 4 && kParts == 2 && kHeads == kPairGroups)
    if (x.pairs && rows >= kLeastPairs)
      return (a.zeros ? multiply_pairs_panel<true> : multiply_pairs_panel<false>)(a, layout, x, block, panel, space);
#endif
  const char* codes = panel_at(a, layout, block, panel);
  const int64_t groups = layout.groups, apart = kHeads * layout.head_bytes + layout.step_bytes;
  const bool tiles = integers_on_tiles(rows * kParts), in_order = splits_in_order(kBits, rows * kParts);
  const bool widens = kBits == 4 && !in_order;
  const uint8_t* table = a.code == kFloat4 ? kFloat4Numbers : nullptr;
#if defined(PAGODA_WORDS)
  const auto add = a.zeros ? add_step<true, kHeads, 0> : add_step<false, kHeads, 0>;
#else
  auto add = a.zeros ? add_step<true, kHeads, 0> : add_step<false, kHeads, 0>;
  if (splits_leave_parts(tiles)) add = a.zeros ? add_step<true, kHeads, kParts> : add_step<false, kHeads, kParts>;
#endif
  static constexpr int32_t nothing[kSplitSteps * kHeads] = {};
  alignas(64) float zeros[kSplitSteps][kHeads][kPanel];
  for (int64_t g = 0, steps; g < groups; g += steps) {
    steps = tiles ? 1 : std::min(kSplitSteps, groups - g);
    const Group stored = group_at(codes, layout, g);
    for (int64_t s = 0; s < steps; ++s) {
      const char* heads = stored.heads + s * apart;
      if (widens) {
        for (int64_t i = 0; i < apart - layout.step_bytes; i += kLine) __builtin_prefetch(heads + kAhead + i, 0, 2);
        widen_steps(space.widened + s * kStepBytes, stored.weights + s * apart, 1, table);
      }
      for (int h = 0; a.zeros && h < kHeads; ++h, heads += layout.head_bytes) scaled_zeros_of(zeros[s][h], a, heads);
    }
    for (int64_t r = 0, piece; r < rows; r += piece) {
#if defined(PAGODA_WORDS)
      piece = equal_piece(rows - r, kMaxWordRows);
#else
      piece = integer_piece(rows - r, kParts, tiles);
#endif
      const int64_t row = first + r;
      const int32_t* sums = x.sums + (row * groups + g) * kHeads;
#if defined(PAGODA_WORDS)
      const int64_t each = piece * kParts;
      split_words<kHeads>(x.words + row * kParts * x.columns + g * kStep, x.columns,
                          widens ? space.widened : stored.weights, widens ? kStepBytes : apart, steps,
                          a.zeros ? nothing : sums, a.zeros ? 0 : groups * kHeads, space.products, piece);
#else
      const Split split{x.integers + row * kParts * x.columns + g * kStep, x.columns,
                        widens ? space.widened : stored.weights, widens ? kStepBytes : apart, steps,
                        a.zeros ? nothing : sums, a.zeros ? 0 : groups * kHeads, space.products};
      const int64_t each = split_products<kParts, kHeads>(split, piece, tiles, in_order, table);
#endif
      for (int64_t s = 0; s < steps; ++s)
        add(space.totals + r * kPanel, space.products + s * kHeads * each * kPanel, each, sums + s * kHeads,
            x.scales + row * groups + g + s, groups, stored.heads + s * apart, layout.head_bytes, zeros[s][0], piece,
            g + s > 0);
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
  const Layout layout(a.inputs, a.outputs, a.bits, a.group, a.code == kAffine ? sizeof(float) : a.zeros);
  auto multiply = layout.heads == 1   ? multiply_panel<kBits, kParts>
                  : layout.heads == 2 ? multiply_split_panel<kBits, kParts, 2>
                                      : multiply_split_panel<kBits, kParts, 4>;
  bool joined = false;
  int64_t words = 0;
#if defined(PAGODA_WORDS)
  words = a.rows;
  joined = kParts == 2 && (layout.heads > 1 || layout.group_steps * kStep <= kMostJoinedInputs);
  if (joined)
    multiply = layout.heads == 1   ? multiply_panel<kBits, 1>
               : layout.heads == 2 ? multiply_split_panel<kBits, 1, 2>
                                   : multiply_split_panel<kBits, 1, 4>;
  else
    words *= kParts;
#endif
  const int64_t pair_rows = kBits == 4 && kParts == 2 && layout.heads == kPairGroups ? rows_of_pairs(a.rows) : 0;
  // Tiles read on to the end of a multiple of 16 rows, from the first row of any weight. With an odd number of steps
  // rows do not meet in the same lines of the first cache.
  const int64_t columns = (layout.steps | 1) * kStep, padded = round_up(a.rows * kParts, kTiledRows) + kTiledRows;
  const int64_t scales = a.rows * layout.groups, sums = scales * std::max<int64_t>(kParts, layout.heads);
  inputs.reserve((padded + 2 * words + 4 * pair_rows) * columns + (scales + sums) * 4 + 5 * 64);
  const Inputs x{columns, joined ? 1 : kParts, inputs.take<int8_t>(padded * columns),
                 inputs.take<int16_t>(words * columns),
                 pair_rows ? inputs.take<uint32_t>(pair_rows * columns) : nullptr, pair_rows, joined,
                 inputs.take<float>(scales), inputs.take<int32_t>(sums)};
  // As many rows at a time as stay in the second cache together.
  const int64_t most =
      std::clamp((1 << 20) / (columns * (pair_rows ? 4 : kParts)) / kTiledRows, (int64_t)1, (int64_t)16) * kTiledRows;
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
      multiply(a, layout, x, block, panel, space);
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
  else if (a.bits == 8) a.input_bits == 8 && a.input_offset == 0 ? run<8, 1>(a) : run<8, 2>(a);
  else a.input_bits == 8 ? run<4, 1>(a) : run<4, 2>(a);
  return 0;
}
