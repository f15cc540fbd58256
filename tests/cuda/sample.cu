// Some of the kernels, for test_compile.py: every width and dtype takes minutes.
#include "backward.cuh"
#include "forward.cuh"

namespace xlnet_kernels::cuda {

// Two blocks at a time on a multiprocessor, each with 1 KB for the system (CUDA programming guide, compute
// capabilities): heads of 64 on sm_80 with its 164 KB, forward's heads of 128 on sm_90 and sm_100 with their 228 KB.
constexpr bool twice_in(int bytes, int kilobytes) { return 2 * (bytes + 1024) <= kilobytes * 1024; }
static_assert(twice_in(ForwardShape<BFloat16, 64>::SHARED, 164));
static_assert(twice_in(ForwardShape<BFloat16, 128>::SHARED, 228));
static_assert(twice_in(BackwardShape<BFloat16, 64>::SHARED, 164));
// and what a block may have at most on sm_86, sm_89 and sm_120, on sm_80
static_assert(ForwardShape<BFloat16, 128>::SHARED <= 99 * 1024);
static_assert(BackwardShape<BFloat16, 64>::SHARED <= 99 * 1024 && BackwardShape<float, 64>::SHARED <= 99 * 1024);
static_assert(BackwardShape<BFloat16, 128>::SHARED <= 163 * 1024 && BackwardShape<float, 128>::SHARED <= 163 * 1024);

template std::string launch_forward<BFloat16, 64>(Call, Stream);
template std::string launch_forward<BFloat16, 128>(Call, Stream);
template std::string launch_forward<float, 64>(Call, Stream);
template std::string launch_backward<BFloat16, 64>(Backward, Stream);
template std::string launch_backward<BFloat16, 128>(Backward, Stream);
template std::string launch_backward<float, 64>(Backward, Stream);

}  // namespace xlnet_kernels::cuda
