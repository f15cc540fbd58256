// Backward in one pass: a block has BN keys and walks over the tiles of BM rows of which one sees them.
//
//   P = exp(score - lse);  dV += P' dO;  dP = dO V';  dS = P (dP - delta) scale;  dK += dS' Q + colsum(dS) u
//   dQ += dS K + band R;  dR += band' Q + colsum(band) v          where the band is dS shifted back: (i, j) -> (i, p)
//
// dK and dV stay in registers; dQ and dR are added in float32 to global memory, where blocks meet: atomically, or each
// block into a copy of its own. BM / 16 by GROUPS warps: of the scores each has 16 rows and 1 / GROUPS of the keys, of
// the products 16 rows and 1 / GROUPS of the head width.
#pragma once

#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "dropout.cuh"
#include "position.cuh"
#include "prepare.cuh"

namespace xlnet_kernels::cuda {

template <typename Element, int WIDTH>
struct BackwardShape {
  using T = Element;
  static constexpr int D = WIDTH, BM = sizeof(T) == 2 ? BACKWARD_TILE_16_BITS : BACKWARD_TILE_32_BITS, BN = BM,
                       GROUPS = sizeof(T) * D > 128 ? 2 : 1;
  static constexpr int WARPS = BM / 16 * GROUPS, THREADS = WARPS * WARP, WINDOW = BM + BN;
  static constexpr int KEYS = BN / GROUPS, WIDTH_PART = D / GROUPS;  // of one warp
  using Rows = Tile<T, D>;
  using Ring = Tile<T, D, WINDOW>;
  using Scores = Tile<T, BN>;
  using Band = Tile<T, WINDOW>;
  static constexpr int ROWS_BYTES = Rows::bytes(BM), RING_BYTES = Ring::bytes(WINDOW), SCORES_BYTES = Scores::bytes(BM),
                       BAND_BYTES = Band::bytes(BM), LABELS = 3 * BN * 4, SUMS = GROUPS * BM * 4,
                       LAGS = BM / 16 * 2 * 4;
  static constexpr int SHARED = 4 * ROWS_BYTES + RING_BYTES + 2 * SCORES_BYTES + BAND_BYTES + LABELS + SUMS + LAGS;
};

// Two neighbours of a gradient in global memory.
DEVICE void add(float* to, float first, float second, bool atomically) {
  if (atomically) return add_atomically(to, first, second);
  to[0] += first;
  to[1] += second;
}

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, 1) backward_kernel(Backward a) {
  using T = typename S::T;
  constexpr int D = S::D, BM = S::BM, BN = S::BN, N = S::KEYS / 8, PART = S::WIDTH_PART;
  const Call& call = a.call;
  const Gradients& grad = a.gradients;
  const RelAttention& p = call.p;
  const int lane = thread_index() % WARP, warp = thread_index() / WARP, g = lane / 4, t = lane % 4;
  const int strip = warp % (BM / 16), part = warp / (BM / 16);  // of 16 rows or keys; of the other dimension
  const int keys = int(p.mem_len + p.key_len), width = int(p.width), heads = int(p.heads);
  const int tiles = tiles_of(keys, BN), row_tiles = tiles_of(p.length, BM);
  const bool tf32 = call.tf32, atomically = !grad.deterministic;
  const int64_t slot = atomically ? 0 : block_index().x;

  char* memory = shared_memory();
  const auto take = [&](int bytes) {
    char* taken = memory;
    memory += bytes;
    return reinterpret_cast<T*>(taken);
  };
  const typename S::Rows key_tile{take(S::ROWS_BYTES)}, value_tile{take(S::ROWS_BYTES)};
  const typename S::Rows query_tile{take(S::ROWS_BYTES)}, grad_tile{take(S::ROWS_BYTES)};
  const typename S::Ring ring{take(S::RING_BYTES)};
  const typename S::Scores probability{take(S::SCORES_BYTES)}, score_grad{take(S::SCORES_BYTES)};
  const typename S::Band band{take(S::BAND_BYTES)};
  int32_t* const label_memory = reinterpret_cast<int32_t*>(memory);
  const KeyTile label{label_memory, label_memory + BN, reinterpret_cast<float*>(label_memory + 2 * BN)};
  float* const different_sums = label.bias + BN;                                    // (GROUPS, BM)
  int* const lag_bounds = reinterpret_cast<int*>(different_sums + S::GROUPS * BM);  // (BM / 16, 2)

  const int groups = call.shared_rel_key ? heads : int(p.batch) * heads, group = block_index().y;
  const int items = tiles * (call.shared_rel_key ? int(p.batch) : 1);
  for (int item = block_index().x; item < items; item += grid_size().x) {
    const int b = call.shared_rel_key ? item / tiles : group / heads, h = group % heads, head = b * heads + h;
    const int j0 = item % tiles * BN;
    const auto key_at = [&](const Tensor4& of_memory, const Tensor4& current, int j) {
      const bool in_memory = j < p.mem_len;
      const Tensor4& of = in_memory ? of_memory : current;
      return static_cast<T*>(of.data) + b * of.stride[0] + h * of.stride[1] +
             (in_memory ? j : j - p.mem_len) * of.stride[2];
    };
    const T* rel_key = static_cast<const T*>(p.rel_key.data) + b * p.rel_key.stride[0] + h * p.rel_key.stride[1];
    const float* rel_bias = rel_bias_of(call, b, h);
    float* grad_rel = grad.rel_key ? grad.rel_key + (slot * groups + group) * p.rel_rows * width : nullptr;
    float* grad_query = grad.query + (slot * p.batch * heads + head) * p.length * width;
    float* grad_different = grad.different + (slot * p.batch * heads + head) * p.length;
    const float* row_values = grad.row_values + head * p.length;
    const int64_t all_rows = p.batch * heads * p.length;

    sync_block();  // no one reads the tiles of the item before any more
    copy_rows<S::THREADS>(key_tile, 0, BN, width, p.query.data, [&](int k) -> const T* {
      return j0 + k < keys ? key_at(p.memory_key, p.key, j0 + k) : nullptr;
    });
    copy_rows<S::THREADS>(value_tile, 0, BN, width, p.query.data, [&](int k) -> const T* {
      return j0 + k < keys ? key_at(p.memory_value, p.value, j0 + k) : nullptr;
    });
    commit_copies();
    load_labels<S::THREADS>(call, label, b, h, j0, BN);

    float grad_key[PART / 8][4] = {}, grad_value[PART / 8][4] = {}, key_sum[4] = {};
    int window = 0;  // first row of rel_key in the ring
    bool has_window = false;
    for (int tile = 0; tile < row_tiles; ++tile) {
      const int place = tile * BM;
      const RowTile rows = load_row_tile(call, b, place, BM);
      const Seen seen = seen_pairs(call, rows, b, j0, BN);
      if (seen == Seen::none) continue;
      const bool all_seen = seen == Seen::all && place + BM <= p.length;
      const int origin = int(p.max_distance - p.mem_len) - rows.last_position + j0;
      const int span = rows.last_position - rows.first_position;
      const auto copy_window = [&](int begin, int end) {
        copy_rows<S::THREADS>(ring, begin, end, width, p.query.data, [&](int r) -> const T* {
          return r >= 0 && r < p.rel_rows ? rel_key + r * p.rel_key.stride[2] : nullptr;
        });
      };
      const auto clear_band = [&] {
        for (int i = thread_index(); i < S::BAND_BYTES / 16; i += S::THREADS)
          reinterpret_cast<Block*>(band.data)[i] = {};
      };

      sync_block();  // no one reads the rows of the tile before any more
      const auto row_of = [&](const Tensor4& of, int m) -> const T* {
        if (place + m >= p.length) return nullptr;
        return static_cast<const T*>(of.data) + b * of.stride[0] + h * of.stride[1] +
               row_at(p, b, place + m) * of.stride[2];
      };
      copy_rows<S::THREADS>(query_tile, 0, BM, width, p.query.data, [&](int m) { return row_of(p.query, m); });
      copy_rows<S::THREADS>(grad_tile, 0, BM, width, p.query.data, [&](int m) { return row_of(grad.out, m); });
      // rows of later positions: the window moves down
      copy_window(origin, has_window && origin == window - BM ? origin + BM : origin + S::WINDOW);
      commit_copies();
      clear_band();
      const Row row[2] = {load_row(p, b, place + 16 * strip + g), load_row(p, b, place + 16 * strip + g + 8)};
      int lag[2];
      float delta[2], log_total[2], different[2];
      for (int r = 0; r < 2; ++r) {
        lag[r] = row[r].inside ? rows.last_position - row[r].position : -1;
        delta[r] = row_values[DELTA * all_rows + row[r].index];
        log_total[r] = row_values[LOG_TOTAL * all_rows + row[r].index];
        different[r] = row_values[DIFFERENT * all_rows + row[r].index];
      }
      wait_for_copies<0>();
      sync_block();

      // scores of 16 rows and KEYS keys
      float score[N][4] = {};
      for (int behind = 0; behind <= span; behind += BM) {
        if (behind > 0) {
          sync_block();
          copy_window(origin + behind, origin + behind + S::WINDOW);
          commit_copies();
          wait_for_copies<0>();
          sync_block();
        }
        const int from_here[2] = {lag[0] - behind, lag[1] - behind};
        add_position_scores<T, BM, D>(score, ring, origin + behind + part * S::KEYS, rel_bias, from_here, tf32, lane,
                                      [&](int k) { return load_a(query_tile, 16 * strip, k, lane); });
      }
      window = origin;
      has_window = span < BM;
      add_product<T, D>(
          score, tf32, [&](int k) { return load_a(query_tile, 16 * strip, k, lane); },
          [&](int k, int n) { return load_b(key_tile, part * S::KEYS + n, k, lane); });
      float probability_grad[N][4] = {};
      add_product<T, D>(
          probability_grad, tf32, [&](int k) { return load_a(grad_tile, 16 * strip, k, lane); },
          [&](int k, int n) { return load_b(value_tile, part * S::KEYS + n, k, lane); });

      const float scale = float(p.scale), kept_scale = float(1 / (1 - p.dropout_p));
      const Dropout dropout = load_dropout(p.dropout_state, p.dropout_threshold);
      float different_sum[2] = {0, 0};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int part_keys = part * S::KEYS;
        const uint32_t seen_here =
            all_seen ? ~0u : seen_columns<S::KEYS>(p, row[r], b, h, j0 + part_keys, label.rank + part_keys, t);
        const uint32_t kept =
            dropout.threshold ? kept_columns<S::KEYS>(dropout, head, row[r].index, j0 + part * S::KEYS, t) : ~0u;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float of_value[2];
          for (int parity = 0; parity < 2; ++parity) {
            float& s = score[n][2 * r + parity];
            const int k = part * S::KEYS + 8 * n + 2 * t + parity;
            const bool elsewhere = label.id[k] != row[r].id;
            s = (s + label.bias[k]) * (scale * LOG2_E) + (elsewhere ? different[r] : 0.f);
            const bool is_seen = seen_here >> (2 * n + parity) & 1;
            const float exponential = is_seen ? exp2_approximately(s - log_total[r]) : 0.f;
            const float factor = kept >> (2 * n + parity) & 1 ? kept_scale : 0.f;
            of_value[parity] = exponential * factor;
            // a row that sees nothing may have infinite gradients: not times zero
            s = is_seen ? exponential * (probability_grad[n][2 * r + parity] * factor - delta[r]) * scale : 0.f;
            if (elsewhere) different_sum[r] += s;
          }
          const int m = 16 * strip + g + 8 * r, column = part * S::KEYS + 8 * n + 2 * t;
          store_pair(probability.at(m, column), of_value[0], of_value[1]);
          store_pair(score_grad.at(m, column), score[n][2 * r], score[n][2 * r + 1]);
        }
        different_sum[r] = sum_of_quad(different_sum[r]);
        if (t == 0) different_sums[part * BM + 16 * strip + g + 8 * r] = different_sum[r];
      }
      sync_block();

      // dV and dK of 16 keys
      add_product<T, BM>(
          grad_value, tf32, [&](int k) { return load_a_transposed(probability, k, 16 * strip, lane); },
          [&](int k, int n) { return load_b_transposed(grad_tile, k, part * PART + n, lane); });
      add_product<T, BM>(
          grad_key, tf32, [&](int k) { return load_a_transposed(score_grad, k, 16 * strip, lane); },
          [&](int k, int n) { return load_b_transposed(query_tile, k, part * PART + n, lane); });
#pragma unroll
      for (int k = 0; k < BM; k += DEPTH<T>)
        multiply<T>(key_sum, load_a_transposed(score_grad, k, 16 * strip, lane), ones<T>(), 0, tf32);
      if (p.segment_embed) {
        for (int m = thread_index(); m < BM && place + m < p.length; m += S::THREADS) {
          float sum = different_sums[m];
          if (S::GROUPS == 2) sum += different_sums[BM + m];
          float* to = grad_different + row_at(p, b, place + m);
          if (atomically) {
            add_atomically(to, sum);
          } else {
            *to += sum;
          }
        }
      }

      // dQ of 16 rows
      float grad_rows[PART / 8][4] = {};
      add_product<T, BN>(
          grad_rows, tf32, [&](int k) { return load_a(score_grad, 16 * strip, k, lane); },
          [&](int k, int n) { return load_b_transposed(key_tile, k, part * PART + n, lane); });
      for (int behind = 0; behind <= span; behind += BM) {
        if (behind > 0) {
          sync_block();
          copy_window(origin + behind, origin + behind + S::WINDOW);
          commit_copies();
          clear_band();
          wait_for_copies<0>();
          sync_block();
        } else if (span >= BM) {  // the last window of the scores is still there
          sync_block();
          copy_window(origin, origin + S::WINDOW);
          commit_copies();
          wait_for_copies<0>();
        }
        // the band: each row's dS from its lag on
        int first = BM, last = -1;
        for (int r = 0; r < 2; ++r) {
          const int from_here = lag[r] - behind;
          if (from_here < 0 || from_here >= BM) continue;
          first = smaller(first, from_here);
          last = larger(last, from_here);
          T* to = band.at(16 * strip + g + 8 * r, from_here + part * S::KEYS + 2 * t);
#pragma unroll
          for (int n = 0; n < N; ++n)
            for (int parity = 0; parity < 2; ++parity) store_one(to + 8 * n + parity, score[n][2 * r + parity]);
        }
        first = least_of_warp(first);
        last = -least_of_warp(-last);
        if (lane == 0 && part == 0) {
          lag_bounds[2 * strip] = first;
          lag_bounds[2 * strip + 1] = last;
        }
        sync_block();
        for (int k = first / 16 * 16; k < last + BN && last >= 0; k += DEPTH<T>) {
          const Operand a_band = load_a(band, 16 * strip, k, lane);
#pragma unroll
          for (int n = 0; n < PART; n += 16) {
            const Operand r = load_b_transposed(ring, origin + behind + k, part * PART + n, lane);
            multiply<T>(grad_rows[n / 8], a_band, r, 0, tf32);
            multiply<T>(grad_rows[n / 8 + 1], a_band, r, 1, tf32);
          }
        }
        if (grad_rel == nullptr) continue;

        // dR of 16 rows of the window at a time
        for (int m = 16 * strip; m < S::WINDOW; m += BM) {
          float grad_window[PART / 8][4] = {}, window_sum[4] = {};
          bool any = false;
          for (int of = 0; of < BM / 16; ++of) {  // 16 rows of query
            if (lag_bounds[2 * of + 1] < 0 || lag_bounds[2 * of] >= m + 16 || lag_bounds[2 * of + 1] + BN <= m)
              continue;
            any = true;
#pragma unroll
            for (int k = 0; k < 16; k += DEPTH<T>) {
              const Operand a_band = load_a_transposed(band, 16 * of + k, m, lane);
              multiply<T>(window_sum, a_band, ones<T>(), 0, tf32);
#pragma unroll
              for (int n = 0; n < PART; n += 16) {
                const Operand q = load_b_transposed(query_tile, 16 * of + k, part * PART + n, lane);
                multiply<T>(grad_window[n / 8], a_band, q, 0, tf32);
                multiply<T>(grad_window[n / 8 + 1], a_band, q, 1, tf32);
              }
            }
          }
          if (!any) continue;
          for (int r = 0; r < 2; ++r) {
            const int at = origin + behind + m + g + 8 * r;
            if (at < 0 || at >= p.rel_rows) continue;
#pragma unroll
            for (int n = 0; n < PART / 8; ++n) {
              const int d = part * PART + 8 * n + 2 * t;
              if (d >= width) continue;
              const T* v = static_cast<const T*>(p.position_bias) + h * width + d;
              const float v0 = p.position_bias ? to_float(v[0]) : 0.f, v1 = p.position_bias ? to_float(v[1]) : 0.f;
              add(grad_rel + int64_t(at) * width + d, grad_window[n][2 * r] + window_sum[2 * r] * v0,
                  grad_window[n][2 * r + 1] + window_sum[2 * r] * v1, atomically);
            }
          }
        }
      }
      for (int r = 0; r < 2; ++r) {
        if (!row[r].inside) continue;
#pragma unroll
        for (int n = 0; n < PART / 8; ++n) {
          const int d = part * PART + 8 * n + 2 * t;
          if (d < width)
            add(grad_query + int64_t(row[r].index) * width + d, grad_rows[n][2 * r], grad_rows[n][2 * r + 1],
                atomically);
        }
      }
    }
    wait_for_copies<0>();

    for (int r = 0; r < 2; ++r) {
      const int j = j0 + 16 * strip + g + 8 * r;
      if (j >= keys) continue;
      if (t == 0 && part == 0) grad.key_sum[int64_t(head) * keys + j] = key_sum[2 * r];
      T* to_key = key_at(grad.memory_key, grad.key, j);
      T* to_value = key_at(grad.memory_value, grad.value, j);
#pragma unroll
      for (int n = 0; n < PART / 8; ++n) {
        const int d = part * PART + 8 * n + 2 * t;
        if (d >= width) continue;
        const T* u = static_cast<const T*>(p.content_bias) + h * width + d;
        const float u0 = p.content_bias ? to_float(u[0]) : 0.f, u1 = p.content_bias ? to_float(u[1]) : 0.f;
        store_pair(to_key + d, grad_key[n][2 * r] + key_sum[2 * r] * u0, grad_key[n][2 * r + 1] + key_sum[2 * r] * u1);
        store_pair(to_value + d, grad_value[n][2 * r], grad_value[n][2 * r + 1]);
      }
    }
  }
}

template <typename T, int D>
std::string launch_backward(const Backward& a, Stream stream) {
  using S = BackwardShape<T, D>;
  const char* error = prepare<T>(a.call, stream);
  if (error) return failure("prepare", a.call, 0, error);
  error = prepare_rows<T>(a, stream);
  if (error) return failure("prepare_rows", a.call, 0, error);
  const RelAttention& p = a.call.p;
  const int groups = int(a.call.shared_rel_key ? p.heads : p.batch * p.heads);
  error = launch(backward_kernel<S>, {a.gradients.slots, groups, 1}, S::THREADS, S::SHARED, stream, a);
  return error ? failure("backward", a.call, S::SHARED, error) : "";
}

}  // namespace xlnet_kernels::cuda
