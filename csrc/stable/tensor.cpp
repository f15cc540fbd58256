#include "tensor.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace xlnet_kernels {
namespace {

namespace stable = torch::stable;

// Whether new memory is full of NaN: the tests ask so, because this interface leaves torch's own option for it aside.
const bool poisons = std::getenv("XLNET_KERNELS_POISON") != nullptr;

void check(AOTITorchError code, const char* what) { CHECK(code == TORCH_SUCCESS, "rel_attention: torch cannot ", what); }

stable::detail::ScalarType of_number(ScalarType dtype) {
  return stable::detail::to<stable::detail::ScalarType>(stable::detail::from(dtype));
}

Tensor kept(const stable::Tensor& found) {
  AtenTensorHandle handle;
  check(aoti_torch_new_tensor_handle(found.get(), &handle), "share a tensor");
  return Tensor::owned(handle);
}

}  // namespace

Tensor::Tensor(AtenTensorHandle handle, bool is_owned) : handle_(handle), is_owned_(is_owned) {
  int64_t *sizes, *strides;
  const bool is_known =
      aoti_torch_get_dim(handle, &dim_) == TORCH_SUCCESS && aoti_torch_get_sizes(handle, &sizes) == TORCH_SUCCESS &&
      aoti_torch_get_strides(handle, &strides) == TORCH_SUCCESS &&
      aoti_torch_get_dtype(handle, &dtype_) == TORCH_SUCCESS &&
      aoti_torch_get_device_type(handle, &device_.type) == TORCH_SUCCESS &&
      aoti_torch_get_device_index(handle, &device_.index) == TORCH_SUCCESS &&
      aoti_torch_get_data_ptr(handle, &data_) == TORCH_SUCCESS;
  if (!is_known && is_owned) aoti_torch_delete_tensor_object(handle);
  check(is_known ? TORCH_SUCCESS : TORCH_FAILURE, "read a tensor: it must be dense and have memory");
  sizes_ = sizes;
  strides_ = strides;
}

Tensor::Tensor(const Tensor& other)
    : handle_(other.handle_),
      is_owned_(other.is_owned_),
      dim_(other.dim_),
      dtype_(other.dtype_),
      device_(other.device_),
      sizes_(other.sizes_),
      strides_(other.strides_),
      data_(other.data_) {
  if (is_owned_) check(aoti_torch_new_tensor_handle(other.handle_, &handle_), "share a tensor");
}

void Tensor::swap(Tensor& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(is_owned_, other.is_owned_);
  std::swap(dim_, other.dim_);
  std::swap(dtype_, other.dtype_);
  std::swap(device_, other.device_);
  std::swap(sizes_, other.sizes_);
  std::swap(strides_, other.strides_);
  std::swap(data_, other.data_);
}

int64_t Tensor::numel() const { return std::accumulate(sizes_, sizes_ + dim_, int64_t{1}, std::multiplies<>()); }

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int64_t d = dim_ - 1; d >= 0; --d) {
    if (sizes_[d] == 0) return true;
    if (sizes_[d] != 1 && strides_[d] != expected) return false;
    expected *= sizes_[d];
  }
  return true;
}

stable::Tensor Tensor::shared() const {
  AtenTensorHandle handle;
  check(aoti_torch_new_tensor_handle(handle_, &handle), "share a tensor");
  return stable::Tensor(handle);
}

AtenTensorHandle Tensor::release() {
  AtenTensorHandle handle = handle_;
  if (handle != nullptr && !is_owned_) check(aoti_torch_new_tensor_handle(handle_, &handle), "share a tensor");
  is_owned_ = false;
  handle_ = nullptr;
  return handle;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : kept(stable::contiguous(shared())); }

Tensor Tensor::to(ScalarType dtype) const {
  return dtype == dtype_ ? *this : kept(stable::to(shared(), of_number(dtype)));
}

const Tensor& Tensor::zero_() const {
  stable::Tensor alias = shared();
  stable::zero_(alias);
  return *this;
}

const Tensor& Tensor::fill_(double value) const {
  stable::fill_(shared(), value);
  return *this;
}

Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor& like) {
  AtenTensorHandle handle;
  const auto [type, index] = like.device();
  const AOTITorchError code = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                       dtype, type, index, &handle);
  CHECK(code == TORCH_SUCCESS, "rel_attention: ", like.device(), " is out of memory for a ", Named{dtype},
        " tensor of shape ", sizes);
  Tensor found = Tensor::owned(handle);
  if (poisons && found.is_cpu() && found.nbytes() > 0)
    std::memset(found.data_ptr(), 0xff, static_cast<size_t>(found.nbytes()));
  return found;
}

Tensor empty(Sizes sizes, ScalarType dtype, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes.data()[d], 1)) strides[d] = step;
  return empty_strided(sizes, strides, dtype, like);
}

Tensor padded(const Tensor& rows, int64_t count) {
  return kept(stable::pad(rows.contiguous().shared(), {0, count}));
}

void copy_columns(const Tensor& to, const Tensor& from) {
  stable::Tensor source = from.shared(), target = to.shared();
  stable::copy_(target, stable::narrow(source, from.dim() - 1, 0, to.size(-1)));
}

std::pair<Tensor, Tensor> sorted(const Tensor& rows) {
  std::array<StableIValue, 4> stack{stable::detail::from(rows.shared()), stable::detail::from(std::optional(true)),
                                    stable::detail::from(int64_t{-1}), stable::detail::from(false)};
  check(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION), "sort positions");
  return {kept(stable::detail::to<stable::Tensor>(stack[0])), kept(stable::detail::to<stable::Tensor>(stack[1]))};
}

std::ostream& operator<<(std::ostream& stream, Sizes sizes) {
  stream << '[';
  for (size_t d = 0; d < sizes.size(); ++d) stream << (d ? ", " : "") << sizes.data()[d];
  return stream << ']';
}

std::ostream& operator<<(std::ostream& stream, Named name) {
  return stream << torch::headeronly::toString(of_number(name.dtype));
}

std::ostream& operator<<(std::ostream& stream, Device device) {
  if (device.type == aoti_torch_device_type_cpu()) return stream << "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return stream << "cuda:" << device.index;
  return stream << "device " << device.type << ':' << device.index;
}

}  // namespace xlnet_kernels
