#include "../backward.cuh"

namespace xlnet_kernels::cuda {

template std::string backward_of<float>(const Backward&, Stream);

}  // namespace xlnet_kernels::cuda
