// Forward: a block of BM query rows walks over the tiles of BN keys that one of them sees; a warp has 16 of the rows.
//
//   score = band of (q + v).r, shifted, + (q + u).k + segment term;  softmax on line;  out += P v
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
  static constexpr int D = WIDTH, BM = sizeof(T) == 4 && D > 64 ? 32 : 64;
  static constexpr int BN = sizeof(T) * D <= 128 ? 64 : sizeof(T) * D <= 256 ? 32 : 16;
  static constexpr int THREADS = BM / 16 * WARP, WINDOW = BM + BN;
  static constexpr int RING = WINDOW + BN <= 64 ? 64 : WINDOW + BN <= 128 ? 128 : 256;
  using Keys = Tile<T, D>;
  using Ring = Tile<T, D, RING>;
  static constexpr int KEY_BYTES = Keys::bytes(BN), RING_BYTES = Ring::bytes(RING);
  static constexpr bool QUERY_IN_REGISTERS = sizeof(T) == 2;
  static constexpr int STAGE = 2 * KEY_BYTES + 3 * BN * 4;
  static constexpr int SHARED = 2 * STAGE + RING_BYTES + (QUERY_IN_REGISTERS ? 0 : Keys::bytes(BM));
};

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, S::SHARED <= 100 * 1024 ? 2 : 1) forward_kernel(Call call) {
  using T = typename S::T;
  constexpr int D = S::D, BM = S::BM, BN = S::BN, N = BN / 8, STEPS = D / DEPTH<T>;
  const RelAttention& p = call.p;
  const int lane = thread_index() % WARP, warp = thread_index() / WARP, g = lane / 4, t = lane % 4;
  const int row_tiles = tiles_of(p.length, BM), head = block_index().x / row_tiles;
  const int b = head / int(p.heads), h = head % int(p.heads), place = block_index().x % row_tiles * BM;
  const int keys = int(p.mem_len + p.key_len), width = int(p.width);

  // shared memory: two stages of keys, values and labels; the ring of rel_key; float32: the rows of query
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

  // this lane's two rows: labels, position, query as operand a
  const RowTile rows = load_row_tile(call, b, place, BM);
  const Row row[2] = {load_row(p, b, place + 16 * warp + g), load_row(p, b, place + 16 * warp + g + 8)};
  const T* query[2];
  for (int r = 0; r < 2; ++r)
    query[r] = static_cast<const T*>(p.query.data) + b * p.query.stride[0] + h * p.query.stride[1] +
               row[r].index * p.query.stride[2];
  Operand q[STEPS];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = step * DEPTH<T> + t * (4 / int(sizeof(T))) + i / 2 * CHUNK<T>;
      q[step].word[i] = d < width && row[i % 2].inside ? *reinterpret_cast<const uint32_t*>(query[i % 2] + d) : 0;
    }
  const float scale = float(p.scale) * LOG2_E;  // scores are in units of log 2 from here on
  float same[2] = {0, 0}, different[2] = {0, 0};
  segment_scores<T>(p, q, h, t, scale, same, different);
  if constexpr (!S::QUERY_IN_REGISTERS) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *query_tile.at(16 * warp + g + i % 2 * 8, step * DEPTH<T> + t + i / 2 * CHUNK<T>) = float_of(q[step].word[i]);
    sync_warp();
  }
  const auto load_query = [&](int k) {
    if constexpr (S::QUERY_IN_REGISTERS)
      return q[k / DEPTH<T>];
    else
      return load_a(query_tile, 16 * warp, k, lane);
  };
  const int span = rows.last_position - rows.first_position;
  int lag[2];
  for (int r = 0; r < 2; ++r) lag[r] = row[r].inside ? rows.last_position - row[r].position : -1;

  const auto key_row = [&](const Tensor4& memory_rows, const Tensor4& current, int j) -> const T* {
    if (j >= keys) return nullptr;
    const bool in_memory = j < p.mem_len;
    const Tensor4& of = in_memory ? memory_rows : current;
    return static_cast<const T*>(of.data) + b * of.stride[0] + h * of.stride[1] +
           (in_memory ? j : j - p.mem_len) * of.stride[2];
  };
  const auto copy_keys = [&](int j0, int stage) {
    copy_rows<S::THREADS>(key_tile(stage), 0, BN, width, p.query.data,
                          [&](int k) { return key_row(p.memory_key, p.key, j0 + k); });
    copy_rows<S::THREADS>(value_tile(stage), 0, BN, width, p.query.data,
                          [&](int k) { return key_row(p.memory_value, p.value, j0 + k); });
    load_labels<S::THREADS>(call, label_of(stage), b, h, j0, BN);
  };
  const T* rel_key = static_cast<const T*>(p.rel_key.data) + b * p.rel_key.stride[0] + h * p.rel_key.stride[1];
  const auto copy_rel_key = [&](int begin, int end) {
    copy_rows<S::THREADS>(ring, begin, end, width, p.query.data, [&](int r) -> const T* {
      return r >= 0 && r < p.rel_rows ? rel_key + r * p.rel_key.stride[2] : nullptr;
    });
  };
  const float* rel_bias = rel_bias_of(call, b, h);
  // row of rel_key for the block's last position and key 0
  const int origin = int(p.max_distance - p.mem_len) - rows.last_position;

  const int tiles = tiles_of(keys, BN);
  const auto next_seen = [&](int tile) {  // the first tile from `tile` on with a pair that is seen
    for (; tile < tiles; tile += WARP) {
      const int mine = tile + lane;
      const uint32_t seen = ballot(mine < tiles && seen_pairs(call, rows, b, mine * BN, BN) != Seen::none);
      if (seen) return tile + first_bit(seen);
    }
    return tiles;
  };

  const Dropout dropout = load_dropout(p.dropout_state, p.dropout_threshold);
  float out[D / 8][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  bool has_window = false;  // the ring holds the tile's window
  int tile = next_seen(0), stage = 0;
  if (tile < tiles) copy_keys(tile * BN, 0);
  while (tile < tiles) {
    const int j0 = tile * BN, next = next_seen(tile + 1);
    wait_for_copies<0>();
    sync_block();  // this tile is here, and no one reads the one before any more
    if (!has_window) copy_rel_key(origin + j0, origin + j0 + S::WINDOW);
    commit_copies();
    const bool goes_on = next == tile + 1 && span < BM;
    if (next < tiles) copy_keys(next * BN, 1 - stage);
    if (next < tiles && goes_on) copy_rel_key(origin + j0 + S::WINDOW, origin + j0 + S::WINDOW + BN);
    commit_copies();

    float score[N][4] = {};
    for (int behind = 0; behind <= span; behind += BM) {
      if (behind > 0) {
        sync_block();
        copy_rel_key(origin + j0 + behind, origin + j0 + behind + S::WINDOW);
        commit_copies();
        wait_for_copies<0>();
        sync_block();
      } else if (!has_window) {
        wait_for_copies<1>();
        sync_block();
      }
      const int from_here[2] = {lag[0] - behind, lag[1] - behind};
      add_position_scores<T, BM, D>(score, ring, origin + j0 + behind, rel_bias, from_here, call.tf32, lane,
                                    load_query);
    }

    add_product<T, D>(score, call.tf32, load_query, [&](int k, int n) { return load_b(key_tile(stage), n, k, lane); });

    // bias, scale, segment term, mask
    const KeyTile label = label_of(stage);
    const bool all_seen = seen_pairs(call, rows, b, j0, BN) == Seen::all && place + BM <= p.length;
    float most[2] = {largest[0], largest[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t seen = all_seen ? ~0u : seen_columns<BN>(p, row[r], b, h, j0, label.rank, t);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int k = 8 * n + 2 * t + parity;
          float& s = score[n][2 * r + parity];
          s = (s + label.bias[k]) * scale + (label.id[k] != row[r].id ? different[r] : 0.f);
          if (!(seen >> (2 * n + parity) & 1)) s = -INFINITY;
          most[r] = fmaxf(most[r], s);
        }
    }

    // softmax on line: what came before shrinks where the largest score has grown
    float shrink[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = largest_of_quad(most[r]);
      base[r] = most[r] == -INFINITY ? 0.f : most[r];  // -inf - -inf would be NaN
      shrink[r] = exp2_approximately(largest[r] - base[r]);
      largest[r] = most[r];
      total[r] *= shrink[r];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = exp2_approximately(score[n][i] - base[i / 2]);
        total[i / 2] += score[n][i];
      }
    if (dropout.threshold) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t kept = kept_columns<BN>(dropout, head, row[r].index, j0, t);
#pragma unroll
        for (int n = 0; n < N; ++n)
          for (int parity = 0; parity < 2; ++parity)
            if (!(kept >> (2 * n + parity) & 1)) score[n][2 * r + parity] = 0;
      }
    }
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[d][i] *= shrink[i / 2];
    add_product<T, BN>(
        out, call.tf32, [&](int k) { return as_operand<T>(score + k / 8); },
        [&](int k, int n) { return load_b_transposed<true>(value_tile(stage), k, n, lane); });
    has_window = goes_on;
    tile = next;
    stage = 1 - stage;
  }
  wait_for_copies<0>();

  for (int r = 0; r < 2; ++r) {
    total[r] = sum_of_quad(total[r]);
    if (!row[r].inside) continue;
    const bool sees_any = total[r] != 0;  // NaN counts
    const float factor = sees_any ? float(1 / (1 - p.dropout_p)) / total[r] : 0.f;
    T* to = static_cast<T*>(p.out.data) + b * p.out.stride[0] + h * p.out.stride[1] + row[r].index * p.out.stride[2];
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
      if (8 * d + 2 * t < width) store_pair(to + 8 * d + 2 * t, out[d][2 * r] * factor, out[d][2 * r + 1] * factor);
    if (t == 0)
      static_cast<float*>(p.lse)[head * p.length + row[r].index] =
          sees_any ? (largest[r] + log2f(total[r]) + same[r]) * LN_2 : -INFINITY;
  }
}

template <typename T, int D>
std::string launch_forward(const Call& call, Stream stream) {
  using S = ForwardShape<T, D>;
  const char* error = prepare<T>(call, stream);
  if (error) return failure("prepare", call, 0, error);
  const int64_t blocks = (call.p.length + S::BM - 1) / S::BM * call.p.batch * call.p.heads;
  error = launch(forward_kernel<S>, {int(blocks), 1, 1}, S::THREADS, S::SHARED, stream, call);
  return error ? failure("forward", call, S::SHARED, error) : "";
}

}  // namespace xlnet_kernels::cuda
