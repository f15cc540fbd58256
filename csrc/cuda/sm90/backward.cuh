// Backward on sm_90a: a block has 128 keys, 64 of each of two consumer warpgroups, and a producer that brings the rows.
// Compiled for other architectures it is an error, and `serves` (heuristics.h) does not choose it.
#pragma once

#include "../dispatch.cuh"
#include "../postprocess.cuh"
#include "../preprocess.cuh"
#include "backward_consumer.cuh"
#include "backward_producer.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, 1) warpgroup_backward_kernel(const __grid_constant__ Backward a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const BackwardWarpgroupMemory<S> memory{swizzled_memory()};
  memory.init();
  if (thread_index() < WARPGROUP) {
    shrink_registers<S::PRODUCER_REGISTERS>();
    const BlockItem item = own_item(a.call.order);
    if (thread_index() < WARP)
      BackwardProducer<S>{a, memory, item.b, item.h, item.tile * S::KEYS, {}, {}, false}.run();
  } else {
    grow_registers<S::CONSUMER_REGISTERS>();
    Lane lane = this_lane();
    const int consumer = lane.warp / 4 - 1;
    lane.warp %= 4;
    const auto tile_of_keys = [&] {
      const BlockItem item = own_item(a.call.order);
      return KeyTile<S>(a, {S::CONSUMERS * item.tile + consumer, item.b, item.h});
    };
    const KeyTile<S> tile = tile_of_keys();
    BackwardConsumer<S> work(a, tile, memory, consumer, lane);
    work.run();
    backward_epilogue(a, tile_of_keys(), WarpPart{lane, lane.warp, 0}, work.dV, work.dK, work.key_sum);
  }
#else
  trap();
#endif
}

template <typename S>
std::string launch_warpgroup_backward(Backward a, Stream stream) {
  using T = typename S::T;
  const RelAttention& p = a.call.p;
  a.call.order = backward_order(p, (p.mem_len + p.key_len + S::KEYS - 1) / S::KEYS, false);
  const char* error = preprocess<T>(a, stream);
  if (error) return failure("preprocess", a.call, 0, error);
  error = launch(warpgroup_backward_kernel<S>, {a.call.order.blocks(), 1, 1}, S::THREADS, S::SHARED, stream, a);
  if (error) return failure("backward on sm_90a", a.call, S::SHARED, error);
  error = postprocess<T>(a, stream);
  return error ? failure("postprocess", a.call, 0, error) : "";
}

template <typename T>
std::string warpgroup_backward_of(const Backward& a, Stream stream) {
  return dispatch_head_dim(
      a.call.p.head_dim,
      [&](auto head_dim) {
        const auto launch_with = [&](auto dropout) {
          return a.call.p.rows.position
                     ? launch_warpgroup_backward<WarpgroupBackwardShape<T, head_dim, dropout, true>>(a, stream)
                     : launch_warpgroup_backward<WarpgroupBackwardShape<T, head_dim, dropout>>(a, stream);
        };
        return a.call.p.dropout.threshold ? launch_with(std::true_type()) : launch_with(std::false_type());
      },
      WarpgroupHeadDims());
}

}  // namespace xlnet_kernels::cuda
