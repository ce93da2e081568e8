// Slots that hold the states of a step's sequences. The struct's Python twin is in state_slots.py.
#pragma once

#include "vector.h"

struct StateSlots {
  char* state;  // null: there is one sequence, of all tokens, which begins, and whose state nobody wants
  const int32_t* starts;
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

static inline int64_t sequences_of(const StateSlots& s) { return s.state ? s.sequences : 1; }

static inline SequenceRun run_of(const StateSlots& s, int64_t sequence, int64_t tokens) {
  if (!s.state) return {0, tokens, nullptr, nullptr};
  const int64_t bytes = s.slot_stride * bytes_of(s.dtype), read = s.read[sequence], write = s.write[sequence];
  return {s.starts[sequence], s.starts[sequence + 1], read < 0 ? nullptr : s.state + read * bytes,
          write < 0 ? nullptr : s.state + write * bytes};
}

// The tokens that belong to sequences; those behind them are padding.
static inline int64_t tokens_of(const StateSlots& s, int64_t tokens) {
  return s.state ? s.starts[s.sequences] : tokens;
}

// 0 if all offsets and slots are in range; else which are not (1: starts, 2: read, 3: write), and above 8 bits where.
static inline int64_t wrong_slots(const StateSlots& s, int64_t tokens) {
  if (!s.state) return 0;
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
