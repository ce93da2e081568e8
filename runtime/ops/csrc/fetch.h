// Fetching from memory what is read next: weights in loops over them, and runs of bytes here and there (a cache).
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

// Asks for the cache lines that will be needed next, a few at a time: a burst of requests is dropped or
// stalls the processor, spread over the arithmetic they cost little. The lines come as runs of bytes.
struct Prefetcher {
  struct Run {
    const char* at;
    const char* end;
  };
  static constexpr int kMaxRuns = 128;
  Run runs[kMaxRuns];
  int count, next_run, lines_per_step;
  Run current;

  void clear() {
    count = next_run = lines_per_step = 0;
    current = Run{nullptr, nullptr};
  }
  void add(const char* from, int64_t bytes) {
    if (count < kMaxRuns) runs[count++] = Run{from, from + bytes};
  }
  // Share out what was added over `steps` steps of the inner loops to come.
  void spread(int64_t steps) {
    int64_t lines = 0;
    for (int i = 0; i < count; ++i) lines += (runs[i].end - runs[i].at + 63) / 64;
    lines_per_step = (int)((lines + steps - 1) / steps);
    if (count) current = runs[next_run++];
  }
  Run next() {
    return next_run < count ? runs[next_run++] : Run{nullptr, nullptr};
  }
  void step() {
    if (current.at == current.end) return;
    for (int i = 0; i < lines_per_step; ++i) __builtin_prefetch(current.at + i * 64, 0, 2);
    current.at += lines_per_step * 64;
    if (current.at >= current.end) current = next();
  }
};
