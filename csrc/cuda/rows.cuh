// Rows of tensors in global memory, and their way into the tiles of shared memory.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace xlnet_kernels::cuda {

DEVICE int tiles_of(int64_t length, int size) { return int((length + size - 1) / size); }

// One head's rows: row i starts i strides behind the first.
template <typename T>
struct HeadRows {
  T* first;
  int stride;  // elements; the host makes sure that it fits

  DEVICE T* operator()(int i) const {  // as one multiplication, with the stride where the call's arguments are
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + multiply_wide(i * int(sizeof(T)), stride));
  }
  DEVICE HeadRows kept() const { return {kept_in_register(first), stride}; }
};

template <typename T>
DEVICE HeadRows<T> rows_of(const Tensor4& of, int b, int h) {
  return {static_cast<T*>(of.data) + b * of.stride[0] + h * of.stride[1], int(of.stride[2])};
}

// One head's keys, or values: memory first, then the segment.
template <typename T>
struct KeyRows {
  HeadRows<T> memory, segment;  // the segment's first row is key 0 too, so that key mem_len is its own first
  int mem_len;

  DEVICE T* operator()(int j) const { return j < mem_len ? memory(j) : segment(j); }
};

template <typename T>
DEVICE KeyRows<T> key_rows_of(const RelAttention& p, const Tensor4& memory, const Tensor4& segment, int b, int h) {
  const int mem_len = int(p.mem_len);
  HeadRows<T> rows = rows_of<T>(segment, b, h);
  rows.first = rows(-mem_len);
  return {rows_of<T>(memory, b, h), rows, mem_len};
}

// One head's row of a bias (H, D); null: there is no bias.
template <typename T>
DEVICE const T* bias_of_head(const void* bias, const RelAttention& p, int64_t h) {
  return bias ? static_cast<const T*>(bias) + h * p.head_dim : nullptr;
}

// The index of a sorted row in the tensors, and its position: rows of query are sorted by position. Both are clamped to
// the valid range, because they are unchecked. No address depends on their order.
DEVICE int row_index(const RelAttention& p, int b, int sorted_row) {
  if (p.rows.order == nullptr) return sorted_row;
  return larger(0, smaller(p.rows.order[b * p.length + sorted_row], int(p.length) - 1));
}
DEVICE int row_position(const RelAttention& p, int b, int sorted_row) {
  if (p.rows.position == nullptr) return sorted_row;
  return larger(0, smaller(p.rows.position[b * p.length + sorted_row], int(p.key_len) - 1));
}

// 16 aligned bytes as numbers, and back.
template <typename T>
DEVICE void unpack_chunk(const Bytes16& chunk, float (&x)[CHUNK<T>]) {
  constexpr int EACH = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack<T>(chunk.word[i], reinterpret_cast<float (&)[EACH]>(x[EACH * i]));
}
template <typename T>
DEVICE void load_chunk(const T* from, float (&x)[CHUNK<T>]) {
  unpack_chunk<T>(*reinterpret_cast<const Bytes16*>(from), x);
}
template <typename T>
DEVICE void store_chunk(T* to, const float (&x)[CHUNK<T>]) {
  Bytes16 chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2)
      chunk.word[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    else
      chunk.word[i] = bits_of(x[i]);
  }
  *reinterpret_cast<Bytes16*>(to) = chunk;
}

// Four elements as numbers, and back: 8 bytes in 16 bits.
constexpr int FOUR = 4;
struct alignas(8) Bytes8 {
  uint32_t word[2];
};
template <typename T>
using Four = std::conditional_t<sizeof(T) == 2, Bytes8, Bytes16>;

template <typename T>
DEVICE Four<T> load_four(const T* from) {
  return *reinterpret_cast<const Four<T>*>(from);
}
template <typename T>
DEVICE void unpack_four(const Four<T>& four, float (&x)[FOUR]) {
  constexpr int EACH = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < FOUR / EACH; ++i) unpack<T>(four.word[i], reinterpret_cast<float (&)[EACH]>(x[EACH * i]));
}
template <typename T>
DEVICE void store_four(T* to, const float (&x)[FOUR]) {
  if constexpr (sizeof(T) == 4)
    store_chunk(to, x);
  else
    *reinterpret_cast<Bytes8*>(to) = {{pack<T>(x[0], x[1]), pack<T>(x[2], x[3])}};
}

