// CPU kernel of pagoda::packed_linear for rows of bf16 over weights in panels of 16, 32 or 64 outputs, each
// [inputs / 2][outputs of the panel][2], padded with zeros to whole panels and to 32 inputs. Its Python twin is in
// packed_linear.py; keep them in step.
//
// On x86 processors that multiply bf16 it is oneDNN that lays weights out so and that takes many rows; few are ours.
// Elsewhere both are ours. Few rows wait for memory: threads read panels one after the other and fetch ahead (see
// shares.h, fetch.h).

#include "bf16_rows_arm.h"
#include "fetch.h"
#include "multiply.h"
#include "rows.h"
#include "scratch.h"
#include "shares.h"
#include "widened_rows.h"

struct BlockedLinearArguments {
  const char* input;
  const char* weight;
  const char* bias;  // or null
  char* out;
  int64_t bias_dtype;
  int64_t rows, inputs, outputs, input_row, panel, threads;
};
static_assert(sizeof(BlockedLinearArguments) == 11 * 8, "packed_linear.py packs 11 integers");

namespace {

constexpr int64_t kStepInputs = 32;
constexpr int64_t kStepPairs = 16;

template <int V>
void write_panel(const BlockedLinearArguments& a, int64_t first, int64_t rows, int64_t panel, const float* sums) {
  const int64_t begin = panel * V * 16, count = std::min<int64_t>(V * 16, a.outputs - begin);
  alignas(64) float bias[V * 16];
  if (a.bias) load_floats(bias, a.bias + begin * bytes_of(a.bias_dtype), a.bias_dtype, count, 1);
  for (int64_t r = 0; r < rows; ++r) {
    uint16_t* to = (uint16_t*)a.out + (first + r) * a.outputs + begin;
    for (int64_t n = 0; n < count; n += kLanes) {
      vfloat number = load(sums + r * V * 16 + n);
      if (a.bias) number = number + load(bias + n);
      if (count - n >= kLanes) BrainHalf::write(to + n, number);
      else write_part<BrainHalf>(to + n, number, count - n);
    }
  }
}

#if defined(PAGODA_BF16)
constexpr int64_t kTallest = 32;   // rows that the tiles take at once
constexpr int kFewestTiled = 5;    // rows; fewer leave the tiles idle
constexpr int kVectorRows = 6;     // rows x 4 vectors of sums fill the register file

// to[r][n] = sum_k x[r][k] w[k][n] for R rows and a panel of V vectors.
template <int R, int V>
void few_rows(const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t pairs, float* to, Fetch fetch) {
  constexpr int kChains = R * V >= 8 ? 1 : R * V >= 4 ? 2 : 4;  // a single one would wait for each sum
  __m512 sums[kChains][R][V];
#pragma GCC unroll 4
  for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[c][r][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k += kChains)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const uint32_t* at = w + (k + c) * V * 16;
      __m512bh weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = (__m512bh)_mm512_loadu_si512(at + v * 16);
      fetch.round();
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[r * x_stride + k + c]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[c][r][v] = _mm512_dpbf16_ps(sums[c][r][v], pair, weights[v]);
      }
    }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      __m512 sum = sums[0][r][v];
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, sums[c][r][v]);
      _mm512_storeu_ps(to + (r * V + v) * 16, sum);
    }
}

