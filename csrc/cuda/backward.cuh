// Backward in one pass: a block has BLOCK_N keys and visits every tile of BLOCK_M rows in which some row sees them.
//
//   P = exp(score - row_max) / row_sum;  dV += P' dO;  dP = dO V';  dS = P (dP - delta);  dK += dS' Q + colsum(dS) u
//   dQ += dS K + band R;  dR += band' Q + colsum(band) v          where the band is dS shifted back: (i, j) -> (i, p)
//
// dK is scaled in the end, sums by `postprocess`. dK and dV stay in registers; dQ and dR are added in float32 to global
// memory, where blocks meet: in any order, or in that of ordered_accumulation.cuh. M_TILES by GROUPS warps: of the
// scores each has 16 rows and 1 / GROUPS of the keys, of the products 16 rows and 1 / GROUPS of the columns.
#pragma once

#include "backward_products.cuh"
#include "bias.cuh"
#include "dispatch.cuh"
#include "dropout.cuh"
#include "ordered_accumulation.cuh"
#include "postprocess.cuh"
#include "preprocess.cuh"

namespace xlnet_kernels::cuda {

// Scores of 16 rows and KEYS keys.
template <typename S, int N>
DEVICE void backward_scores(const Call& call, const KeyTile<S>& tile, const BackwardMemory<S>& memory,
                            const WarpPart& of, const BackwardSteps<S>& steps, const StepRows& rows,
                            const BandSlices<S::BLOCK_M>& slices, float (&score)[N][4]) {
  using T = typename S::T;
  const RelAttention& p = call.p;
  const Lane& lane = of.lane;
  const Step& step = steps.step;
  const int part_keys = of.part * S::KEYS, window = step.window + part_keys;
  const RowFragments<S> query(memory.queries(), 16 * of.m_tile, lane.id);
  const auto load_query = [&](int k) { return query(k); };

#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[n][i] = memory.labels.bias[part_keys + 8 * n + 2 * lane.t + i % 2];

  // position
  float band[2][4];
  slices.for_each([&](int r) { return rows.shift[r]; }, true, lane.id,
                  [&](const BandSlice& slice) {
                    add_position<T, S::HEAD_DIM>(score, band, false, memory.ring, window,
                                                 tile.rel_bias + clamped_window(window, int(p.rel_len)), slice,
                                                 call.tf32, lane.id, load_query);
                  });

  // content, last as in forward: scores are to be the same
  add_product<T, S::HEAD_DIM>(score, call.tf32, load_query,
                              [&](int k, int n) { return load_b(memory.keys, part_keys + n, k, lane.id); });

  // segments, mask
  const RowLabels labels[2] = {rows.row[0], rows.row[1]};
  const int32_t* const key_segment = memory.labels.segment + part_keys;
  if (is_one_segment<S::KEYS>(key_segment, lane.id))
    add_segment(score, float(p.scale) * LOG2_E, key_segment[0], labels, rows.different);
  else
    add_segments(score, float(p.scale) * LOG2_E, key_segment, labels, rows.different, lane.t);
  apply_mask(score, steps.visibility(), p, labels, tile.b, tile.h, step.row_tile * S::BLOCK_M + 16 * of.m_tile + lane.g,
             tile.j0 + part_keys, memory.labels.rank + part_keys, lane.t);
}

// Stores a number for each of 16 rows and KEYS keys.
template <typename S, int N>
DEVICE void store_scores(const typename S::Scores& to, const WarpPart& of, const float (&score)[N][4]) {
  const int m = 16 * of.m_tile + of.lane.g, column = of.part * S::KEYS + 2 * of.lane.t;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < N; ++n) store_pair(to.at(m + 8 * r, column + 8 * n), score[n][2 * r], score[n][2 * r + 1]);
}

