// Primitives of a GPU: all inline PTX is here and in sm90/primitives.cuh. benchmarks/lib/simt/primitives.cuh defines
// the same functions for the host.
//
// A warp is 32 lanes. Functions that say "warp" must be called by all of its lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#define KERNEL __global__ void
#define DEVICE __device__ __forceinline__
#define THREADS_PER_BLOCK(threads, blocks) __launch_bounds__(threads, blocks)

namespace xlnet_kernels::cuda {

using Stream = cudaStream_t;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

struct Index {
  int x, y, z;
};

DEVICE int thread_index() { return threadIdx.x; }
DEVICE Index block_index() { return {int(blockIdx.x), int(blockIdx.y), int(blockIdx.z)}; }
DEVICE Index grid_size() { return {int(gridDim.x), int(gridDim.y), int(gridDim.z)}; }

// The block's dynamic shared memory, 16-byte aligned.
DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Warp: the value of another lane; the lanes for which a condition holds.
template <typename T>
DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
DEVICE uint32_t ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }

DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Warp: four 8 x 8 matrices of 16-bit numbers. Lane 8 m + r has the address of row r (16 bytes) of matrix m; afterwards
// lane l has in[m] = elements 2 (l % 4) and + 1 of row l / 4. Transposed: rows 2 (l % 4) and + 1 of column l / 4.
DEVICE void ldmatrix(uint32_t (&in)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(in[0]), "=r"(in[1]), "=r"(in[2]), "=r"(in[3])
               : "r"(shared_address(row))
               : "memory");
}
DEVICE void ldmatrix_transposed(uint32_t (&in)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(in[0]), "=r"(in[1]), "=r"(in[2]), "=r"(in[3])
               : "r"(shared_address(row))
               : "memory");
}

// Warp: sum (16 x 8) += a (16 x DEPTH) b (DEPTH x 8). With g = lane / 4, t = lane % 4, and pairs of 16-bit numbers
// packed into one word, the lower index in the lower half:
//   sum[0..3]: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
//   16 bits, DEPTH 16: a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);  b: (2t.., g), (2t + 8.., g)
//   float, DEPTH 8, TF32: a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);  b: (t, g), (t + 4, g)
template <typename T>
DEVICE void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
DEVICE void mma<Half>(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DEVICE void mma<BFloat16>(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DEVICE void mma<float>(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The nearest TF32 number (10 bits of mantissa), as the bits of a float.
DEVICE uint32_t round_to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Two numbers in one word, the first in the lower half, and back.
template <typename T>
DEVICE uint32_t pack(float low, float high);
template <>
DEVICE uint32_t pack<Half>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
DEVICE uint32_t pack<BFloat16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(BFloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
DEVICE float to_float(Half x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

// -inf for what is not visible: where the float16 number in the lower half of a is not less than that in b's, and in
// the upper half. A number's sign and magnitude order it, whatever its bits mean.
DEVICE void hide_unless_less(float& lower, float& upper, uint32_t a, uint32_t b) {
  asm("{ .reg .pred p, q; setp.lt.f16x2 p|q, %2, %3; selp.f32 %0, %0, 0fFF800000, p; selp.f32 %1, %1, 0fFF800000, q; }"
      : "+f"(lower), "+f"(upper)
      : "r"(a), "r"(b));
}

DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

// BYTES (4 or 16) from global to shared memory, both aligned to them; zeros where not `inside`, and `global` is not
// looked at then. They have arrived for the calling thread after wait_for_copies, for others after a sync_block that
// follows.
template <int BYTES>
DEVICE void copy_async(void* shared, const void* global, bool inside) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    static_assert(BYTES == 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(inside ? 4 : 0)
                 : "memory");
  }
}
// Ends a group of copies; waits until at most PENDING of this thread's newest groups are under way.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// To global memory. Of a pointer's space atomicAdd would ask each time, with a loop at hand for shared memory.
DEVICE void add_atomically(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
// Whether one instruction adds two neighbouring numbers of a lane: from sm_90 on.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_VECTOR_RED = true;
#else
constexpr bool HAS_VECTOR_RED = false;
#endif
// Two neighbours, 8-byte aligned; only where HAS_VECTOR_RED.
DEVICE void add_atomically(float* to, float first, float second) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
}

// One to a counter in global memory; returns what it was. Who counts knows all that was done before others had counted,
// also by threads that those had met at a barrier.
DEVICE int32_t count_up(int32_t* counter) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
// Numbers in global memory for other blocks: who loads it knows all that was done before it was stored, also by threads
// that the storing one had met at a barrier.
DEVICE void store_release(int32_t* to, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// About this long, twice as long at most.
DEVICE void pause(int nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

DEVICE float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// The lowest bit that is set.
DEVICE int first_bit(uint32_t word) { return __ffs(int(word)) - 1; }
DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// All 64 bits of a product, by one instruction: where a factor's sign was extended out of a loop, a product of 64-bit
// numbers would take four.
DEVICE int64_t multiply_wide(int a, int b) {
  int64_t result;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(result) : "r"(a), "r"(b));
  return result;
}

// A number, or pointer to global memory, that the compiler keeps instead of computing it again where it is used.
DEVICE uint32_t kept_in_register(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <typename T>
DEVICE T* kept_in_register(T* pointer) {
  size_t address = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(address));
  return reinterpret_cast<T*>(__cvta_global_to_generic(address));
}

// Bytes of shared memory that a block may have on a device; -1 if there is no such device.
inline int shared_memory_of_block(int device) {
  int bytes = -1;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess) return bytes;
  cudaGetLastError();  // else the next launch would report it
  return -1;
}

// Whether the kernels of sm90/ are part of this build.
constexpr bool HAS_WARPGROUPS = true;

// Capability of the current device: 90 is sm_90; 0 if there is none.
inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  const bool found = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  if (!found) cudaGetLastError();  // else the next launch would report it
  return found ? 10 * major + minor : 0;
}

// Runs `kernel` on grid x threads; the error's text, or null. An error that an earlier call left behind is told as such.
template <typename Arguments>
inline const char* launch(void (*kernel)(Arguments), Index grid, int threads, int shared_bytes, Stream stream,
                          const Arguments& arguments) {
  // An event that is not ready is no failure, but leaves an error, too.
  if (const cudaError_t earlier = cudaGetLastError(); earlier != cudaSuccess && earlier != cudaErrorNotReady) {
    static thread_local std::string text;
    text = "not launched, because an earlier CUDA call or kernel had failed: ";
    return (text += cudaGetErrorString(earlier)).c_str();
  }
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) kernel<<<dim3(grid.x, grid.y, grid.z), threads, shared_bytes, stream>>>(arguments);
  const cudaError_t last = cudaGetLastError();  // clears that of the attribute too: the next launch is not to report it
  if (error == cudaSuccess) error = last;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace xlnet_kernels::cuda
