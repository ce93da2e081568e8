// Attention of one tile: some query rows of one (sequence, KV head) over a range of its keys, in one pass
// with the online softmax of FlashAttention (Dao et al. 2022). The rows of a tile are (token, head of the
// group) pairs, so that a block of keys is read once for all query heads that share it (GQA).
#pragma once

#include <vector>

#include "few_rows_tiles.h"
#include "few_rows_vectors.h"
#include "pack.h"
#include "softmax.h"

// A sequence of the call: its new tokens and where its keys are.
struct Sequence {
  int64_t batch;           // index along the query's batch dimension
  int64_t first_token;     // along the query's token dimension
  int64_t tokens;
  int64_t first_position;  // of first_token
  int64_t keys;            // context length
  const int32_t* blocks;
};

struct Tile {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // row = token * group + head within the group
  int64_t first_key, end_key;
  float* partial;  // null: normalize and write the result; else: (weighted values, maximum, sum) per row
};

// Where a tile's blocks of keys begin. What lies before its first key is not looked at.
static inline int64_t first_block_key(const Problem& p, const Tile& t) {
  return p.invariant ? t.first_key / kBlockKeys * kBlockKeys : t.first_key;
}

static inline void note_rows(Prefetcher& ahead, const char* row, int rows, int64_t stride, int64_t bytes) {
  if (stride == bytes) ahead.add(row, rows * bytes);
  else for (int i = 0; i < rows; ++i) ahead.add(row + i * stride, bytes);
}

// Calls each(i, run, id, offset) for the runs of keys [first + skip, first + n) that lie in one block: key first + i and
// the `run` - 1 after it are in block `id` from `offset` on.
template <class Each>
static inline void for_each_part(const Problem& p, const Sequence& s, int64_t first, int skip, int n,
                                 const Each& each) {
  int64_t block = (first + skip) / p.block_size, offset = (first + skip) % p.block_size;
  for (int i = skip; i < n; ++block, offset = 0) {
    const int run = (int)lesser(n - i, p.block_size - offset);
    each(i, run, (int64_t)s.blocks[block], offset);
    i += run;
  }
}

// Calls each(i, run, key, value) for the same runs: key first + i is at `key`, the `run` - 1 after it follow at the
// row strides.
template <class Each>
static inline void for_each_run(const Problem& p, const Sequence& s, int64_t kv_head, int64_t first, int skip, int n,
                                const Each& each) {
  const int64_t size = bytes_of(p.key_dtype);
  for_each_part(p, s, first, skip, n, [&](int i, int run, int64_t id, int64_t offset) {
    each(i, run, p.key + (id * p.key_block + kv_head * p.key_head + offset * p.key_row) * size,
         p.value + (id * p.value_block + kv_head * p.value_head + offset * p.value_row) * size);
  });
}

// Calls each(i, run, key_scale, value_scale) for the same runs.
template <class Each>
static inline void for_each_run_of_scales(const Problem& p, const Sequence& s, int64_t kv_head, int64_t first,
                                          int skip, int n, const Each& each) {
  for_each_part(p, s, first, skip, n, [&](int i, int run, int64_t id, int64_t offset) {
    each(i, run,
         p.key_scales + id * p.key_scale_block + kv_head * p.key_scale_head + offset * p.key_scale_row,
         p.value_scales + id * p.value_scale_block + kv_head * p.value_scale_head + offset * p.value_scale_row);
  });
}

static inline void load_scales(const Problem& p, const Sequence& s, int64_t kv_head, int64_t first, int skip, int n,
                               BlockScales& scales) {
  for (int i = 0; i < skip; ++i) scales.keys[i] = scales.values[i] = 0.f;
  for_each_run_of_scales(p, s, kv_head, first, skip, n, [&](int i, int run, const float* key, const float* value) {
    for (int j = 0; j < run; ++j) {
      scales.keys[i + j] = key[j * p.key_scale_row];
      scales.values[i + j] = value[j * p.value_scale_row];
    }
  });
  for (int i = n; i < kBlockKeys; ++i) scales.keys[i] = scales.values[i] = 0.f;
}

