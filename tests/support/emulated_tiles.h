// AMX tiles in plain C++, for processors without them: included before anything else, it takes the place of the
// intrinsics. As Intel's manual describes them, with sums of bf16 in float and denormals kept.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {
struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64];
};
static thread_local Tile tiles[8];

static inline void load_config(const void* from) {
  const uint8_t* config = (const uint8_t*)from;
  for (int t = 0; t < 8; ++t) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * t, 2);
    tiles[t].rows = config[48 + t];
    tiles[t].bytes = bytes;
    std::memset(tiles[t].data, 0, sizeof tiles[t].data);
  }
}
static inline void release() {
  for (Tile& tile : tiles) tile.rows = tile.bytes = 0;
}
static inline void zero(int t) { std::memset(tiles[t].data, 0, sizeof tiles[t].data); }
static inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles[t].rows; ++r) std::memcpy(tiles[t].data[r], (const char*)from + r * stride, tiles[t].bytes);
}
static inline void store(int t, void* to, int64_t stride) {
  for (int r = 0; r < tiles[t].rows; ++r) std::memcpy((char*)to + r * stride, tiles[t].data[r], tiles[t].bytes);
}
static inline void check(int c, int a, int b) {  // what the processor answers with an exception
  if (tiles[c].rows != tiles[a].rows || tiles[c].bytes != tiles[b].bytes || tiles[a].bytes != 4 * tiles[b].rows) abort();
  if (!tiles[c].rows || !tiles[a].bytes) abort();
}
static inline void multiply_int8(int c, int a, int b) {
  check(c, a, b);
  for (int r = 0; r < tiles[c].rows; ++r)
    for (int n = 0; n < tiles[c].bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, tiles[c].data[r] + 4 * n, 4);
      for (int k = 0; k < tiles[b].rows; ++k)
        for (int i = 0; i < 4; ++i) sum += (int8_t)tiles[a].data[r][4 * k + i] * (int32_t)tiles[b].data[k][4 * n + i];
      std::memcpy(tiles[c].data[r] + 4 * n, &sum, 4);
    }
}
static inline float widened(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
static inline void multiply_bf16(int c, int a, int b) {
  check(c, a, b);
  for (int r = 0; r < tiles[c].rows; ++r)
    for (int n = 0; n < tiles[c].bytes / 4; ++n) {
      float sum;
      std::memcpy(&sum, tiles[c].data[r] + 4 * n, 4);
      for (int k = 0; k < tiles[b].rows; ++k)
        for (int i = 0; i < 2; ++i)
          sum += widened(tiles[a].data[r] + 4 * k + 2 * i) * widened(tiles[b].data[k] + 4 * n + 2 * i);
      std::memcpy(tiles[c].data[r] + 4 * n, &sum, 4);
    }
}
}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbsud emulated::multiply_int8
#define _tile_dpbf16ps emulated::multiply_bf16
#define syscall(...) 0
