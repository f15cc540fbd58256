// The order of blocks (csrc/cuda/block_order.h) for block_order.py.
#include "cuda/block_order.h"

using namespace xlnet_kernels;

// (tile, b, h) of each block; returns how many heads begin together.
extern "C" int block_items(int backward, int ordered, int64_t batch, int64_t heads, int64_t length, int64_t rel_len,
                           int64_t head_dim, int64_t tiles, cuda::BlockItem* to) {
  RelAttention p{};
  p.dtype = DType::bfloat16;
  p.batch = batch;
  p.heads = heads;
  p.length = p.key_len = length;
  p.rel_len = rel_len;
  p.head_dim = head_dim;
  const cuda::BlockOrder order = backward ? cuda::backward_order(p, tiles, ordered) : cuda::forward_order(p, tiles);
  for (int i = 0; to && i < order.blocks(); ++i) to[i] = order.item(i);
  return order.together;
}
