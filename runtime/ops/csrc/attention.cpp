// CPU kernels of pagoda::attention and pagoda::paged_attention. Plain C interface: one struct of pointers,
// sizes and strides per operator (their Python twins are in attention.py and paged_attention.py; keep them in
// step). Nothing of torch is included, which keeps the build at a few seconds.

#include <omp.h>

#include <atomic>

#include "int8_rows.h"
#include "plan.h"

struct AttentionArguments {
  const char* query;
  const char* key;
  const char* value;
  const char* mask;  // or null, like sinks and slopes
  const char* sinks;
  const char* slopes;
  char* out;
  int64_t dtype, mask_dtype, sinks_dtype, slopes_dtype;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  int64_t query_batch, query_head, query_token, query_dim;
  int64_t key_batch, key_head, key_token, key_dim;
  int64_t value_batch, value_head, value_token, value_dim_stride;
  int64_t mask_batch, mask_head, mask_query, mask_key;
  int64_t sinks_stride, slopes_stride;
  int64_t is_causal, window, chunk, threads;
  double scale, softcap;
};

struct PagedAttentionArguments {
  const char* query;
  const char* key;
  const char* value;
  char* key_cache;
  char* value_cache;
  const int64_t* slots;
  const int32_t* block_table;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const char* sinks;  // or null, like slopes
  const char* slopes;
  char* key_scales;  // of int8 caches, or null, like value_scales
  char* value_scales;
  const char* selected;  // bool, by token and position of its sequence, or null
  const char* relative;  // added by head, token and distance back to the key, or null
  char* out;
  int64_t dtype, cache_dtype, sinks_dtype, slopes_dtype, relative_dtype;
  int64_t heads, kv_heads, tokens, sequences, table_width, num_blocks, block_size, dim, value_dim;
  int64_t query_head, query_token, query_dim;
  int64_t key_head, key_token, key_dim;
  int64_t value_head, value_token, value_dim_stride;
  int64_t key_block, key_row, key_cache_head, key_cache_dim;
  int64_t value_block, value_row, value_cache_head, value_cache_dim;
  int64_t key_scale_block, key_scale_row, key_scale_head;
  int64_t value_scale_block, value_scale_row, value_scale_head;
  int64_t sinks_stride, slopes_stride, selected_token;
  int64_t relative_head, relative_token, relative_distance, relative_extent;
  int64_t window, chunk, threads, invariant;
  double scale, softcap;
};
static_assert(sizeof(AttentionArguments) == 42 * 8, "attention.py packs 40 integers and 2 doubles");
static_assert(sizeof(PagedAttentionArguments) == 66 * 8,
              "paged_attention.py packs 64 integers and 2 doubles");

// What a kernel returns: 0, or one of these in the low byte and the index of the culprit above it.
enum Failure : int64_t { kBadSlot = 1, kBadQueryStart = 2, kBadLength = 3, kBadBlock = 4 };

static inline int64_t failure(Failure what, int64_t index) { return what | index << 8; }

