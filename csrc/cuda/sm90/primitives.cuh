// Primitives of sm_90a for the warpgroup kernels, beside ../primitives.cuh: wgmma, mbarriers, transfer of registers.
//
// A warpgroup is four warps. wgmma multiplies its 64 rows, 16 of each warp; the sums lie in each warp's registers as
// mma's do. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "mbarrier".
#pragma once

#include <primitives.cuh>
#include <type_traits>

namespace xlnet_kernels::cuda {

constexpr int WARPGROUP = 128;

// Ends the launch with an error.
DEVICE void trap() { asm volatile("trap;"); }

// Dynamic shared memory as the 128-byte swizzle wants it: its pattern begins anew every 1024 bytes.
DEVICE char* swizzled_memory() {
  extern __shared__ __align__(1024) char swizzled[];
  return swizzled;
}

// A matrix in shared memory, 128-byte swizzle, from `bytes` after `data` on: how far apart its panels (`leading`) and
// its groups of eight rows are. Sums are of 32 bits, which no address carries out of.
DEVICE uint64_t matrix_descriptor(const void* data, int bytes, int leading, int eight_rows) {
  constexpr uint32_t SWIZZLE_128 = 1u << 30;
  const uint32_t low = shared_address(data) / 16 + uint32_t(bytes / 16 + leading / 16 * 65536);
  return uint64_t(SWIZZLE_128 + eight_rows / 16) << 32 | low;
}

// A matrix without swizzle: 8 rows of 16 bytes lie together, and chunks of eight columns and groups of eight rows are
// as far apart as the caller says.
DEVICE uint64_t plain_descriptor(const void* data, int bytes, int leading, int stride) {
  const uint32_t low = shared_address(data) / 16 + uint32_t(bytes / 16 + leading / 16 * 65536);
  return uint64_t(uint32_t(stride / 16)) << 32 | low;
}

#define SUMS_1(s, n) "+f"(s[n][0]), "+f"(s[n][1]), "+f"(s[n][2]), "+f"(s[n][3])
#define SUMS_4(s, n) SUMS_1(s, n), SUMS_1(s, n + 1), SUMS_1(s, n + 2), SUMS_1(s, n + 3)
#define REGISTERS_32                                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64                                                                                  \
  REGISTERS_32                                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BEGUN_1(s, n) "=f"(s[n][0]), "=f"(s[n][1]), "=f"(s[n][2]), "=f"(s[n][3])
#define BEGUN_4(s, n) BEGUN_1(s, n), BEGUN_1(s, n + 1), BEGUN_1(s, n + 2), BEGUN_1(s, n + 3)
#define WGMMA_64(type, SUMS, ADDS)                                                                               \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %38, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type   \
               "." type " {" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, %37; }"                     \
               : SUMS(sum, 0), SUMS(sum, 4)                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED), ADDS)
#define WGMMA_128(type)                                                                                                \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
               " {" REGISTERS_64 "}, {%64, %65, %66, %67}, %68, adds, 1, 1, %69; }"                                    \
               : SUMS_4(sum, 0), SUMS_4(sum, 4), SUMS_4(sum, 8), SUMS_4(sum, 12)                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED))

// Warpgroup: sum (64 x 8 N) += a (64 x 16) b (16 x 8 N), a as mma takes it; b's columns are rows of shared memory, or,
// TRANSPOSED, its rows are. Asynchronous until wait_for_products: its registers must stay untouched.
template <typename T, int TRANSPOSED>
DEVICE void wgmma(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, BFloat16>)
    WGMMA_64("bf16", SUMS_4, "n"(1));
  else
    WGMMA_64("f16", SUMS_4, "n"(1));
}
template <typename T, int TRANSPOSED>
DEVICE void wgmma(float (&sum)[16][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, BFloat16>)
    WGMMA_128("bf16");
  else
    WGMMA_128("f16");
}
// wgmma whose sum begins here.
template <typename T, int TRANSPOSED>
DEVICE void begin_wgmma(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, BFloat16>)
    WGMMA_64("bf16", BEGUN_4, "n"(0));
  else
    WGMMA_64("f16", BEGUN_4, "n"(0));
}

// wgmma whose sum begins here unless it adds, in the registers that it has been in.
template <typename T, int TRANSPOSED>
DEVICE void wgmma_or_begin(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, BFloat16>)
    WGMMA_64("bf16", SUMS_4, "r"(int(adds)));
  else
    WGMMA_64("f16", SUMS_4, "r"(int(adds)));
}

#define WGMMA_SHARED_64(type, adds, SUMS)                                                                           \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type \
               "." type " {" REGISTERS_32 "}, %32, %33, adds, 1, 1, %34, %35; }"                                    \
               : SUMS(sum, 0), SUMS(sum, 4)                                                                         \
               : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B))