// Softmax and dropout. Leaves P in shared memory as the values had it, and dS too unless DS_AFTER_DV. Scores become dS.
template <typename S, int N>
DEVICE void score_gradients(const Call& call, const KeyTile<S>& tile, const BackwardMemory<S>& memory,
                            const WarpPart& of, const StepRows& rows, float (&score)[N][4]) {
  using T = typename S::T;
  const RelAttention& p = call.p;
  const Lane& lane = of.lane;
  const int part_keys = of.part * S::KEYS, first_row = 16 * of.m_tile;
  const float kept_scale = float(p.dropout.kept_scale);
  const Philox philox = load_philox(p.dropout, tile.b, tile.head);
  uint32_t kept[2] = {};  // only with dropout
  if (philox.threshold)
#pragma unroll
    for (int r = 0; r < 2; ++r) kept[r] = kept_columns<S::KEYS>(philox, rows.row[r].index, tile.j0 + part_keys, lane.t);
  float row_max[2], kept_factor[2], delta[2];
  // Not read with the other row values, because registers are scarce before this point.
  for (int r = 0; r < 2; ++r) {
    const float* values = tile.row_values + rows.row[r].index;
    row_max[r] = rows.row[r].inside ? values[ROW_MAX * tile.all_rows] : INFINITY;  // exponentials are 0
    kept_factor[r] = kept_scale * values[INVERSE * tile.all_rows];
    delta[r] = values[DELTA * tile.all_rows];
  }
  const RowFragments<S> grad_out(memory.grad_out, first_row, lane.id);
  constexpr int SOME = N < 4 ? N : 4;  // eights of keys at a time: dP of all of them would not fit into the registers
#pragma unroll
  for (int first = 0; first < N; first += SOME) {
    float dP[SOME][4] = {};
    add_product<T, S::HEAD_DIM>(
        dP, call.tf32, [&](int k) { return grad_out(k); },
        [&](int k, int n) { return load_b(memory.values, part_keys + 8 * first + n, k, lane.id); });
    const auto softmax_gradients = [&](bool has_dropout) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = first; n < first + SOME; ++n) {
          float probability[2];
          for (int parity = 0; parity < 2; ++parity) {
            const int i = 2 * r + parity;
            const bool is_kept = !has_dropout || kept[r] >> (2 * n + parity) & 1;
            score[n][i] -= row_max[r];
            probability[parity] =
                softmax_backward(score[n][i], dP[n - first][i], is_kept ? kept_factor[r] : 0.f, delta[r]);
          }
          const int m = first_row + lane.g + 8 * r, column = part_keys + 8 * n + 2 * lane.t;
          store_pair(memory.probability().at(m, column), probability[0], probability[1]);
          if (!S::DS_AFTER_DV) store_pair(memory.dS.at(m, column), score[n][2 * r], score[n][2 * r + 1]);
        }
      }
    };
    philox.threshold ? softmax_gradients(true) : softmax_gradients(false);
  }
}

// Leaves the sums of dS over keys of another segment in shared memory.
template <typename S, int N>
DEVICE void sum_different(const BackwardMemory<S>& memory, const WarpPart& of, const StepRows& rows,
                          const float (&dS)[N][4]) {
  const Lane& lane = of.lane;
  const int32_t* const key_segment = memory.labels.segment + of.part * S::KEYS;
  const RowLabels labels[2] = {rows.row[0], rows.row[1]};
  float sum[2] = {};
  const auto add = [&](auto counts) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (counts(n, i)) sum[i / 2] += dS[n][i];
  };
  if (is_one_segment<S::KEYS>(key_segment, lane.id)) {
    const bool differs[2] = {labels[0].segment != key_segment[0], labels[1].segment != key_segment[0]};
    if (ballot(differs[0] || differs[1])) add([&](int, int i) { return differs[i / 2]; });
  } else {
    add([&](int n, int i) { return is_different(key_segment, labels, n, i, lane.t); });
  }
  for (int r = 0; r < 2; ++r) {
    sum[r] = quad_sum(sum[r]);
    if (lane.t == 0) memory.different_sums[of.part * S::BLOCK_M + 16 * of.m_tile + lane.g + 8 * r] = sum[r];
  }
}

