// CPU kernel of pagoda::linear_recurrence and linear_recurrence_seq. The struct's Python twin is in
// linear_recurrence.py.
//
// The rows of a state, one for each element of a value, do not meet: token by token, a row decays, is multiplied by the
// key and the query, and gets a multiple of the key. So eight rows at a time stay in the nearest cache while a tile of
// tokens passes, and a state is read from memory and written to it once in a step. What both products give is
// all that the result needs: (a s + w k) q = a (s q) + w (k q).
//
// A blocked form of the delta rule (WY, chunks of 64 tokens) multiplies matrices instead, but more numbers: on vectors
// of fp32 it saves nothing, and its results would depend on where a step cuts a sequence. These here do not.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "fetch.h"
#include "rows.h"
#include "scratch.h"
#include "state_slots.h"
#include "sums.h"

struct RecurrenceArguments {
  const char* query;
  const char* key;
  const char* value;
  const char* decay;
  const char* beta;  // null: values are written as they are, not the delta rule
  char* out;         // contiguous
  StateSlots slots;
  int64_t query_dtype, key_dtype, value_dtype, decay_dtype, beta_dtype;
  int64_t tokens, key_heads, heads, dim, value_dim;
  int64_t query_token, query_head, query_step;
  int64_t key_token, key_head, key_step;
  int64_t value_token, value_head, value_step;
  int64_t decay_token, decay_head, decay_step;
  int64_t beta_token, beta_head;
  int64_t by_channel;  // decay has a number for each element of a key
  int64_t normalize, threads;
  double scale, eps;
};
static_assert(sizeof(RecurrenceArguments) == 43 * 8, "linear_recurrence.py packs 41 integers and 2 doubles");

namespace {

constexpr int64_t kRecurrenceTokens = 16;
constexpr int64_t kRecurrenceRows = 64;
constexpr int64_t kRowsAtOnce = 8;

// What the rows of a head need to know of a token.
struct RecurrenceToken {
  float* key;
  float* query;       // scaled
  float* decay;       // by channel, or null; then key and query are kept decayed, too
  float* seen_key;    // what a row is multiplied by before it decays
  float* seen_query;
  float decay_all, beta, key_query;
};

float dot(const float* a, const float* b, int64_t n) {
  vfloat sum = {};
  for (int64_t i = 0; i < n; i += kLanes) sum = multiply_add(sum, load(a + i), load(b + i));
  return sum_lanes(sum);
}

// The products of four rows, as they were before a token, with its key (in the delta rule) and its query.
template <bool kDelta>
inline void multiply_rows(const float* rows, int64_t width, const RecurrenceToken& token, float* by_key,
                          float* by_query) {
  vfloat keys[4] = {}, queries[4] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const vfloat key = load(token.seen_key + i), query = load(token.seen_query + i);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const vfloat s = load(rows + r * width + i);
      if (kDelta) keys[r] = multiply_add(keys[r], s, key);
      queries[r] = multiply_add(queries[r], s, query);
    }
  }
  if (kDelta) sum_lanes_of_four(keys, by_key);
  sum_lanes_of_four(queries, by_query);
}

// Four rows decay, and get their multiples of the key. `from` may be `to`. As many rows at `next` are fetched, if any:
// into the second cache, since the nearest one waits for few lines at a time.
template <bool kByChannel, bool kFetch>
inline void write_rows(const float* from, float* to, int64_t width, const RecurrenceToken& token,
                       const float* written, const float* next) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const vfloat key = load(token.key + i);
    const vfloat factor = kByChannel ? load(token.decay + i) : splat(token.decay_all);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      store(to + r * width + i, multiply_add(load(from + r * width + i) * factor, splat(written[r]), key));
      if (kFetch) __builtin_prefetch(next + r * width + i, 0, 2);
    }
  }
}

// Eight rows and one token, four at a time: the sums of the first are waited for while the others are multiplied.
template <bool kDelta, bool kByChannel, bool kFetch>
inline void advance_rows(const float* from, float* to, int64_t width, const RecurrenceToken& token, const float* value,
                         float* out, const float* next) {
  float by_key[kRowsAtOnce] = {}, by_query[kRowsAtOnce], written[kRowsAtOnce];
  for (int64_t r = 0; r < kRowsAtOnce; r += 4)
    multiply_rows<kDelta>(from + r * width, width, token, by_key + r, by_query + r);
  const float decay = kByChannel ? 1.f : token.decay_all;  // else it is in the products
  for (int64_t r = 0; r < kRowsAtOnce; ++r) {
    written[r] = kDelta ? (value[r] - decay * by_key[r]) * token.beta : value[r];
    out[r] = decay * by_query[r] + written[r] * token.key_query;
  }
  for (int64_t r = 0; r < kRowsAtOnce; r += 4)
    write_rows<kByChannel, kFetch>(from + r * width, to + r * width, width, token, written + r, next + r * width);
}