#define WGMMA_SHARED_128(type, adds, SUMS)                                                                           \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type \
               "." type " {" REGISTERS_64 "}, %64, %65, adds, 1, 1, %66, %67; }"                                     \
               : SUMS(sum, 0), SUMS(sum, 4), SUMS(sum, 8), SUMS(sum, 12)                                             \
               : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B))
#define WGMMA_SHARED(type, adds, SUMS) \
  if constexpr (N == 8)                \
    WGMMA_SHARED_64(type, adds, SUMS); \
  else                                 \
    WGMMA_SHARED_128(type, adds, SUMS)

// Warpgroup: sum (64 x 8 N) += a b with both in shared memory; TRANSPOSED_A: a's columns are rows there.
template <typename T, int TRANSPOSED_A, int TRANSPOSED_B, int N>
DEVICE void wgmma(float (&sum)[N][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    WGMMA_SHARED("bf16", "1", SUMS_4);
  } else {
    WGMMA_SHARED("f16", "1", SUMS_4);
  }
}
// wgmma whose sum begins here.
template <typename T, int TRANSPOSED_A, int TRANSPOSED_B, int N>
DEVICE void begin_wgmma(float (&sum)[N][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    WGMMA_SHARED("bf16", "0", BEGUN_4);
  } else {
    WGMMA_SHARED("f16", "0", BEGUN_4);
  }
}

// No instruction: what computes these numbers stays before it, and what uses them after it. The compiler does not see
// that a fence or a wait has to do with registers.
template <int N>
DEVICE void pin(float (&sum)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[n][i])::"memory");
}
DEVICE void pin(uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Warpgroup: before the first wgmma after registers that it uses have changed.
DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Warpgroup: until no group is under way.
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Until at most PENDING groups are under way.
template <int PENDING>
DEVICE void wait_for_older_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The threads of one warpgroup wait for each other; `barrier` from 1 on, sync_block has 0.
DEVICE void sync_warpgroup(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WARPGROUP) : "memory"); }
// wgmma then sees what this thread knows to be in shared memory.
DEVICE void fence_shared_memory() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Warp: stores four 8 x 8 matrices of 16-bit numbers, a word of each as ldmatrix leaves it. Lane 8 m + r has the
// address of row r of matrix m.
DEVICE void store_matrices(uint32_t row, uint32_t word0, uint32_t word1, uint32_t word2, uint32_t word3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(word0), "r"(word1),
               "r"(word2), "r"(word3)
               : "memory");
}
// The lower 16 bits of a word, without a register of 16 bits for them.
DEVICE void store_lower_half(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// All bits of those halves of a word in which a float16 number of a is less than that of b.
DEVICE uint32_t where_less(uint32_t a, uint32_t b) {
  uint32_t mask;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

DEVICE float log2_approximately(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
DEVICE float divide_approximately(float x, float y) {
  float result;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// As add_atomically of two neighbours, OFFSET elements further on.
template <int OFFSET>
DEVICE void add_atomically_at(float* to, float first, float second) {
  asm volatile("red.global.add.v2.f32 [%0+%3], {%1, %2};" ::"l"(to), "f"(first), "f"(second), "n"(4 * OFFSET)
               : "memory");
}

// As copy_async of 16 bytes that are inside, to an address of shared memory.
DEVICE void copy_whole(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// A barrier in shared memory, which counts arrivals; phases have parities 0, 1, 0, .. The one before the first is over.
struct Barrier {
  uint64_t* state;

  DEVICE void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(state)), "r"(arrivals) : "memory");
  }
  DEVICE void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(state)) : "memory");
  }
  // This thread arrives when its copies so far have.
  DEVICE void arrive_after_copies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(state)) : "memory");
  }
  DEVICE void wait(uint32_t parity) const {
    uint32_t over;
    do {
      asm volatile(
          "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
          : "=r"(over)
          : "r"(shared_address(state)), "r"(parity)
          : "memory");
    } while (!over);
  }
};

// Zero, made here: a constant may be moved to where products are under way, which then wait for it.
DEVICE uint32_t zero_made_here() {
  uint32_t zero;
  asm volatile("mov.b32 %0, 0;" : "=r"(zero)::"memory");
  return zero;
}

// A number of which the compiler does not know that it is equal in all lanes.
DEVICE int in_each_lane(int x, int lane) { return int(__byte_perm(x, x, 0x3210 + lane % 2 * 0x4444)); }

// All bits of each half are its highest one.
DEVICE uint32_t signs_of_halves(uint32_t x) {
  asm("prmt.b32 %0, %0, 0, 0xbb99;" : "+r"(x));
  return x;
}

// Warpgroup: gives registers back; asks for more, and waits until they are there.
template <int COUNT>
DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace xlnet_kernels::cuda
