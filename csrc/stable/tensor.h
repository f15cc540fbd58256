// Tensors through torch's stable C interface, which is all that the library of kernels knows of torch: one file serves
// every torch from 2.10 on and every Python.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace xlnet_kernels {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// torch's numbers of dtypes
using ScalarType = int32_t;
inline const ScalarType FLOAT16 = aoti_torch_dtype_float16(), BFLOAT16 = aoti_torch_dtype_bfloat16(),
                        FLOAT32 = aoti_torch_dtype_float32(), FLOAT64 = aoti_torch_dtype_float64(),
                        BOOL = aoti_torch_dtype_bool(), UINT8 = aoti_torch_dtype_uint8(),
                        INT8 = aoti_torch_dtype_int8(), INT16 = aoti_torch_dtype_int16(),
                        INT32 = aoti_torch_dtype_int32(), INT64 = aoti_torch_dtype_int64();

struct Device {
  int32_t type, index;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

// A tensor, or none. Its facts are read once, because each is a call into torch.
class Tensor {
 public:
  Tensor() = default;
  // The tensor of an argument, which outlives the operator's call: copies of it cost nothing.
  Tensor(const torch::stable::Tensor& argument) : Tensor(borrowed(argument.get())) {}
  static Tensor borrowed(AtenTensorHandle handle) { return {handle, false}; }
  static Tensor owned(AtenTensorHandle handle) { return {handle, true}; }
  Tensor(const Tensor& other);
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor other) noexcept {
    swap(other);
    return *this;
  }
  ~Tensor() {
    if (is_owned_) aoti_torch_delete_tensor_object(handle_);
  }

  bool defined() const { return handle_ != nullptr; }
  int64_t dim() const { return dim_; }
  Sizes sizes() const { return {sizes_, static_cast<size_t>(dim_)}; }
  Sizes strides() const { return {strides_, static_cast<size_t>(dim_)}; }
  // Size and stride of a dimension, negative from the end. Raises ValueError where there is none.
  int64_t size(int64_t d) const { return sizes_[from_start(d)]; }
  int64_t stride(int64_t d) const { return strides_[from_start(d)]; }
  int64_t numel() const;
  int64_t nbytes() const { return numel() * element_size(); }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_)); }
  ScalarType scalar_type() const { return dtype_; }
  Device device() const { return device_; }
  bool is_cpu() const { return device_.type == aoti_torch_device_type_cpu(); }
  bool is_contiguous() const;
  void* data_ptr() const { return data_; }
  template <typename T>
  T* data_ptr() const {
    return static_cast<T*>(data_);
  }

  // A new reference for torch, and one that this object gives away
  torch::stable::Tensor shared() const;
  AtenTensorHandle release();

  Tensor contiguous() const;
  Tensor to(ScalarType dtype) const;
  const Tensor& zero_() const;
  const Tensor& fill_(double value) const;

 private:
  AtenTensorHandle handle_ = nullptr;
  bool is_owned_ = false;
  int64_t dim_ = 0;
  ScalarType dtype_ = 0;
  Device device_{};
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  void* data_ = nullptr;

  Tensor(AtenTensorHandle handle, bool is_owned);
  void swap(Tensor& other) noexcept;
  int64_t from_start(int64_t d) const;
};
using OptionalTensor = std::optional<Tensor>;

// Uninitialised, on the device of `like`
Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor& like);
Tensor empty(Sizes sizes, ScalarType dtype, const Tensor& like);
inline Tensor empty_like(const Tensor& like) { return empty(like.sizes(), like.scalar_type(), like); }

// With `count` zeros behind each row, contiguous
Tensor padded(const Tensor& rows, int64_t count);
// Copies the first columns of `from`'s rows.
void copy_columns(const Tensor& to, const Tensor& from);
// Values in ascending order and where they were, of each row
std::pair<Tensor, Tensor> sorted(const Tensor& rows);

// Shapes, dtypes and devices as torch prints them
struct Named {
  ScalarType dtype;
};
std::ostream& operator<<(std::ostream& stream, Sizes sizes);
std::ostream& operator<<(std::ostream& stream, Named name);
std::ostream& operator<<(std::ostream& stream, Device device);

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Python sees a RuntimeError of CHECK and a ValueError of CHECK_VALUE, because pybind11 makes that of
// std::invalid_argument, and autograd.cpp in backward.
#define CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(xlnet_kernels::text(__VA_ARGS__))
#define CHECK_VALUE(condition, ...) \
  if (!(condition)) throw std::invalid_argument(xlnet_kernels::text(__VA_ARGS__))

inline int64_t Tensor::from_start(int64_t d) const {
  CHECK_VALUE(-dim_ <= d && d < dim_, "a tensor of shape ", sizes(), " has no dimension ", d);
  return d < 0 ? d + dim_ : d;
}

}  // namespace xlnet_kernels
