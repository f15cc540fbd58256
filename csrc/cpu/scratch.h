// The memory that threads work in.
#pragma once

#include "arithmetic.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// `count` zeros each
template <typename... T>
INLINE void clear(int64_t count, T*... data) {
  (memset(data, 0, static_cast<size_t>(count) * sizeof(T)), ...);
}

// Hands out aligned pieces of a buffer; with a null base it only counts.
struct Carver {
  char* base;
  int64_t used;

  template <typename T>
  T* take(int64_t count) {
    used = round_up(used, 64);
    T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += count * static_cast<int64_t>(sizeof(T));
    return piece;
  }
  // Pieces of `count` numbers each
  template <typename... T>
  void take(int64_t count, T*&... pieces) {
    ((pieces = take<T>(count)), ...);
  }
};

// One buffer, a piece per slot; on huge pages where there are some, for rows are pages apart (5% of backward). One is
// kept for the next call, unless it is large: new pages cost short sequences more than their products.
struct Scratch {
  static constexpr size_t HEAD = 4096, HUGE_PAGE = 2 << 20, MAX_KEPT = 64 << 20;
  char* data = nullptr;  // a head with its own size comes before
  int64_t bytes_per_slot;

  Scratch(int64_t slots, int64_t bytes) : bytes_per_slot(round_up(bytes, 4096)) {
    const size_t total = HEAD + static_cast<size_t>(slots * bytes_per_slot);
    void* memory = __atomic_exchange_n(&kept, static_cast<void*>(nullptr), __ATOMIC_ACQUIRE);
    if (memory == nullptr || *static_cast<size_t*>(memory) < total) {
      free(memory);
      if (posix_memalign(&memory, HUGE_PAGE, total) != 0) return;
#ifdef MADV_HUGEPAGE
      madvise(memory, total, MADV_HUGEPAGE);
#endif
      *static_cast<size_t*>(memory) = total;
    }
    data = static_cast<char*>(memory) + HEAD;
  }
  ~Scratch() {
    if (data == nullptr) return;
    void* memory = data - HEAD;
    if (*static_cast<size_t*>(memory) <= MAX_KEPT) memory = __atomic_exchange_n(&kept, memory, __ATOMIC_ACQ_REL);
    free(memory);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  static inline void* kept = nullptr;
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
