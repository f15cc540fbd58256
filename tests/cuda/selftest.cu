// Kernels for tests/cuda/test_simt.py: every primitive, and every mistake that must be seen.
#include <primitives.cuh>

#include <cstdint>

namespace xlnet_kernels::cuda {

struct Numbers {
  const float* in;
  const uint16_t* half_in;
  int count;
  uint32_t *half, *bfloat16, *tf32;  // pairs (x, -x) of 16 bits
  float *exp2, *from_half, *from_bfloat16;
};

KERNEL THREADS_PER_BLOCK(64, 1) convert(Numbers n) {
  const int stride = 64 * grid_size().x;
  for (int i = block_index().x * 64 + thread_index(); i < n.count; i += stride) {
    n.half[i] = pack<Half>(n.in[i], -n.in[i]);
    n.bfloat16[i] = pack<BFloat16>(n.in[i], -n.in[i]);
    n.tf32[i] = round_to_tf32(n.in[i]);
    n.exp2[i] = exp2_approximately(n.in[i]);
    n.from_half[i] = to_float(Half{n.half_in[i]});
    n.from_bfloat16[i] = to_float(BFloat16{n.half_in[i]});
  }
}

struct Warp {
  const int* from;
  int mask;
  float *shuffled, *exchanged;
  uint32_t* ballots;
};

KERNEL exchange(Warp w) {
  const int i = thread_index();
  w.shuffled[i] = shuffle(float(i), w.from[i]);
  w.exchanged[i] = float_of(shuffle_xor(bits_of(float(i)), w.mask));
  w.ballots[i] = ballot(w.from[i] % 2 == 0);
}

struct Matrices {
  const uint16_t* in;  // 32 rows of 8
  uint32_t *straight, *transposed;
};

KERNEL load(Matrices m) {
  uint16_t* shared = reinterpret_cast<uint16_t*>(shared_memory());
  const int lane = thread_index(), row = lane * 16;  // every other 16 bytes
  for (int i = 0; i < 8; ++i) shared[row + i] = m.in[8 * lane + i];
  sync_warp();
  uint32_t in[4];
  ldmatrix(in, shared + row);
  for (int i = 0; i < 4; ++i) m.straight[4 * lane + i] = in[i];
  ldmatrix_transposed(in, shared + row);
  for (int i = 0; i < 4; ++i) m.transposed[4 * lane + i] = in[i];
}

struct Product {
  const uint32_t *a, *b;  // per lane: 4 and 2 words
  float* sum;             // per lane: 4
  int repeats;
};

template <typename T>
KERNEL multiply(Product p) {
  const int lane = thread_index();
  float sum[4];
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) sum[i] = p.sum[4 * lane + i], a[i] = p.a[4 * lane + i];
  for (int i = 0; i < 2; ++i) b[i] = p.b[2 * lane + i];
  for (int i = 0; i < p.repeats; ++i) mma<T>(sum, a, b);
  for (int i = 0; i < 4; ++i) p.sum[4 * lane + i] = sum[i];
}

enum Mistake : int {
  NONE,
  NO_BARRIER,
  NO_BARRIER_AFTER,
  NO_SYNC_WARP,
  NO_WAIT,
  LATE_WAIT,
  NEVER_WAITS,
  TWO_COPIES,
  MISALIGNED_TO,
  MISALIGNED_FROM,
  TO_GLOBAL,
  FROM_SHARED,
  LOAD_UNDER_WAY,
  WORD_UNDER_WAY,
  WORD_MISALIGNED,
  LOAD_MISALIGNED,
  LOAD_OUTSIDE,
  LANE_ELSEWHERE,
  LANE_ENDS,
  LANE_AT_BARRIER,
  WARP_ENDS,
  OTHER_BARRIER,
  PAIR_MISALIGNED,
  ATOMIC_ON_SHARED,
  DIVISION,
  NULL_POINTER,
  VECTOR_MISALIGNED,
  ARRAY_INDEX,
};

struct Sums {
  const float* in;  // rounds x threads
  float* out;       // rounds
  int rounds, mistake, zero;
};

