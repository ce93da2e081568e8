// CPU kernels of pagoda::all_reduce and pagoda::all_gather where the ranks of a group share memory. The Python twin of
// the structs is in runtime/parallel/shared_group.py.
//
// Ranks proceed in rounds. In round g a rank writes to bank g % 2 of its own region, sets `arrived` to g, waits until
// all ranks have arrived at g, and reads bank g % 2 of the others until it arrives at g + 1. A bank is written again in
// round g + 2, after all ranks have arrived at g + 1, so nobody reads it any more: one wait per round is enough.

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "rows.h"

namespace {

constexpr int64_t kMostRanks = 64, kLine = 64;
constexpr int64_t kSmallReduce = 64 << 10;  // bytes; every rank sums up to so many by itself
constexpr int kPauses = 2000, kYields = 64;
constexpr int64_t kNap = 20'000'000;  // ns until a sleeping rank looks for failures

struct alignas(128) Seat {  // of one rank, which alone writes it except for `sleepers`
  std::atomic<uint32_t> arrived;    // at this round; wraps around
  std::atomic<uint32_t> sleepers;   // ranks that wait for a change of `arrived` in the system
  std::atomic<uint64_t> calls[2];   // by bank, what the rank exchanges; the same on all ranks
  int64_t process;
};

struct SharedHeader {
  char magic[8];
  int64_t version, size, slot_bytes, bytes;
  alignas(64) std::atomic<uint64_t> failure;  // 0, or Failure | culprit << 8 | rank that found it << 16
  alignas(128) Seat seats[kMostRanks];
  char words[kMostRanks][256];  // why a rank stopped the group
};
constexpr int64_t kRegions = 28672;  // bytes before the first rank's region
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint64_t>::is_always_lock_free, "processes share them");
static_assert(offsetof(SharedHeader, failure) == 64 && offsetof(SharedHeader, seats) == 128 && sizeof(Seat) == 128 &&
                  offsetof(Seat, process) == 24 && offsetof(SharedHeader, words) == 8320 &&
                  sizeof(SharedHeader) <= kRegions,
              "shared_group.py reads and writes these places");

struct Member {  // what one process knows of a group
  char* memory;  // null once it was left
  int64_t rank, size, slot_bytes, timeout, step, exchanges;
  int64_t spent;  // ns in exchanges
  int64_t watched[kMostRanks];  // descriptors of the other ranks' processes, readable once they end; -1: none
};
static_assert(sizeof(Member) == (8 + kMostRanks) * 8, "shared_group.py makes it of integers");

enum Failure : uint64_t { kStopped = 1, kLate, kEnded, kDiffer };

struct AllReduceArguments {
  Member* member;
  const char* input;
  char* out;
  int64_t dtype, count, threads;
};
static_assert(sizeof(AllReduceArguments) == 6 * 8, "shared_group.py packs 6 integers");

struct AllGatherArguments {
  Member* member;
  const char* input;
  char* out;
  int64_t rows, row_bytes, threads;
};
static_assert(sizeof(AllGatherArguments) == 6 * 8, "shared_group.py packs 6 integers");

struct StopArguments {
  Member* member;
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec nap = {0, kNap};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
}
inline void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
inline bool has_ended(int64_t watched) {
  pollfd process = {(int)watched, POLLIN, 0};
  return watched >= 0 && poll(&process, 1, 0) > 0;
}

inline SharedHeader& header_of(const Member& member) { return *(SharedHeader*)member.memory; }

// Where a rank writes in a bank: its input, and what it sums up for all.
inline char* slot_of(const Member& m, int64_t rank, int64_t bank) {
  return m.memory + kRegions + (4 * rank + 2 * bank) * m.slot_bytes;
}
inline char* sums_of(const Member& m, int64_t rank, int64_t bank) { return slot_of(m, rank, bank) + m.slot_bytes; }

// Only the first failure of a group counts. Returns it.
int64_t fail(const Member& m, Failure failure, int64_t culprit) {
  SharedHeader& header = header_of(m);
  uint64_t found = 0;
  const uint64_t mine = failure | (uint64_t)culprit << 8 | (uint64_t)m.rank << 16;
  if (header.failure.compare_exchange_strong(found, mine)) found = mine;
  for (int64_t r = 0; r < m.size; ++r) wake(header.seats[r].arrived);
  return (int64_t)found;
}

inline bool at_round(const Seat& seat, uint32_t round) {
  return (int32_t)(seat.arrived.load(std::memory_order_acquire) - round) >= 0;
}

