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

template <typename T>
INLINE void add_row(const Tensor4& to, int64_t b, int64_t h, int64_t row, const T* from, T factor, int64_t head_dim) {
  if (to.data == nullptr) return;
  T* start = static_cast<T*>(to.data) + row_start(to, b, h, row);
  int64_t d = 0;
  if (to.stride[3] == 1)
    for (; d + LANES<T> <= head_dim; d += LANES<T>) add(start + d, factor * load(from + d));
  for (; d < head_dim; ++d) start[d * to.stride[3]] += factor * from[d];
}

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
    const T unscale = static_cast<T>(LN2);
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim;
    for (int64_t j = 0; j < chunk.keys; ++j) {
      const int64_t key = chunk.first_key + j, row = key < p.mem_len ? key : key - p.mem_len;
      const Keys& to = key < p.mem_len ? g.memory : g.keys;
      if (wanted.key) add_row(to.key, b, h, row, dK + j * dim, unscale, p.head_dim);
      if (wanted.value) add_row(to.value, b, h, row, dV + j * dim, T(1), p.head_dim);
    }
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