// One pointer per key and per value of [first, first + n), padded with `zeros` to full groups of 16, and in place of
// the first `skip`.
static void point_rows(const Problem& p, const Sequence& s, int64_t kv_head, int64_t first, int skip, int n,
                       const char* zeros, const char** keys, const char** values) {
  const int64_t key_row = p.key_row * bytes_of(p.key_dtype), value_row = p.value_row * bytes_of(p.key_dtype);
  for (int i = 0; i < skip; ++i) keys[i] = values[i] = zeros;
  for_each_run(p, s, kv_head, first, skip, n, [&](int i, int run, const char* key, const char* value) {
    for (int j = 0; j < run; ++j) {
      keys[i + j] = key + j * key_row;
      values[i + j] = value + j * value_row;
    }
  });
  for (int i = n; i % 16; ++i) keys[i] = values[i] = zeros;
}

// Notes the keys and values of [first + skip, first + n) to be fetched ahead.
static void note_block(const Problem& p, const Sequence& s, int64_t kv_head, int64_t first, int skip, int n,
                       Prefetcher& ahead) {
  const int64_t size = bytes_of(p.key_dtype);
  for_each_run(p, s, kv_head, first, skip, n, [&](int, int run, const char* key, const char* value) {
    note_rows(ahead, key, run, p.key_row * size, p.dim * size);
    note_rows(ahead, value, run, p.value_row * size, p.value_dim * size);
  });
  if (p.key_scales == nullptr) return;
  for_each_run_of_scales(p, s, kv_head, first, skip, n, [&](int, int run, const float* key, const float* value) {
    note_rows(ahead, (const char*)key, run, p.key_scale_row * 4, 4);
    note_rows(ahead, (const char*)value, run, p.value_scale_row * 4, 4);
  });
}

// Copies rows whose elements are `stride` apart to contiguous ones and points to those.
static void straighten_rows(const char** rows, int n, int64_t dim, int64_t size, int64_t stride,
                            char* spare) {
  for (int i = 0; i < n; ++i, spare += dim * size) {
    if (size == 4)
      for (int64_t d = 0; d < dim; ++d) ((uint32_t*)spare)[d] = ((const uint32_t*)rows[i])[d * stride];
    else if (size == 1)
      for (int64_t d = 0; d < dim; ++d) spare[d] = rows[i][d * stride];
    else
      for (int64_t d = 0; d < dim; ++d) ((uint16_t*)spare)[d] = ((const uint16_t*)rows[i])[d * stride];
    rows[i] = spare;
  }
}

// Points each row to what the mask adds to its n scores; false if the mask hides all of them from all rows.
static bool load_tile_mask(const Problem& p, const Sequence& s, Row* row, int rows, int64_t first, int n,
                           float* mask) {
  bool hidden = true;
  const char* last = nullptr;
  for (int r = 0; r < rows; ++r) {
    const int64_t token = s.first_token + row[r].token;
    const int64_t at = s.batch * p.mask_batch + row[r].head * p.mask_head + token * p.mask_query;
    const char* from = p.mask + at * bytes_of(p.mask_dtype);
    if (from == last) {  // heads that share a mask
      row[r].mask = row[r - 1].mask;
      continue;
    }
    float* to = mask + r * kBlockKeys;
    for (int i = n; i % 16; ++i) to[i] = 0.f;
    hidden &= load_mask(p, from, first, n, to);
    row[r].mask = to;
    last = from;
  }
  return !hidden;
}

// Points each row to what the bias by distance adds to its n scores.
static void load_relative_bias(const Problem& p, const Sequence& s, Row* row, int rows, int64_t first, int n,
                               float* bias) {
  for (int r = 0; r < rows; ++r) {
    const int64_t at = row[r].head * p.relative_head + (s.first_token + row[r].token) * p.relative_token;
    const int64_t position = row[r].position - first;  // of the key at distance 0, from the block's first key on
    const int begin = (int)lesser(greater(position - p.relative_extent + 1, 0), kBlockKeys);
    const int end = (int)lesser(position + 1, n);
    float* to = bias + r * kBlockKeys;
    std::memset(to, 0, kBlockKeys * sizeof(float));
    for (int i = begin; i < end; ++i)
      to[i] = load_entry(p.relative, at + (position - i) * p.relative_distance, p.relative_dtype);
    row[r].mask = to;
  }
}

