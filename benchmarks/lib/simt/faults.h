// Traps of a kernel, turned into something that can be reported.
#pragma once

#include <csignal>
#include <vector>

namespace simt {

struct Fault {
  const char* action = nullptr;  // "reads", "divides an integer by zero"; null: nothing has happened
  bool has_address = false;
  const char* address = nullptr;
};
Fault take_fault();  // the last one, and forgets it

// As long as it lives, traps of this thread call `leave`, which returns only if the trap is not a kernel's.
class FaultHandler {
 public:
  explicit FaultHandler(void (*leave)());
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  std::vector<char> stack;
  stack_t stack_before;
};

}  // namespace simt
