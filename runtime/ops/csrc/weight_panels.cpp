// Lays a weight of 16-bit numbers out in panels of outputs, each [inputs / 2][outputs of the panel][2], padded with
// zeros to whole panels and to 32 inputs. Its Python twin is in weight_panels.py; keep them in step.

#include <algorithm>
#include <cstring>

#include "rows.h"

struct LayOutArguments {
  const char* weight;
  char* out;
  int64_t outputs, inputs, weight_row;  // the row in elements
  int64_t panel, threads;
};
static_assert(sizeof(LayOutArguments) == 7 * 8, "weight_panels.py packs 7 integers");

namespace {

constexpr int64_t kPanelPairs = 64;  // of a tile, which stays in the first cache
constexpr int64_t kPaddedInputs = 32;

template <int64_t P>
void lay_out_panel(const LayOutArguments& a, int64_t panel) {
  const int64_t pairs = (a.inputs + kPaddedInputs - 1) / kPaddedInputs * kPaddedInputs / 2;
  const int64_t rows = std::min(P, a.outputs - panel * P);
  const uint16_t* from = (const uint16_t*)a.weight + panel * P * a.weight_row;
  uint32_t* to = (uint32_t*)a.out + panel * pairs * P;
  uint32_t tile[P][kPanelPairs];
  if (rows < P) std::memset(tile, 0, sizeof tile);
  for (int64_t first = 0; first < pairs; first += kPanelPairs, to += kPanelPairs * P) {
    const int64_t count = std::min(kPanelPairs, pairs - first), inputs = std::min(2 * count, a.inputs - 2 * first);
    for (int64_t r = 0; r < rows; ++r) {
      if (inputs < 2 * count) std::memset(tile[r], 0, sizeof tile[r]);
      std::memcpy(tile[r], from + r * a.weight_row + 2 * first, inputs * sizeof *from);
    }
    for (int64_t pair = 0; pair < count; ++pair) {
      for (int64_t r = 0; r < P; ++r) to[pair * P + r] = tile[r][pair];
    }
  }
}

template <int64_t P>
void run(const LayOutArguments& a) {
  share((a.outputs + P - 1) / P, a.outputs * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) lay_out_panel<P>(a, panel);
  });
}

}  // namespace

// 0, or 1 where there are no such panels.
extern "C" int64_t pagoda_lay_out_panels(const LayOutArguments* arguments) {
  const LayOutArguments& a = *arguments;
  if (a.panel == 16) run<16>(a);
  else if (a.panel == 32) run<32>(a);
  else if (a.panel == 64) run<64>(a);
  else return 1;
  return 0;
}
