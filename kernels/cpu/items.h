// How the attention of a step is cut into items that threads take in any order.
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

// Of sequences with one new token each; and of a prompt, whose keys are turned once for all of them.
constexpr int ROWS_AT_ONCE = 24, PROMPT_ROWS = 48;

// Query rows of one sequence and one KV head, which are its tokens times the query heads of that head: [first, end) of
// them. `row` is the sequence's first in qkv.
struct Member {
  int64_t sequence, row, first, end;
};

// What one thread does at a time: at most PROMPT_ROWS rows; its members' first `shared` tokens lie in the same blocks.
struct Item {
  std::vector<Member> members;
  int64_t head, shared;
};

// Prompts go by tiles; sequences with one new token each that begin with the same blocks are read once for all of them.
// Of `sequences`: counts[i] new tokens at the end of contexts[i], in the blocks tables[starts[i] ..]; `group` query heads
// for each KV head; `window` tokens that one sees, 0 for all.
std::vector<Item> items_of(int64_t sequences, const int64_t *counts, const int64_t *contexts, const int64_t *starts,
                           const int64_t *tables, int64_t block_size, int64_t kv_heads, int64_t group,
                           int64_t window, int threads);

}  // namespace headrace
