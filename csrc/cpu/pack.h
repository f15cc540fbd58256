// Storage -> work: rows converted, padded with zeros, transposed where a product runs over head_dim.
#pragma once

#include "chunks.h"
#include "scratch.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

INLINE float as_work(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

INLINE float to_work(float x) { return x; }
INLINE double to_work(double x) { return x; }
INLINE float to_work(BFloat16 x) { return as_work(static_cast<uint32_t>(x.bits) << 16); }
INLINE float to_work(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  // Moving the bits up leaves an exponent 112 too small; the multiplication mends it, subnormals included.
  const float value = as_work(magnitude << 13) * as_work((112u + 127u) << 23);
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // inf and NaN
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return as_work(bits | special | sign);
}

INLINE void from_work(float x, float* to) { *to = x; }
INLINE void from_work(double x, double* to) { *to = x; }
INLINE void from_work(float x, BFloat16* to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = x == x ? static_cast<uint16_t>(rounded) : 0x7fc0u;
}
INLINE void from_work(float x, Float16* to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits >= 0x47800000u) {  // 65536 and more, inf, NaN
    half = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: adding 0.5 aligns the result's last bit with the float's
    const float aligned = as_work(bits) + 0.5f;
    memcpy(&half, &aligned, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign);
}

template <typename S, typename T>
INLINE void read_as(const S* from, int64_t count, T* to) {
  int64_t d = 0;
  if constexpr (sizeof(S) == sizeof(T))  // the same type; rows are too short for a call of memcpy
    for (; d + LANES<T> <= count; d += LANES<T>) store(to + d, load(from + d));
  for (; d < count; ++d) to[d] = to_work(from[d]);
}

template <typename S, typename T>
INLINE void read_as(const S* from, int64_t stride, int64_t count, T* to) {
  if (stride == 1) {
    read_as(from, count, to);
  } else {
    for (int64_t d = 0; d < count; ++d) to[d] = to_work(from[d * stride]);
  }
}

template <typename S, typename T>
INLINE void write_as(const T* from, int64_t count, S* to, int64_t stride) {
  if (stride == 1) {
    for (int64_t d = 0; d < count; ++d) from_work(from[d], to + d);
  } else {
    for (int64_t d = 0; d < count; ++d) from_work(from[d], to + d * stride);
  }
}

// `count` elements of storage from element `start` on
INLINE void read(DType dtype, const void* data, int64_t start, int64_t stride, int64_t count, float* to) {
  if (dtype == DType::float32) read_as(static_cast<const float*>(data) + start, stride, count, to);
  if (dtype == DType::bfloat16) read_as(static_cast<const BFloat16*>(data) + start, stride, count, to);
  if (dtype == DType::float16) read_as(static_cast<const Float16*>(data) + start, stride, count, to);
}
INLINE void read(DType, const void* data, int64_t start, int64_t stride, int64_t count, double* to) {
  read_as(static_cast<const double*>(data) + start, stride, count, to);
}
INLINE void write(DType dtype, const float* from, int64_t count, void* data, int64_t start, int64_t stride) {
  if (dtype == DType::float32) write_as(from, count, static_cast<float*>(data) + start, stride);
  if (dtype == DType::bfloat16) write_as(from, count, static_cast<BFloat16*>(data) + start, stride);
  if (dtype == DType::float16) write_as(from, count, static_cast<Float16*>(data) + start, stride);
}
INLINE void write(DType, const double* from, int64_t count, void* data, int64_t start, int64_t stride) {
  write_as(from, count, static_cast<double*>(data) + start, stride);
}

INLINE int64_t row_start(const Tensor4& t, int64_t b, int64_t h, int64_t row) {
  return b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
}

// Row `row` of head (b, h), padded with zeros to `padded` elements
template <typename T>
static void read_row(const RelAttention& p, const Tensor4& t, int64_t b, int64_t h, int64_t row, int64_t padded,
                     T* to) {
  read(p.dtype, t.data, row_start(t, b, h, row), t.stride[3], p.head_dim, to);
  for (int64_t d = p.head_dim; d < padded; ++d) to[d] = 0;
}

INLINE int64_t bytes_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

constexpr int64_t ROWS_AHEAD = 16;  // rows between the one that is read and the one that is prefetched

// Prefetches a row that is read or written soon, because the hardware does not predict rows of one head that lie far
// apart. `size`: bytes of a number. CACHE: the level that it goes to.
template <int CACHE = 1>
INLINE void prefetch_row(const RelAttention& p, const Tensor4& t, int64_t b, int64_t h, int64_t row, int64_t size) {
  if (t.data == nullptr || t.stride[3] != 1) return;
  const char* data = static_cast<const char*>(t.data) + row_start(t, b, h, row) * size;
  for (int64_t byte = 0; byte < p.head_dim * size; byte += 64) __builtin_prefetch(data + byte, 0, 4 - CACHE);
}

// Prefetches what is next row by row, and the row's share of the keys, between the work on rows: the hardware neither
// predicts where they lie nor has room for many prefetches at once.
INLINE void prefetch_next(const RelAttention& p, const Next& next, int64_t row, const Tensor4& grad_out = {}) {
  if (!next.exists) return;
  const int64_t size = bytes_of(p.dtype);
  prefetch_row<2>(p, p.rows.query, next.b, next.h, row, size);
  prefetch_row<2>(p, p.out, next.b, next.h, row, size);
  prefetch_row<2>(p, grad_out, next.b, next.h, row, size);
  const int64_t keys = smaller(p.key_len, 2 * SHORT_LENGTH);
  for (int64_t key = row * keys / p.length; key < (row + 1) * keys / p.length; ++key) {
    prefetch_row<2>(p, p.keys.key, next.b, next.h, key, size);
    prefetch_row<2>(p, p.keys.value, next.b, next.h, key, size);
  }
}

// The largest finite number of a 16-bit dtype: the residual is relative to it where rounding gives infinity.
INLINE float largest_of(DType dtype) { return dtype == DType::float16 ? 65504.f : as_work(0x7f7f0000u); }
INLINE float clamped(float x, float largest) { return x > largest ? largest : x < -largest ? -largest : x; }

// Writes row `row` of the output, rounded, and where it is wanted the rounding error. `from` is changed.
INLINE void write_rounded(const RelAttention& p, int64_t b, int64_t h, int64_t row, float* from) {
  const int64_t start = row_start(p.out, b, h, row), stride = p.out.stride[3];
  write(p.dtype, from, p.head_dim, p.out.data, start, stride);
  if (p.out_residual.data == nullptr) return;
  const float largest = largest_of(p.dtype);
  float rounded[64];
  for (int64_t d0 = 0; d0 < p.head_dim; d0 += 64) {
    const int64_t count = smaller(p.head_dim - d0, 64);
    read(p.dtype, p.out.data, start + d0 * stride, stride, count, rounded);
    for (int64_t d = 0; d < count; ++d) from[d0 + d] -= clamped(rounded[d], largest);
  }
  write(p.dtype, from, p.head_dim, p.out_residual.data, row_start(p.out_residual, b, h, row), p.out_residual.stride[3]);
}
INLINE void write_rounded(const RelAttention& p, int64_t b, int64_t h, int64_t row, double* from) {
  write(p.dtype, from, p.head_dim, p.out.data, row_start(p.out, b, h, row), p.out.stride[3]);
}

// Row `row` of the output before it was rounded, padded with zeros; `spare` holds a row.
INLINE void read_unrounded(const RelAttention& p, int64_t b, int64_t h, int64_t row, int64_t padded, float* spare,
                           float* to) {
  read_row(p, p.out, b, h, row, padded, to);
  if (p.out_residual.data == nullptr) return;
  read_row(p, p.out_residual, b, h, row, padded, spare);
  const float largest = largest_of(p.dtype);
  for (int64_t d = 0; d < p.head_dim; ++d) to[d] = clamped(to[d], largest) + spare[d];
}
INLINE void read_unrounded(const RelAttention& p, int64_t b, int64_t h, int64_t row, int64_t padded, double*,
                           double* to) {
  read_row(p, p.out, b, h, row, padded, to);
}

// Row `row` of contiguous (rows, D), padded with zeros; zeros if there is no such parameter
template <typename T>
static void read_parameter(const RelAttention& p, const void* data, int64_t row, int64_t padded, T* to) {
  clear(padded, to);
  if (data != nullptr) read(p.dtype, data, row * p.head_dim, 1, p.head_dim, to);
}

// The rows of up to two tensors one after the other, counted from `start`; zeros before and after, and where `unread`
struct RowSequence {
  Tensor4 part[2];
  int64_t rows[2];
  int64_t start;
  const bool* unread = nullptr;  // by row of the sequence (unread.h), of those that are loaded; or null

  // The tensor that row j lies in and its index there; null outside of both. `left`: rows from there to its end
  const Tensor4* locate(int64_t j, int64_t& row, int64_t& left) const {
    row = start + j;
    int which = 0;
    if (row >= rows[0]) {
      row -= rows[0];
      which = 1;
    }
    left = rows[which] - row;
    return row < 0 || left <= 0 ? nullptr : &part[which];
  }

  // As `locate`, but null for unread rows as well, and `left` does not reach beyond the flag of row j.
  const Tensor4* find(int64_t j, int64_t& row, int64_t& left) const {
    const Tensor4* tensor = locate(j, row, left);
    if (tensor == nullptr || unread == nullptr) return tensor;
    left = 1;
    return unread[j] ? nullptr : tensor;
  }
};

// Row j may be one that is never loaded, which has no flag in `unread`.
INLINE void prefetch_row(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t j,
                         int64_t size) {
  int64_t row, left;
  const Tensor4* tensor = sequence.locate(j, row, left);
  if (tensor != nullptr) prefetch_row(p, *tensor, b, h, row, size);
}

// A chunk's keys: memory first, then the current segment
INLINE RowSequence keys_of(const RelAttention& p, const Tensor4& memory, const Tensor4& current, const Chunk& chunk) {
  return {{memory, current}, {p.mem_len, p.key_len}, chunk.first_key};
}

INLINE RowSequence window_of(const RelAttention& p, int64_t rel_first) {
  return {{p.rel_key.rows, {}}, {p.rel_len, 0}, rel_first};
}

// LANES rows, whole vectors long -> one panel [depth][LANES]
template <typename T>
static void transpose_panel(const T* rows, int64_t stride, int64_t depth, T* panel) {
  for (int64_t d0 = 0; d0 < depth; d0 += LANES<T>) {
    Vec<T> block[LANES<T>];
    transpose_block(rows + d0, stride, block);
    for (int64_t d = d0; d < smaller(d0 + LANES<T>, depth); ++d) store(panel + d * LANES<T>, block[d - d0]);
  }
}

// Where transpose_row_panels stores vectors: in one row of panels, ...
template <typename T>
struct Panels {
  T* to;
  template <typename Store>
  INLINE_MEMBER void put(int64_t offset, int64_t /*d*/, Vec<T> x) const {
    Store::apply(to + offset, x);
  }
};

// ... or in two, of terms with a bias each, scaled
template <typename T>
struct BiasedPanels {
  T *content, *position;
  const T *content_bias, *position_bias;
  T scale;
  template <typename Store>
  INLINE_MEMBER void put(int64_t offset, int64_t d, Vec<T> x) const {
    Store::apply(content + offset, (x + content_bias[d]) * scale);
    Store::apply(position + offset, (x + position_bias[d]) * scale);
  }
};

// `count` rows of `padded` elements -> panels [count / PANEL_ROWS, rounded up][depth][PANEL_ROWS]. Reads up to LANES
// rows past the end and writes up to LANES elements, or a panel: a whole vector is stored where PANEL_ROWS elements
// count, and the next one mends it.
template <typename T, typename To>
static void transpose_row_panels(const T* rows, int64_t count, int64_t padded, int64_t depth, const To to) {
  constexpr int64_t PIECES = (PANEL_ROWS + LANES<T> - 1) / LANES<T>;
  constexpr bool IS_HALF = 2 * PANEL_ROWS == LANES<T>;  // two panels from one transposition
  constexpr int64_t STEP = IS_HALF ? LANES<T> : PANEL_ROWS;
  for (int64_t r = 0; r < count; r += STEP) {
    const T* const from = rows + r * padded;
    for (int64_t d0 = 0; d0 < depth; d0 += LANES<T>) {
      Vec<T> block[PIECES][LANES<T>];
      for (int64_t piece = 0; piece < PIECES; ++piece)
        transpose_block(from + piece * LANES<T> * padded + d0, padded, block[piece]);
      for (int64_t d = d0; d < smaller(d0 + LANES<T>, depth); ++d) {
        const int64_t start = r * depth + d * PANEL_ROWS;
        if constexpr (IS_HALF) {
          to.template put<StoreHalf<T, 0>>(start, d, block[0][d - d0]);
          to.template put<StoreHalf<T, 1>>(start + depth * PANEL_ROWS, d, block[0][d - d0]);
        } else {
          for (int64_t piece = 0; piece < PIECES; ++piece)
            to.template put<StoreAll<T>>(start + piece * LANES<T>, d, block[piece][d - d0]);
        }
      }
    }
  }
}

// Whether all of `count` numbers, whole vectors, are finite: zero times any other is NaN
template <typename T>
INLINE bool are_finite(const T* x, int64_t count) {
  Vec<T> even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * LANES<T> <= count; i += 2 * LANES<T>) {
    even += load(x + i) * T(0);
    odd += load(x + i + LANES<T>) * T(0);
  }
  if (i < count) even += load(x + i) * T(0);
  return sum<T>(even + odd) == 0;
}