// The sum of each round's numbers, by a tree in shared memory; thread 0 knows it.
KERNEL reduce(Sums s) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int thread = thread_index();
  for (int round = 0; round < s.rounds; ++round) {
    shared[thread] = s.in[128 * round + thread];
    for (int width = 64; width > 0; width /= 2) {
      if (s.mistake != NO_BARRIER || width != 32) sync_block();
      if (thread < width) shared[thread] += shared[thread + width];
    }
    if (thread == 0) s.out[round] = shared[0];
    if (s.mistake != NO_BARRIER_AFTER) sync_block();
  }
}

// Each lane adds up its neighbours' numbers, handed over in shared memory.
KERNEL neighbours(Sums s) {
  const int lane = thread_index() % 32;
  float* shared = reinterpret_cast<float*>(shared_memory()) + thread_index() - lane;
  float sum = 0;
  for (int round = 0; round < s.rounds; ++round) {
    shared[lane] = s.in[128 * round + thread_index()];
    sync_warp();
    sum += shared[(lane + 1) % 32];
    if (s.mistake != NO_SYNC_WARP) sync_warp();
  }
  add_atomically(s.out, sum);
}

// The sum of all numbers, copied to shared memory one round ahead of its use.
KERNEL pipeline(Sums s) {
  char* shared = shared_memory();
  const int thread = thread_index();
  float sum = 0;
  const auto fetch = [&](int round) {
    // Rows of 16 bytes, of which each thread copies one for a neighbouring warp; a row behind the end counts as zeros.
    const int row = (thread + 32) % 128;
    copy_async<16>(shared + round % 2 * 2048 + 16 * row, s.in + 512 * (round < s.rounds ? round : 0) + 4 * row,
                   round < s.rounds);
    commit_copies();
  };
  fetch(0);
  for (int round = 0; round < s.rounds; ++round) {
    fetch(round + 1);
    if (s.mistake == LATE_WAIT) {
      wait_for_copies<2>();
    } else if (s.mistake != NO_WAIT) {
      wait_for_copies<1>();
    }
    if (s.mistake != NO_BARRIER) sync_block();
    const float* row = reinterpret_cast<float*>(shared + round % 2 * 2048 + 16 * thread);
    for (int i = 0; i < 4; ++i) sum += row[i];
    if (s.mistake != NO_BARRIER_AFTER) sync_block();
  }
  if (s.mistake != NEVER_WAITS) wait_for_copies<0>();
  add_atomically(s.out, sum);
}

struct alignas(8) Pair {
  float first, second;
};

// Single mistakes that have a sentence of their own.
KERNEL mistake(Sums s) {
  char* shared = shared_memory();
  const int thread = thread_index(), lane = thread % 32;
  char* mine = shared + 16 * thread;
  uint32_t in[4];
  switch (s.mistake) {
    case TWO_COPIES:
      copy_async<16>(shared, s.in, true);
      sync_block();
      break;
    case MISALIGNED_TO:
      copy_async<16>(mine + 8, s.in, true);
      break;
    case MISALIGNED_FROM:
      copy_async<16>(mine, s.in + 2, true);
      break;
    case TO_GLOBAL:
      copy_async<16>(s.out, s.in, true);
      break;
    case FROM_SHARED:
      copy_async<16>(mine, mine, true);
      break;
    case LOAD_UNDER_WAY:
      copy_async<16>(mine, s.in, true);
      sync_block();
      ldmatrix(in, mine);
      wait_for_copies<0>();
      break;
    case WORD_UNDER_WAY:
      copy_async<4>(mine + 8, s.in + 1, true);
      ldmatrix(in, mine);
      wait_for_copies<0>();
      break;
    case WORD_MISALIGNED:
      copy_async<4>(mine + 2, s.in, true);
      break;
    case LOAD_MISALIGNED:
      ldmatrix(in, shared + 18 * lane);
      break;
    case LOAD_OUTSIDE:
      ldmatrix_transposed(in, shared + 2048 - 8 + 16 * lane);
      break;
    case LANE_ELSEWHERE:
      if (lane == 7) {
        sync_warp();
      } else {
        ballot(true);
      }
      break;
    case LANE_ENDS:
      if (thread == 40) return;
      s.out[0] = shuffle(1.0f, 0);
      break;
    case LANE_AT_BARRIER:
      if (lane >= 16) sync_block();
      sync_warp();
      break;
    case WARP_ENDS:
      if (thread / 32 == 2) return;
      sync_block();
      break;
    case OTHER_BARRIER:
      if (thread / 32 == 3) {
        sync_block();
      } else {
        sync_block();
      }
      break;
    case PAIR_MISALIGNED:
      add_atomically(s.out + 1, 1, 2);
      break;
    case ATOMIC_ON_SHARED:
      add_atomically(reinterpret_cast<float*>(mine), 1);
      break;
    case DIVISION:
      s.out[0] = float(thread / s.zero);
      break;
    case NULL_POINTER:
      if (thread == 9) *reinterpret_cast<volatile float*>(uintptr_t(s.zero)) = 1;
      break;
    case VECTOR_MISALIGNED:
      reinterpret_cast<Pair*>(mine + 4)->first = 1;
      break;
    case ARRAY_INDEX: {
      const int table[] = {thread, lane};
      s.out[0] = float(table[s.zero + 2]);
      break;
    }
    default:
      break;
  }
}

