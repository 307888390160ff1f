// Attention of items, or of sequences in pages: query rows whose keys overlap in any way.
//
// A stretch is a run of keys that a set of items sees; all rows of these items, times the query
// heads of a KV head, pass over it together, so that its keys and values are read, and converted to
// float32, once. Stretches end where an item's keys end. Each gives partial results, which are
// merged at the end. An item of many rows needs no company: its blocks of rows are on their own.
// Stretches depend on the sizes only, not on the number of threads, and so does the result.
#pragma once

#include <numeric>
#include <vector>

#include "decode.h"

namespace lz {

struct Grouped {
  const void *query, *key, *value;
  void *out;                                    // (tokens, heads, head_dim_v), without gaps
  float *lse;                                   // (tokens, heads)
  bool has_lse;
  int64_t tokens, heads, kv_heads, head_dim, head_dim_v;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;   // in elements; the last dimension has no gaps
  int64_t left, right;                          // -1: no limit on that side
  float scale, softcap;
  int threads;
};

constexpr int64_t MAX_SHARED_ROWS = 64;         // rows of an item, with which it still shares its keys
constexpr int64_t STRETCH = 1024;               // keys of a stretch at most: work for other threads

struct Item { int64_t first, count, keys, diagonal; };  // query rows; the key on the diagonal of the first
struct Piece { int64_t key, value, count; };            // keys one after another: offsets of the first, in elements
struct Member { int64_t item, key; };                   // which key of an item is the first of a stretch
struct Stretch {
  int64_t first_member, members, first_piece, pieces, keys, rows;
  bool alone;                                   // no other stretch has keys for its rows
  int64_t state;                                // where its partial results are
};

struct Plan {
  std::vector<Item> items;
  std::vector<Member> members;
  std::vector<Piece> pieces;
  std::vector<Stretch> stretches;
  const Grouped &a;
  int64_t group = a.heads / a.kv_heads;

  explicit Plan(const Grouped &call) : a(call) {}

  // The keys that some row of an item sees.
  int64_t low(const Item &i) const { return a.left < 0 ? 0 : std::max<int64_t>(i.diagonal - a.left, 0); }
  int64_t high(const Item &i) const {
    return a.right < 0 ? i.keys : std::clamp<int64_t>(i.diagonal + i.count + a.right, 0, i.keys);
  }

  // Adds query rows; blocks(item) is called for each block of an item that is too long to share.
  template <class F> bool add(int64_t first, int64_t count, int64_t keys, F blocks) {
    Item item{first, count, keys, keys - count};
    if (count * group <= MAX_SHARED_ROWS) {
      items.push_back(item);
      return true;
    }
    const int64_t block = std::max<int64_t>(MAX_SHARED_ROWS / group, 1);
    for (int64_t at = 0; at < count; at += block) {
      Item part{first + at, std::min(block, count - at), keys, item.diagonal + at};
      items.push_back(part);
      if (low(part) >= high(part)) continue;
      open(true);
      members.push_back({int64_t(items.size()) - 1, low(part)});
      blocks(part);
      close();
    }
    return false;
  }

  void open(bool alone) {
    stretches.push_back({int64_t(members.size()), 0, int64_t(pieces.size()), 0, 0, 0, alone, 0});
  }
  void piece(int64_t key, int64_t value, int64_t count) {
    pieces.push_back({key, value, count});
    stretches.back().keys += count;
  }
  void close() {
    Stretch &s = stretches.back();
    s.members = int64_t(members.size()) - s.first_member, s.pieces = int64_t(pieces.size()) - s.first_piece;
    for (int64_t i = 0; i < s.members; i++) s.rows += items[members[s.first_member + i].item].count * group;
  }
};

// The items of grouped attention: (q_start, n, k_start, m) each, with chunks or without.
struct ItemTable {
  const int32_t *items, *starts, *lengths;
  bool has_chunks;
  int64_t count, chunks, tokens_q, tokens_k;

