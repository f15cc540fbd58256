// Backward on sm_90a: a block has 128 keys, 64 of each of two consumer warpgroups, a producer that brings the rows, and
// where consumers add in order a warp for each that waits for its turn.
// Compiled for other architectures it is an error, and `serves` (heuristics.h) does not choose it.
#pragma once

#include "../dispatch.cuh"
#include "../ordered_accumulation.cuh"
#include "../postprocess.cuh"
#include "../preprocess.cuh"
#include "backward_consumer.cuh"
#include "backward_producer.cuh"

namespace xlnet_kernels::cuda {

// A warp that waits for a consumer's turn to add, tile by tile of rows, and at the end, and says how far that consumer
// has come: the consumer's warps have no registers for it.
template <typename S>
DEVICE void keep_order(const Backward& a, const BackwardWarpgroupMemory<S>& memory, const BlockItem& item, int consumer,
                       int lane) {
  OrderedAccumulation ordered(a, item, S::CONSUMERS, consumer);
  for (CyclicPlace<S::STAGES> stage{};; stage.advance()) {
    memory.full_stage(stage.index()).wait(stage.parity());
    const uint32_t tile = memory.info(stage.index()).tile();
    const bool ends = tile == RowTileInfo::NO_TILE;
    int first_row = 0;
    if (!ends) {
      first_row = S::POSITIONS ? memory.rows(stage.index()).first : int(tile) * S::BLOCK_M;
      ordered.wait(first_row, lane);
    }
    sync_warp();  // no lane still waits for the last phase of has_added, which the consumer may end from here on
    if (lane == 0) memory.may_add(consumer).arrive();
    memory.has_added(consumer).wait(stage.passed % 2);
    if (lane == 0) ordered.pass(ends ? ENDED : first_row + 1);
    if (ends) break;
  }
}

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, 1) warpgroup_backward_kernel(const __grid_constant__ Backward a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const BackwardWarpgroupMemory<S> memory{swizzled_memory()};
  memory.init(a.gradients.sums.progress.data);
  const auto own_block = [&] {
    // By the number that a block gets when it begins: ordered_accumulation.cuh
    if constexpr (S::ORDERED) return item_of(a.call.order, memory.block_number());
    return own_item(a.call.order);
  };
  if (thread_index() < WARPGROUP) {
    shrink_registers<S::PRODUCER_REGISTERS>();
    const int warp = thread_index() / WARP;
    if (warp == 0) {
      const BlockItem item = own_block();
      BackwardProducer<S>{a, memory, item.b, item.h, item.tile * S::KEYS, {}, {}, false}.run();
    } else if (S::ORDERED && warp <= S::CONSUMERS) {
      keep_order<S>(a, memory, own_block(), warp - 1, thread_index() % WARP);
    }
  } else {
    grow_registers<S::CONSUMER_REGISTERS>();
    Lane lane = this_lane();
    const int consumer = lane.warp / 4 - 1;
    lane.warp %= 4;
    const auto tile_of_keys = [&] {
      const BlockItem item = own_block();
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
  a.call.order = backward_order(p, (p.mem_len + p.key_len + S::KEYS - 1) / S::KEYS, S::ORDERED);
  const char* error = preprocess<T>(a, stream);
  if (error) return failure("preprocess", a.call, 0, error);
  error = launch(warpgroup_backward_kernel<S>, {a.call.order.blocks(), 1, 1}, S::THREADS, S::SHARED, stream, a);
  if (error) return failure("backward on sm_90a", a.call, S::SHARED, error);
  error = postprocess<T>(a, stream);
  return error ? failure("postprocess", a.call, 0, error) : "";
}

template <typename T, bool ORDERED>
std::string warpgroup_backward_of(const Backward& a, Stream stream) {
  return dispatch_head_dim(
      a.call.p.head_dim,
      [&](auto head_dim) {
        const auto launch_with = [&](auto dropout) {
          const auto launch = [&](auto positions) {
            using S = WarpgroupBackwardShape<T, head_dim, dropout, positions, ORDERED>;
            return launch_warpgroup_backward<S>(a, stream);
          };
          return a.call.p.rows.position ? launch(std::true_type()) : launch(std::false_type());
        };
        return a.call.p.dropout.threshold ? launch_with(std::true_type()) : launch_with(std::false_type());
      },
      WarpgroupHeadDims());
}

}  // namespace xlnet_kernels::cuda
