#include "../forward.cuh"

namespace xlnet_kernels::cuda {

template std::string forward_of<float>(const Call&, Stream);

}  // namespace xlnet_kernels::cuda
