// Forward on sm_90a: a block has 128 query rows, 64 of each of two consumer warpgroups, and a producer that brings what
// they read. Compiled for other architectures it is an error, and `serves` (heuristics.h) does not choose it.
#pragma once

#include "../forward.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace xlnet_kernels::cuda {

// Scales and stores the output, the log-sum-exp and what backward needs.
template <typename S>
DEVICE void warpgroup_epilogue(const RelAttention& p, const ForwardTile<S>& tile, Consumer<S>& consumer) {
  using T = typename S::T;
  float (&out)[S::HEAD_DIM / 8][4] = consumer.out[0];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const OutputScale scale = finish_row(p, tile, consumer.softmax, 0, r, consumer.lse());
#pragma unroll
    for (int d = 0; d < S::HEAD_DIM / 8; ++d)
      for (int parity = 0; parity < 2; ++parity) out[d][2 * r + parity] = scale(out[d][2 * r + parity]);
  }
  const auto store = [&](const Tensor4& to, auto round) {
    const HeadRows<T> rows = rows_of<T>(to, tile.b, tile.h);
    store_rows(
        consumer.free_rows(), 16 * (tile.lane.warp % 4), tile.lane,
        [&](int d, int r) { return round(out[d][2 * r], out[d][2 * r + 1]); },
        [&](int r) {
          const int sorted_row = tile.sorted_row(0) + 8 * r;
          return sorted_row < p.length ? rows(row_index(p, tile.b, sorted_row)) : nullptr;
        });
  };
  store(p.out, [](float first, float second) { return pack<T>(first, second); });
  if (p.out_residual.data)
    store(p.out_residual, [](float first, float second) { return pack_residual<T>(first, second); });
}

// One warpgroup's 64 rows, from the query to the output. Nothing is computed before the registers are there.
template <typename S>
DEVICE void consume(const Call& call, const WarpgroupMemory<S>& memory) {
  const RelAttention& p = call.p;
  ForwardTile<S> tile(p, own_item(call.order));
  tile.lane.warp -= WARPGROUP / WARP;
  Consumer<S> consumer(call, tile, memory);
  consumer.load_rows();
  consumer.run();
  warpgroup_epilogue(p, tile, consumer);
  store_nan_rows(p, tile, consumer.softmax, [&] { return consumer.had_tile(); });
}

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, 1) warpgroup_forward_kernel(const __grid_constant__ Call call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const WarpgroupMemory<S> memory{swizzled_memory()};
  memory.init();
  if (thread_index() < WARPGROUP) {
    shrink_registers<S::PRODUCER_REGISTERS>();
    const BlockItem item = own_item(call.order);
    if (thread_index() < WARP) Producer<S>(call, memory, item.b, item.h, item.tile * S::BLOCK_M).run();
  } else {
    grow_registers<S::CONSUMER_REGISTERS>();
    consume(call, memory);
  }
#else
  trap();
#endif
}

template <typename S>
std::string launch_warpgroup_forward(Call call, Stream stream) {
  using T = typename S::T;
  call.order = forward_order(call.p, (call.p.length + S::BLOCK_M - 1) / S::BLOCK_M);
  const char* error = preprocess<T>(call, stream);
  if (error) return failure("preprocess", call, 0, error);
  error = launch(warpgroup_forward_kernel<S>, {call.order.blocks(), 1, 1}, S::THREADS, S::SHARED, stream, call);
  return error ? failure("forward on sm_90a", call, S::SHARED, error) : "";
}

template <typename T>
std::string warpgroup_forward_of(const Call& call, Stream stream) {
  return dispatch_head_dim(
      call.p.head_dim,
      [&](auto head_dim) {
        const auto launch_with = [&](auto dropout) {
          return call.p.rows.position
                     ? launch_warpgroup_forward<WarpgroupShape<T, head_dim, dropout, true>>(call, stream)
                     : launch_warpgroup_forward<WarpgroupShape<T, head_dim, dropout>>(call, stream);
        };
        return call.p.dropout.threshold ? launch_with(std::true_type()) : launch_with(std::false_type());
      },
      WarpgroupHeadDims());
}

}  // namespace xlnet_kernels::cuda