// 0 once all ranks have arrived at a round, else the group's failure.
int64_t wait_for_all(const Member& m, uint32_t round) {
  SharedHeader& header = header_of(m);
  int64_t begin = 0, looks = 0;
  for (int64_t r = 0; r < m.size; ++r) {
    Seat& seat = header.seats[r];
    for (int i = 0; i < kPauses && !at_round(seat, round); ++i) pause();
    for (; !at_round(seat, round); ++looks) {
      if (const uint64_t failure = header.failure.load(std::memory_order_acquire)) return (int64_t)failure;
      const int64_t time = now();
      if (!begin) begin = time;
      if (time - begin > m.timeout) return fail(m, kLate, r);
      if (looks < kYields) {
        sched_yield();
        continue;
      }
      for (int64_t s = r; s < m.size; ++s)
        if (has_ended(m.watched[s]) && !at_round(header.seats[s], round)) return fail(m, kEnded, s);
      const uint32_t seen = seat.arrived.load(std::memory_order_acquire);
      seat.sleepers.fetch_add(1);
      if ((int32_t)(seen - round) < 0) sleep_while(seat.arrived, seen);
      seat.sleepers.fetch_sub(1);
    }
  }
  return 0;
}

// One call's way through the rounds.
class Exchange {
 public:
  Exchange(Member& member, uint64_t call)
      : member_(member),
        own_(header_of(member).seats[member.rank]),
        round_(own_.arrived.load(std::memory_order_relaxed) + 1),
        call_((call + (uint64_t)member.step) * 0x9E3779B97F4A7C15u),
        begin_(now()) {
    ++member.exchanges;
  }
  ~Exchange() { member_.spent += now() - begin_; }
  int64_t failure() const { return (int64_t)header_of(member_).failure.load(std::memory_order_acquire); }
  int64_t bank() const { return round_ & 1; }  // to write in; behind `meet`, what was written lies in the other one
  int64_t meet() {
    own_.calls[bank()].store(call_, std::memory_order_relaxed);
    own_.arrived.store(round_);
    if (own_.sleepers.load()) wake(own_.arrived);
    if (const int64_t failure = wait_for_all(member_, round_)) return failure;
    for (int64_t r = 0; r < member_.size; ++r)
      if (header_of(member_).seats[r].calls[bank()].load(std::memory_order_relaxed) != call_)
        return fail(member_, kDiffer, r);
    ++round_;
    return 0;
  }

 private:
  Member& member_;
  Seat& own_;
  uint32_t round_;
  uint64_t call_;
  int64_t begin_;
};

struct Run {  // of bytes
  int64_t begin, end;
  int64_t bytes() const { return end - begin; }
  // Parts `first` up to `last` of `count`, at the borders of cache lines.
  Run part(int64_t first, int64_t last, int64_t count) const {
    const int64_t lines = (bytes() + kLine - 1) / kLine;
    return {std::min(begin + lines * first / count * kLine, end), std::min(begin + lines * last / count * kLine, end)};
  }
};

inline void copy_run(char* to, const char* from, Run run) {
  if (run.bytes() > 0) std::memcpy(to + run.begin, from + run.begin, run.bytes());
}

// The sum of the sources, from the first to the last in float32, rounded once, into one or two places.
void sum_run(char* to, char* too, const char* const* sources, int64_t count, int64_t dtype, Run run) {
  constexpr int64_t kBlock = 1024;
  float sums[kBlock], next[kBlock];
  const int64_t item = bytes_of(dtype);
  for (int64_t at = run.begin; at < run.end; at += kBlock * item) {
    const int64_t n = std::min(kBlock, (run.end - at) / item);
    load_floats(sums, sources[0] + at, dtype, n, 1);
    for (int64_t r = 1; r < count; ++r) {
      load_floats(next, sources[r] + at, dtype, n, 1);
      for (int64_t i = 0; i < n; ++i) sums[i] += next[i];
    }
    store_floats(to + at, dtype, sums, n);
    if (too) std::memcpy(too + at, to + at, n * item);
  }
}

// Everybody sums all.
int64_t reduce_at_once(const AllReduceArguments& a, Exchange& exchange, Run all) {
  const Member& m = *a.member;
  const int64_t bank = exchange.bank();
  copy_run(slot_of(m, m.rank, bank), a.input, all);
  if (const int64_t failure = exchange.meet()) return failure;
  const char* sources[kMostRanks];
  for (int64_t r = 0; r < m.size; ++r) sources[r] = r == m.rank ? a.input : slot_of(m, r, bank);
  sum_run(a.out, nullptr, sources, m.size, a.dtype, all);
  return 0;
}

