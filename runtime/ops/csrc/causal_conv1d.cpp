// CPU kernel of pagoda::causal_conv1d and causal_conv1d_seq. The struct's Python twin is in causal_conv1d.py.
//
// A thread takes a block of channels through all sequences. Each sum is over the same taps in the same order wherever
// its token stands, so that no result depends on how a sequence is cut into steps.

#include <algorithm>

#include "rows.h"
#include "state_slots.h"

struct ConvolutionArguments {
  const char* x;  // like all tensors here in one dtype
  const char* weight;
  const char* bias;  // or null
  char* out;         // contiguous
  StateSlots slots;
  int64_t dtype, tokens, channels, taps;
  int64_t x_token, weight_channel, weight_tap, bias_stride;
  int64_t silu, threads;
};
static_assert(sizeof(ConvolutionArguments) == 22 * 8, "causal_conv1d.py packs 22 integers");

namespace {

constexpr int64_t kConvolutionChannels = 128;  // of a block
constexpr int64_t kMostTaps = 8;

template <class Format, int64_t kTaps>
struct ConvolutionBlock {
  typedef typename Format::element Element;
  const ConvolutionArguments& a;
  const int64_t first, count;  // channels
  float weight[kTaps][kConvolutionChannels] = {};
  float bias[kConvolutionChannels] = {};
  Element zeros[kConvolutionChannels] = {};

  ConvolutionBlock(const ConvolutionArguments& a, int64_t first)
      : a(a), first(first), count(std::min(kConvolutionChannels, a.channels - first)) {
    const int64_t size = sizeof(Element);
    for (int64_t j = 0; j < kTaps; ++j)
      load_floats(weight[j], a.weight + (first * a.weight_channel + j * a.weight_tap) * size, a.dtype, count,
                  a.weight_channel);
    if (a.bias) load_floats(bias, a.bias + first * a.bias_stride * size, a.dtype, count, a.bias_stride);
  }

  // The inputs of the token at `t`, which may be one of those before the step.
  const Element* input(const SequenceRun& run, int64_t t) const {
    if (t >= run.begin) return (const Element*)a.x + t * a.x_token + first;
    return run.before ? (const Element*)run.before + (kTaps - 1 + t - run.begin) * a.channels + first : zeros;
  }

  void token(const Element* const* inputs, Element* out) const {
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, count - c);
      vfloat sum = load(bias + c);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kTaps; ++j) {
        const vfloat x = n == kLanes ? Format::read(inputs[j] + c) : read_part<Format>(inputs[j] + c, n);
        sum = multiply_add(sum, x, load(weight[j] + c));
      }
      if (a.silu) {
        sum = Format::rounded(sum);
        sum = sum / (1.f + exponential(-sum));
      }
      if (n == kLanes) Format::write(out + c, sum);
      else write_part<Format>(out + c, sum, n);
    }
  }

  void sequence(const SequenceRun& run) const {
    const Element* inputs[kTaps];
    for (int64_t t = run.begin; t < run.end; ++t) {
      for (int64_t j = 0; j < kTaps; ++j) inputs[j] = input(run, t - kTaps + 1 + j);
      token(inputs, (Element*)a.out + t * a.channels + first);
    }
    if (!run.after || run.begin == run.end) return;
    // In this order no row is lost that the same slot's state still needs.
    for (int64_t j = 0; j < kTaps - 1; ++j)
      std::memmove((Element*)run.after + j * a.channels + first, input(run, run.end - kTaps + 1 + j),
                   count * sizeof(Element));
  }
};

template <class Format, int64_t kTaps>
void convolve(const ConvolutionArguments& a) {
  const int64_t blocks = (a.channels + kConvolutionChannels - 1) / kConvolutionChannels;
  share(blocks, a.tokens * a.channels, a.threads, [&a](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const ConvolutionBlock<Format, kTaps> block(a, b * kConvolutionChannels);
      for (int64_t s = 0; s < sequences_of(a.slots); ++s) block.sequence(run_of(a.slots, s, a.tokens));
    }
  });
}

template <class Format, int64_t kTaps = 2>
void convolve_with_taps(const ConvolutionArguments& a) {
  if (a.taps == kTaps) convolve<Format, kTaps>(a);
  else if constexpr (kTaps < kMostTaps) convolve_with_taps<Format, kTaps + 1>(a);
}

}  // namespace

extern "C" int64_t pagoda_causal_conv1d(const ConvolutionArguments* arguments) {
  const ConvolutionArguments& a = *arguments;
  if (const int64_t wrong = wrong_slots(a.slots, a.tokens)) return wrong;
  const int64_t row = a.channels * bytes_of(a.dtype), used = tokens_of(a.slots, a.tokens);
  std::memset(a.out + used * row, 0, (a.tokens - used) * row);
  with_format(a.dtype, [&a](auto format) { convolve_with_taps<decltype(format)>(a); });
  return 0;
}
