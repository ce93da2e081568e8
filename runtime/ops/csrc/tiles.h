// The same products on AMX tiles (Intel, from Sapphire Rapids on): 16 rows by 16 columns by 32 bf16 in one
// instruction, which takes operands in the very layout that `Bf16` has.
#pragma once

#include "fetch.h"
#include "vector.h"

#if defined(PAGODA_BF16) && defined(__AMX_BF16__) && defined(__linux__)
#define PAGODA_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

constexpr int kTileRows = 16;
constexpr int kTilePairs = 16;  // of bf16, along the inner dimension

// Linux hands out the tile registers on request only; a machine or a sandbox may refuse.
static inline bool tiles_allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

static thread_local int tile_rows = 0;   // of results and of A, as configured; 0: not configured
static thread_local int tile_inner = 0;  // 32-bit columns of A, and rows of B

// Tiles 0..3 hold results, 4 holds A, 5..7 hold B; with fewer than 16 `inner` columns 5 holds A, too.
static inline void configure_tiles(int rows, int inner = kTilePairs) {
  if (rows == tile_rows && inner == tile_inner) return;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool a = tile == 4 || (tile == 5 && inner < kTilePairs);
    config.row_bytes[tile] = (uint16_t)(a ? 4 * inner : 64);
    config.rows[tile] = (uint8_t)(tile < 4 || a ? rows : inner);
  }
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
  tile_rows = rows;
  tile_inner = inner;
}

// Others (oneDNN) configure tiles on the same threads: nothing may be left behind.
static inline void release_tiles() {
  if (tile_rows) _tile_release();
  tile_rows = 0;
}

// out[r][n] = (kAdds ? out[r][n] : 0) + sum_k a[r][k] b[k][n] for the configured rows, 16 * V columns and
// `chunks` * 16 pairs.
template <int V, bool kAdds>
static void multiply_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* out,
                           int64_t out_stride, int64_t chunks, Prefetcher& ahead) {
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
  if constexpr (kAdds) {
    _tile_loadd(0, out, out_stride * 4);
    if constexpr (V > 1) _tile_loadd(1, out + 16, out_stride * 4);
    if constexpr (V > 2) _tile_loadd(2, out + 32, out_stride * 4);
    if constexpr (V > 3) _tile_loadd(3, out + 48, out_stride * 4);
  } else {
    _tile_zero(0);
    if constexpr (V > 1) _tile_zero(1);
    if constexpr (V > 2) _tile_zero(2);
    if constexpr (V > 3) _tile_zero(3);
  }
  for (int64_t k = 0; k < chunks; ++k) {
    ahead.step();
    const uint32_t* b_k = b + k * kTilePairs * b_stride;
    _tile_loadd(4, a + k * kTilePairs, a_stride * 4);
    _tile_loadd(5, b_k, b_stride * 4);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (V > 1) {
      _tile_loadd(6, b_k + 16, b_stride * 4);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (V > 2) {
      _tile_loadd(7, b_k + 32, b_stride * 4);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (V > 3) {
      _tile_loadd(5, b_k + 48, b_stride * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, out, out_stride * 4);
  if constexpr (V > 1) _tile_stored(1, out + 16, out_stride * 4);
  if constexpr (V > 2) _tile_stored(2, out + 32, out_stride * 4);
  if constexpr (V > 3) _tile_stored(3, out + 48, out_stride * 4);
  asm volatile("" ::: "memory");
}
#endif
