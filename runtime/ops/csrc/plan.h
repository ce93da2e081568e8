// Cuts a call into tiles of work, splits the biggest over their keys, and merges what was split.
#pragma once

#include "tile.h"

// A tile that was split over its keys: the partial results of `count` tiles from `first_tile` on.
struct Split {
  int64_t first_tile, count;
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<Split> splits;
  std::vector<float> partials;
  double work = 0.;  // multiply-adds, and as much again as reading keys costs
};

// Appends the pieces of a tile to `to`, cut at multiples of `step` keys from `origin` on; how many there are.
static int64_t append_pieces(Tile t, int64_t origin, int64_t step, std::vector<Tile>& to) {
  int64_t pieces = 0;
  for (int64_t end = t.end_key; t.first_key < end; t.first_key = t.end_key, ++pieces) {
    t.end_key = lesser(end, origin + ((t.first_key - origin) / step + 1) * step);
    to.push_back(t);
  }
  return pieces;
}

// Gives the pieces of a tile, from `first` on, room for their results at `at`; where the next ones' begins.
static float* place_partials(const Problem& p, Tile* first, int64_t count, float* at) {
  for (int64_t n = 0; n < count; ++n, at += first->rows * (p.columns + 2)) first[n].partial = at;
  return at;
}

// Whether the result of a tile is that of several pieces, whoever takes them.
static inline bool is_in_pieces(const Problem& p, const Tile& t) {
  return p.invariant && !t.partial && t.first_key / kSplitKeys < (t.end_key - 1) / kSplitKeys;
}

// Cuts the call into tiles of about equal worth. `tall` rows per tile reuse a packed block of keys well and
// still leave query, scores and results in the level-2 cache.
static void plan_tiles(const Problem& p, const std::vector<Sequence>& sequences, int64_t threads,
                       Plan& plan) {
  const int64_t tall = p.columns <= 128 ? 256 : 128;
  plan.tiles.clear();
  plan.splits.clear();
  plan.work = 0.;
  // Reading keys costs as much as a few rows of arithmetic: a lone decoding row is not 1/64 of a full tile.
  const auto worth = [](const Tile& t) { return (double)(t.end_key - t.first_key) * (double)(t.rows + 8); };
  double total = 0.;
  std::vector<Tile>& tiles = plan.tiles;
  for (int64_t i = 0; i < (int64_t)sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    const int64_t rows = s.tokens * p.group, count = (rows + tall - 1) / tall;
    for (int64_t head = 0; head < p.kv_heads; ++head)
      for (int64_t n = count - 1; n >= 0; --n) {  // the last tiles of a causal prompt see most keys: first
        Tile t{i, head, rows * n / count, 0, 0, 0, nullptr};
        t.rows = rows * (n + 1) / count - t.first_row;
        int64_t low, high;  // of the other end: the intervals of later rows only move up
        seen_keys(p, s.first_position + t.first_row / p.group, s.keys, &t.first_key, &high);
        seen_keys(p, s.first_position + (t.first_row + t.rows - 1) / p.group, s.keys, &low, &t.end_key);
        t.end_key = greater(t.end_key, t.first_key);
        tiles.push_back(t);
        total += worth(t);
        plan.work += worth(t) * (double)(p.dim + p.value_dim);
      }
  }
  if (threads == 1 || tiles.empty()) return;

  // Few long sequences: what is worth more than its share is split over its keys, too (as in Flash-Decoding). Of an
  // invariant call one thread takes the pieces of a tile where there are tiles enough.
  constexpr int64_t kLeastKeys = 256;
  const double share = total / (double)(4 * threads);
  const int64_t whole = (int64_t)tiles.size();
  if (p.invariant && whole >= 4 * threads) return;
  int64_t floats = 0;
  for (int64_t i = 0; i < whole; ++i) {
    const Tile t = tiles[i];
    const int64_t keys = t.end_key - t.first_key;
    int64_t origin = 0, step = kSplitKeys;
    if (p.invariant) {
      if (!is_in_pieces(p, t)) continue;
    } else {
      const int64_t pieces = lesser((int64_t)(worth(t) / share) + 1, keys / kLeastKeys);
      if (worth(t) <= share || pieces < 2) continue;
      origin = t.first_key;
      step = round_up((keys + pieces - 1) / pieces, kBlockKeys);
    }
    const int64_t first = (int64_t)tiles.size(), pieces = append_pieces(t, origin, step, tiles);
    plan.splits.push_back(Split{first, pieces});
    tiles[i].rows = 0;  // replaced by its pieces
    floats += pieces * t.rows * (p.columns + 2);
  }
  if (plan.splits.empty()) return;
  plan.partials.resize(floats);
  float* at = plan.partials.data();
  for (const Split& split : plan.splits) at = place_partials(p, tiles.data() + split.first_tile, split.count, at);
}

static void merge_split(const Problem& p, const Sequence& s, const Tile* pieces, int64_t count,
                        Scratch& scratch) {
  const int64_t stride = p.columns + 2;
  scratch.reserve(p.columns * sizeof(float) + 64);
  float* sum_values = scratch.take<float>(p.columns);
  for (int64_t r = 0; r < pieces[0].rows; ++r) {
    float maximum = -INFINITY, sum = 0.f;
    for (int64_t n = 0; n < count; ++n) {
      const float other = pieces[n].partial[r * stride + p.columns];
      // A NaN stays: the comparison that lets it in is the negated one.
      maximum = !(other <= maximum) ? other : maximum;
    }
    std::memset(sum_values, 0, p.columns * sizeof(float));
    for (int64_t n = 0; n < count; ++n) {
      const float* from = pieces[n].partial + r * stride;
      const float factor = power_of_two(from[p.columns] - finite_maximum(maximum));
      sum += from[p.columns + 1] * factor;
      for (int64_t d = 0; d < p.columns; d += kLanes)
        store(sum_values + d, load(sum_values + d) + load(from + d) * factor);
    }
    const int64_t flat = pieces[0].first_row + r, head = pieces[0].kv_head * p.group + flat % p.group;
    finish_row(p, out_row(p, s, flat / p.group, head), head, sum_values, maximum, sum);
  }
}
