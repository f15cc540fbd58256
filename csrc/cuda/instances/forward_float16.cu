#include "../forward.cuh"

namespace xlnet_kernels::cuda {

template std::string forward_of<Half>(const Call&, Stream);

}  // namespace xlnet_kernels::cuda
