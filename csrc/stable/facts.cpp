// Facts about the library, its build and its choices on this machine: operators that xlnet_kernels/_compiled.py reads.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include <string>

#include "../cpu/bfloat16/products.h"
#include "../cpu/kernels.h"
#include "../cuda/heuristics.h"
#include "../cuda/kernels.h"
#include "../inputs.h"
#include "entry.h"

#ifdef CUDA_KERNEL  // by Hugging Face's kernel-builder, which tells neither version nor architectures
#include <cuda.h>
#define XLNET_KERNELS_CUDA_VERSION CUDA_VERSION
#define XLNET_KERNELS_CUDA_ARCHITECTURES
#endif

namespace xlnet_kernels {

// The operator's arguments. Used, because xlnet_kernels/_extension.py reads them from the file before it loads it.
#define NAME(type, name) #name ","
extern const char ARGUMENTS[];
__attribute__((used)) const char ARGUMENTS[] =
    "xlnet_kernels::rel_attention:" DIFFERENTIABLE_INPUTS(NAME, ) OTHER_INPUTS(NAME, ) NUMBERS(NAME, );
#undef NAME

namespace {

constexpr const char* COMPILER =
#if defined(__clang__)
    "clang " __clang_version__;
#elif defined(__GNUC__)
    "g++ " __VERSION__;
#else
    "unknown compiler";
#endif

std::string quoted(const char* text) { return text == nullptr ? "null" : '"' + std::string(text) + '"'; }

// The members of a JSON object or the elements of an array, one after the other
class List {
 public:
  List& add(const std::string& element) {
    text += (text.empty() ? "" : ", ") + element;
    return *this;
  }
  List& add(const char* name, const std::string& value) { return add(quoted(name) + ": " + value); }
  List& add(const char* name, const char* value) { return add(name, quoted(value)); }
  List& add(const char* name, long value) { return add(name, std::to_string(value)); }
  std::string object() const { return '{' + text + '}'; }
  std::string array() const { return '[' + text + ']'; }

 private:
  std::string text;
};

// Tiles, threads and shared memory of each CUDA kernel that the sources have, in a build without CUDA as well.
std::string cuda_kernels() {
  List found;
  for (const auto& sizes : cuda::kernel_sizes())
    found.add(List()
                  .add("kernel", sizes.kernel)
                  .add("dtype", sizes.dtype)
                  .add("head_dim", sizes.head_dim)
                  .add("block_m", sizes.block_m)
                  .add("block_n", sizes.block_n)
                  .add("threads", sizes.threads)
                  .add("shared_bytes", sizes.shared_bytes)
                  .object());
  return found.array();
}

// Which CUDA kernels run: for each kind the calls that it serves, the first that does being chosen.
template <typename Choices>
std::string cuda_choices(const Choices& choices) {
  List found;
  for (const auto& choice : choices) found.add(List().add(quoted(choice.kernels)).add(quoted(choice.calls)).array());
  return found.array();
}

// A JSON object. The CPU's instruction set is null where XLNET_KERNELS_CPU asks for one there is not. Products are null
// where bfloat16 is converted to float32, and where operands of float32 are not taken apart.
std::string build_facts() {
  const cpu::Choice choice = cpu::choose_kernels();
  List facts;
  facts.add("torch_version", TORCH_VERSION).add("compiler", COMPILER).add("cpp_standard", __cplusplus);
  facts.add("cpu_instruction_set", choice.name);
  const cpu::Products* products = choice.products;
  facts.add("cpu_bfloat16_products", products == nullptr ? nullptr : products->name);
  facts.add("cpu_products_of_parts", products == nullptr || !products->are_faster_in_parts ? nullptr : products->name);
#ifdef XLNET_KERNELS_CUDA_VERSION  // by setup.py, when CUDA sources are part of the build
  facts.add("cuda_version", XLNET_KERNELS_QUOTE(XLNET_KERNELS_CUDA_VERSION));              // e.g. "12.6"
  facts.add("cuda_architectures", XLNET_KERNELS_QUOTE(XLNET_KERNELS_CUDA_ARCHITECTURES));  // e.g. "8.0;9.0+PTX"
#else
  facts.add("cuda_version", nullptr).add("cuda_architectures", nullptr);
#endif
  facts.add("cuda_kernels", cuda_kernels());
  facts.add("cuda_forward_choices", cuda_choices(cuda::FORWARD_CHOICES));
  facts.add("cuda_backward_choices", cuda_choices(cuda::BACKWARD_CHOICES));
  return facts.object();
}

// Bytes of shared memory that a block may have on the device of this index, -1 if there is none
int64_t cuda_shared_memory([[maybe_unused]] int64_t device) {
#ifdef XLNET_KERNELS_CUDA_VERSION
  return cuda::shared_memory_limit(static_cast<int>(device));
#else
  return -1;
#endif
}

// The address of the `Entries`
int64_t entries() {
#ifdef XLNET_KERNELS_CUDA_VERSION
  static const Entries found{cpu::entry(), cuda::entry()};
#else
  static const Entries found{cpu::entry(), {}};
#endif
  return reinterpret_cast<int64_t>(&found);
}

}  // namespace
}  // namespace xlnet_kernels

STABLE_TORCH_LIBRARY_FRAGMENT(XLNET_KERNELS_NAMESPACE, library) {
  library.def("build_facts() -> str").def("cuda_shared_memory(int device) -> int").def("entries() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(XLNET_KERNELS_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl("build_facts", TORCH_BOX(&xlnet_kernels::build_facts));
  library.impl("cuda_shared_memory", TORCH_BOX(&xlnet_kernels::cuda_shared_memory));
  library.impl("entries", TORCH_BOX(&xlnet_kernels::entries));
}
