// CPU kernel of pagoda::invariant_linear (its Python twin is in invariant_linear.py; keep them in step): products whose
// sums are taken in one order, whatever the number of rows, of threads, and the place of a row among the others.
//
// Weights are read where and as they lie, out[r][n] = sum_k x[r][k] w[n][k]. Where the numbers of an output follow each
// other, lane j of a vector sums the products of every kLanes-th input from j on, and the lanes are folded in halves at
// last. Where those of an input do (a transposed weight), a lane is an output and adds one product after the other.
// Rows and outputs are blocked for registers and caches, which moves sums between memory and registers and rounds
// nothing. Processors with dot products of bf16 take those, for one row as for many.

#include "multiply.h"
#include "rows.h"
#include "scratch.h"
#include "shares.h"

struct InvariantLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;  // or null
  char* out;
  int64_t dtype, bias_dtype;
  int64_t rows, inputs, outputs, input_row;
  int64_t weight_row, weight_column;  // one of them is 1
  int64_t threads;
};
static_assert(sizeof(InvariantLinearArguments) == 13 * 8, "invariant_linear.py packs 13 integers");

namespace {

constexpr int64_t kBlockRows = 64;   // rows that share a stretch of weights
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kBlockOutputs = 16;  // a multiple of kLanes
constexpr int kPieceRows = kRegisters == 32 ? 6 : 3;  // rows x 4 sums, and what they are made of, fill the registers
constexpr int kLoneVectors = 8;                   // of a single row: fewer would wait for each other

// Weights as floats.
template <class Number>
struct Wide {
  typedef Number Format;
  typedef typename Format::element element;
  typedef float input;
  typedef vfloat vector;
  static constexpr int64_t kStep = kLanes;
  static inline vfloat read_input(const input* p) { return load(p); }
  static inline vfloat read(const element* p) { return Format::read(p); }
  static inline vfloat read_first(const element* p, int64_t n) { return read_part<Format>(p, n); }
  static inline vfloat add(vfloat sum, vfloat x, vfloat w) { return multiply_add(sum, x, w); }
};

#if defined(PAGODA_BF16)
struct Paired {
  typedef BrainHalf Format;
  typedef uint16_t element;
  typedef uint16_t input;
  typedef __m512i vector;
  static constexpr int64_t kStep = 2 * kLanes;
  static inline vector read_input(const input* p) { return _mm512_loadu_si512(p); }
  static inline vector read(const element* p) { return _mm512_loadu_si512(p); }
  static inline vector read_first(const element* p, int64_t n) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
  }
  static inline vfloat add(vfloat sum, vector x, vector w) { return Bf16::fma(sum, x, w); }
};
#elif defined(PAGODA_ARM_BF16)
struct Paired {
  typedef BrainHalf Format;
  typedef uint16_t element;
  typedef uint16_t input;
  typedef bfloat16x8_t vector;
  static constexpr int64_t kStep = 2 * kLanes;
  static inline vector read_input(const input* p) { return read(p); }
  static inline vector read(const element* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
  static inline vector read_first(const element* p, int64_t n) {
    element whole[kStep] = {};
    std::memcpy(whole, p, n * sizeof *p);
    return read(whole);
  }
  static inline vfloat add(vfloat sum, vector x, vector w) { return (vfloat)vbfdotq_f32((float32x4_t)sum, x, w); }
};
#endif

// The input's rows next to each other, in the form that the products read, beyond their end zeros.
template <class Kind>
struct InputRows {
  typedef typename Kind::input input;
  input* rows;
  int64_t columns;
  void fill(const InvariantLinearArguments& a, int64_t row) const {
    const char* from = a.input + row * a.input_row * bytes_of(a.dtype);
    input* to = rows + row * columns;
    if constexpr (sizeof(input) == 4) load_floats((float*)to, from, a.dtype, a.inputs, 1);
    else std::memcpy(to, from, a.inputs * sizeof(input));
    std::memset(to + a.inputs, 0, (columns - a.inputs) * sizeof(input));
  }
};

// sums[r * kBlockOutputs + c] += products of inputs [0, steps * kStep + rest) for R rows and C outputs.
template <class Kind, int R, int C>
void add_products(const typename Kind::input* x, int64_t x_row, const typename Kind::element* w, int64_t w_row,
                  int64_t steps, int64_t rest, vfloat* sums) {
  vfloat sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = sums[r * kBlockOutputs + c];
  const auto add = [&](const auto& read) {
    typename Kind::vector row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = Kind::read_input(x + r * x_row);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const typename Kind::vector weight = read(w + c * w_row);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = Kind::add(sum[r][c], row[r], weight);
    }
  };
  for (int64_t s = 0; s < steps; ++s, x += Kind::kStep, w += Kind::kStep)
    add([](const typename Kind::element* p) { return Kind::read(p); });
  if (rest) add([rest](const typename Kind::element* p) { return Kind::read_first(p, rest); });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r * kBlockOutputs + c] = sum[r][c];
}

