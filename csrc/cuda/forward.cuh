// Forward: a block of BM query rows walks over the tiles of BN keys that one of them sees; a warp has STRIPS of 16
// rows.
//
//   score = u.k + q.k + band of (q + v).r, shifted, then scale, segment term and mask;  softmax on line;  out += P v
//
// K and V come double-buffered by cp.async. The rows of rel_key lie in a ring: from one tile to the next its window
// moves on by BN rows, so each row is fetched once per block.
#pragma once

#include "dispatch.cuh"
#include "dropout.cuh"
#include "position.cuh"
#include "prepare.cuh"
#include "segments.cuh"

namespace xlnet_kernels::cuda {

template <typename Element, int WIDTH>
struct ForwardShape {
  using T = Element;
  // Two strips of a warp share what they multiply with: half the traffic of shared memory, where registers allow it.
  static constexpr int D = WIDTH, STRIPS = sizeof(T) == 2 && D <= 64 ? 2 : 1;
  static constexpr int WARPS = sizeof(T) == 4 && D > 64 ? 2 : 4, THREADS = WARPS * WARP, BM = 16 * STRIPS * WARPS;
  static constexpr int BN = sizeof(T) * D <= 64 ? 64 : sizeof(T) * D <= 256 ? 32 : 16, WINDOW = BM + BN;
  static constexpr int RING = POWER_OF_TWO<WINDOW + BN>;
  static_assert(WINDOW <= REL_MARGIN);
  using Keys = Tile<T, D>;
  using Ring = Tile<T, D, RING>;
  static constexpr int KEY_BYTES = Keys::bytes(BN), RING_BYTES = Ring::bytes(RING);
  static constexpr bool QUERY_IN_REGISTERS = sizeof(T) == 2;
  static constexpr int STAGE = 2 * KEY_BYTES + 3 * BN * 4;
  static constexpr int QUERY_BYTES = QUERY_IN_REGISTERS ? 0 : Keys::bytes(BM), KEPT_BYTES = STRIPS * THREADS * 4;
  static constexpr int SHARED = 2 * STAGE + RING_BYTES + QUERY_BYTES + KEPT_BYTES;
};

// Exponentials are taken of scores less a row's base, which is raised to its largest score when that has come this far
// above it, in units of log 2: exponentials are at most 256. Sum and output have the same base, which falls out of
// their quotient.
constexpr float MARGIN = 8;

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, S::SHARED <= 100 * 1024 ? 2 : 1) forward_kernel(Call call) {
  using T = typename S::T;
  constexpr int D = S::D, BM = S::BM, BN = S::BN, N = BN / 8, STEPS = D / DEPTH<T>, STRIPS = S::STRIPS;
  const RelAttention& p = call.p;
  const int lane = thread_index() % WARP, warp = thread_index() / WARP, g = lane / 4, t = lane % 4;
  const int row_tiles = tiles_of(p.length, BM), h = block_index().y;
  int tile_of_rows = block_index().x, b = block_index().z;
  for (; tile_of_rows >= row_tiles; tile_of_rows -= row_tiles) b += grid_size().z;  // a batch beyond the grid
  if (b >= p.batch) return;
  const int place = tile_of_rows * BM, head = b * int(p.heads) + h;
  const int keys = int(p.mem_len + p.key_len), width = int(p.head_dim);

  // shared memory: two stages of keys, values and labels; the ring of rel_key; float32: the rows of query; dropout
  char* const memory = shared_memory();
  const auto key_tile = [&](int stage) { return typename S::Keys{reinterpret_cast<T*>(memory + stage * S::STAGE)}; };
  const auto value_tile = [&](int stage) {
    return typename S::Keys{reinterpret_cast<T*>(memory + stage * S::STAGE + S::KEY_BYTES)};
  };
  const auto label_of = [&](int stage) {
    int32_t* labels = reinterpret_cast<int32_t*>(memory + stage * S::STAGE + 2 * S::KEY_BYTES);
    return KeyTile{labels, labels + BN, reinterpret_cast<float*>(labels + 2 * BN)};
  };
  const typename S::Ring ring{reinterpret_cast<T*>(memory + 2 * S::STAGE)};
  const typename S::Keys query_tile{reinterpret_cast<T*>(memory + 2 * S::STAGE + S::RING_BYTES)};
  // of this thread and each strip: what dropout keeps of 64 keys, 16 bits for each of two rows
  uint32_t* const kept = reinterpret_cast<uint32_t*>(memory + S::SHARED - S::KEPT_BYTES) + thread_index();
  for (int stage = 0; stage < 2; ++stage) clear_labels<S::THREADS>(label_of(stage), BN);

  // this lane's rows, two of each strip: labels, query as operand a, segment term
  const float scale = float(p.scale) * LOG2_E;  // scores are in units of log 2 from there on
  const auto place_of = [&](int s) { return place + 16 * (STRIPS * warp + s) + g; };
  RowLabel row[STRIPS][2];
  Operand q[STRIPS][STEPS];
  float different[STRIPS][2] = {};
  float* const lse = static_cast<float*>(p.lse) + int64_t(head) * p.length;
#pragma unroll
  for (int s = 0; s < STRIPS; ++s) {
    const Rows<const T> query = rows_of<const T>(p.rows.query, b, h);
    const Row rows[2] = {load_row(p, b, place_of(s)), load_row(p, b, place_of(s) + 8)};
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = step * DEPTH<T> + t * (4 / int(sizeof(T))) + i / 2 * CHUNK<T>;
        const Row& of = rows[i % 2];
        q[s][step].word[i] = d < width && of.inside ? *reinterpret_cast<const uint32_t*>(query(of.index) + d) : 0;
        if constexpr (!S::QUERY_IN_REGISTERS)
          *query_tile.at(place_of(s) - place + i % 2 * 8, step * DEPTH<T> + t + i / 2 * CHUNK<T>) =
              float_of(q[s][step].word[i]);
      }
    float same[2] = {};
    segment_scores<T>(p, q[s], h, t, scale, same, different[s]);
    for (int r = 0; r < 2; ++r) {
      row[s][r] = rows[r];
      if (rows[r].inside && t == 0) lse[rows[r].index] = same[r];  // until the end
    }
  }
  if constexpr (!S::QUERY_IN_REGISTERS) sync_warp();
  const auto load_query = [&](int k, int s) {
    if constexpr (S::QUERY_IN_REGISTERS)
      return q[s][k / DEPTH<T>];
    else
      return load_a(query_tile, 16 * (STRIPS * warp + s), k, lane);
  };

  // how the rows lie to the window of rel_key, whose first row is that of the block's last position and key 0
  const int last_position = position_at(p, b, smaller(place + BM, int(p.length)) - 1);
  const int span = last_position - position_at(p, b, place);
  const int origin = int(p.rel_key.max_distance - p.mem_len) - last_position;
  const auto lag_of = [&](int place) {
    const Row of = load_row(p, b, place);
    return of.inside ? last_position - of.position : -1;
  };
  Runs<BM> runs[STRIPS];
  for (int s = 0; s < STRIPS; ++s) runs[s].find({lag_of(place_of(s)), lag_of(place_of(s) + 8)}, lane);

  const auto key_rows = key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h);
  const auto value_rows = key_rows_of<const T>(p, p.memory.value, p.keys.value, b, h);
  const auto rel_rows = rows_of<const T>(p.rel_key.rows, b, h);
  const float* rel_bias = rel_bias_of(call, b, h);
  const auto copy_keys = [&](int j0, int stage) {
    if (j0 >= key_rows.mem_len) {
      copy_rows<S::THREADS, BN>(key_tile(stage), 0, key_rows.segment, j0, keys, width);
      copy_rows<S::THREADS, BN>(value_tile(stage), 0, value_rows.segment, j0, keys, width);
    } else {
      copy_rows<S::THREADS, BN>(key_tile(stage), 0, key_rows, j0, keys, width);
      copy_rows<S::THREADS, BN>(value_tile(stage), 0, value_rows, j0, keys, width);
    }
    copy_labels<S::THREADS, BN>(call, label_of(stage), b, h, j0);
  };
  const auto copy_rel_key = [&](int begin) {
    copy_rows<S::THREADS, BN>(ring, begin, rel_rows, begin, int(p.rel_len), width);
  };
  const auto copy_window = [&](int begin) {
#pragma unroll 1
    for (int i = 0; i < S::WINDOW; i += BN) copy_rel_key(begin + i);
  };

  Walk walk{tiles_of(keys, BN)};
  const auto next_tile = [&](Seen& seen) {
    return walk.next(seen, lane,
                     [&](int i) { return seen_pairs(call, load_row_tile(call, b, place, BM), b, i * BN, BN); });
  };
  float out[STRIPS][D / 8][4] = {}, total[STRIPS][2] = {};
  float base[STRIPS][2] = {};
  uint32_t fresh = ~0u;     // a bit for each of this lane's rows: it has seen no key yet, its base is none
  bool has_window = false;  // the ring holds the tile's window
  Seen seen, next_seen;
  int tile = next_tile(seen), stage = 0;
  sync_block();  // labels are cleared
  if (tile < walk.tiles) copy_keys(tile * BN, 0);
  commit_copies();
  while (tile < walk.tiles) {
    const int j0 = tile * BN, next = next_tile(next_seen);
    wait_for_copies<0>();
    sync_block();  // this tile is here, and no one reads the one before any more
    if (!has_window) copy_window(origin + j0);
    commit_copies();
    const bool goes_on = next == tile + 1 && span < BM;
    if (next < walk.tiles) copy_keys(next * BN, 1 - stage);
    if (next < walk.tiles && goes_on) copy_rel_key(origin + j0 + S::WINDOW);
    commit_copies();

    // once, but for rows far apart: then once for each window of rel_key, each time with the rows that it serves
    for (int behind = 0; behind <= span; behind += BM) {
      const KeyTile label = label_of(stage);
      float score[STRIPS][N][4];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          for (int s = 0; s < STRIPS; ++s) score[s][n][i] = label.bias[8 * n + 2 * t + i % 2];
      add_product<T, D>(score, call.tf32, load_query,
                        [&](int k, int n) { return load_b(key_tile(stage), n, k, lane); });

      if (behind > 0) {
        sync_block();
        copy_window(origin + j0 + behind);
        commit_copies();
        wait_for_copies<0>();
        sync_block();
      } else if (!has_window) {
        wait_for_copies<1>();
        sync_block();
      }
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) {
        const auto lags = [&](int r) { return lag_of(place_of(s) + 8 * r) - behind; };
        runs[s].for_each(lags, behind == 0, lane, [&](const Run& run) {
          add_position_scores<T, D>(score[s], ring, origin + j0 + behind, rel_bias, run, call.tf32, lane,
                                    [&](int k) { return load_query(k, s); });
        });
      }

      if (p.dropout.threshold && (j0 % 64 == 0 || !has_window)) {
        const Dropout dropout = load_dropout(p.dropout.state, p.dropout.threshold);
        for (int s = 0; s < STRIPS; ++s) {
          uint32_t bits = 0;
          for (int r = 0; r < 2; ++r) {
            const int index = row_at(p, b, smaller(place_of(s) + 8 * r, int(p.length) - 1));
            bits |= kept_columns<64>(dropout, head, index, j0 / 64 * 64, t) << (16 * r);
          }
          kept[s * S::THREADS] = bits;
        }
      }
      // scale, segment term, mask, softmax on line
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) {
        float most[2] = {-INFINITY, -INFINITY};
        const float here[2] = {-base[s][0], -base[s][1]};
        const float there[2] = {different[s][0] + here[0], different[s][1] + here[1]};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool elsewhere = label.id[8 * n + 2 * t + i % 2] != row[s][i / 2].id;
            score[s][n][i] = score[s][n][i] * scale + (elsewhere ? there[i / 2] : here[i / 2]);
          }
        if (span >= BM) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int lag = lag_of(place_of(s) + 8 * r) - behind;
            if (lag >= 0 && lag < BM) continue;
