// Chunks: tasks that a call is cut into, taken in ascending order by any number of threads.
#pragma once

#include "arithmetic.h"
#include "kernels.h"
#include "scratch.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// The reach of query rows whose own keys are first_own .. last_own: the keys for whose distance rel_key has a row
struct Reach {
  int64_t begin, end;

  Reach(const RelAttention& p, int64_t first_own, int64_t last_own)
      : begin(larger(first_own - p.rel_key.max_distance, 0)),
        end(smaller(last_own - p.rel_key.max_distance + p.rel_len, p.mem_len + p.key_len)) {
    if (end <= begin) begin = end = 0;
  }
};

INLINE int64_t row_index_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.order[b * p.length + sorted];
}
INLINE int64_t position_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.position[b * p.length + sorted];
}

template <typename T>
struct Sizes;

// A task: a chunk of the query rows of one head of one sequence, and the keys that they may see.
struct Chunk {
  int64_t index, b, h;
  int64_t begin, end;     // rows sorted by position
  int64_t last_position;  // of its rows
  int64_t first_key;      // that is packed key 0; a multiple of KEY_GROUP
  int64_t keys;
  int64_t key_groups;   // groups of KEY_GROUP keys
  int64_t padded_keys;  // rounded up to whole vectors
  int64_t rel_first;    // row of rel_key that is packed row 0
  int64_t window_rows;  // packed rows of rel_key, with room for a register tile

  template <typename T>
  Chunk(const RelAttention& p, const Sizes<T>& sizes, int64_t task)
      : index(task / p.heads / p.batch), b(task / p.heads % p.batch), h(task % p.heads) {
    begin = index * sizes.chunk_rows;
    end = smaller(begin + sizes.chunk_rows, p.length);
    last_position = position_at(p, b, end - 1);
    const int64_t first_position = position_at(p, b, begin);
    const Reach range(p, p.mem_len + first_position, p.mem_len + last_position);
    first_key = round_down(range.begin, KEY_GROUP);
    keys = range.end - first_key;
    key_groups = (keys + KEY_GROUP - 1) / KEY_GROUP;
    padded_keys = round_up(keys, LANES<T>);
    rel_first = p.rel_key.max_distance - p.mem_len - last_position + first_key;
    window_rows = round_up(keys + last_position - first_position + ROW_ROWS, LANES<T>);
  }
};

// Sizes of a call's chunks and buffers. Chunks depend on the shape alone, never on the number of threads, because sums
// are then grouped in one way.
template <typename T>
struct Sizes {
  int64_t padded_dim;  // D rounded up to whole vectors
  int64_t chunk_rows, chunks;
  int64_t max_keys = 0;         // of a chunk, whole vectors
  int64_t max_window_rows = 0;  // packed rows of rel_key that one chunk can need
  int64_t run = 1;  // sequences whose chunks of a head a thread takes one after the other, loading what they share once

  // `shares_rel_key`: sequences of the batch have the same rows of rel_key, and one gradient of them
  Sizes(const RelAttention& p, int64_t min_chunk_rows, bool shares_rel_key = false) {
    padded_dim = round_up(p.head_dim, LANES<T>);
    constexpr int64_t enough_tasks = 32;
    const int64_t wanted = p.length * p.batch * p.heads / enough_tasks;
    chunk_rows = round_up(smaller(larger(wanted, min_chunk_rows), 2048), BLOCK_M);
    chunks = (p.length + chunk_rows - 1) / chunk_rows;
    const int64_t sequences = p.rows.order == nullptr ? smaller(p.batch, 1) : p.batch;  // with chunks of their own
    for (int64_t index = 0; p.heads > 0 && index < chunks; ++index)
      for (int64_t b = 0; b < sequences; ++b) {
        const Chunk chunk(p, *this, (index * p.batch + b) * p.heads);
        max_keys = larger(max_keys, chunk.padded_keys);
        max_window_rows = larger(max_window_rows, chunk.window_rows);
      }
    constexpr int64_t enough_runs = 64, enough_rows = 2 * SHORT_LENGTH;
    if (shares_rel_key && p.rows.order == nullptr && chunks == 1)
      run = larger(smaller(p.batch * p.heads / enough_runs, enough_rows / p.length), 1);
  }

  // Whether the sequence is the first, or the last, of its run
  bool starts_run(int64_t b) const { return b % run == 0; }
  bool ends_run(int64_t b, int64_t batch) const { return (b + 1) % run == 0 || b + 1 == batch; }
};

// The sequence and head that a thread probably takes next, to prefetch its rows
struct Next {
  bool exists;
  int64_t b, h;
};

// run(chunk, next, slot_scratch) for every chunk, runs of them started in ascending order. False if memory runs out.
template <typename T, typename F>
INLINE bool for_each_chunk(const RelAttention& p, const Sizes<T>& sizes, int64_t threads, int64_t bytes,
                           Parallel parallel, F run) {
  const int64_t groups = (p.batch + sizes.run - 1) / sizes.run;
  const int64_t runs = sizes.chunks * groups * p.heads, slots = smaller(runs, threads);
  if (slots == 0) return true;
  const Scratch scratch(slots, bytes);
  if (scratch.data == nullptr) return false;
  struct Context {
    int64_t next, runs, groups, slots;
    const RelAttention& p;
    const Sizes<T>& sizes;
    const Scratch& scratch;
    F& run;

    int64_t head(int64_t drawn) const { return drawn % p.heads; }
    int64_t first_sequence(int64_t drawn) const { return drawn / p.heads % groups * sizes.run; }
  } context{0, runs, groups, slots, p, sizes, scratch, run};
  parallel(
      slots,
      [](void* opaque, int64_t slot) {
        Context& c = *static_cast<Context*>(opaque);
        for (;;) {
          const int64_t drawn = __atomic_fetch_add(&c.next, int64_t(1), __ATOMIC_RELAXED);
          if (drawn >= c.runs) return;
          const int64_t index = drawn / c.p.heads / c.groups, h = c.head(drawn);
          const int64_t first = c.first_sequence(drawn), end = smaller(first + c.sizes.run, c.p.batch);
          const int64_t after = drawn + c.slots;  // while other threads draw one each
          const Next next_run{c.p.length <= SHORT_LENGTH && after < c.runs, c.first_sequence(after), c.head(after)};
          for (int64_t b = first; b < end; ++b)
            c.run(Chunk(c.p, c.sizes, (index * c.p.batch + b) * c.p.heads + h),
                  b + 1 < end ? Next{true, b + 1, h} : next_run, c.scratch.data + slot * c.scratch.bytes_per_slot);
        }
      },
      &context);
  return true;
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
