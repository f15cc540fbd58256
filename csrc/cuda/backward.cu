#include "backward.cuh"

namespace xlnet_kernels::cuda {

template <>
std::string backward<Stream>(const Call& call, const Gradients& gradients, Stream stream) {
  return dispatch(call, [&](auto element, auto width) {
    return launch_backward<decltype(element), decltype(width)::value>({call, gradients}, stream);
  });
}

}  // namespace xlnet_kernels::cuda
