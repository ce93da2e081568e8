// Work that lies in memory one piece after the other, shared out among threads: each reads a stretch of its own from
// the beginning to the end, which can be fetched ahead across the borders of pieces, and takes pieces of others only
// when its own are done.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

class Shares {
 public:
  Shares(int64_t pieces, int64_t threads) : team_(std::min(threads, kMost)) {
    for (int64_t t = 0; t < team_; ++t) {
      shares_[t].next.store(pieces * t / team_, std::memory_order_relaxed);
      shares_[t].end = pieces * (t + 1) / team_;
    }
  }
  int64_t team() const { return team_; }
  // Calls work(piece) until none is left; `thread` is the caller's number.
  template <class Work>
  void take(int64_t thread, const Work& work) {
    for (int64_t i = 0; i < team_; ++i) {
      Share& share = shares_[(thread + i) % team_];
      for (int64_t piece; (piece = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) work(piece);
    }
  }

 private:
  static constexpr int64_t kMost = 256;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int64_t team_;
  Share shares_[kMost];
};