// Rows 0 .. count-1 of head (b, h), kept as rows [j][padded] and as panels. Either may be null; `spare` holds LANES
// rows where they are not kept. `count` is a multiple of LANES. False if a row that is kept as such is not finite.
template <typename T>
static bool pack(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t count,
                 int64_t padded, T* rows, T* spare, T* panels) {
  constexpr DType same = sizeof(T) == sizeof(double) ? DType::float64 : DType::float32;
  bool finite = true;
  for (int64_t j0 = 0; j0 < count; j0 += LANES<T>) {
    T* group = rows == nullptr ? spare : rows + j0 * padded;
    for (int64_t lane = 0; lane < LANES<T>; ++lane)
      prefetch_row(p, sequence, b, h, j0 + lane + ROWS_AHEAD, bytes_of(p.dtype));
    int64_t row, left;
    const Tensor4* tensor = sequence.find(j0, row, left);
    if (rows == nullptr && p.dtype == same && tensor != nullptr && left >= LANES<T> && tensor->stride[3] == 1 &&
        p.head_dim == padded) {  // panels straight from where the rows are
      transpose_panel(static_cast<const T*>(tensor->data) + row_start(*tensor, b, h, row), tensor->stride[2],
                      p.head_dim, panels + j0 * p.head_dim);
      continue;
    }
    for (int64_t lane = 0; lane < LANES<T>; ++lane) {
      tensor = sequence.find(j0 + lane, row, left);
      if (tensor != nullptr) {
        read_row(p, *tensor, b, h, row, padded, group + lane * padded);
      } else {
        clear(padded, group + lane * padded);
      }
    }
    if (rows != nullptr) finite = are_finite(group, LANES<T> * padded) && finite;
    if (panels != nullptr) transpose_panel(group, padded, p.head_dim, panels + j0 * p.head_dim);
  }
  return finite;
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