  // Returns the first item with rows that do not exist, or -1.
  int64_t first_invalid() const {
    for (int64_t i = 0; i < count; i++) {
      const int64_t q = items[4 * i], n = items[4 * i + 1], k = items[4 * i + 2], m = items[4 * i + 3];
      if (n < 0 || m < 0 || (n && (q < 0 || q > tokens_q - n)) || (m && k < 0)) return i;
      if (!m) continue;
      if (!has_chunks) {
        if (k > tokens_k - m) return i;
        continue;
      }
      const int64_t length = lengths[i];
      if (length < 1 || (k + m - 1) / length >= chunks) return i;
      for (int64_t c = k / length; c <= (k + m - 1) / length; c++) {
        const int64_t from = std::max(k - c * length, int64_t(0)), to = std::min(k + m - c * length, length);
        const int64_t start = starts[i * chunks + c];
        if (start + from < 0 || start + to > tokens_k) return i;
      }
    }
    return -1;
  }

  // Calls run(row, count, key) for the keys [low, high) of item i.
  template <class F> void runs(int64_t i, int64_t low, int64_t high, F run) const {
    const int64_t k = items[4 * i + 2];
    if (!has_chunks) return run(k + low, high - low, low);
    const int64_t length = lengths[i];
    for (int64_t at = low; at < high;) {
      const int64_t p = k + at, some = std::min(length - p % length, high - at);
      run(starts[i * chunks + p / length] + p % length, some, at);
      at += some;
    }
  }

  void plan(Plan &p) const {
    struct Run { int64_t row, end, item, key; };
    std::vector<Run> runs_;
    std::vector<int64_t> cuts;
    for (int64_t i = 0; i < count; i++) {
      if (!items[4 * i + 1]) continue;
      const bool shares = p.add(items[4 * i], items[4 * i + 1], items[4 * i + 3], [&](const Item &block) {
        runs(i, p.low(block), p.high(block), [&](int64_t row, int64_t some, int64_t) {
          p.piece(row * p.a.k_token, row * p.a.v_token, some);
        });
      });
      if (!shares || p.low(p.items.back()) >= p.high(p.items.back())) continue;
      runs(i, p.low(p.items.back()), p.high(p.items.back()), [&](int64_t row, int64_t some, int64_t key) {
        runs_.push_back({row, row + some, int64_t(p.items.size()) - 1, key});
        cuts.push_back(row), cuts.push_back(row + some);
      });
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    // The runs over each interval between cuts: `seen[i]` to `seen[i + 1]` of `over`.
    const int64_t intervals = std::max<int64_t>(int64_t(cuts.size()) - 1, 0);
    std::vector<int64_t> seen(intervals + 2, 0);
    auto index = [&](int64_t row) { return std::lower_bound(cuts.begin(), cuts.end(), row) - cuts.begin(); };
    for (const Run &r : runs_)
      for (int64_t i = index(r.row); cuts[i] < r.end; i++) seen[i + 2]++;
    std::partial_sum(seen.begin(), seen.end(), seen.begin());
    std::vector<Member> over(intervals ? seen[intervals + 1] : 0);
    for (const Run &r : runs_)
      for (int64_t i = index(r.row); cuts[i] < r.end; i++) over[seen[i + 1]++] = {r.item, r.key + cuts[i] - r.row};
    // Intervals of the same items one after another, by key: what lies in pieces is one stretch.
    std::vector<int64_t> order(intervals);
    std::iota(order.begin(), order.end(), int64_t(0));
    auto compare = [&](int64_t x, int64_t y) {
      const int64_t nx = seen[x + 1] - seen[x], ny = seen[y + 1] - seen[y];
      if (nx != ny) return nx < ny;
      for (int64_t i = 0; i < nx; i++)
        if (over[seen[x] + i].item != over[seen[y] + i].item) return over[seen[x] + i].item < over[seen[y] + i].item;
      return nx && over[seen[x]].key != over[seen[y]].key ? over[seen[x]].key < over[seen[y]].key : x < y;
    };
    if (has_chunks) std::sort(order.begin(), order.end(), compare);
    const Member *last = nullptr;               // of the open stretch: its members, at the end of its keys
    int64_t last_keys = 0;
    for (int64_t i : order) {
      const int64_t members = seen[i + 1] - seen[i], keys = cuts[i + 1] - cuts[i];
      const Member *own = over.data() + seen[i];
      if (!members) continue;
      bool goes_on = last && p.stretches.back().keys + keys <= STRETCH
                     && int64_t(p.members.size()) - p.stretches.back().first_member == members;
      for (int64_t m = 0; goes_on && m < members; m++)
        goes_on = own[m].item == last[m].item && own[m].key == last[m].key + last_keys;
      for (int64_t at = 0; at < keys; at += STRETCH) {
        if (!goes_on || at) {
          if (last) p.close();
          p.open(false);
          for (int64_t m = 0; m < members; m++) p.members.push_back({own[m].item, own[m].key + at});
        }
        p.piece((cuts[i] + at) * p.a.k_token, (cuts[i] + at) * p.a.v_token, std::min(STRETCH, keys - at));
        last = own;
      }
      last_keys = keys;
    }
    if (last) p.close();
  }
};

// The block tables of a paged cache: sequences with equal pages at their beginning share them, as
// far as they are equal, and so do those of them whose next pages are equal.
struct PageTable {
  const void *table, *lengths, *starts;         // starts: of the queries; absent: one each
  bool has_starts, wide;                        // wide: of int64, not int32
  int64_t batch, width, table_row, pages, page_size, tokens, k_page, v_page;

