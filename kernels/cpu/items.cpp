#include "items.h"

#include <algorithm>

#include "vector.h"

namespace headrace {

constexpr int64_t SHARED_LEAST = 64;  // tokens; for fewer it is not worth it

struct Sequences {
  const int64_t *counts, *contexts, *starts, *tables;
  int64_t block_size, window;

  // Tokens at the beginning that lie in the same blocks, at most `limit`, in whole tiles.
  int64_t common(int64_t a, int64_t b, int64_t limit) const {
    const int64_t *ours = tables + starts[a], *theirs = tables + starts[b];
    int64_t blocks = 0;
    while (blocks * block_size < limit && ours[blocks] == theirs[blocks]) ++blocks;
    return std::min(blocks * block_size, limit) / LANES * LANES;
  }

  // Tokens that a sequence with one new token does not see.
  int64_t before(int64_t sequence) const { return window ? std::max<int64_t>(0, contexts[sequence] - window) : 0; }

  // Make `member`, a sequence with one new token, one of the first item's that begins as it does.
  bool joined(std::vector<Item> &items, const Member &member, int64_t most) const {
    for (Item &item : items) {
      const int64_t first = item.members[0].sequence;
      if ((int64_t)item.members.size() >= most || counts[first] != 1) continue;
      const int64_t known = item.shared ? item.shared : contexts[first] - 1;
      const int64_t shared = common(member.sequence, first, std::min(known, contexts[member.sequence] - 1));
      if (shared - before(first) < SHARED_LEAST || shared - before(member.sequence) < SHARED_LEAST) continue;
      if (shared * 2 < item.shared) continue;
      item.shared = shared;
      item.members.push_back(member);
      return true;
    }
    return false;
  }
};

std::vector<Item> items_of(int64_t sequences, const int64_t *counts, const int64_t *contexts, const int64_t *starts,
                           const int64_t *tables, int64_t block_size, int64_t kv_heads, int64_t group,
                           int64_t window, int threads) {
  const Sequences all{counts, contexts, starts, tables, block_size, window};
  const int64_t at_once = std::max<int64_t>(1, PROMPT_ROWS / group) * group;
  // Two items for each thread, so that none ends long after the others.
  const int64_t together = std::min<int64_t>(ROWS_AT_ONCE / group, sequences * kv_heads / (2 * threads));
  std::vector<Item> items;
  int64_t row = 0;
  for (int64_t s = 0; s < sequences; row += counts[s++]) {
    const int64_t rows = counts[s] * group;
    if (counts[s] == 1 && all.joined(items, {s, row, 0, rows}, together)) continue;
    // Whole tokens of a prompt; of more query heads than are taken at once (MQA), some of a token's.
    for (int64_t first = 0; first < rows; first += at_once)
      for (int64_t some = first; some < std::min(rows, first + at_once); some += PROMPT_ROWS)
        items.push_back({{{s, row, some, std::min({rows, first + at_once, some + PROMPT_ROWS})}}, 0, 0});
  }
  const size_t of_a_head = items.size();
  for (int64_t head = 1; head < kv_heads; ++head)
    for (size_t i = 0; i < of_a_head; ++i) {
      items.push_back(items[i]);
      items.back().head = head;
    }
  return items;
}

}  // namespace headrace