// The same for `outputs` outputs.
template <class Kind, int R>
void add_rows(const typename Kind::input* x, int64_t x_row, const typename Kind::element* w, int64_t w_row,
              int64_t steps, int64_t rest, vfloat* sums, int64_t outputs) {
  constexpr int kMany = R == 1 ? kLoneVectors : 4;
  int64_t n = 0;
  for (; n + kMany <= outputs; n += kMany)
    add_products<Kind, R, kMany>(x, x_row, w + n * w_row, w_row, steps, rest, sums + n);
  for (; n < outputs; ++n) add_products<Kind, R, 1>(x, x_row, w + n * w_row, w_row, steps, rest, sums + n);
}

// Of each 2 * kHalf lanes the halves of a, added up, then those of b.
template <int kHalf>
inline vfloat fold(vfloat a, vfloat b) {
  vint lower, upper;
  for (int i = 0; i < kLanes; ++i) {
    const bool first = i % (2 * kHalf) < kHalf;
    lower[i] = first ? i : kLanes + i - kHalf;
    upper[i] = first ? i + kHalf : kLanes + i;
  }
  return __builtin_shuffle(a, b, lower) + __builtin_shuffle(a, b, upper);
}

// Lane i becomes the sum of the lanes of v[i]; v is used up.
template <int kHalf = kLanes / 2>
inline vfloat sums_of_lanes(vfloat* v) {
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) v[i] = fold<kHalf>(v[i], v[i + kHalf]);
  if constexpr (kHalf > 1) return sums_of_lanes<kHalf / 2>(v);
  return v[0];
}

// Writes n <= kLanes results, the bias added.
template <class Format>
inline void write_results(const InvariantLinearArguments& a, int64_t row, int64_t first, int64_t n, vfloat sum) {
  if (a.bias) {
    alignas(64) float bias[kLanes] = {};
    load_floats(bias, a.bias + first * bytes_of(a.bias_dtype), a.bias_dtype, n, 1);
    sum += load(bias);
  }
  auto* to = (typename Format::element*)a.out + row * a.outputs + first;
  if (n == kLanes) Format::write(to, sum);
  else write_part<Format>(to, sum, n);
}

