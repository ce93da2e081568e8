// CPU kernels of pagoda::masked_argmax and pagoda::apply_bitmask_ (their Python twin is structured.py): logits of which
// a mask leaves some. Bit i % 32 of word i / 32 of a mask stands for column i; a word that is 0 costs a look at it.

#include <algorithm>
#include <cmath>

#include "rows.h"

struct MaskedChoiceArguments {
  char* logits;
  int64_t row_stride, step;  // in elements
  const uint32_t* masks;
  int64_t mask_stride;  // in words
  const int64_t* rows;  // of logits, one for each mask
  int64_t* chosen;      // one for each mask; null: what a mask leaves out becomes -inf instead
  int64_t dtype, count, columns, words, threads;
};
static_assert(sizeof(MaskedChoiceArguments) == 12 * 8, "structured.py packs 12 integers");

namespace {

constexpr int64_t kWord = 32;        // columns of a word of a mask
constexpr int64_t kBlockWords = 16;  // whose largest logit is noted; the place in a block is looked up once, at the end

// kLanes bits of a word from bit `first` on, as lanes of all ones or zeros.
inline vint lanes_of(uint32_t word, int first) {
  vint bit;
  for (int i = 0; i < kLanes; ++i) bit[i] = 1 << i;
  const vint bits = vint{} + (int32_t)(word >> first);
  return (bits & bit) != vint{};
}

template <class Format>
class MaskedRow {
 public:
  typedef typename Format::element Element;

  MaskedRow(const uint32_t* mask, int64_t words, int64_t columns)
      : mask_(mask), whole_(std::min(words, columns / kWord)), columns_(columns) {
    if (whole_ < words && columns % kWord) last_ = mask[whole_] & ((1u << columns % kWord) - 1);
    covered_ = std::min(words * kWord, columns);
  }

  // The first column with the largest logit that the mask leaves; -1 where there is none that is finite, or a NaN.
  int64_t best(const Element* x) const {
    float highest = -INFINITY;
    int64_t block = -1;
    vint is_nan = {};
    for (int64_t w = 0; w < whole_; w += kBlockWords) {
      vfloat top[2] = {splat(-INFINITY), splat(-INFINITY)};
      uint32_t any = 0;
      for (int64_t i = w; i < std::min(w + kBlockWords, whole_); ++i) {
        const uint32_t word = mask_[i];
        if (!word) continue;
        any |= word;
#pragma GCC unroll 8
        for (int lane = 0; lane < kWord; lane += kLanes) {
          const vfloat v = lanes_of(word, lane) ? Format::read(x + i * kWord + lane) : splat(-INFINITY);
          is_nan |= v != v;
          top[lane / kLanes % 2] = larger(v, top[lane / kLanes % 2]);
        }
      }
      if (!any) continue;
      const float most = largest_lane(larger(top[0], top[1]));
      if (most > highest) highest = most, block = w;
    }
    for (int i = 0; i < kLanes; ++i)
      if (is_nan[i]) return -1;
    int64_t place = -1;
    for (int64_t i = 0; i < kWord && last_ >> i; ++i) {
      if (!(last_ >> i & 1)) continue;
      const float v = number(x[whole_ * kWord + i]);
      if (v != v) return -1;
      if (v > highest) highest = v, place = whole_ * kWord + i;
    }
    if (!std::isfinite(highest)) return -1;
    if (place >= 0) return place;
    for (place = block * kWord; !(mask_[place / kWord] >> place % kWord & 1) || number(x[place]) != highest;) ++place;
    return place;
  }

  // Sets what the mask leaves out to -inf.
  void apply(Element* x) const {
    const Element low = lowest();
    for (int64_t i = 0; i < whole_; ++i) {
      const uint32_t word = mask_[i];
      Element* at = x + i * kWord;
      if (!~word) continue;
      if (!word) {
        std::fill(at, at + kWord, low);
        continue;
      }
#pragma GCC unroll 8
      for (int lane = 0; lane < kWord; lane += kLanes) {
        const vfloat v = Format::read(at + lane);
        Format::write(at + lane, lanes_of(word, lane) ? v : splat(-INFINITY));
      }
    }
    for (int64_t i = whole_ * kWord; i < columns_; ++i)
      if (i >= covered_ || !(last_ >> (i - whole_ * kWord) & 1)) x[i] = low;
  }

 private:
  static float number(float x) { return x; }
  static float number(uint16_t x) {
    typename Format::element whole[kLanes] = {(typename Format::element)x};
    return Format::read(whole)[0];
  }
  static Element lowest() {
    Element whole[kLanes];
    Format::write(whole, splat(-INFINITY));
    return whole[0];
  }

  const uint32_t* mask_;
  int64_t whole_, columns_, covered_;  // words of columns that are all there; columns that have a bit
  uint32_t last_ = 0;                  // bits of the columns behind them
};

}  // namespace

extern "C" int64_t pagoda_masked_choice(const MaskedChoiceArguments* arguments) {
  const MaskedChoiceArguments& a = *arguments;
  if (!a.chosen && a.step != 1) return 1;
  with_format(a.dtype, [&](auto format) {
    typedef decltype(format) Format;
    typedef typename Format::element Element;
    share(a.count, a.count * a.columns, a.threads, [&a](int64_t begin, int64_t end) {
      static thread_local std::vector<Element> copy;
      if (a.step != 1) copy.resize(a.columns);
      for (int64_t r = begin; r < end; ++r) {
        Element* x = (Element*)a.logits + a.rows[r] * a.row_stride;
        const MaskedRow<Format> row(a.masks + r * a.mask_stride, a.words, a.columns);
        if (a.chosen) a.chosen[r] = row.best(straightened((const Element*)x, a.step, a.columns, copy.data()));
        else row.apply(x);
      }
    });
  });
  return 0;
}