KERNEL deep(Sums s) {
  volatile char much[300 << 10];
  much[s.zero] = char(s.mistake);
  s.out[0] = much[s.zero];
}

struct Access {
  float *shared, *global;  // one of them is null: `index` is of shared memory then
  int index, thread;
  bool write;
};

KERNEL access(Access a) {
  volatile float* memory = a.global ? a.global : reinterpret_cast<float*>(shared_memory());
  sync_block();
  if (thread_index() != a.thread) return;
  if (a.write) {
    memory[a.index] = 1;
  } else {
    a.shared[0] = memory[a.index];
  }
}

struct Grid {
  int* out;  // x, y, z of block and grid, and when it ran
  int* counter;
};

KERNEL visit(Grid g) {
  const Index block = block_index(), grid = grid_size();
  int* out = g.out + 7 * (block.x + grid.x * (block.y + grid.y * block.z));
  if (thread_index()) return;
  const int values[] = {block.x, block.y, block.z, grid.x, grid.y, grid.z, (*g.counter)++};
  for (int i = 0; i < 7; ++i) out[i] = values[i];
}

}  // namespace xlnet_kernels::cuda

using namespace xlnet_kernels::cuda;

extern "C" {

const char* run_convert(Numbers n) { return launch(convert, {3, 1, 1}, 64, 0, nullptr, n); }
const char* run_exchange(Warp w) { return launch(exchange, {1, 1, 1}, 32, 0, nullptr, w); }
const char* run_load(Matrices m) { return launch(load, {1, 1, 1}, 32, 1024, nullptr, m); }
const char* run_multiply(Product p, int type) {
  const auto kernel = type == 0 ? multiply<Half> : type == 1 ? multiply<BFloat16> : multiply<float>;
  return launch(kernel, {1, 1, 1}, 32, 0, nullptr, p);
}
const char* run_reduce(Sums s) { return launch(reduce, {1, 1, 1}, 128, 512, nullptr, s); }
const char* run_neighbours(Sums s) { return launch(neighbours, {1, 1, 1}, 128, 512, nullptr, s); }
const char* run_pipeline(Sums s) { return launch(pipeline, {1, 1, 1}, 128, 4096, nullptr, s); }
const char* run_mistake(Sums s) { return launch(mistake, {1, 2, 1}, 128, 2048, nullptr, s); }
const char* run_deep(Sums s) { return launch(deep, {1, 1, 1}, 32, 0, nullptr, s); }
const char* run_access(Access a, int shared_bytes) { return launch(access, {1, 1, 1}, 64, shared_bytes, nullptr, a); }
const char* run_visit(Grid g, Index grid, int threads, int shared_bytes) {
  return launch(visit, grid, threads, shared_bytes, nullptr, g);
}
}
