// Sentences about threads, places and kernels.
#pragma once

#include <string>
#include <vector>

#include "machine.h"

namespace simt {

// The last primitive that a thread called, and what has become of it.
struct State {
  enum Kind { runs, waits, ended } kind;
  const char* what;
  Place place;
};

std::string text(const Index& index);  // "(1, 2, 3)"
// "warp 0, lanes 0-3, 5: waiting in shuffle (file.cuh:12), lane 4: ended; warps 1-3, all lanes: can go on"
std::string describe(const std::vector<State>& threads);
std::string kernel_name(void (*kernel)(), const char* arguments_type);

}  // namespace simt