// Some rows of one head in one sequence.
struct RecurrencePiece {
  const RecurrenceArguments& a;
  const SequenceRun run;
  const int64_t head, first, rows;  // the first of these rows
  const int64_t width;              // of a row, whole vectors
  RecurrenceToken tokens[kRecurrenceTokens];
  float* values;   // [kRecurrenceTokens, kRecurrenceRows]
  float* results;  // likewise
  const float* next = nullptr;  // as many rows that this thread comes to behind these, or null

  RecurrencePiece(const RecurrenceArguments& a, int64_t sequence, int64_t head, int64_t first)
      : a(a), run(run_of(a.slots, sequence, a.tokens)), head(head), first(first),
        rows(std::min(kRecurrenceRows, a.value_dim - first)), width(round_up(a.dim, kLanes)) {}

  bool is_as_stored() const {
    return a.slots.dtype == kFloat32 && width == a.dim && rows % kRowsAtOnce == 0;
  }

  int64_t offset() const { return (head * a.value_dim + first) * a.dim; }

  // Its rows in memory, or null where they are copied, or begin as zeros.
  const float* stored_rows() const {
    return is_as_stored() && run.before ? (const float*)run.before + offset() : nullptr;
  }

  void compute(Scratch& scratch) {
    const int64_t vectors = a.by_channel ? 5 : 2, whole = round_up(rows, kRowsAtOnce);
    const size_t bytes = (vectors * kRecurrenceTokens + whole) * round_up(width * 4, 64) + 2 * kRecurrenceTokens * kRecurrenceRows * 4;
    scratch.reserve(bytes);
    for (RecurrenceToken& token : tokens) {
      token.seen_key = token.key = scratch.take<float>(width);
      token.seen_query = token.query = scratch.take<float>(width);
      if (!a.by_channel) continue;
      token.decay = scratch.take<float>(width);
      token.seen_key = scratch.take<float>(width);
      token.seen_query = scratch.take<float>(width);
    }
    values = scratch.take<float>(kRecurrenceTokens * kRecurrenceRows);
    results = scratch.take<float>(kRecurrenceTokens * kRecurrenceRows);
    float* copy = scratch.take<float>(whole * width);

    const int64_t at = offset();
    float* state = is_as_stored() && run.after ? (float*)(run.after + at * 4) : copy;
    const float* before = state;
    if (!run.before) std::memset(state, 0, whole * width * 4);
    else if (is_as_stored()) before = stored_rows();
    else widen(run.before, at, copy, whole);
    for (int64_t t = run.begin; t < run.end; t += kRecurrenceTokens) {
      const int64_t count = std::min(kRecurrenceTokens, run.end - t);
      tile(t, count, before, state, t + count < run.end ? nullptr : next);
      before = state;
    }
    if (run.after && state == copy) narrow(copy, run.after, at);
  }

  void widen(const char* from, int64_t at, float* to, int64_t whole) const {
    for (int64_t r = 0; r < rows; ++r) take_floats(to + r * width, width, from, at + r * a.dim, a.slots.dtype, a.dim, 1);
    std::memset(to + rows * width, 0, (whole - rows) * width * 4);
  }

  void narrow(const float* from, char* to, int64_t at) const {
    for (int64_t r = 0; r < rows; ++r) put_floats(to, at + r * a.dim, a.slots.dtype, from + r * width, a.dim);
  }