static inline char* out_row(const Problem& p, const Sequence& s, int64_t token, int64_t head) {
  const int64_t at = s.batch * p.out_batch + ((s.first_token + token) * p.heads + head) * p.value_dim;
  return p.out + at * bytes_of(p.query_dtype);
}

static inline size_t scratch_bytes(const Problem& p, int64_t rows) {
  const int64_t floats = rows * (p.dim + 2 * kBlockKeys + p.columns + kBlockKeys + 32) +
                         kBlockKeys * (2 * p.dim + p.columns + p.value_dim + 32) + 8 * (p.dim + p.columns);
  return floats * 4 + 65536;
}

constexpr int kGroupKeys = 16;  // keys that are packed together
constexpr int kTileKeys = 32;   // values that a tile holds as pairs
constexpr int kStretchRows = 16;  // that go from scores to weighted values together

// What the softmax knows of the rows of a tile before the first key, and their queries.
template <class Kind>
static void start_rows(const Problem& p, const Sequence& s, const Tile& t, Row* row, typename Kind::element* query) {
  for (int r = 0; r < t.rows; ++r) {
    Row& x = row[r];
    const int64_t flat = t.first_row + r;
    x.token = flat / p.group;
    x.head = t.kv_head * p.group + flat % p.group;
    x.position = s.first_position + x.token;
    x.maximum = -INFINITY;
    x.sum = vfloat{};
    x.mask = nullptr;
    x.slope = p.slopes ? load_entry(p.slopes, x.head * p.slopes_stride, p.slopes_dtype) : 0.f;
    seen_keys(p, x.position, s.keys, &x.low, &x.high);
    x.low = greater(x.low, t.first_key);
    x.high = lesser(x.high, t.end_key);
    const int64_t at =
        s.batch * p.query_batch + x.head * p.query_head + (s.first_token + x.token) * p.query_token;
    pack_query(Kind{}, query + r * (p.dim / Kind::kPerElement), p.query + at * bytes_of(p.query_dtype), p.dim,
               p.query_dtype, p.query_dim);
  }
}

// Writes what the rows of a tile have come to.
static void finish_rows(const Problem& p, const Sequence& s, const Tile& t, const Row* row, float* result) {
  for (int r = 0; r < t.rows; ++r) {
    if (t.partial) {
      float* to = t.partial + r * (p.columns + 2);
      std::memcpy(to, result + r * p.columns, p.columns * 4);
      to[p.columns] = row[r].maximum;
      to[p.columns + 1] = sum_lanes(row[r].sum);
    } else {
      finish_row(p, out_row(p, s, row[r].token, row[r].head), row[r].head, result + r * p.columns,
                 row[r].maximum, sum_lanes(row[r].sum));
    }
  }
}

// The keys and values of a tile, a block at a time, while those of the next block are fetched ahead. `next`, if any, is
// the tile that this thread takes afterwards: its first keys are fetched during the last block.
class KeyBlocks {
 public:
  int64_t first;  // key of the block
  int n;          // its keys; 0 or less after the last block
  Prefetcher ahead;

  KeyBlocks(const Problem& p, const std::vector<Sequence>& sequences, const Tile& t, const Tile* next,
            const char* zeros)
      : first(first_block_key(p, t)), p_(p), sequences_(sequences), tile_(t), next_(next), zeros_(zeros) {
    n = point(first);
    look_ahead();
  }

  void advance() {
    first += kBlockKeys;
    n = next_n_;
    now_ = 1 - now_;
    look_ahead();
  }

  // How many keys of the block lie before the tile's first one; zeros stand for them.
  int skip() const { return (int)greater(0, tile_.first_key - first); }

  // One pointer each, padded to full groups of 16. They may be pointed elsewhere.
  const char** keys() { return keys_[now_]; }
  const char** values() { return values_[now_]; }

 private:
  void look_ahead() {
    if (n <= 0) return;
    now_ = 1 - now_;
    next_n_ = point(first + kBlockKeys);
    now_ = 1 - now_;
  }

  int point(int64_t first) {
    const Sequence& s = sequences_[tile_.sequence];
    const int n = (int)lesser(kBlockKeys, tile_.end_key - first);
    ahead.clear();
    if (n > 0) {
      const int skip = (int)greater(0, tile_.first_key - first);
      point_rows(p_, s, tile_.kv_head, first, skip, n, zeros_, keys_[now_], values_[now_]);
      note_block(p_, s, tile_.kv_head, first, skip, n, ahead);
    } else if (next_) {
      const int64_t keys = lesser(kBlockKeys, next_->end_key - next_->first_key);
      note_block(p_, sequences_[next_->sequence], next_->kv_head, next_->first_key, 0, (int)keys, ahead);
    }
    return n;
  }

