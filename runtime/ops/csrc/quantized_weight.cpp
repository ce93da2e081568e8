// Rounds a matrix to int8 or int4 and lays it out in panels (see panels.h; the Python twin is in
// quantized_weight.py).

#include "int8_rows.h"
#include "panels.h"
#include "rows.h"

struct QuantizeWeightArguments {
  const char* weight;
  char* out;
  int64_t dtype, inputs, outputs;
  int64_t input_stride, output_stride;  // in elements
  int64_t bits, group, threads;
};
static_assert(sizeof(QuantizeWeightArguments) == 10 * 8, "quantized_weight.py packs 10 integers");

namespace {

inline vfloat rounded(vfloat x, float least, float most) {
  const vfloat whole = x + kRounder - kRounder;
  return whole < splat(least) ? splat(least) : whole > splat(most) ? splat(most) : whole;
}

// The entry that is farthest from 0; NaN and infinity win.
float farthest(const float* x, int64_t n) {
  float best = 0.f;
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(x[i]) < INFINITY)) return NAN;
    if (std::fabs(x[i]) > std::fabs(best)) best = x[i];
  }
  return best;
}

// Sums of x q and q q over n entries, q = x * inverse as int4.
void correlate(const float* x, int64_t n, float inverse, float* products, float* squares) {
  vfloat xq{}, qq{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vfloat v = load(x + i), q = rounded(v * inverse, -8.f, 7.f);
    xq = xq + v * q;
    qq = qq + q * q;
  }
  *products = sum_lanes(xq);
  *squares = sum_lanes(qq);
}

// The scale of a group, and what its entries are multiplied with before they are rounded. n is a multiple of kLanes.
float scale_of(const float* x, int64_t n, int64_t bits, float* inverse) {
  const float most = farthest(x, n);
  *inverse = 0.f;
  if (!(std::fabs(most) > 1e-30f)) return most != most ? NAN : 0.f;
  if (bits == 8) {
    *inverse = 127.f / std::fabs(most);
    return std::fabs(most) / 127.f;
  }
  // Of a few places for the farthest entry the one that lets the best scale, by least squares, lose the least.
  float best = -1.f, scale = 0.f;
  for (int i = -9; i <= 9; ++i) {
    const float candidate = -(8.f + 0.1f * (float)i) / most;
    float products, squares;
    correlate(x, n, candidate, &products, &squares);
    if (squares > 0.f && products * products / squares > best) {
      best = products * products / squares;
      scale = products / squares;
      *inverse = candidate;
    }
  }
  return scale;
}

void write_output(const QuantizeWeightArguments& a, const Layout& layout, const float* row, char* panel, int64_t n) {
  const float least = a.bits == 8 ? -127.f : -8.f, most = a.bits == 8 ? 127.f : 7.f;
  const int zero = 1 << (a.bits - 1);
  uint8_t whole[kStep];
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t steps = layout.steps_of(g);
    const float* x = row + g * layout.group_steps * kStep;
    char* group = panel + layout.offset_of(g);
    float inverse;
    ((float*)group)[n] = scale_of(x, steps * kStep, a.bits, &inverse);
    for (int64_t s = 0; s < steps; ++s, x += kStep) {
      for (int64_t i = 0; i < kStep; i += kLanes) {
        const vint q = __builtin_convertvector(rounded(load(x + i) * inverse, least, most), vint) + zero;
        for (int l = 0; l < kLanes; ++l) whole[i + l] = (uint8_t)q[l];
      }
      uint8_t* tile = (uint8_t*)group + kScaleBytes + s * layout.step_bytes + n / 16 * (layout.step_bytes / 4) +
                      n % 16 * 4;
      if (a.bits == 8) {
        for (int64_t i = 0; i < 16; ++i) std::memcpy(tile + i * 64, whole + 4 * i, 4);
      } else {
        for (int64_t i = 0; i < 8; ++i)
          for (int k = 0; k < 4; ++k)
            tile[i * 64 + k] = (uint8_t)(whole[4 * i + k] | whole[4 * (i + 8) + k] << 4);
      }
    }
  }
}

}  // namespace

extern "C" int64_t pagoda_quantize_weight(const QuantizeWeightArguments* arguments) {
  const QuantizeWeightArguments& a = *arguments;
  const Layout layout(a.inputs, a.outputs, a.bits, a.group);
  const int64_t columns = layout.steps * kStep, size = bytes_of(a.dtype);
  share(layout.panels, a.outputs * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> row(columns);
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t output = panel * kPanel + n;
        std::fill(row.begin(), row.end(), 0.f);
        if (output < a.outputs)
          load_floats(row.data(), a.weight + output * a.output_stride * size, a.dtype, a.inputs, a.input_stride);
        write_output(a, layout, row.data(), a.out + panel * layout.panel_bytes, n);
      }
  });
  return 0;
}
