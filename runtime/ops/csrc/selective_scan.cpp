// CPU kernel of pagoda::selective_scan and selective_scan_seq. The struct's Python twin is in selective_scan.py.
//
// A thread takes a block of channels through all sequences, a few channels at a time through a tile of tokens: their
// states stay in the nearest cache. Nothing depends on how a sequence is cut into steps.

#include <algorithm>

#include "rows.h"
#include "scratch.h"
#include "state_slots.h"
#include "sums.h"

struct ScanArguments {
  const char* x;
  const char* dt;
  const char* rates;  // A
  const char* writes;  // B
  const char* reads;  // C
  char* out;          // contiguous
  StateSlots slots;
  int64_t x_dtype, dt_dtype, rates_dtype, writes_dtype, reads_dtype;
  int64_t tokens, channels, dim;
  int64_t x_token, x_channel;
  int64_t dt_token, dt_channel;
  int64_t rates_channel, rates_step;
  int64_t writes_token, writes_step;
  int64_t reads_token, reads_step;
  int64_t round_state, threads;
};
static_assert(sizeof(ScanArguments) == 34 * 8, "selective_scan.py packs 34 integers");

namespace {

constexpr int64_t kScanChannels = 64;  // of a block
constexpr int64_t kScanTokens = 16;    // of a tile
constexpr int64_t kChannelsAtOnce = 4;

// Rounded is the format to which states are rounded where they are read.
template <class Rounded>
struct ScanBlock {
  const ScanArguments& a;
  const int64_t first, count, whole;  // channels
  const int64_t width;                // of a channel's state, whole vectors
  float *rates, *writes, *reads, *inputs, *steps, *results, *copy;

  ScanBlock(const ScanArguments& a, int64_t first, Scratch& scratch)
      : a(a), first(first), count(std::min(kScanChannels, a.channels - first)),
        whole(round_up(count, kChannelsAtOnce)), width(round_up(a.dim, kLanes)) {
    const int64_t floats = 2 * kScanChannels * width + 2 * kScanTokens * width + 3 * kScanTokens * kScanChannels;
    scratch.reserve(floats * 4 + 7 * 64);
    rates = scratch.take<float>(kScanChannels * width);
    copy = scratch.take<float>(kScanChannels * width);
    writes = scratch.take<float>(kScanTokens * width);
    reads = scratch.take<float>(kScanTokens * width);
    inputs = scratch.take<float>(kScanTokens * kScanChannels);
    steps = scratch.take<float>(kScanTokens * kScanChannels);
    results = scratch.take<float>(kScanTokens * kScanChannels);
    std::memset(rates, 0, kScanChannels * width * 4);
    for (int64_t c = 0; c < count; ++c)
      take_floats(rates + c * width, width, a.rates, (first + c) * a.rates_channel, a.rates_dtype, a.dim, a.rates_step);
  }

  void sequence(const SequenceRun& run) {
    if (run.begin == run.end) return;
    const int64_t at = first * a.dim, offset = at * 4;
    const bool as_stored = a.slots.dtype == kFloat32 && width == a.dim && whole == count;
    float* state = as_stored && run.after ? (float*)(run.after + offset) : copy;
    const float* before = state;
    if (run.before && as_stored) before = (const float*)(run.before + offset);
    else std::memset(state, 0, whole * width * 4);
    if (run.before && !as_stored)
      for (int64_t c = 0; c < count; ++c)
        take_floats(copy + c * width, width, run.before, at + c * a.dim, a.slots.dtype, a.dim, 1);
    for (int64_t t = run.begin; t < run.end; t += kScanTokens) {
      tile(t, std::min(kScanTokens, run.end - t), before, state);
      before = state;
    }
    if (run.after && state == copy)
      for (int64_t c = 0; c < count; ++c)
        put_floats(run.after, at + c * a.dim, a.slots.dtype, copy + c * width, a.dim);
  }

  void tile(int64_t begin, int64_t tokens, const float* before, float* state) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t t = begin + i;
      take_floats(writes + i * width, width, a.writes, t * a.writes_token, a.writes_dtype, a.dim, a.writes_step);
      take_floats(reads + i * width, width, a.reads, t * a.reads_token, a.reads_dtype, a.dim, a.reads_step);
      take_floats(inputs + i * kScanChannels, whole, a.x, t * a.x_token + first * a.x_channel, a.x_dtype, count, a.x_channel);
      take_floats(steps + i * kScanChannels, whole, a.dt, t * a.dt_token + first * a.dt_channel, a.dt_dtype, count,
           a.dt_channel);
    }
    for (int64_t c = 0; c < count; c += kChannelsAtOnce) {
      const float* from = before + c * width;
      for (int64_t i = 0; i < tokens; ++i, from = state + c * width)
        advance(from, state + c * width, rates + c * width, i, i * kScanChannels + c);
    }
    for (int64_t i = 0; i < tokens; ++i)
      put_floats(a.out, (begin + i) * a.channels + first, a.x_dtype, results + i * kScanChannels, count);
  }

  // Four channels and one token. `from` may be `to`.
  void advance(const float* from, float* to, const float* rate, int64_t token, int64_t at) const {
    vfloat sums[kChannelsAtOnce] = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const vfloat write = load(writes + token * width + i), read = load(reads + token * width + i);
#pragma GCC unroll 4
      for (int c = 0; c < kChannelsAtOnce; ++c) {
        const float step = steps[at + c];
        const vfloat decay = exponential(load(rate + c * width + i) * step);
        const vfloat s = multiply_add(write * step * inputs[at + c], decay, load(from + c * width + i));
        store(to + c * width + i, s);
        sums[c] = multiply_add(sums[c], Rounded::rounded(s), read);
      }
    }
    sum_lanes_of_four(sums, results + at);
  }
};

template <class Rounded>
void scan(const ScanArguments& a) {
  const int64_t blocks = (a.channels + kScanChannels - 1) / kScanChannels;
  share(blocks, a.tokens * a.channels * a.dim, a.threads, [&a](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t b = begin; b < end; ++b) {
      ScanBlock<Rounded> block(a, b * kScanChannels, scratch);
      for (int64_t s = 0; s < sequences_of(a.slots); ++s) block.sequence(run_of(a.slots, s, a.tokens));
    }
  });
}

}  // namespace

extern "C" int64_t pagoda_selective_scan(const ScanArguments* arguments) {
  const ScanArguments& a = *arguments;
  if (const int64_t wrong = wrong_slots(a.slots, a.tokens)) return wrong;
  clear_padding(a.slots, a.tokens, a.out, a.channels * bytes_of(a.x_dtype));
  with_format(a.round_state ? a.x_dtype : (int64_t)kFloat32, [&a](auto format) { scan<decltype(format)>(a); });
  return 0;
}
