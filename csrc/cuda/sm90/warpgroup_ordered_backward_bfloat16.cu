#include "backward.cuh"

namespace xlnet_kernels::cuda {

template std::string warpgroup_backward_of<BFloat16, true>(const Backward&, Stream);

}  // namespace xlnet_kernels::cuda
