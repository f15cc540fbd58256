// Ordered accumulation: tasks add to sums that they share in the order of their tickets.
#pragma once

#include "arithmetic.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// One queue per shared sum. A task waits only for tasks that were started earlier.
struct OrderedAccumulation {
  int64_t* next_ticket;  // by queue; null if memory runs out

  explicit OrderedAccumulation(int64_t queues)
      : next_ticket(static_cast<int64_t*>(calloc(static_cast<size_t>(larger(queues, 1)), sizeof(int64_t)))) {}
  ~OrderedAccumulation() { free(next_ticket); }
  OrderedAccumulation(const OrderedAccumulation&) = delete;
  OrderedAccumulation& operator=(const OrderedAccumulation&) = delete;

  void wait(int64_t queue, int64_t ticket) const {
    while (__atomic_load_n(next_ticket + queue, __ATOMIC_ACQUIRE) != ticket) sched_yield();
  }
  void pass(int64_t queue, int64_t ticket) const {
    __atomic_store_n(next_ticket + queue, ticket + 1, __ATOMIC_RELEASE);
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
