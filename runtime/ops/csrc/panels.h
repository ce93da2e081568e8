// How quantized weights lie in memory: panels of 64 outputs, one after the other.
//
// A panel is its groups of inputs; a group is its head, 64 scales (float) and, where each has a zero of its own, 64
// bytes with those, or 64 offsets (float), then its steps of 64 inputs. Groups of 32 or 16 inputs share a step, with
// their heads in front. A step of integers holds four tiles of 16 outputs; a tile is [16][16][4]: input / 4, output,
// input % 4, which vpdpbusd and AMX take alike. The numbers are stored unsigned, the zero in the middle unless the head
// says otherwise. Of int4, rows i and i + 8 of a tile share 64 bytes, row i in the low halves. A step of fp8 is
// [32][64][2]: input / 2, output, input % 2. Missing inputs and outputs are zeros.
#pragma once

#include <algorithm>

#include "vector.h"

constexpr int64_t kPanel = 64;  // outputs
constexpr int64_t kStep = 64;   // inputs
constexpr int64_t kStepBytes = kPanel * kStep;  // of int8
constexpr int64_t kScaleBytes = kPanel * sizeof(float);

// What the codes of weights are: integers (int8, int4), fp8 (e4m3), fp4 (e2m1), or integers in groups that share a step
// and have offsets. Numbered as in weight_format.py.
enum Code : int64_t { kWhole = 0, kFloat8 = 1, kFloat4 = 2, kAffine = 3 };

// What int8 weights are xored with where products take signed numbers alone, which also takes their zero away.
#if defined(PAGODA_ARM_DOT) && !defined(PAGODA_ARM_I8MM)
constexpr uint8_t kFlip = 128;
#else
constexpr uint8_t kFlip = 0;
#endif

// What the products take the zero of stored weights for.
static inline int32_t zero_of(int64_t bits) { return (1 << (bits - 1)) - (bits == 8 ? kFlip : 0); }

struct Layout {
  // heads: of a step that groups share, 2 or 4, else 1; `groups` counts those groups as one.
  int64_t step_bytes, steps, group_steps, groups, heads, head_bytes, panel_bytes, panels;

  // group: inputs that share a scale, 16, 32 or a multiple of kStep; 0: all. zero_bytes: of an output's zero or offset
  // in a head, or 0.
  Layout(int64_t inputs, int64_t outputs, int64_t bits, int64_t group, int64_t zero_bytes = 0) {
    step_bytes = kStepBytes * bits / 8;
    steps = (inputs + kStep - 1) / kStep;
    heads = group && group < kStep ? kStep / group : 1;
    group_steps = group ? group * heads / kStep : steps;
    groups = (steps + group_steps - 1) / group_steps;
    head_bytes = kScaleBytes + kPanel * zero_bytes;
    panel_bytes = groups * heads * head_bytes + steps * step_bytes;
    panels = (outputs + kPanel - 1) / kPanel;
  }
  int64_t steps_of(int64_t group) const { return std::min(group_steps, steps - group * group_steps); }
  // From the beginning of a panel to a group's head.
  int64_t offset_of(int64_t group) const { return group * (heads * head_bytes + group_steps * step_bytes); }
};