#pragma unroll
            for (int n = 0; n < N; ++n) score[s][n][2 * r] = score[s][n][2 * r + 1] = -INFINITY;
          }
        }
        hide(score[s], seen, p, row[s], b, h, place_of(s), j0, label.rank, t);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) most[i / 2] = fmaxf(most[i / 2], score[s][n][i]);
        const auto grows = [&](int r) { return most[r] > (fresh >> (2 * s + r) & 1 ? -INFINITY : MARGIN); };
        if (ballot(grows(0) || grows(1))) {
          float grown[2], shrink[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            most[r] = largest_of_quad(most[r]);
            grown[r] = grows(r) ? most[r] : 0.f;
            shrink[r] = exp2_approximately(-fmaxf(grown[r], 0.f));  // less than 0: nothing is there yet
            if (grows(r)) fresh &= ~(1u << (2 * s + r));
            base[s][r] += grown[r];
            total[s][r] *= shrink[r];
          }
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[s][n][i] -= grown[i / 2];
#pragma unroll
          for (int d = 0; d < D / 8; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[s][d][i] *= shrink[i / 2];
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            score[s][n][i] = exp2_approximately(score[s][n][i]);
            total[s][i / 2] += score[s][n][i];
          }
        if (p.dropout.threshold) {
          const uint32_t bits = kept[s * S::THREADS] >> j0 % 64 / 4;
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (!(bits >> (16 * (i / 2) + 2 * n + i % 2) & 1)) score[s][n][i] = 0;
        }
      }
      add_product<T, BN>(
          out, call.tf32, [&](int k, int s) { return as_operand<T>(score[s] + k / 8); },
          [&](int k, int n) { return load_b_transposed<true>(value_tile(stage), k, n, lane); });
    }
    has_window = goes_on;
    tile = next;
    seen = next_seen;
    stage = 1 - stage;
  }
  wait_for_copies<0>();

  const auto out_rows = rows_of<T>(p.out, b, h);