#if defined(PAGODA_TILES)
// The same for 16 or, if kTwo, 32 rows, which lie in tiles: [rows / 16][inputs / 32][16][32].
template <int V, bool kTwo>
void multiply_tall(const char* x, int64_t steps, const char* w, float* to) {
  constexpr int64_t kRowBytes = V * 64, kStepBytes = kStepPairs * kRowBytes, kTile = 1024;
  configure_tiles(16);
  for (int n = 0; n < V; n += 2) {
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const char* at = w + n * 64;
    for (int64_t s = 0; s < steps; ++s, at += kStepBytes) {
      for (int64_t i = 0; n == 0 && i < kStepBytes; i += 64) __builtin_prefetch(at + kAhead + i, 0, 2);
      _tile_loadd(4, x + s * kTile, 64);
      _tile_loadd(6, at, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (V > 1) {
        _tile_loadd(7, at + 64, kRowBytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwo) {
        _tile_loadd(5, x + (steps + s) * kTile, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* out = to + n * 16;
    _tile_stored(0, out, kRowBytes);
    if constexpr (V > 1) _tile_stored(1, out + 16, kRowBytes);
    if constexpr (kTwo) {
      _tile_stored(2, out + 16 * V * 16, kRowBytes);
      if constexpr (V > 1) _tile_stored(3, out + 16 * V * 16 + 16, kRowBytes);
    }
    asm volatile("" ::: "memory");
  }
}
#endif

// Where row r's step s of 32 inputs lies: row after row, or in tiles.
struct Packed {
  uint16_t* memory;
  int64_t steps;
  bool tiles;
  uint16_t* at(int64_t r, int64_t s) const {
    return tiles ? memory + ((r / 16 * steps + s) * 16 + r % 16) * kStepInputs : memory + (r * steps + s) * kStepInputs;
  }
};

void pack_row(const BlockedLinearArguments& a, const Packed& x, int64_t r) {
  const uint16_t* from = (const uint16_t*)a.input + r * a.input_row;
  for (int64_t s = 0; s < x.steps; ++s) {
    const int64_t count = std::min(kStepInputs, r < a.rows ? a.inputs - s * kStepInputs : (int64_t)0);
    uint16_t* to = x.at(r, s);
    if (count == kStepInputs) {
      _mm512_storeu_si512(to, _mm512_loadu_si512(from + s * kStepInputs));
    } else {
      std::memset(to, 0, kStepInputs * 2);
      std::memcpy(to, from + s * kStepInputs, count * 2);
    }
  }
}

template <int V>
void multiply_panel(const BlockedLinearArguments& a, const Packed& x, int64_t panel, float* sums) {
  const int64_t pairs = x.steps * kStepPairs;
  const uint32_t* w = (const uint32_t*)a.weight + panel * pairs * V * 16;
#if defined(PAGODA_TILES)
  if (x.tiles) {
    for (int64_t r = 0; r < a.rows; r += kTallest) {
      const int64_t rows = std::min(kTallest, a.rows - r);
      const char* from = (const char*)x.at(r, 0);
      if (rows > 16) multiply_tall<V, true>(from, x.steps, (const char*)w, sums);
      else multiply_tall<V, false>(from, x.steps, (const char*)w, sums);
      write_panel<V>(a, r, rows, panel, sums);
    }
    return;
  }
#endif
  static constexpr decltype(&few_rows<1, V>) by_rows[kVectorRows] = {
      few_rows<1, V>, few_rows<2, V>, few_rows<3, V>, few_rows<4, V>, few_rows<5, V>, few_rows<6, V>};
  const int64_t pieces = pieces_of(a.rows, kVectorRows);
  for (int64_t r = 0, rows, piece = 0; r < a.rows; r += rows, ++piece) {
    rows = equal_piece(a.rows - r, kVectorRows);
    const Fetch fetch = pieces == 1 ? Fetch{(const char*)w + kAheadInOrder, V}
                                    : fetch_of_piece(w, w + pairs * V * 16, pairs, V, pieces, piece);
    by_rows[rows - 1]((const uint32_t*)x.at(r, 0), pairs, w, pairs, sums, fetch);
    write_panel<V>(a, r, rows, panel, sums);
  }
}

template <int V>
void run(const BlockedLinearArguments& a) {
  static thread_local Scratch inputs, own;
  Packed x{nullptr, (a.inputs + kStepInputs - 1) / kStepInputs, false};
#if defined(PAGODA_TILES)
  x.tiles = a.rows >= kFewestTiled && tiles_allowed();
#endif
  const int64_t padded = x.tiles ? round_up(a.rows, 16) : a.rows;
  const int64_t panels = (a.outputs + V * 16 - 1) / (V * 16);
  inputs.reserve(padded * x.steps * kStepInputs * 2 + 64);
  x.memory = inputs.take<uint16_t>(padded * x.steps * kStepInputs);
  const bool alone = padded * a.inputs < kFewElements;
  for (int64_t r = 0; alone && r < padded; ++r) pack_row(a, x, r);
  Shares shares(panels, a.threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    own.reserve(kTallest * V * 16 * 4 + 64);
    float* sums = own.take<float>(kTallest * V * 16);
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < padded; ++r) pack_row(a, x, r);
    }
    shares.take(omp_get_thread_num(), [&](int64_t panel) { multiply_panel<V>(a, x, panel, sums); });
#if defined(PAGODA_TILES)
    release_tiles();
#endif
  }
}

#else
#if defined(PAGODA_ARM_BF16)
typedef BrainRows ManyRows;
#else
typedef WidenedRows ManyRows;
#endif

// The rows of the input in pieces that are multiplied at once, each as its products read it.
struct Pieces {
  ManyRows::element* memory;
  int64_t rows, columns, count;
  int64_t first(int64_t piece) const { return rows * piece / count; }
  int64_t size(int64_t piece) const { return first(piece + 1) - first(piece); }
  int64_t elements() const { return count * ManyRows::kRows * columns; }
  ManyRows::element* at(int64_t piece) const { return memory + piece * ManyRows::kRows * columns; }
};

void pack_piece(const BlockedLinearArguments& a, const Pieces& x, int64_t piece) {
  const uint16_t* from = (const uint16_t*)a.input + x.first(piece) * a.input_row;
  ManyRows::pack(x.at(piece), from, a.input_row, x.size(piece), a.inputs, x.columns);
}

template <int V>
void multiply_panel(const BlockedLinearArguments& a, const Pieces& x, int64_t panel, float* sums) {
  constexpr int64_t kLines = V;  // of a pair of inputs
  const int64_t pairs = x.columns / 2;
  const uint32_t* w = (const uint32_t*)a.weight + panel * pairs * V * 16;
  for (int64_t piece = 0; piece < x.count; ++piece) {
    const Fetch fetch = x.count == 1 ? Fetch{(const char*)w + kAheadInOrder, kLines}
                                     : fetch_of_piece(w, w + pairs * V * 16, pairs, kLines, x.count, piece);
    ManyRows::multiply<V * 16>(x.at(piece), x.size(piece), w, pairs, sums, fetch);
    write_panel<V>(a, x.first(piece), x.size(piece), panel, sums);
  }
}

template <int V>
void run(const BlockedLinearArguments& a) {
  static thread_local Scratch inputs, own;
  Pieces x{nullptr, a.rows, round_up(a.inputs, kStepInputs), pieces_of(a.rows, ManyRows::kRows)};
  inputs.reserve(x.elements() * sizeof *x.memory + 64);
  x.memory = inputs.take<ManyRows::element>(x.elements());
  const bool alone = a.rows * a.inputs < kFewElements;
  for (int64_t piece = 0; alone && piece < x.count; ++piece) pack_piece(a, x, piece);
  Shares shares(pieces_of(a.outputs, V * 16), a.threads);
#pragma omp parallel num_threads((int)shares.team()) if (shares.team() > 1)
  {
    own.reserve(ManyRows::kRows * V * 16 * sizeof(float) + 64);
    float* sums = own.take<float>(ManyRows::kRows * V * 16);
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t piece = 0; piece < x.count; ++piece) pack_piece(a, x, piece);
    }
    shares.take(omp_get_thread_num(), [&](int64_t panel) { multiply_panel<V>(a, x, panel, sums); });
  }
}
#endif

}  // namespace

// 0, or 1 where there is no kernel for such panels.
extern "C" int64_t pagoda_blocked_linear(const BlockedLinearArguments* arguments) {
  const BlockedLinearArguments& a = *arguments;
  if (a.rows == 0 || a.outputs == 0) return 0;
  if (a.panel == 16) run<1>(a);
  else if (a.panel == 32) run<2>(a);
  else if (a.panel == 64) run<4>(a);
  else return 1;
  return 0;
}

// Outputs of the panels that weights are to be packed in for the kernel above alone; 0 where oneDNN packs them.
extern "C" int64_t pagoda_blocked_panel(const void*) {
#if defined(PAGODA_BF16)
  return 0;
#else
  return ManyRows::kPanel;
#endif
}
