// How a producer's warp copies 64 rows of a matrix into shared memory.
#pragma once

#include "../visibility.cuh"
#include "memory.cuh"

namespace xlnet_kernels::cuda {

// The rows of rel_key that some row has a key for. Others count as outside, because rows of a tile beyond the last one
// would read them: NaN there would decide how the warp goes on.
template <bool POSITIONS>
DEVICE Range read_rel_rows(const RelAttention& p) {
  const int64_t positions = POSITIONS ? p.key_len : p.length;
  const int begin = larger(0, int(p.rel_key.max_distance - p.mem_len - positions + 1));
  return {begin, larger(begin, smaller(int(p.rel_len), int(p.rel_key.max_distance + p.key_len)))};
}

// All of them, as mostly: nothing to ask.
template <typename T, int COLUMNS>
DEVICE void copy_whole_rows(const Panels<T, COLUMNS>& to, HeadRows<const T> source, int from, int lane) {
  constexpr int CHUNKS = COLUMNS / CHUNK<T>, STEP = WARP / CHUNKS;  // rows that are copied at a time
  const int column = lane % CHUNKS * CHUNK<T>, start = lane / CHUNKS;
  // Every eighth row has the same swizzle; start < STEP, so that row start + i exchanges chunks by start and i.
  const uint32_t first = shared_address(to.at(start, column));
  const char* const global = reinterpret_cast<const char*>(source(from + start) + column);
  // where registers allow in no uniform one, from which it would be moved for each row
  const int bytes = source.stride * int(sizeof(T)), stride = COLUMNS > 64 ? bytes : in_each_lane(bytes, lane);
#pragma unroll
  for (int way = 0; way < 8; way += STEP)
#pragma unroll
    for (int i = way; i < 64; i += 8) copy_whole((first ^ way * 16) + i * to.ROW, global + int64_t(i) * stride);
}

// Zeros for a row that is not is_inside(row).
template <typename T, int COLUMNS, typename Source, typename Inside>
DEVICE void copy_rows_inside(const Panels<T, COLUMNS>& to, Source source, int from, int lane, Inside is_inside) {
  constexpr int CHUNKS = COLUMNS / CHUNK<T>, STEP = WARP / CHUNKS;
  const int column = lane % CHUNKS * CHUNK<T>, start = lane / CHUNKS;
#pragma unroll 1
  for (int i = 0; i < 64; i += STEP) {
    const int row = from + start + i;
    copy_async<16>(to.at(start + i, column), source(row) + column, is_inside(row));
  }
}

}  // namespace xlnet_kernels::cuda