namespace {

// One thread takes the pieces of a tile, one after the other. `attend` takes a tile and the next one.
template <class Attend>
void attend_in_pieces(const Problem& p, const Sequence& s, const Tile& tile, const Tile* next, Scratch& scratch,
                      const Attend& attend) {
  static thread_local std::vector<Tile> pieces;
  static thread_local std::vector<float> partials;
  pieces.clear();
  const int64_t count = append_pieces(tile, 0, kSplitKeys, pieces);
  partials.resize(count * tile.rows * (p.columns + 2));
  place_partials(p, pieces.data(), count, partials.data());
  for (int64_t n = 0; n < count; ++n) attend(pieces[n], n + 1 < count ? &pieces[n + 1] : next);
  merge_split(p, s, pieces.data(), count, scratch);
}

// Runs `before` for n indices and then the tiles, in one parallel region. Threads meet as seldom as possible:
// where another program runs on one of our cores, every meeting can cost a time slice.
template <class Before>
void run(const Problem& p, const std::vector<Sequence>& sequences, const Plan& plan, int64_t threads,
         int64_t n, const Before& before) {
  static thread_local Scratch own;
  constexpr int64_t kFewWrites = 64;  // tokens whose keys and values one thread copies in microseconds
  const int64_t tiles = (int64_t)plan.tiles.size(), splits = (int64_t)plan.splits.size();
#if defined(PAGODA_BF16)
  const bool keys_fit = p.key_dtype == kBFloat16 || p.key_dtype == kInt8;
  const bool bf16 = p.query_dtype == kBFloat16 && keys_fit && p.dim % 2 == 0;
#endif
  const bool alone = n <= kFewWrites || threads == 1;
  // Of many tiles a thread takes the next one early, to fetch its keys in time; of few that would leave others idle.
  const bool takes_early = tiles >= 8 * threads;
  std::atomic<int64_t> taken{0};
  for (int64_t i = 0; alone && i < n; ++i) before(i);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
  {
    Scratch& scratch = own;
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < n; ++i) before(i);
    }
    const auto take = [&]() -> const Tile* {
      for (;;) {
        const int64_t i = taken.fetch_add(1, std::memory_order_relaxed);
        if (i >= tiles) return nullptr;
        if (plan.tiles[i].rows > 0) return &plan.tiles[i];  // else it was split into others
      }
    };
    const auto attend = [&](const Tile& tile, const Tile* next) {
#if defined(PAGODA_BF16)
      if (bf16) return attend_tile<Bf16>(p, sequences, tile, next, scratch);
#endif
      attend_tile<Float>(p, sequences, tile, next, scratch);
    };
    for (const Tile *tile = take(), *next; tile; tile = next) {
      next = takes_early ? take() : nullptr;
      if (is_in_pieces(p, *tile)) attend_in_pieces(p, sequences[tile->sequence], *tile, next, scratch, attend);
      else attend(*tile, next);
      if (!takes_early) next = take();
    }
#if defined(PAGODA_TILES)
    release_tiles();
#endif
    if (splits > 0) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < splits; ++i) {
        const Tile* first = plan.tiles.data() + plan.splits[i].first_tile;
        merge_split(p, sequences[first->sequence], first, plan.splits[i].count, scratch);
      }
    }
  }
}

// Below this many multiply-adds, waking the other threads costs more than they save.
constexpr double kSmallWork = 1e6;

int64_t check(const PagedAttentionArguments& a) {
  for (int64_t t = 0; t < a.tokens; ++t)
    if (a.slots[t] >= a.num_blocks * a.block_size) return failure(kBadSlot, t);
  if (a.query_starts[0] != 0) return failure(kBadQueryStart, 0);
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t tokens = (int64_t)a.query_starts[s + 1] - a.query_starts[s], keys = a.context_lengths[s];
    if (tokens < 0 || a.query_starts[s + 1] > a.tokens) return failure(kBadQueryStart, s + 1);
    if (tokens == 0) continue;
    if (keys < tokens || keys > a.table_width * a.block_size) return failure(kBadLength, s);
  }
  return 0;
}

// One head of one token, quantized; its scale.
float write_int8(const char* from, int64_t dtype, int64_t stride, char* to, int64_t to_stride, int64_t n,
                 Scratch& scratch) {
  float* floats = scratch.take<float>(n);
  load_floats(floats, from, dtype, n, stride);
  int8_t* whole = to_stride == 1 ? (int8_t*)to : scratch.take<int8_t>(n);
  const float scale = quantize_row(whole, floats, n);
  if (to_stride != 1)
    for (int64_t i = 0; i < n; ++i) to[i * to_stride] = (char)whole[i];
  scratch.used = 0;
  return scale;
}

