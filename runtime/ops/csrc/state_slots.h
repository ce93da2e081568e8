// Slots that hold the states of a step's sequences. The struct's Python twin is in state_slots.py.
#pragma once

#include "vector.h"

struct StateSlots {
  char* state;  // null where it has no elements
  const int32_t* starts;  // null: there is one sequence, of all tokens, which begins, and whose state nobody wants
  const int32_t* read;
  const int32_t* write;
  int64_t dtype, slots, slot_stride, sequences;  // stride in elements; each slot's are next to each other
};

// What one sequence does in a step.
struct SequenceRun {
  int64_t begin, end;  // its tokens
  const char* before;  // its state; null: zeros
  char* after;         // where its state goes; null: nowhere
};

static inline int64_t sequences_of(const StateSlots& s) { return s.starts ? s.sequences : 1; }

static inline SequenceRun run_of(const StateSlots& s, int64_t sequence, int64_t tokens) {
  if (!s.starts) return {0, tokens, nullptr, nullptr};
  const int64_t bytes = s.slot_stride * bytes_of(s.dtype), read = s.read[sequence], write = s.write[sequence];
  return {s.starts[sequence], s.starts[sequence + 1], read < 0 ? nullptr : s.state + read * bytes,
          write < 0 ? nullptr : s.state + write * bytes};
}

// Makes the results of the tokens that belong to no sequence zero; `row` are the bytes of a token's.
static inline void clear_padding(const StateSlots& s, int64_t tokens, char* out, int64_t row) {
  const int64_t used = s.starts ? s.starts[s.sequences] : tokens;
  if (used < tokens) std::memset(out + used * row, 0, (tokens - used) * row);
}

// n numbers, `step` elements apart, as floats, and zeros behind them up to `size`. Called and not inlined: it comes in
// every dtype, which would take the compiler a second for each place.
__attribute__((noinline, unused)) static void take_floats(float* to, int64_t size, const char* from, int64_t at,
                                                          int64_t dtype, int64_t n, int64_t step) {
  load_floats(to, from + at * bytes_of(dtype), dtype, n, step);
  for (int64_t i = n; i < size; ++i) to[i] = 0.f;
}

__attribute__((noinline, unused)) static void put_floats(char* to, int64_t at, int64_t dtype, const float* from,
                                                         int64_t n) {
  store_floats(to + at * bytes_of(dtype), dtype, from, n);
}

// 0 if all offsets and slots are in range; else which are not (1: starts, 2: read, 3: write), and above 8 bits where.
static inline int64_t wrong_slots(const StateSlots& s, int64_t tokens) {
  if (!s.starts) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i <= s.sequences; ++i) {
    const int64_t start = s.starts[i];
    if (start < last || start > tokens || (i == 0 && start)) return 1 | i << 8;
    last = start;
  }
  for (int64_t i = 0; i < s.sequences; ++i)
    if (s.read[i] < -1 || s.read[i] >= s.slots) return 2 | i << 8;
  for (int64_t i = 0; i < s.sequences; ++i)
    if (s.write[i] < -1 || s.write[i] >= s.slots) return 3 | i << 8;
  return 0;
}
