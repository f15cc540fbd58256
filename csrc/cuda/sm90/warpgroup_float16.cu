#include "forward.cuh"

namespace xlnet_kernels::cuda {

template std::string warpgroup_forward_of<Half>(const Call&, Stream);

}  // namespace xlnet_kernels::cuda