#pragma unroll
  for (int s = 0; s < STRIPS; ++s)
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_quad(total[s][r]);
      if (place_of(s) + 8 * r >= p.length) continue;
      const int index = row_at(p, b, place_of(s) + 8 * r);
      const bool sees_any = sum != 0;  // NaN counts
      const float factor = sees_any ? float(1 / (1 - p.dropout.p)) / sum : 0.f;
      T* to = out_rows(index);
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        if (8 * d + 2 * t < width)
          store_pair(to + 8 * d + 2 * t, out[s][d][2 * r] * factor, out[s][d][2 * r + 1] * factor);
      if (t == 0) lse[index] = sees_any ? (base[s][r] + log2f(sum) + lse[index]) * LN_2 : -INFINITY;
    }
}

template <typename T, int D>
std::string launch_forward(const Call& call, Stream stream) {
  using S = ForwardShape<T, D>;
  const char* error = prepare<T>(call, stream);
  if (error) return failure("prepare", call, 0, error);
  const Index grid = grid_of((call.p.length + S::BM - 1) / S::BM, call.p);
  error = launch(forward_kernel<S>, grid, S::THREADS, S::SHARED, stream, call);
  return error ? failure("forward", call, S::SHARED, error) : "";
}

}  // namespace xlnet_kernels::cuda
