// Choice of the thread of a block that goes on: drawn from a seed, among others in ways that no scheduler would choose.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace simt {

constexpr int LANES = 32;

class Schedule {
 public:
  explicit Schedule(uint64_t seed) : seed(seed), state(seed * 0x9e3779b97f4a7c15u + 0xd1342543de82ef95u) {}

  // Every ninth block has the same way; blocks take turns, from the seed on.
  void start_block(int warps) {
    const uint64_t turn = seed + blocks++;
    warp_order = static_cast<Order>(turn % 3);
    lane_order = static_cast<Order>(turn / 3 % 3);
    ready.assign(size_t(warps), 0);
    ranks.resize(size_t(warps));
    at_rank.resize(size_t(warps));
    for (int w = 0; w < warps; ++w) at_rank[w] = w;
    shuffle(at_rank);
    rank();
    set_all_ready();
  }

  void set_waiting(int thread) {
    const int warp = thread / LANES;
    ready[warp] &= ~(1u << thread % LANES);
    if (!ready[warp]) ready_ranks &= ~(1u << ranks[warp]);
  }
  void set_ready(int warp) {
    ready[warp] = ~0u;
    ready_ranks |= 1u << ranks[warp];
  }
  void set_all_ready() {
    if (warp_order == Order::down) shuffle(at_rank), rank();
    ready_ranks = 0;
    for (int w = 0; w < int(ready.size()); ++w) set_ready(w);
  }
  bool any_ready() const { return ready_ranks != 0; }
  bool is_ready(int thread) const { return ready[thread / LANES] >> thread % LANES & 1; }

  int next() {
    const int warp = at_rank[warp_order == Order::any ? draw(ready_ranks) : lowest(ready_ranks)];
    const uint32_t lanes = ready[warp];
    const int lane = lane_order == Order::any ? draw(lanes) : lane_order == Order::up ? lowest(lanes) : highest(lanes);
    return warp * LANES + lane;
  }

  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t n = items.size(); n > 1; --n) std::swap(items[n - 1], items[random() % n]);
  }

 private:
  // Warps: any; each as far ahead of the next as it can, in one order for the block (up), or drawn anew at every
  // barrier (down). Lanes: any, the lowest or the highest that can go on.
  enum class Order { any, up, down };

  static int lowest(uint32_t set) { return __builtin_ctz(set); }
  static int highest(uint32_t set) { return 31 - __builtin_clz(set); }
  // Not all alike, but quick: the first one from a random place on.
  int draw(uint32_t set) {
    const int from = int(random() & 31);
    return (lowest(set >> from | set << (32 - from) % 32) + from) & 31;
  }
  uint32_t random() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33);
  }
  void rank() {
    for (int r = 0; r < int(at_rank.size()); ++r) ranks[at_rank[r]] = r;
  }

  uint64_t seed, state, blocks = 0;
  Order warp_order = Order::any, lane_order = Order::any;
  std::vector<uint32_t> ready;  // lanes of each warp
  uint32_t ready_ranks = 0;     // warps with a ready lane, by rank
  std::vector<int> ranks, at_rank;
};

}  // namespace simt
