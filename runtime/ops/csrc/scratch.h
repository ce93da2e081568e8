// A thread's working memory: it stays until more is needed, and what is taken of it starts on a cache line.
#pragma once

#include <cstdlib>

#include "vector.h"

struct Scratch {
  char* memory = nullptr;
  size_t bytes = 0;
  size_t used = 0;
  ~Scratch() { std::free(memory); }
  void reserve(size_t need) {
    if (need > bytes) {
      std::free(memory);
      memory = (char*)std::aligned_alloc(64, round_up(need, 64));
      bytes = memory ? need : 0;
      if (!memory) std::abort();
    }
    used = 0;
  }
  template <class T>
  T* take(int64_t n) {
    T* p = (T*)(memory + used);
    used += round_up(n * sizeof(T), 64);
    return p;
  }
};
