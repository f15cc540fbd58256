// Puts the tensors that torch makes on the CPU between pages that trap: what a launcher allocates too.
// Undefined, because allocators are not part of torch's stable interface.
#undef TORCH_TARGET_VERSION

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "machine.h"

namespace {

class GuardedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? simt_allocate(bytes, at_start) : nullptr;
    return {data, data, bytes ? simt_free : [](void*) {}, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return simt_free; }

  int at_start = 0;
};

GuardedAllocator guarded;
c10::Allocator* usual = nullptr;

}  // namespace

// Until simt_release_torch; at_start as for simt_allocate.
extern "C" void simt_guard_torch(int at_start) {
  guarded.at_start = at_start;
  if (usual) return;
  usual = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&guarded, 255);
}

extern "C" void simt_release_torch() {
  if (usual) c10::SetCPUAllocator(usual, 255);
  usual = nullptr;
}
