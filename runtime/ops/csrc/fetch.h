// Fetching weights from memory before they are read.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t kLine = 64;
constexpr int64_t kSecondCache = 1000000;  // bytes, at least
// Bytes between what is read and what is fetched: far enough for memory to answer.
constexpr int64_t kAhead = 8192;
// Where all is read once and in order. AMD's Zen 4 fetches ahead by itself then, and being far ahead of it disturbs;
// Intel's processors with AMX keep the distance that was measured there.
#if defined(__AMX_TILE__)
constexpr int64_t kAheadInOrder = 8192;
#else
constexpr int64_t kAheadInOrder = 1024;
#endif

// Lines to fetch while weights are read, so many at each round of a loop.
struct Fetch {
  const char* at;
  int64_t lines;

  void round() {
    for (int64_t i = 0; i < lines; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

// Pieces of rows that read the same weights one after the other, from `begin` on, `lines` lines at each of `rounds`
// rounds: what the one numbered `piece` fetches. All but the first find the weights in the second cache and leave memory
// idle, so each fetches a part of what comes next. A single one, and pieces of more weights than leave room for the
// next in that cache, fetch what they come to themselves.
static inline Fetch fetch_of_piece(const void* begin, const void* next, int64_t rounds, int64_t lines, int64_t pieces,
                                   int64_t piece) {
  const int64_t bytes = rounds * lines * kLine;
  if (pieces == 1 || 2 * bytes > kSecondCache) return {(const char*)begin + kAhead, lines};
  const int64_t part = (lines + pieces - 1) / pieces;
  return {(const char*)next + piece * part * rounds * kLine, std::clamp<int64_t>(lines - piece * part, 0, part)};
}