void write_cache(const PagedAttentionArguments& a, int64_t token, Scratch& scratch) {
  const int64_t slot = a.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / a.block_size, row = slot % a.block_size;
  const int64_t size = bytes_of(a.dtype), cache_size = bytes_of(a.cache_dtype);
  scratch.reserve((a.dim + a.value_dim) * 5 + 256);
  if (a.cache_dtype == kInt8) {
    float* key_scales = (float*)a.key_scales + block * a.key_scale_block + row * a.key_scale_row;
    float* value_scales = (float*)a.value_scales + block * a.value_scale_block + row * a.value_scale_row;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      key_scales[head * a.key_scale_head] =
          write_int8(a.key + (head * a.key_head + token * a.key_token) * size, a.dtype, a.key_dim,
                     a.key_cache + block * a.key_block + row * a.key_row + head * a.key_cache_head,
                     a.key_cache_dim, a.dim, scratch);
      value_scales[head * a.value_scale_head] =
          write_int8(a.value + (head * a.value_head + token * a.value_token) * size, a.dtype, a.value_dim_stride,
                     a.value_cache + block * a.value_block + row * a.value_row + head * a.value_cache_head,
                     a.value_cache_dim, a.value_dim, scratch);
    }
    return;
  }
  const auto copy = [&](const char* from, int64_t stride, char* to, int64_t to_stride, int64_t n) {
    if (a.dtype == a.cache_dtype && stride == 1 && to_stride == 1) {
      std::memcpy(to, from, n * size);
      return;
    }
    float* floats = scratch.take<float>(n);
    load_floats(floats, from, a.dtype, n, stride);
    if (to_stride == 1) store_floats(to, a.cache_dtype, floats, n);
    else
      for (int64_t i = 0; i < n; ++i) store_scalar(to + i * to_stride * cache_size, a.cache_dtype, floats[i]);
    scratch.used = 0;
  };
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    copy(a.key + (head * a.key_head + token * a.key_token) * size, a.key_dim,
         a.key_cache + (block * a.key_block + row * a.key_row + head * a.key_cache_head) * cache_size,
         a.key_cache_dim, a.dim);
    copy(a.value + (head * a.value_head + token * a.value_token) * size, a.value_dim_stride,
         a.value_cache + (block * a.value_block + row * a.value_row + head * a.value_cache_head) * cache_size,
         a.value_cache_dim, a.value_dim);
  }
}

}  // namespace

extern "C" int64_t pagoda_attention(const AttentionArguments* arguments) {
  const AttentionArguments& a = *arguments;
  static thread_local Plan plan;
  static thread_local std::vector<Sequence> sequences;
  static thread_local std::vector<int32_t> ids;
  Problem p{};
  p.query = a.query;
  p.query_dtype = p.key_dtype = a.dtype;
  p.query_batch = a.query_batch, p.query_head = a.query_head;
  p.query_token = a.query_token, p.query_dim = a.query_dim;
  p.out = a.out;
  p.out_batch = a.queries * a.heads * a.value_dim;
  p.key = a.key, p.value = a.value;
  p.key_row = a.key_token, p.key_head = a.key_head, p.key_dim = a.key_dim;
  p.value_row = a.value_token, p.value_head = a.value_head, p.value_dim_stride = a.value_dim_stride;
  p.block_size = a.keys + 1;  // dense keys are one big block per batch entry
  p.heads = a.heads, p.kv_heads = a.kv_heads, p.group = a.heads / a.kv_heads;
  p.dim = a.dim, p.value_dim = a.value_dim, p.columns = round_up(a.value_dim, 16);
  p.mask = a.mask, p.mask_dtype = a.mask_dtype;
  p.mask_batch = a.mask_batch, p.mask_head = a.mask_head;
  p.mask_query = a.mask_query, p.mask_key = a.mask_key;
  p.sinks = a.sinks, p.sinks_dtype = a.sinks_dtype, p.sinks_stride = a.sinks_stride;
  p.slopes = a.slopes, p.slopes_dtype = a.slopes_dtype, p.slopes_stride = a.slopes_stride;
  p.scale = (float)a.scale, p.softcap = (float)a.softcap;
  p.is_causal = a.is_causal, p.window = a.window, p.chunk = a.chunk;

  p.key_block = a.key_batch, p.value_block = a.value_batch;

  ids.resize(a.batch);
  sequences.clear();
  for (int64_t b = 0; b < a.batch; ++b) {
    ids[b] = (int32_t)b;
    sequences.push_back(Sequence{b, 0, a.queries, 0, a.keys, &ids[b]});
  }
  plan_tiles(p, sequences, a.threads, plan);
  run(p, sequences, plan, plan.work < kSmallWork ? 1 : a.threads, 0, [](int64_t) {});
  return 0;
}