// Starts to copy the block's keys, values and labels of keys. Keys that no row reads are zeros.
template <typename S>
DEVICE void copy_tile_of_keys(const Call& call, const KeyTile<S>& tile, const BackwardMemory<S>& memory, int b,
                              int keys, int head_dim) {
  const UnreadRows unread = unread_keys(call, b, tile.h);
  copy_rows_inside<S::THREADS, S::BLOCK_N>(memory.keys, 0, tile.key_rows, tile.j0, head_dim, thread_index(),
                                           [&](int j) { return j < keys && !unread.has(j); });
  copy_rows<S::THREADS, S::BLOCK_N>(memory.values, 0, tile.value_rows, tile.j0, keys, head_dim);
  copy_key_labels<S::THREADS, S::BLOCK_N>(call, memory.labels, b, tile.h, tile.j0);
}

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, 1) backward_kernel(Backward a) {
  constexpr int BLOCK_M = S::BLOCK_M, BLOCK_N = S::BLOCK_N, N = S::KEYS / 8, COLUMNS = S::COLUMNS;
  const Call& call = a.call;
  const RelAttention& p = call.p;
  const Lane lane = this_lane();
  const int keys = int(p.mem_len + p.key_len), head_dim = int(p.head_dim);
  const BlockItem item = key_item(a);
  const int b = item.b;
  BackwardMemory<S> memory(shared_memory());
  clear_key_labels<S::THREADS>(memory.labels, BLOCK_N);

  const KeyTile<S> tile(a, item);
  OrderedAccumulation ordered(a, item);
  sync_block();  // all labels are cleared
  copy_tile_of_keys(call, tile, memory, b, keys, head_dim);
  BackwardSteps<S> steps(call, tile, lane.id);
  const Step& step = steps.step;
  steps.find_tile(lane.id);
  uint32_t masked_rows = 0;  // of those that this thread copies in a step
  if (!steps.is_at_end()) {
    const CopiedRows<S> sorted(p, tile, steps.first_row());
    masked_rows = sorted.masked();
    steps.copy(memory, sorted, true, LOWEST);
  }
  commit_copies();
  make_key_biases<typename S::T, BLOCK_N, S::WARPS>(p, tile.key_rows, tile.h, tile.j0, lane.warp, memory.labels.bias);

  float dK[COLUMNS / 8][4] = {}, dV[COLUMNS / 8][4] = {}, key_sum[4] = {};
  BandSlices<BLOCK_M> slices;
  bool was_consecutive = false;
  while (!steps.is_at_end()) {
    // of which addresses are made anew in each step, as of thread_of_step
    const WarpPart of = warp_part<S>(lane.id, int(kept_in_register(lane.warp)));
    const int row_tile = step.row_tile, first_row = steps.first_row(), window = step.window;
    // consecutive rows have the same shifts in each tile: what is zero in the band stays zero
    const bool consecutive = p.rows.position == nullptr && first_row + BLOCK_M <= p.length;
    const bool same_shifts = consecutive && was_consecutive;
    was_consecutive = consecutive;
    const bool may_add = !ordered.is_ordered() || ordered.has_come(row_tile, of.lane.id);
    // Known by the time that they are copied; without use where QUERY_AHEAD and not DS_AFTER_DV
    const CopiedRows<S> own_rows(p, tile, first_row, masked_rows);
    if (!S::QUERY_AHEAD || !same_shifts) sync_block();  // all warps have read the last step's query and band
    if (!S::QUERY_AHEAD) {
      own_rows.copy(memory.queries(), tile.query_rows, head_dim);
      commit_copies();
    }
    if (!same_shifts) clear_band(memory);
    const StepRows rows = load_step_rows(p, tile, first_row + 16 * of.m_tile + of.lane.g, window);
    wait_for_copies<0>();
    sync_block();
    if (S::DS_AFTER_DV) {  // all warps have read the last step's dS
      own_rows.copy(memory.grad_out, tile.grad_out_rows, head_dim);
      commit_copies();
    }
    if (ordered.is_ordered() && thread_index() == 0) ordered.pass(row_tile);  // all has been added to the tiles before

    if (!same_shifts) slices.find(rows.shift, of.lane.id);
    float score[N][4];
    backward_scores(call, tile, memory, of, steps, rows, slices, score);
    if (S::DS_AFTER_DV) {
      wait_for_copies<0>();
      sync_block();
    }
    score_gradients(call, tile, memory, of, rows, score);
    if (p.segments.embed) sum_different(memory, of, rows, score);
    const ShiftBounds bounds = store_band(memory, of, rows.shift, score);

    // dQ first: a warp that has all keys of its rows needs no other for it
    S::GROUPS == 1 ? sync_warp() : sync_block();
    float dQ[COLUMNS / 8][4] = {};
    add_content_gradient(memory, of, call.tf32, score, dQ);
    add_position_gradient(memory, of, window, bounds, call.tf32, dQ);
    if (!may_add) ordered.wait(row_tile, of.lane.id);
    const HeadRows<float> grad_query = tile.grad_query.kept();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows.row[r].inside ? rows.row[r].index : -1;
      add_rows(grad_query, dQ, r, row, of.part * COLUMNS, head_dim, of.lane);
    }
    if (S::GROUPS == 1) sync_block();

    add_segment_gradient(a, tile, memory, first_row);
    steps.advance(of.lane.id);
    const CopiedRows<S> sorted(p, tile, steps.first_row());  // known by the time that they are copied
    masked_rows = sorted.masked();
    add_value_gradient(memory, of, call.tf32, dV);
    sync_block();  // all warps have read P, dO and the window: others may take their places
    const typename S::Rows queries = memory.queries();
    if (!steps.is_at_end()) steps.copy(memory, sorted, step.row_tile != row_tile, window);
    commit_copies();
    if (S::DS_AFTER_DV) {
      store_scores<S>(memory.dS, of, score);
      sync_block();
    }
    add_key_gradients(a, tile, memory, queries, of, window, dK, key_sum);
  }
  wait_for_copies<0>();
  ordered.end();
  backward_epilogue(a, tile, warp_part<S>(lane.id, lane.warp), dV, dK, key_sum);
}

template <typename T, int HEAD_DIM>
std::string launch_backward(Backward a, Stream stream) {
  using S = BackwardShape<T, HEAD_DIM>;
  const RelAttention& p = a.call.p;
  const bool is_ordered = a.gradients.sums.progress.data != nullptr;
  a.call.order = backward_order(p, (p.mem_len + p.key_len + S::BLOCK_N - 1) / S::BLOCK_N, is_ordered);
  const char* error = preprocess<T>(a, stream);
  if (error) return failure("preprocess", a.call, 0, error);
  error = launch(backward_kernel<S>, {a.call.order.blocks(), 1, 1}, S::THREADS, S::SHARED, stream, a);
  if (error) return failure("backward", a.call, S::SHARED, error);
  error = postprocess<T>(a, stream);
  return error ? failure("postprocess", a.call, 0, error) : "";
}

template <typename T>
std::string backward_of(const Backward& a, Stream stream) {
  return dispatch_head_dim(
      a.call.p.head_dim, [&](auto head_dim) { return launch_backward<T, head_dim>(a, stream); }, HeadDims());
}

}  // namespace xlnet_kernels::cuda