// Rows [first, first + rows) of outputs [begin, begin + outputs), whose numbers follow each other.
template <class Kind>
void multiply_block_by_outputs(const InvariantLinearArguments& a, const InputRows<Kind>& x, int64_t first, int64_t rows,
                               int64_t begin, int64_t outputs) {
  vfloat sums[kBlockRows * kBlockOutputs];
  std::memset(sums, 0, rows * kBlockOutputs * sizeof(vfloat));
  const auto* weights = (const typename Kind::element*)a.weight + begin * a.weight_row;
  for (int64_t k = 0; k < a.inputs; k += kBlockInputs) {
    const int64_t inputs = std::min(kBlockInputs, a.inputs - k);
    const int64_t steps = inputs / Kind::kStep, rest = inputs % Kind::kStep;
    for (int64_t r = 0, count; r < rows; r += count) {
      count = equal_piece(rows - r, kPieceRows);
      const auto* from = x.rows + (first + r) * x.columns + k;
      vfloat* to = sums + r * kBlockOutputs;
      const auto add = [&](auto size) {
        add_rows<Kind, decltype(size)::value>(from, x.columns, weights + k, a.weight_row, steps, rest, to, outputs);
      };
      switch (count) {
        case 1: add(std::integral_constant<int, 1>{}); break;
        case 2: add(std::integral_constant<int, 2>{}); break;
        case 3: add(std::integral_constant<int, 3>{}); break;
#if defined(PAGODA_AVX512) || defined(__aarch64__)
        case 4: add(std::integral_constant<int, 4>{}); break;
        case 5: add(std::integral_constant<int, 5>{}); break;
        case 6: add(std::integral_constant<int, 6>{}); break;
#endif
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < outputs; n += kLanes)
      write_results<typename Kind::Format>(a, first + r, begin + n, std::min<int64_t>(kLanes, outputs - n),
                                           sums_of_lanes(sums + r * kBlockOutputs + n));
}

// R rows from `row` on of C vectors of outputs from `begin` on, of which the last one has `last` lanes.
template <class Format, int R, int C>
void multiply_by_inputs(const InvariantLinearArguments& a, const float* x, int64_t x_row, int64_t row, int64_t begin,
                        int64_t last) {
  const auto* w = (const typename Format::element*)a.weight + begin;
  vfloat sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = vfloat{};
  for (int64_t k = 0; k < a.inputs; ++k, w += a.weight_column) {
    vfloat weight[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      weight[c] = c < C - 1 || last == kLanes ? Format::read(w + c * kLanes) : read_part<Format>(w + c * kLanes, last);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vfloat spread = splat(x[r * x_row + k]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(sum[r][c], spread, weight[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      write_results<Format>(a, row + r, begin + c * kLanes, c < C - 1 ? kLanes : last, sum[r][c]);
}

// Rows [first, first + rows) of outputs [begin, begin + outputs), whose numbers lie a weight's column apart.
template <class Format>
void multiply_block_by_inputs(const InvariantLinearArguments& a, const InputRows<Wide<Format>>& x, int64_t first,
                              int64_t rows, int64_t begin, int64_t outputs) {
  for (int64_t r = 0, count; r < rows; r += count) {
    count = std::min<int64_t>(rows - r, 2);
    const float* from = x.rows + (first + r) * x.columns;
    for (int64_t n = 0; n < outputs;) {
      const int64_t left = outputs - n, row = first + r, at = begin + n;
      if (left >= 4 * kLanes) {
        if (count == 2) multiply_by_inputs<Format, 2, 4>(a, from, x.columns, row, at, kLanes);
        else multiply_by_inputs<Format, 1, 4>(a, from, x.columns, row, at, kLanes);
        n += 4 * kLanes;
      } else {
        const int64_t last = std::min<int64_t>(kLanes, left);
        if (count == 2) multiply_by_inputs<Format, 2, 1>(a, from, x.columns, row, at, last);
        else multiply_by_inputs<Format, 1, 1>(a, from, x.columns, row, at, last);
        n += last;
      }
    }
  }
}

template <class Kind>
void run_invariant(const InvariantLinearArguments& a) {
  static thread_local Scratch scratch;
  const bool by_inputs = a.weight_column != 1;
  const int64_t columns = round_up(a.inputs, Kind::kStep);
  scratch.reserve(a.rows * columns * sizeof(typename Kind::input));
  const InputRows<Kind> x{scratch.take<typename Kind::input>(a.rows * columns), columns};
  const bool alone = a.rows * a.inputs < kFewElements;
  for (int64_t r = 0; alone && r < a.rows; ++r) x.fill(a, r);
  const int64_t width = by_inputs ? 8 * kLanes : kBlockOutputs;
  const int64_t panels = pieces_of(a.outputs, width), blocks = pieces_of(a.rows, kBlockRows);
  const int64_t threads = a.rows * a.inputs * a.outputs < kFewElements ? 1 : a.threads;
  Shares shares(blocks * panels, threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; ++r) x.fill(a, r);
    }
    shares.take(omp_get_thread_num(), [&](int64_t task) {
      const int64_t first = task / panels * kBlockRows, begin = task % panels * width;
      const int64_t rows = std::min(kBlockRows, a.rows - first), outputs = std::min(width, a.outputs - begin);
      if constexpr (sizeof(typename Kind::input) == 4)
        if (by_inputs) return multiply_block_by_inputs<typename Kind::Format>(a, x, first, rows, begin, outputs);
      multiply_block_by_outputs<Kind>(a, x, first, rows, begin, outputs);
    });
  }
}

}  // namespace

extern "C" int64_t pagoda_invariant_linear(const InvariantLinearArguments* arguments) {
  const InvariantLinearArguments& a = *arguments;
  if (a.rows == 0 || a.outputs == 0) return 0;
#if defined(PAGODA_BF16) || defined(PAGODA_ARM_BF16)
  if (a.dtype == kBFloat16 && a.weight_column == 1) {
    run_invariant<Paired>(a);
    return 0;
  }
#endif
  with_format(a.dtype, [&](auto format) { run_invariant<Wide<decltype(format)>>(a); });
  return 0;
}
