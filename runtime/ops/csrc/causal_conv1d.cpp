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

template <class Format>
struct ConvolutionBlock {
  typedef typename Format::element Element;
  const ConvolutionArguments& a;
  const int64_t first, count;  // channels
  float weight[kMostTaps][kConvolutionChannels] = {};
  float bias[kConvolutionChannels] = {};
  Element zeros[kConvolutionChannels] = {};

  ConvolutionBlock(const ConvolutionArguments& a, int64_t first)
      : a(a), first(first), count(std::min(kConvolutionChannels, a.channels - first)) {
    for (int64_t j = 0; j < a.taps; ++j)
      take_floats(weight[j], count, a.weight, first * a.weight_channel + j * a.weight_tap, a.dtype, count,
                  a.weight_channel);
    if (a.bias) take_floats(bias, count, a.bias, first * a.bias_stride, a.dtype, count, a.bias_stride);
  }

  // The inputs of the token at `t`, which may be one of those before the step.
  const Element* input(const SequenceRun& run, int64_t t) const {
    if (t >= run.begin) return (const Element*)a.x + t * a.x_token + first;
    return run.before ? (const Element*)run.before + (a.taps - 1 + t - run.begin) * a.channels + first : zeros;
  }

  void token(const Element* const* inputs, Element* out) const {
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, count - c);
      vfloat sum = load(bias + c);
      for (int64_t j = 0; j < a.taps; ++j) {
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
    const Element* inputs[kMostTaps];
    for (int64_t t = run.begin; t < run.end; ++t) {
      for (int64_t j = 0; j < a.taps; ++j) inputs[j] = input(run, t - a.taps + 1 + j);
      token(inputs, (Element*)a.out + t * a.channels + first);
    }
    if (!run.after || run.begin == run.end) return;
    // In this order no row is lost that the same slot's state still needs.
    for (int64_t j = 0; j < a.taps - 1; ++j)
      std::memmove((Element*)run.after + j * a.channels + first, input(run, run.end - a.taps + 1 + j),
                   count * sizeof(Element));
  }
};

template <class Format>
void convolve(const ConvolutionArguments& a) {
  const int64_t blocks = (a.channels + kConvolutionChannels - 1) / kConvolutionChannels;
  share(blocks, a.tokens * a.channels, a.threads, [&a](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const ConvolutionBlock<Format> block(a, b * kConvolutionChannels);
      for (int64_t s = 0; s < sequences_of(a.slots); ++s) block.sequence(run_of(a.slots, s, a.tokens));
    }
  });
}

}  // namespace

extern "C" int64_t pagoda_causal_conv1d(const ConvolutionArguments* arguments) {
  const ConvolutionArguments& a = *arguments;
  if (const int64_t wrong = wrong_slots(a.slots, a.tokens)) return wrong;
  clear_padding(a.slots, a.tokens, a.out, a.channels * bytes_of(a.dtype));
  with_format(a.dtype, [&a](auto format) { convolve<decltype(format)>(a); });
  return 0;
}