  int64_t number(const void *of, int64_t i) const { return wide ? ((const int64_t *)of)[i] : ((const int32_t *)of)[i]; }
  int64_t query(int64_t i) const { return has_starts ? number(starts, i) : i; }

  bool valid() const {
    if (has_starts && (query(0) != 0 || query(batch) != tokens)) return false;
    for (int64_t i = 0; i < batch; i++) {
      const int64_t n = number(lengths, i);
      if (n < 0 || n > width * page_size || query(i + 1) < query(i)) return false;
      for (int64_t p = 0; p * page_size < n; p++) {
        const int64_t page = number(table, i * table_row + p);
        if (page < 0 || page >= pages) return false;
      }
    }
    return true;
  }

  int64_t page(int64_t i, int64_t key) const { return number(table, i * table_row + key / page_size); }

  void plan(Plan &p) const {
    struct Sequence { int64_t row, item, high; };
    struct Group { std::vector<Sequence> sequences; int64_t key; };
    auto add_piece = [&](int64_t i, int64_t key, int64_t end) {
      const int64_t slot = key % page_size, some = std::min(page_size - slot, end - key);
      p.piece(page(i, key) * k_page + slot * p.a.k_token, page(i, key) * v_page + slot * p.a.v_token, some);
      return some;
    };
    std::vector<Group> groups(1);
    for (int64_t i = 0; i < batch; i++) {
      const int64_t n = query(i + 1) - query(i);
      if (!n) continue;
      if (p.add(query(i), n, number(lengths, i), [&](const Item &block) {
            for (int64_t key = p.low(block); key < p.high(block);) key += add_piece(i, key, p.high(block));
          })) {
        const int64_t low = p.low(p.items.back());
        groups[0].key = groups[0].sequences.empty() ? low : std::min(groups[0].key, low);
        groups[0].sequences.push_back({i, int64_t(p.items.size()) - 1, p.high(p.items.back())});
      }
    }
    while (!groups.empty()) {
      std::vector<Sequence> all = std::move(groups.back().sequences);
      int64_t key = groups.back().key;
      groups.pop_back();
      all.erase(std::remove_if(all.begin(), all.end(), [&](auto &s) { return s.high <= key; }), all.end());
      std::sort(all.begin(), all.end(), [&](auto &x, auto &y) {
        const int64_t first = page(x.row, key), second = page(y.row, key);
        return first == second ? x.row < y.row : first < second;
      });
      for (size_t from = 0, to; from < all.size(); from = to) {
        int64_t end = all[from].high;
        for (to = from; to < all.size() && page(all[to].row, key) == page(all[from].row, key); to++)
          end = std::min(end, all[to].high);
        p.open(false);
        for (size_t s = from; s < to; s++) p.members.push_back({all[s].item, key});
        int64_t at = key;
        auto equal = [&] {
          for (size_t s = from + 1; s < to; s++)
            if (page(all[s].row, at) != page(all[from].row, at)) return false;
          return true;
        };
        do at += add_piece(all[from].row, at, end); while (at < end && at - key + page_size <= STRETCH && equal());
        p.close();
        groups.push_back({{all.begin() + from, all.begin() + to}, at});
      }
    }
  }
};

}  // namespace lz
