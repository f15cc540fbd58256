#include "direct.h"

#include <ATen/record_function.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace xlnet_kernels {
namespace {

using at::Tensor;

const Entries* entries = nullptr;

c10::DispatchKeySet usual_keys(c10::DispatchKey device, c10::BackendComponent backend) {
  return c10::DispatchKeySet(device) | c10::getAutogradRelatedKeySetFromBackend(backend) |
         c10::getAutocastRelatedKeySetFromBackend(backend);
}

AtenTensorHandle to_handle(const Tensor& t) {
  return t.defined() ? torch::aot_inductor::tensor_pointer_to_tensor_handle(const_cast<Tensor*>(&t)) : nullptr;
}

Tensor taken(AtenTensorHandle handle) {
  if (handle == nullptr) return {};
  Tensor found = std::move(*torch::aot_inductor::tensor_handle_to_tensor_pointer(handle));
  aoti_torch_delete_tensor_object(handle);
  return found;
}

// Calls the library, whose stable interface has no kind of errors for this one.
template <typename Call>
void with_out_of_memory_error(Call call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    const bool is_out_of_memory = std::strstr(error.what(), "is out of memory") != nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory, error.what());
    throw;
  }
}

}  // namespace

void use(int64_t address) { entries = reinterpret_cast<const Entries*>(address); }

bool is_plain(const Tensor& t) {
  static const auto cpu = usual_keys(c10::DispatchKey::CPU, c10::BackendComponent::CPUBit);
  static const auto cuda = usual_keys(c10::DispatchKey::CUDA, c10::BackendComponent::CUDABit);
  return (t.key_set() | cpu) == cpu || (t.key_set() | cuda) == cuda;
}

const Entry* find_entry(const Tensor& query) {
  static const c10::DispatchKeySet usual{c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView};
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  if (entries == nullptr || (included | usual) != usual) return nullptr;
  if (at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()) return nullptr;
  const Entry& found = query.is_cpu() ? entries->cpu : entries->cuda;
  return found.forward == nullptr ? nullptr : &found;
}

Results forward(const Entry& entry, const Tensor* const* tensors, const Numbers& numbers, bool needs_backward) {
  const at::AutoDispatchBelowAutograd guard;
  std::array<AtenTensorHandle, TENSORS> handles;
  for (size_t i = 0; i < TENSORS; ++i) handles[i] = tensors[i] == nullptr ? nullptr : to_handle(*tensors[i]);
  std::array<AtenTensorHandle, RESULTS> found;
  with_out_of_memory_error([&] { entry.forward(handles.data(), numbers, needs_backward, found.data()); });
  Results results;
  std::transform(found.begin(), found.end(), results.begin(), taken);
  return results;
}

std::vector<Tensor> backward(const Entry& entry, const std::array<Tensor, SAVED>& saved, const Needs& needs,
                             const Arguments& arguments) {
  const at::AutoDispatchBelowAutograd guard;
  std::array<AtenTensorHandle, SAVED> given;
  std::transform(saved.begin(), saved.end(), given.begin(), to_handle);
  std::array<AtenTensorHandle, TENSORS> handles;
  std::transform(arguments.tensors.begin(), arguments.tensors.end(), handles.begin(), to_handle);
  std::array<AtenTensorHandle, DIFFERENTIABLE> found;
  with_out_of_memory_error(
      [&] { entry.backward(given.data(), needs, handles.data(), arguments.numbers, found.data()); });
  std::vector<Tensor> results(DIFFERENTIABLE);
  std::transform(found.begin(), found.end(), results.begin(), taken);
  return results;
}

}  // namespace xlnet_kernels
