#include "forward.cuh"

namespace xlnet_kernels::cuda {

template <>
std::string forward<Stream>(const Call& call, Stream stream) {
  return dispatch(call, [&](auto element, auto width) {
    return launch_forward<decltype(element), decltype(width)::value>(call, stream);
  });
}

}  // namespace xlnet_kernels::cuda