// Piece by piece, every rank sums its part of each. Between two waits it writes one piece, sums its part of the piece
// before that and copies the others' sums of the piece before that.
int64_t reduce_in_pieces(const AllReduceArguments& a, Exchange& exchange, Run all) {
  const Member& m = *a.member;
  const int64_t pieces = (all.end + m.slot_bytes - 1) / m.slot_bytes;
  const auto piece = [&](int64_t i) { return Run{0, std::min(m.slot_bytes, all.end - i * m.slot_bytes)}; };
  for (int64_t i = 0; i < pieces + 2; ++i) {
    const int64_t bank = exchange.bank(), before = 1 - bank;
    share(a.threads, m.slot_bytes / 4, a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < m.size; ++r) {
        const auto mine = [&](int64_t i) { return piece(i).part(r, r + 1, m.size).part(begin, end, a.threads); };
        if (i < pieces && r != m.rank) copy_run(slot_of(m, m.rank, bank), a.input + i * m.slot_bytes, mine(i));
        if (i > 0 && i <= pieces && r == m.rank) {
          const int64_t at = (i - 1) * m.slot_bytes;
          const char* sources[kMostRanks];
          for (int64_t s = 0; s < m.size; ++s) sources[s] = s == m.rank ? a.input + at : slot_of(m, s, before);
          sum_run(sums_of(m, m.rank, bank), a.out + at, sources, m.size, a.dtype, mine(i - 1));
        }
        if (i > 1 && r != m.rank) copy_run(a.out + (i - 2) * m.slot_bytes, sums_of(m, r, before), mine(i - 2));
      }
    });
    if (i <= pieces)
      if (const int64_t failure = exchange.meet()) return failure;
  }
  return 0;
}

// Bytes of a rank's input to where they stand in the rows of all.
void place(const AllGatherArguments& a, int64_t rank, const char* from, Run run) {
  const int64_t size = a.member->size;
  for (int64_t at = run.begin; at < run.end;) {
    const int64_t row = at / a.row_bytes, column = at % a.row_bytes;
    const int64_t n = std::min(a.row_bytes - column, run.end - at);
    std::memcpy(a.out + (row * size + rank) * a.row_bytes + column, from + (at - run.begin), n);
    at += n;
  }
}

}  // namespace

extern "C" int64_t pagoda_shared_all_reduce(const AllReduceArguments* arguments) {
  const AllReduceArguments& a = *arguments;
  if (!a.member->memory) return 1;
  const Run all = {0, a.count * bytes_of(a.dtype)};
  if (!all.end) return 0;
  Exchange exchange(*a.member, (uint64_t)(all.end << 8 | a.dtype << 1));
  if (const int64_t failure = exchange.failure()) return failure;
  const bool small = all.end <= std::min(kSmallReduce, a.member->slot_bytes);
  return small ? reduce_at_once(a, exchange, all) : reduce_in_pieces(a, exchange, all);
}

extern "C" int64_t pagoda_shared_all_gather(const AllGatherArguments* arguments) {
  const AllGatherArguments& a = *arguments;
  if (!a.member->memory) return 1;
  const Member& m = *a.member;
  const int64_t bytes = a.rows * a.row_bytes;
  Exchange exchange(*a.member, (uint64_t)(bytes << 8) ^ (uint64_t)a.row_bytes * 0xC2B2AE3D27D4EB4Fu ^ 1);
  if (const int64_t failure = exchange.failure()) return failure;
  for (int64_t at = 0; at < bytes; at += m.slot_bytes) {
    const int64_t bank = exchange.bank();
    const Run piece = {0, std::min(m.slot_bytes, bytes - at)};
    copy_run(slot_of(m, m.rank, bank), a.input + at, piece);
    if (const int64_t failure = exchange.meet()) return failure;
    share(a.threads, piece.end / 4, a.threads, [&](int64_t begin, int64_t end) {
      const Run mine = piece.part(begin, end, a.threads);
      for (int64_t r = 0; r < m.size; ++r) {
        const char* from = r == m.rank ? a.input + at : slot_of(m, r, bank);
        place(a, r, from + mine.begin, {at + mine.begin, at + mine.end});
      }
    });
  }
  return 0;
}

// Lets every rank that waits, or ever will, return with a failure. Returns the group's failure.
extern "C" int64_t pagoda_shared_stop(const StopArguments* arguments) {
  return fail(*arguments->member, kStopped, arguments->member->rank);
}
#endif