  void tile(int64_t begin, int64_t count, const float* before, float* state, const float* fetched) {
    for (int64_t i = 0; i < count; ++i) {
      prepare(tokens[i], begin + i);
      const int64_t at = (begin + i) * a.value_token + head * a.value_head + first * a.value_step;
      take_floats(values + i * kRecurrenceRows, kRecurrenceRows, a.value, at, a.value_dtype, rows, a.value_step);
    }
    if (a.beta && a.by_channel) advance<true, true>(count, before, state, fetched);
    else if (a.beta) advance<true, false>(count, before, state, fetched);
    else if (a.by_channel) advance<false, true>(count, before, state, fetched);
    else advance<false, false>(count, before, state, fetched);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = ((begin + i) * a.heads + head) * a.value_dim + first;
      put_floats(a.out, at, a.value_dtype, results + i * kRecurrenceRows, rows);
    }
  }

  template <bool kDelta, bool kByChannel>
  void advance(int64_t count, const float* before, float* state, const float* fetched) {
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
      const float* from = before + r * width;
      float* to = state + r * width;
      for (int64_t i = 0; i < count; ++i, from = to) {
        const float* value = values + i * kRecurrenceRows + r;
        float* out = results + i * kRecurrenceRows + r;
        const RecurrenceToken& token = tokens[i];
        if (i == 0 && fetched)
          advance_rows<kDelta, kByChannel, true>(from, to, width, token, value, out, fetched + r * width);
        else
          advance_rows<kDelta, kByChannel, false>(from, to, width, token, value, out, from);
      }
    }
  }

  void prepare(RecurrenceToken& token, int64_t t) const {
    const int64_t shared = head / (a.heads / a.key_heads);
    load_vector(token.query, a.query, t * a.query_token + shared * a.query_head, a.query_dtype, a.query_step);
    load_vector(token.key, a.key, t * a.key_token + shared * a.key_head, a.key_dtype, a.key_step);
    multiply(token.query, (float)a.scale * (a.normalize ? inverse_norm(token.query) : 1.f));
    if (a.normalize) multiply(token.key, inverse_norm(token.key));
    token.key_query = dot(token.key, token.query, width);
    token.beta = a.beta ? load_entry(a.beta, t * a.beta_token + head * a.beta_head, a.beta_dtype) : 1.f;
    const int64_t decay = t * a.decay_token + head * a.decay_head;
    if (!a.by_channel) {
      token.decay_all = std::exp(load_entry(a.decay, decay, a.decay_dtype));
      return;
    }
    load_vector(token.decay, a.decay, decay, a.decay_dtype, a.decay_step);
    for (int64_t i = 0; i < width; i += kLanes) {
      const vfloat factor = exponential(load(token.decay + i));
      store(token.decay + i, factor);
      store(token.seen_key + i, factor * load(token.key + i));
      store(token.seen_query + i, factor * load(token.query + i));
    }
  }

  void load_vector(float* to, const char* from, int64_t at, int64_t dtype, int64_t step) const {
    take_floats(to, width, from, at, dtype, a.dim, step);
  }

  float inverse_norm(const float* x) const { return 1.f / std::sqrt(dot(x, x, width) + (float)a.eps); }

  void multiply(float* x, float factor) const {
    for (int64_t i = 0; i < width; i += kLanes) store(x + i, load(x + i) * factor);
  }
};

RecurrencePiece piece_at(const RecurrenceArguments& a, int64_t piece) {
  const int64_t parts = (a.value_dim + kRecurrenceRows - 1) / kRecurrenceRows;
  const int64_t head = piece / parts % a.heads, sequence = piece / parts / a.heads;
  return {a, sequence, head, piece % parts * kRecurrenceRows};
}

// One piece; while its last tokens pass, the next one, or none, is fetched.
void recur(const RecurrenceArguments& a, int64_t piece, int64_t next) {
  static thread_local Scratch scratch;
  RecurrencePiece work = piece_at(a, piece);
  if (next >= 0) work.next = piece_at(a, next).stored_rows();
  if (work.run.begin < work.run.end) work.compute(scratch);
}

}  // namespace

extern "C" int64_t pagoda_linear_recurrence(const RecurrenceArguments* arguments) {
  const RecurrenceArguments& a = *arguments;
  if (const int64_t wrong = wrong_slots(a.slots, a.tokens)) return wrong;
  clear_padding(a.slots, a.tokens, a.out, a.heads * a.value_dim * bytes_of(a.value_dtype));
  const int64_t parts = (a.value_dim + kRecurrenceRows - 1) / kRecurrenceRows;
  const int64_t pieces = sequences_of(a.slots) * a.heads * parts;
  if (a.threads == 1 || a.tokens * a.heads * a.value_dim * a.dim < kFewElements) {
    for (int64_t i = pieces; i-- > 0;) recur(a, i, i - 1);
    return 0;
  }
  // The last sequences first: steps list prompts behind sequences that have one token.
  std::atomic<int64_t> left{pieces};
  const auto take = [&] { return left.fetch_sub(1, std::memory_order_relaxed) - 1; };
#pragma omp parallel num_threads((int)a.threads)
  for (int64_t i = take(), next; i >= 0; i = next) recur(a, i, next = take());
  return 0;
}