  const Problem& p_;
  const std::vector<Sequence>& sequences_;
  const Tile& tile_;
  const Tile* next_;
  const char* zeros_;
  int now_ = 0, next_n_ = 0;
  const char* keys_[2][kBlockKeys];
  const char* values_[2][kBlockKeys];
};

#if defined(PAGODA_BF16)
// A tile of few rows, without packing keys. Way: FewRowsOnTiles or FewRowsOnVectors.
template <class Way>
static void attend_few_rows(const Problem& p, const std::vector<Sequence>& sequences, const Tile& t, const Tile* next,
                            Scratch& scratch) {
  const Sequence& s = sequences[t.sequence];
  const int rows = (int)t.rows;
  scratch.reserve(rows * ((int64_t)sizeof(Row) + p.dim * 2 + p.columns * 4) + (p.dim + p.columns) * 2 + Way::bytes(p) +
                  4096);
  Row* row = scratch.take<Row>(rows);
  uint32_t* query = scratch.take<uint32_t>(rows * (p.dim / 2));
  float* result = scratch.take<float>(rows * p.columns);
  char* zeros = scratch.take<char>((p.dim + p.columns) * 2);
  std::memset(result, 0, rows * p.columns * sizeof(float));
  std::memset(zeros, 0, (p.dim + p.columns) * 2);
  start_rows<Bf16>(p, s, t, row, query);
  Way way(p, row, rows, query, scratch);
  for (KeyBlocks block(p, sequences, t, next, zeros); block.n > 0; block.advance()) {
    block.ahead.spread(way.steps());
    way.add(block.keys(), block.values(), block.first, block.n, result, block.ahead);
  }
  way.finish();
  finish_rows(p, s, t, row, result);
}
#endif