// How a warp goes through ROWS_AT_ONCE rows of one head, EACH columns for each lane: as many lanes to a row as it
// takes, or the power of two above, but PASSES at least, so that as many passes follow each other.
constexpr int ROWS_AT_ONCE = WARP;
template <int EACH, int PASSES>
struct RowLanes {
  int lane, bits = 0;     // 1 << bits lanes are together a row's
  int rows, row, column;  // of one pass; this lane's, of them, and its first column
  bool inside;            // whether there is such a column

  DEVICE explicit RowLanes(int head_dim) : lane(thread_index() % WARP) {
    while (EACH << bits < head_dim || 1 << bits < PASSES) ++bits;
    rows = WARP >> bits;
    row = lane >> bits;
    column = (lane & ((1 << bits) - 1)) * EACH;
    inside = column < head_dim;
  }
  // Sums over all lanes of a row
  template <int COUNT>
  DEVICE void add_up(float (&x)[COUNT]) const {
    for (int step = 1; step < 1 << bits; step *= 2)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) x[i] += shuffle_xor(x[i], step);
  }
  // use(base) before each PASSES passes, the first of which has rows from `base` on
  template <typename Use>
  DEVICE void for_each(Use use) const {
#pragma unroll 1
    for (int base = 0; base < ROWS_AT_ONCE; base += PASSES * rows) use(base);
  }
  // Each lane has a number for one of the ROWS_AT_ONCE: the one for this lane's row in a pass; and back, each keeps its
  // own.
  DEVICE float of_row(float own, int base) const { return shuffle(own, base + row); }
  DEVICE void keep_own(float& own, float of_row, int base) const {
    const int behind = lane - base;
    const float x = shuffle(of_row, behind << bits);
    if (uint32_t(behind) < uint32_t(rows)) own = x;
  }
};

// This lane's part of one row after the other.
template <typename T>
struct RowWalk {
  T* at;
  int64_t step;

  template <typename Lanes>
  DEVICE RowWalk(const HeadRows<T>& of, int first, const Lanes& lanes)
      : at(of.first + int64_t(first + lanes.row) * of.stride + lanes.column), step(int64_t(lanes.rows) * of.stride) {}
  DEVICE T* next() {
    T* const now = at;
    at += step;
    return now;
  }
};

// use(row, column) of every chunk of 16 bytes in COUNT rows that is `thread`'s to copy.
template <int THREADS, int COUNT, typename T, int COLUMNS, typename Use>
DEVICE void for_each_chunk(int thread, Use use) {
  constexpr int CHUNKS = COLUMNS / CHUNK<T>, TOGETHER = POWER_OF_TWO<CHUNKS>, STEP = THREADS / TOGETHER;
  static_assert(STEP > 0 && COUNT % STEP == 0);
  const int column = thread % TOGETHER * CHUNK<T>, start = thread / TOGETHER;
  if (column >= COLUMNS) return;
#pragma unroll
  for (int i = 0; i < COUNT; i += STEP) use(start + i, column);
}

// Copies rows from .. from + COUNT - 1 of `source`, each of `head_dim` elements, to rows to .. of the tile; zeros for
// one that is not is_inside(row).
template <int THREADS, int COUNT, typename T, int COLUMNS, int RING, typename Source, typename Inside>
DEVICE void copy_rows_inside(const Tile<T, COLUMNS, RING>& tile, int to, Source source, int from, int head_dim,
                             int thread, Inside is_inside) {
  for_each_chunk<THREADS, COUNT, T, COLUMNS>(thread, [&](int i, int column) {
    const int row = from + i;
    copy_async<16>(tile.at(to + i, column), source(row) + column, column < head_dim && is_inside(row));
  });
}
// Zeros for those that are not among the source's `count` rows
template <int THREADS, int COUNT, typename T, int COLUMNS, int RING, typename Source>
DEVICE void copy_rows(const Tile<T, COLUMNS, RING>& tile, int to, Source source, int from, int count, int head_dim,
                      int thread = thread_index()) {
  copy_rows_inside<THREADS, COUNT>(tile, to, source, from, head_dim, thread,
                                   [&](int row) { return uint32_t(row) < uint32_t(count); });
}

}  // namespace xlnet_kernels::cuda
