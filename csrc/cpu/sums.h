// Gradients that are sums over query rows: added up over a chunk, then added to the results.
#pragma once

#include "chunks.h"
#include "pack.h"
#include "scratch.h"
#include "softmax.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// Which products the wanted gradients need
struct Wanted {
  bool query, key, value, rel_key;

  explicit Wanted(const RelAttentionGradients& g)
      : query(g.query.data != nullptr || g.content_bias != nullptr || g.position_bias != nullptr),
        key(g.keys.key.data != nullptr || g.memory.key.data != nullptr),
        value(g.keys.value.data != nullptr || g.memory.value.data != nullptr),
        rel_key(g.rel_key.data != nullptr) {}
};

// Adds `factor` times `from` to a row, or replaces it.
template <typename T, bool REPLACES = false>
INLINE void add_row(const Tensor4& to, int64_t b, int64_t h, int64_t row, const T* from, T factor, int64_t head_dim) {
  if (to.data == nullptr) return;
  T* start = static_cast<T*>(to.data) + row_start(to, b, h, row);
  int64_t d = 0;
  if (to.stride[3] == 1)
    for (; d + LANES<T> <= head_dim; d += LANES<T>) {
      const Vec<T> x = factor * load(from + d);
      REPLACES ? store(start + d, x) : add(start + d, x);
    }
  for (; d < head_dim; ++d) {
    T& element = start[d * to.stride[3]];
    element = (REPLACES ? T(0) : element) + factor * from[d];
  }
}

// The gradient of keys, or of values, of one sequence and head. Its first chunk replaces rows, to save clearing them;
// later ones add.
struct KeyGradient {
  const RelAttention& p;
  const Chunk& chunk;
  const Tensor4 &memory, &current;

  template <typename T>
  INLINE_MEMBER void add(int64_t j, const T* from, T factor) const {
    const int64_t key = chunk.first_key + j;
    if (chunk.index == 0) {
      add_row<T, true>(tensor_of(key), chunk.b, chunk.h, row_of(key), from, factor, p.head_dim);
    } else {
      add_row<T, false>(tensor_of(key), chunk.b, chunk.h, row_of(key), from, factor, p.head_dim);
    }
  }

  // Zeros for the keys before and after the first chunk's
  template <typename T>
  void clear_others() const {
    if (chunk.index != 0) return;
    for (int64_t key = 0; key < p.mem_len + p.key_len; ++key) {
      const Tensor4& to = tensor_of(key);
      if (to.data == nullptr || (key >= chunk.first_key && key < chunk.first_key + chunk.keys)) continue;
      T* row = static_cast<T*>(to.data) + row_start(to, chunk.b, chunk.h, row_of(key));
      for (int64_t d = 0; d < p.head_dim; ++d) row[d * to.stride[3]] = 0;
    }
  }

 private:
  const Tensor4& tensor_of(int64_t key) const { return key < p.mem_len ? memory : current; }
  int64_t row_of(int64_t key) const { return key < p.mem_len ? key : key - p.mem_len; }
};

// Gradients of the biases and the segment embeddings of one head
template <typename T>
struct ParameterSums {
  T *grad_content_bias, *grad_position_bias, *grad_segment_bias, *grad_same, *grad_different;

  void carve_parameters(Carver& carver, int64_t padded_dim) {
    carver.take(padded_dim, grad_content_bias, grad_position_bias, grad_segment_bias, grad_same, grad_different);
  }
  void start_parameters(int64_t padded_dim) const {
    clear(padded_dim, grad_content_bias, grad_position_bias, grad_segment_bias, grad_same, grad_different);
  }
  void add_parameters(const RelAttentionGradients& g, const RelAttention& p, int64_t h) const {
    const auto add = [&](void* to, int64_t row, const T* from) {
      if (to == nullptr) return;
      for (int64_t d = 0; d < p.head_dim; ++d) static_cast<T*>(to)[row * p.head_dim + d] += from[d];
    };
    add(g.content_bias, h, grad_content_bias);
    add(g.position_bias, h, grad_position_bias);
    add(g.segment_bias, h, grad_segment_bias);
    add(g.segment_embed, h, grad_same);
    add(g.segment_embed, p.heads + h, grad_different);
  }
};

template <typename T>
struct ChunkSums : ParameterSums<T> {
  T *dK, *dV, *dR;  // of the chunk's keys and of packed rows of rel_key

  void carve(Carver& carver, const Sizes<T>& sizes) {
    carver.take((sizes.max_keys + ROW_ROWS) * sizes.padded_dim, dK, dV);  // the last register tile is a whole one
    carver.take(sizes.max_window_rows * sizes.padded_dim, dR);
    this->carve_parameters(carver, sizes.padded_dim);
  }

  void start_keys(const Sizes<T>& sizes, const Chunk& chunk) const {
    clear(chunk.padded_keys * sizes.padded_dim, dK, dV);
  }

  void start_shared(const Sizes<T>& sizes, const Chunk& chunk) const {
    clear(chunk.window_rows * sizes.padded_dim, dR);
    this->start_parameters(sizes.padded_dim);
  }

  void add_keys(const RelAttentionGradients& g, const Wanted& wanted, const RelAttention& p, const Sizes<T>& sizes,
                const Chunk& chunk) const {
    const auto add = [&](const Tensor4& memory, const Tensor4& current, const T* from, T factor) {
      const KeyGradient gradient{p, chunk, memory, current};
      for (int64_t j = 0; j < chunk.keys; ++j) gradient.add(j, from + j * sizes.padded_dim, factor);
      gradient.template clear_others<T>();
    };
    if (wanted.key) add(g.memory.key, g.keys.key, dK, static_cast<T>(LN2));
    if (wanted.value) add(g.memory.value, g.keys.value, dV, T(1));
  }

  // Gradients that a run of sequences shares: rel_key and the parameters
  void add_shared(const RelAttentionGradients& g, const Wanted& wanted, const RelAttention& p, const Sizes<T>& sizes,
                  const Chunk& chunk) const {
    const T unscale = static_cast<T>(LN2);
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim;
    if (wanted.rel_key)
      for (int64_t t = larger(0, -chunk.rel_first); t < chunk.window_rows && chunk.rel_first + t < p.rel_len; ++t)
        add_row(g.rel_key, b, h, chunk.rel_first + t, dR + t * dim, unscale, p.head_dim);
    this->add_parameters(g, p, h);
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