template <class Kind>
static void attend_tile(const Problem& p, const std::vector<Sequence>& sequences, const Tile& t, const Tile* next,
                        Scratch& scratch) {
  const Sequence& s = sequences[t.sequence];
  typedef typename Kind::element element;
  const bool plain = p.scale > 0.f && !(p.softcap > 0.f) && !p.slopes && !p.mask && !p.relative;
#if defined(PAGODA_BF16)
  if constexpr (Kind::kPerElement == 2) {
#if defined(PAGODA_TILES)
    if (!p.invariant && plain && FewRowsOnTiles::fits(p, (int)t.rows))
      return attend_few_rows<FewRowsOnTiles>(p, sequences, t, next, scratch);
#endif
    if (!p.invariant && plain && FewRowsOnVectors::fits(p, (int)t.rows))
      return attend_few_rows<FewRowsOnVectors>(p, sequences, t, next, scratch);
  }
#endif
  const int64_t steps = p.dim / Kind::kPerElement;
  const int64_t size = bytes_of(p.key_dtype);
  const int rows = (int)t.rows;
  // Few enough at a time that their scores stay in the level-1 cache; the tiles take as many at once.
  const int stretch = (int)lesser(rows, kStretchRows);

  scratch.reserve(scratch_bytes(p, rows));
  Row* row = scratch.take<Row>(rows);
  float* decay = scratch.take<float>(stretch);
  element* query = scratch.take<element>(rows * steps);
  element* keys = scratch.take<element>(steps * kBlockKeys);
  element* values = scratch.take<element>(kBlockKeys / Kind::kPerElement * p.columns);
  float* scores = scratch.take<float>(stretch * kBlockKeys);
  element* weights = scratch.take<element>(stretch * kBlockKeys / Kind::kPerElement);
  float* result = scratch.take<float>(rows * p.columns);
  float* mask = p.mask || p.relative ? scratch.take<float>(rows * kBlockKeys) : nullptr;
  float* spare = scratch.take<float>(4 * (p.dim + 4));
  char* straight_keys = p.key_dim != 1 ? scratch.take<char>(kBlockKeys * p.dim * size) : nullptr;
  char* straight_values =
      p.value_dim_stride != 1 ? scratch.take<char>(kBlockKeys * p.value_dim * size) : nullptr;
  std::memset(result, 0, rows * p.columns * sizeof(float));
  char* zeros = scratch.take<char>((p.dim + p.columns) * 4);
  std::memset(zeros, 0, (p.dim + p.columns) * 4);

  start_rows<Kind>(p, s, t, row, query);
  BlockScales block_scales;
  const BlockScales* scales = p.key_scales ? &block_scales : nullptr;
  for (KeyBlocks block(p, sequences, t, next, zeros); block.n > 0; block.advance()) {
    const int64_t first = block.first;
    const int n = block.n;
    Prefetcher& ahead = block.ahead;
    // All the work on a block shares the requests for the next one.
    ahead.spread(pieces_of(rows, stretch) * (multiply_steps<Kind>(stretch, kBlockKeys, steps) +
                                             multiply_steps<Kind>(stretch, p.columns, kBlockKeys / Kind::kPerElement)) +
                 kBlockKeys / kGroupKeys + rows + kBlockKeys / kValueKeys);
    if (p.relative) load_relative_bias(p, s, row, rows, first, n, mask);
    else if (mask && !load_tile_mask(p, s, row, rows, first, n, mask)) continue;
    const int skip = block.skip();
    if (straight_keys) straighten_rows(block.keys() + skip, n - skip, p.dim, size, p.key_dim, straight_keys);
    if (straight_values)
      straighten_rows(block.values() + skip, n - skip, p.value_dim, size, p.value_dim_stride, straight_values);

    if (scales) load_scales(p, s, t.kv_head, first, skip, n, block_scales);
    const int groups = (n + kGroupKeys - 1) / kGroupKeys;
    for (int i = 0; i < groups * kGroupKeys; i += kGroupKeys) {
      pack_keys(Kind{}, keys + i, block.keys() + i, 1, p.dim, p.key_dtype, spare);
      ahead.step();
    }
    for (int i = 0; i < n; i += kValueKeys) {
      pack_values(Kind{}, values + i / Kind::kPerElement * p.columns, block.values() + i,
                  (int)lesser(kValueKeys, n - i), p.value_dim, p.columns, p.key_dtype);
      ahead.step();
    }
    for (int from = 0; from < rows; from += stretch) {
      const int count = (int)lesser(stretch, rows - from);
      Row* part = row + from;
      const int64_t last = part[count - 1].high - first;  // later rows see later keys
      if (last <= 0 || part[0].low >= first + n) continue;
      const int seen = (int)lesser(n, round_up(last, on_tiles<Kind>(count, steps) ? kTileKeys : kGroupKeys));
      multiply<Kind>(query + from * steps, steps, keys, kBlockKeys, scores, kBlockKeys, steps, nullptr, count,
                     (int)round_up(seen, kGroupKeys), p.invariant, ahead);
      if (plain && (count >= kLanes || p.invariant)) {  // fewer leave lanes idle
        for (int r = 0; r < count; ++r) {
          if (scales) scale_scores(scores + r * kBlockKeys, *scales);
          const int64_t begin = part[r].low - first, end = lesser(part[r].high - first, n);
          if (begin > 0 || end < kBlockKeys) hide_scores(scores + r * kBlockKeys, begin, end);
        }
        const auto weigh = scales ? weigh_plain_rows<Kind, true> : weigh_plain_rows<Kind, false>;
        for (int r = 0; r < count; r += kLanes)
          weigh(p.scale * kLog2E, part + r, (int)lesser(kLanes, count - r), scores + r * kBlockKeys, scales,
                weights + r * (kBlockKeys / Kind::kPerElement), decay + r, ahead);
      } else {
        for (int r = 0; r < count; ++r) {
          decay[r] = weigh_row<Kind>(p, part[r], scores + r * kBlockKeys, scales,
                                     weights + r * (kBlockKeys / Kind::kPerElement), first, n);
          ahead.step();
        }
      }
      multiply<Kind>(weights, kBlockKeys / Kind::kPerElement, values, p.columns, result + from * p.columns,
                     p.columns, (seen + Kind::kPerElement - 1) / Kind::kPerElement, decay, count, (int)p.columns,
                     p.invariant, ahead);
    }
  }

  finish_rows(p, s, t, row, result);
}
