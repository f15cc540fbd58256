// Stands in for the CUDA runtime under what nvcc compiles: launches are handed to a callback, by the kernel's name.
// Beside it, an allocator that knows which of torch's tensors are alive.
// Undefined, because allocators are not part of torch's stable interface.
#undef TORCH_TARGET_VERSION

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch_device.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Size {
  unsigned x, y, z;
};
struct Function {
  std::string name;
  int dynamic_shared = 48 * 1024;  // what a kernel may ask for unless it has been allowed more
};
struct Configuration {
  Size grid, block;
  size_t shared;
  void* stream;
};
// Returns an error's number, or 0.
using Launch = int (*)(const char* name, const unsigned* grid, const unsigned* block, uint64_t shared, void** arguments);

enum Error { NONE = 0, INVALID_VALUE = 1, INVALID_FUNCTION = 98, LAUNCH_FAILED = 719 };
enum Attribute { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, PROCESSORS = 16, SHARED_OPTIN = 97 };

// By the host's function that stands for the kernel; there before any other object registers its kernels.
std::map<const void*, Function>& functions() {
  static std::map<const void*, Function> all;
  return all;
}
Configuration configuration;
Launch launch = nullptr;
int last_error = NONE, architecture = 80, most_shared = 0;

int start(Function& function, Size grid, Size block, void** arguments, size_t shared) {
  if (shared > size_t(function.dynamic_shared) || grid.y > 65535 || grid.z > 65535 || block.x > 1024) {
    return last_error = INVALID_VALUE;
  }
  const int error = launch ? launch(function.name.c_str(), &grid.x, &block.x, shared, arguments) : LAUNCH_FAILED;
  if (error != NONE) last_error = error;  // an earlier one stays until someone asks
  return error;
}

std::map<uintptr_t, size_t> live, arrays;  // bytes by start, of tensors and of arrays in them
std::mutex live_mutex;

// Start and bytes of what an address lies in, the one that begins last; null when there is none.
const std::pair<const uintptr_t, size_t>* find(const std::map<uintptr_t, size_t>& all, uintptr_t address) {
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  --after;
  return address < after->first + after->second ? &*after : nullptr;
}

void release(void* data) {
  const std::lock_guard lock(live_mutex);
  const auto found = live.find(uintptr_t(data));
  if (found != live.end()) {
    arrays.erase(arrays.lower_bound(found->first), arrays.lower_bound(found->first + found->second));
    live.erase(found);
  }
  std::free(data);
}

class Known final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(512, (bytes + 511) / 512 * 512) : nullptr;  // as CUDA's allocator aligns
    if (data) {
      const std::lock_guard lock(live_mutex);
      live[uintptr_t(data)] = bytes;
    }
    return {data, data, data ? release : [](void*) {}, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
};

Known known;
c10::Allocator* usual = nullptr;

}  // namespace

void xlnet_kernels::cuda::announce_array(void* start, int64_t bytes) {
  const std::lock_guard lock(live_mutex);
  if (bytes > 0 && find(live, uintptr_t(start))) arrays[uintptr_t(start)] = size_t(bytes);
}

extern "C" {

void machine_on_launch(Launch callback) { launch = callback; }
void machine_device(int number, int shared) { architecture = number, most_shared = shared; }
void machine_size(int processors, int tiles) {
  xlnet_kernels::cuda::device_processors = processors, xlnet_kernels::cuda::device_tiles = tiles;
}

// Tensors that torch makes on the CPU from now on are known, until `machine_forget`.
void machine_know() {
  if (usual) return;
  usual = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&known, 255);
}
void machine_forget() {
  if (usual) c10::SetCPUAllocator(usual, 255);
  usual = nullptr;
}
// Start and bytes of the known array, or else tensor, that an address lies in; false when there is none.
bool machine_find(uint64_t address, uint64_t* place) {
  const std::lock_guard lock(live_mutex);
  const auto* found = find(arrays, address);
  if (!found) found = find(live, address);
  if (found) place[0] = found->first, place[1] = found->second;
  return found;
}

// Functions that nvcc's host code calls.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  functions()[host].name = name;
}
unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
int __cudaPopCallConfiguration(Size* grid, Size* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  std::memcpy(stream, &configuration.stream, sizeof(void*));
  return NONE;
}
int __cudaGetKernel(void** kernel, const void* host) {
  const auto found = functions().find(host);
  if (found == functions().end()) return last_error = INVALID_FUNCTION;
  *kernel = &found->second;
  return NONE;
}
int __cudaLaunchKernel(void* kernel, Size grid, Size block, void** arguments, size_t shared, void*) {
  return start(*static_cast<Function*>(kernel), grid, block, arguments, shared);
}
int cudaLaunchKernel(const void* host, Size grid, Size block, void** arguments, size_t shared, void*) {
  const auto found = functions().find(host);
  return found == functions().end() ? last_error = INVALID_FUNCTION
                                  : start(found->second, grid, block, arguments, shared);
}
int cudaFuncSetAttribute(const void* host, int attribute, int value) {
  const auto found = functions().find(host);
  const bool dynamic_shared = attribute == 8;
  if (found == functions().end()) return last_error = INVALID_FUNCTION;
  if (dynamic_shared && value > most_shared) return last_error = INVALID_VALUE;
  if (dynamic_shared) found->second.dynamic_shared = value;
  return NONE;
}
int cudaGetDevice(int* device) { return *device = 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case COMPUTE_MAJOR:
      return *value = architecture / 10, NONE;
    case COMPUTE_MINOR:
      return *value = architecture % 10, NONE;
    case PROCESSORS:
      return *value = xlnet_kernels::cuda::processors(), NONE;
    case SHARED_OPTIN:
      return *value = most_shared, NONE;
    default:
      return last_error = INVALID_VALUE;
  }
}
int cudaGetLastError() {
  const int error = last_error;
  last_error = NONE;
  return error;
}
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(int error) {
  switch (error) {
    case NONE:
      return "no error";
    case INVALID_VALUE:
      return "invalid argument";
    case INVALID_FUNCTION:
      return "invalid device function";
    default:
      return "the machine ended the launch";
  }
}

}  // extern "C"
