// Calls kernels one after the other with arguments that were packed before.
#include <cstdint>

struct KernelCall {
  int64_t (*kernel)(const void* arguments);
  const void* arguments;
};

struct ReplayArguments {
  const KernelCall* calls;
  int64_t count;
};

// 0, or the number of the call, counted from 1, whose kernel refused its arguments; those after it are not made.
extern "C" int64_t pagoda_replay(const ReplayArguments* arguments) {
  for (int64_t i = 0; i < arguments->count; ++i)
    if (arguments->calls[i].kernel(arguments->calls[i].arguments)) return i + 1;
  return 0;
}