extern "C" int64_t pagoda_paged_attention(const PagedAttentionArguments* arguments) {
  const PagedAttentionArguments& a = *arguments;
  static thread_local Plan plan;
  static thread_local std::vector<Sequence> sequences;
  if (const int64_t failed = check(a)) return failed;
  Problem p{};
  p.query = a.query;
  p.query_dtype = a.dtype, p.key_dtype = a.cache_dtype;
  p.query_head = a.query_head, p.query_token = a.query_token, p.query_dim = a.query_dim;
  p.out = a.out;
  p.key = a.key_cache, p.value = a.value_cache;
  p.key_block = a.key_block, p.key_row = a.key_row;
  p.key_head = a.key_cache_head, p.key_dim = a.key_cache_dim;
  p.value_block = a.value_block, p.value_row = a.value_row;
  p.value_head = a.value_cache_head, p.value_dim_stride = a.value_cache_dim;
  p.key_scales = (const float*)a.key_scales, p.value_scales = (const float*)a.value_scales;
  p.key_scale_block = a.key_scale_block, p.key_scale_row = a.key_scale_row;
  p.key_scale_head = a.key_scale_head;
  p.value_scale_block = a.value_scale_block, p.value_scale_row = a.value_scale_row;
  p.value_scale_head = a.value_scale_head;
  p.block_size = a.block_size;
  p.heads = a.heads, p.kv_heads = a.kv_heads, p.group = a.heads / a.kv_heads;
  p.dim = a.dim, p.value_dim = a.value_dim, p.columns = round_up(a.value_dim, 16);
  p.sinks = a.sinks, p.sinks_dtype = a.sinks_dtype, p.sinks_stride = a.sinks_stride;
  p.slopes = a.slopes, p.slopes_dtype = a.slopes_dtype, p.slopes_stride = a.slopes_stride;
  p.scale = (float)a.scale, p.softcap = (float)a.softcap;
  p.is_causal = 1, p.window = a.window, p.chunk = a.chunk;
  p.invariant = a.invariant;
  p.mask = a.selected, p.mask_dtype = kBool;
  p.mask_query = a.selected_token, p.mask_key = 1;
  p.relative = a.relative, p.relative_dtype = a.relative_dtype;
  p.relative_head = a.relative_head, p.relative_token = a.relative_token;
  p.relative_distance = a.relative_distance, p.relative_extent = a.relative_extent;

  sequences.clear();
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t tokens = a.query_starts[s + 1] - a.query_starts[s], keys = a.context_lengths[s];
    if (tokens == 0) continue;
    const int32_t* blocks = a.block_table + s * a.table_width;
    int64_t low, high;
    seen_keys(p, keys - tokens, keys, &low, &high);
    for (int64_t b = low / a.block_size; b * a.block_size < keys; ++b)
      if (blocks[b] < 0 || blocks[b] >= a.num_blocks) return failure(kBadBlock, s);
    sequences.push_back(Sequence{0, a.query_starts[s], tokens, keys - tokens, keys, blocks});
  }
  const int64_t token_bytes = a.heads * a.value_dim * bytes_of(a.dtype), used = a.query_starts[a.sequences];
  if (a.tokens > used) std::memset(a.out + used * token_bytes, 0, (a.tokens - used) * token_bytes);

  plan_tiles(p, sequences, a.threads, plan);
  run(p, sequences, plan, plan.work < kSmallWork ? 1 : a.threads, a.tokens, [&a](int64_t token) {
    static thread_local Scratch scratch;
    write_cache(a, token, scratch);
  });
  return 0;
}
