// Deterministic backward: in which order blocks add to the sums that they share.
//
// Blocks of a head add in the order of their keys: one adds to anything at a tile of rows when all that have earlier
// keys are done with that tile and with those before it. What a row of query gets is then in one order. So is what a
// row of rel_key gets: rows are sorted by position, so that of two pairs at the same distance the one with the earlier
// key has no later row. On sm_90a consumers take the place of blocks, and first rows that of tiles, because each
// consumer has keys of its own and a tile may have several runs of rows.
//
// A block takes its keys by the number it gets when it begins. Those that it waits for have begun before, whatever
// order blocks are started in; and of one head as few as possible are under way, which is what they wait for.
#pragma once

#include "dispatch.cuh"
#include "rows.cuh"

namespace xlnet_kernels::cuda {

// Nanoseconds between two looks of a warp that waits, because looks of all warps would take L2's time from additions. A
// tile of rows takes about a microsecond.
constexpr int SHORTEST_PAUSE = 32, LONGEST_PAUSE = 512;

constexpr int32_t ENDED = INT32_MAX;  // of a block that has added all its terms

// A block's place among those of its head, or that of one of its `parts`.
struct OrderedAccumulation {
  int32_t* const& progress;  // null: blocks add in any order
  int head, own;             // the first of this head's blocks among all, and this one among them
  int first = 0;             // all before it have ended

  DEVICE OrderedAccumulation(const Backward& a, const BlockItem& item, int parts = 1, int part = 0)
      : progress(a.gradients.sums.progress.data),
        head((item.b * int(a.call.p.heads) + item.h) * a.call.order.tiles * parts),
        own(item.tile * parts + part) {}

  DEVICE bool is_ordered() const { return progress != nullptr; }
  // Where the tiles of rows begin that a block of this head may still add to; its address is made anew each time, since
  // registers are scarce.
  DEVICE int32_t* begin(int block) const { return progress + int(kept_in_register(1 + head + block)); }

  // One thread, which knows that its block has added all that it adds to earlier tiles of rows
  DEVICE void pass(int32_t row_tile) const { store_release(begin(own), row_tile); }

  // Warp: whether all blocks before this one are done with a tile of rows
  DEVICE bool has_come(int32_t row_tile, int lane) {
    for (int i = first; i < own; i += WARP) {
      const int32_t begins = i + lane < own ? load_acquire(begin(i + lane)) : ENDED;
      if (ballot(begins <= row_tile)) return false;
      if (i == first && !ballot(begins != ENDED)) first += WARP;
    }
    return true;
  }
  DEVICE void wait(int32_t row_tile, int lane) {
    for (int nanoseconds = SHORTEST_PAUSE; !has_come(row_tile, lane); nanoseconds += nanoseconds) {
      nanoseconds = smaller(nanoseconds, LONGEST_PAUSE);
      pause(nanoseconds);
    }
    sync_warp();  // each lane knows what others have acquired: a ballot orders no memory
  }

  // Block: it has added everything.
  DEVICE void end() const {
    if (!is_ordered()) return;
    sync_block();
    if (thread_index() == 0) pass(ENDED);
  }
};

// This block's tile of keys. Called by the block before it has anything in shared memory.
DEVICE BlockItem key_item(const Backward& a) {
  int32_t* const begun = a.gradients.sums.progress.data;
  if (begun == nullptr) return own_item(a.call.order);
  int32_t* const shared = reinterpret_cast<int32_t*>(shared_memory());
  if (thread_index() == 0) *shared = count_up(begun);
  sync_block();
  const int number = *shared;
  sync_block();  // all have read it before the tiles come
  return item_of(a.call.order, number);
}

}  // namespace xlnet_kernels::cuda
