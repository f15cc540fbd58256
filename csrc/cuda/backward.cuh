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
  static_assert(WINDOW <= REL_MARGIN);
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

// To a gradient in global memory.
DEVICE void add(float* to, float x, bool atomically) {
  if (atomically) {
    add_atomically(to, x);
  } else {
    *to += x;
  }
}

// Row r of a product's two, 8 N columns wide, of which this lane has two in eight, from `column` on.
template <int N>
DEVICE void add_row(float* to, const float (&product)[N][4], int r, int column, int width, bool atomically) {
  if (atomically) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (column + 8 * n < width) add_atomically(to + column + 8 * n, product[n][2 * r], product[n][2 * r + 1]);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < 2; ++i)
        if (column + 8 * n < width) to[column + 8 * n + i] += product[n][2 * r + i];
  }
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
  const int keys = int(p.mem_len + p.key_len), width = int(p.head_dim), heads = int(p.heads);
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

  clear_labels<S::THREADS>(label, BN);

  const int groups = call.shared_rel_key ? heads : int(p.batch) * heads, h = block_index().y;
  // mostly one tile of one batch; several where few blocks share copies of gradients, or the batch is beyond the grid
  for (int tile = block_index().x, b = block_index().z;; tile += grid_size().x) {
    for (; tile >= tiles; tile -= tiles) b += grid_size().z;
    if (b >= p.batch) return;
    const int head = b * heads + h, group = call.shared_rel_key ? h : head, j0 = tile * BN;
    const auto key_rows = key_rows_of<T>(p, p.memory.key, p.keys.key, b, h);
    const auto value_rows = key_rows_of<T>(p, p.memory.value, p.keys.value, b, h);
    const auto query_rows = rows_of<T>(p.rows.query, b, h), grad_out_rows = rows_of<T>(grad.out, b, h);
    const auto rel_rows = rows_of<T>(p.rel_key.rows, b, h);
    const float* rel_bias = rel_bias_of(call, b, h);
    const int64_t first_rel = (slot * groups + group) * p.rel_len,
                  first_row = (slot * p.batch * heads + head) * p.length;
    const Rows<float> grad_rel{grad.rel_key + first_rel * width, width};
    const Rows<float> grad_query{grad.query + first_row * width, width};
    const float* row_values = grad.row_values + int64_t(head) * p.length;
    const int64_t all_rows = p.batch * heads * p.length;

    sync_block();  // no one reads the tiles of the item before any more
    copy_rows<S::THREADS, BN>(key_tile, 0, key_rows, j0, keys, width);
    copy_rows<S::THREADS, BN>(value_tile, 0, value_rows, j0, keys, width);
    copy_labels<S::THREADS, BN>(call, label, b, h, j0);
    commit_copies();

    float grad_key[PART / 8][4] = {}, grad_value[PART / 8][4] = {}, key_sum[4] = {};
    int window = 0;  // first row of rel_key in the ring
    bool has_window = false;
    Runs<BM> runs;
    bool was_in_line = false;
    Walk walk{row_tiles};
    while (true) {
      Seen seen;
      const int row_tile =
          walk.next(seen, lane, [&](int i) { return seen_pairs(call, load_row_tile(call, b, i * BM, BM), b, j0, BN); });
      if (row_tile >= row_tiles) break;
      const int place = row_tile * BM, last_position = position_at(p, b, smaller(place + BM, int(p.length)) - 1);
      const int span = last_position - position_at(p, b, place);
      // once, but for rows far apart: then once for each window of rel_key, each time with the rows that it serves
      for (int behind = 0; behind <= span; behind += BM) {
        const int origin = int(p.rel_key.max_distance - p.mem_len) - last_position + j0 + behind;
        const auto copy_half_window = [&](int begin) {
          copy_rows<S::THREADS, BM>(ring, begin, rel_rows, begin, int(p.rel_len), width);
        };
        const auto clear_band = [&] {
          for (int i = thread_index(); i < S::BAND_BYTES / 16; i += S::THREADS)
            reinterpret_cast<Block*>(band.data)[i] = {};
        };

        sync_block();  // no one reads the rows of the tile before any more
        const auto copy_tile = [&](const typename S::Rows& to, const Rows<T>& rows) {
          if (p.rows.order == nullptr) {
            copy_rows<S::THREADS, BM>(to, 0, rows, place, int(p.length), width);
          } else {
            const auto at_place = [&](int m) { return rows(row_at(p, b, smaller(m, int(p.length) - 1))); };
            copy_rows<S::THREADS, BM>(to, 0, at_place, place, int(p.length), width);
          }
        };
        if (behind == 0) {
          copy_tile(query_tile, query_rows);
          copy_tile(grad_tile, grad_out_rows);
        }
        copy_half_window(origin);
        // rows of later positions: the window moves down
        if (!has_window || origin != window - BM) copy_half_window(origin + BM);
        commit_copies();
        // rows one after the other lag in each tile as in the one before: what is zero in the band stays zero
        const bool in_line = p.rows.position == nullptr && place + BM <= p.length, same_lags = in_line && was_in_line;
        was_in_line = in_line;
        if (!same_lags) clear_band();
        Row row[2] = {load_row(p, b, place + 16 * strip + g), load_row(p, b, place + 16 * strip + g + 8)};
        int lag[2];
        float delta[2], here[2], there[2];
        for (int r = 0; r < 2; ++r) {
          lag[r] = last_position - row[r].position - behind;
          row[r].inside = row[r].inside && lag[r] >= 0 && lag[r] < BM;
          if (!row[r].inside) lag[r] = -1;
          const float* values = row_values + row[r].index;
          delta[r] = row[r].inside ? values[DELTA * all_rows] : 0.f;
          here[r] = row[r].inside ? -values[LOG_TOTAL * all_rows] : -INFINITY;  // exponentials are 0
          there[r] = here[r] + values[DIFFERENT * all_rows];
        }
        wait_for_copies<0>();
        sync_block();

        // scores of 16 rows and KEYS keys
        const auto load_query = [&](int k) { return load_a(query_tile, 16 * strip, k, lane); };
        const int part_keys = part * S::KEYS;
        float score[N][4];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) score[n][i] = label.bias[part_keys + 8 * n + 2 * t + i % 2];
        add_product<T, D>(score, tf32, load_query,
                          [&](int k, int n) { return load_b(key_tile, part_keys + n, k, lane); });
        if (!same_lags) runs.find(lag, lane);
        runs.for_each([&](int r) { return lag[r]; }, true, lane,
                      [&](const Run& run) {
                        add_position_scores<T, D>(score, ring, origin + part_keys, rel_bias, run, tf32, lane,
                                                  load_query);
                      });
        window = origin;
        has_window = true;
        const float scale = float(p.scale);
        const auto is_elsewhere = [&](int n, int i) {
          return label.id[part_keys + 8 * n + 2 * t + i % 2] != row[i / 2].id;
        };
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            score[n][i] = score[n][i] * (scale * LOG2_E) + (is_elsewhere(n, i) ? there[i / 2] : here[i / 2]);
        hide(score, seen, p, {row[0], row[1]}, b, h, place + 16 * strip + g, j0 + part_keys, label.rank + part_keys, t);

        const float kept_scale = float(1 / (1 - p.dropout.p));
        const Dropout dropout = load_dropout(p.dropout.state, p.dropout.threshold);
        uint32_t kept[2] = {~0u, ~0u};
        if (dropout.threshold)
          for (int r = 0; r < 2; ++r) kept[r] = kept_columns<S::KEYS>(dropout, head, row[r].index, j0 + part_keys, t);
        float different_sum[2] = {0, 0};
        constexpr int SOME =
            N < 4 ? N : 4;  // eights of keys at a time: dP of all of them would not fit into the registers
#pragma unroll
        for (int first = 0; first < N; first += SOME) {
          float probability_grad[SOME][4] = {};
          add_product<T, D>(
              probability_grad, tf32, [&](int k) { return load_a(grad_tile, 16 * strip, k, lane); },
              [&](int k, int n) { return load_b(value_tile, part_keys + 8 * first + n, k, lane); });
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = first; n < first + SOME; ++n) {
              float of_value[2];
              for (int parity = 0; parity < 2; ++parity) {
                const int i = 2 * r + parity;
                float& s = score[n][i];
                const bool hidden = s == -INFINITY;
                const float exponential = exp2_approximately(s);
                const float factor = kept[r] >> (2 * n + parity) & 1 ? kept_scale : 0.f;
                of_value[parity] = hidden ? 0.f : exponential * factor;
                // not times zero: a row that sees nothing, or sees NaN elsewhere, may have NaN for delta or log-sum-exp
                s = hidden ? 0.f : exponential * (probability_grad[n - first][i] * factor - delta[r]) * scale;
                if (is_elsewhere(n, i)) different_sum[r] += s;
              }
              const int m = 16 * strip + g + 8 * r, column = part_keys + 8 * n + 2 * t;
              store_pair(probability.at(m, column), of_value[0], of_value[1]);
              store_pair(score_grad.at(m, column), score[n][2 * r], score[n][2 * r + 1]);
            }
        }
        for (int r = 0; r < 2; ++r) {
          different_sum[r] = sum_of_quad(different_sum[r]);
          if (t == 0) different_sums[part * BM + 16 * strip + g + 8 * r] = different_sum[r];
        }
        sync_block();

        // dV and dK of 16 keys
        add_product<T, BM>(
            grad_value, tf32, [&](int k) { return load_a_transposed(probability, k, 16 * strip, lane); },
            [&](int k, int n) { return load_b_transposed(grad_tile, k, part * PART + n, lane); });
        add_product<T, BM>(
            grad_key, tf32,
            [&](int k) {
              const Operand a_keys = load_a_transposed(score_grad, k, 16 * strip, lane);
              multiply<T>(key_sum, a_keys, ones<T>(), 0, tf32);
              return a_keys;
            },
            [&](int k, int n) { return load_b_transposed(query_tile, k, part * PART + n, lane); });
        if (p.segments.embed) {
          for (int m = thread_index(); m < BM && place + m < p.length; m += S::THREADS) {
            float sum = different_sums[m];
            if (S::GROUPS == 2) sum += different_sums[BM + m];
            add(grad.different + first_row + row_at(p, b, place + m), sum, atomically);
          }
        }

        // dQ of 16 rows
        float grad_rows[PART / 8][4] = {};
        add_product<T, BN>(
            grad_rows, tf32, [&](int k) { return load_a(score_grad, 16 * strip, k, lane); },
            [&](int k, int n) { return load_b_transposed(key_tile, k, part * PART + n, lane); });
        // the band: each row's dS from its lag on
        int first = BM, last = -1;
        for (int r = 0; r < 2; ++r) {
          if (lag[r] < 0) continue;
          first = smaller(first, lag[r]);
          last = larger(last, lag[r]);
          T* to = band.at(16 * strip + g + 8 * r, lag[r] + part_keys + 2 * t);
#pragma unroll
          for (int n = 0; n < N; ++n)
            for (int parity = 0; parity < 2; ++parity) store_one(to + 8 * n + parity, score[n][2 * r + parity]);
        }
        first = least_of_warp(first);
        last = largest_of_warp(last);
        if (lane == 0 && part == 0) {
          lag_bounds[2 * strip] = first;
          lag_bounds[2 * strip + 1] = last;
        }
        sync_block();
        for (int k = first / 16 * 16; k < last + BN && last >= 0; k += DEPTH<T>) {
          const Operand a_band = load_a(band, 16 * strip, k, lane);
#pragma unroll
          for (int n = 0; n < PART; n += 16) {
            const Operand r = load_b_transposed(ring, origin + k, part * PART + n, lane);
            multiply<T>(grad_rows[n / 8], a_band, r, 0, tf32);
            multiply<T>(grad_rows[n / 8 + 1], a_band, r, 1, tf32);
          }
        }

        // dR of 16 rows of the window at a time
        for (int m = 16 * strip; m < S::WINDOW && grad.rel_key; m += BM) {
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
            const int at = origin + m + g + 8 * r;
            if (at < 0 || at >= p.rel_len) continue;
            add_row(grad_rel(at), grad_window, r, part * PART + 2 * t, width, atomically);
            if (grad.rel_sum && t == 0 && part == 0) add(grad.rel_sum + first_rel + at, window_sum[2 * r], atomically);
          }
        }
        for (int r = 0; r < 2; ++r)
          if (row[r].inside) add_row(grad_query(row[r].index), grad_rows, r, part * PART + 2 * t, width, atomically);
      }
    }
    wait_for_copies<0>();

    for (int r = 0; r < 2; ++r) {
      const int j = j0 + 16 * strip + g + 8 * r;
      if (j >= keys) continue;
      if (t == 0 && part == 0) grad.key_sum[int64_t(head) * keys + j] = key_sum[2 * r];
      T* to_key = key_rows_of<T>(p, grad.memory_key, grad.key, b, h)(j);
      T* to_value = key_rows_of<T>(p, grad.memory_value, grad.value, b, h)(j);
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
  const Gradients& grad = a.gradients;
  Index grid = grid_of((p.mem_len + p.key_len + S::BN - 1) / S::BN, p);
  if (grad.deterministic) grid = {grad.slots, grid.y, a.call.shared_rel_key ? 1 : grid.z};
  error = launch(backward_kernel<S>, grid, S::THREADS, S::SHARED, stream, a);
  return error ? failure("backward", a.call, S::SHARED, error) : "";
}

}  // namespace xlnet_kernels::cuda
