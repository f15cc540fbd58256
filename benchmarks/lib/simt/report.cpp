#include "report.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace simt {

namespace {

std::string demangled(const char* name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  const std::string result = status == 0 ? plain : name;
  std::free(plain);
  return result;
}

// "0-3, 5"
std::string ranges(const std::vector<int>& sorted) {
  std::string result;
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    if (i) result += ", ";
    result += std::to_string(sorted[i]);
    if (end - i > 1) result += "-" + std::to_string(sorted[end - 1]);
    i = end;
  }
  return result;
}

std::string activity(const State& state) {
  if (state.kind == State::ended) return "ended";
  if (state.kind == State::runs) return "can go on";
  return std::string("waiting in ") + state.what + " (" + text(state.place) + ")";
}

std::string describe_warp(const State* lanes) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (int lane = 0; lane < LANES; ++lane) {
    const std::string what = activity(lanes[lane]);
    size_t g = 0;
    while (g < groups.size() && groups[g].first != what) ++g;
    if (g == groups.size()) groups.push_back({what, {}});
    groups[g].second.push_back(lane);
  }
  std::string result;
  for (const auto& [what, members] : groups) {
    if (!result.empty()) result += ", ";
    result += members.size() == LANES ? "all lanes" : (members.size() == 1 ? "lane " : "lanes ") + ranges(members);
    result += ": " + what;
  }
  return result;
}

}  // namespace

// One file can have its name at two addresses.
bool Place::operator==(const Place& other) const {
  return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
}

std::string text(const Place& place) {
  if (!place.file) return "?";
  const char* slash = std::strrchr(place.file, '/');
  return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

std::string text(const Index& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string describe(const std::vector<State>& threads) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t begin = 0; begin + LANES <= threads.size(); begin += LANES) {
    const std::string what = describe_warp(&threads[begin]);
    if (groups.empty() || groups.back().first != what) groups.push_back({what, {}});
    groups.back().second.push_back(int(begin / LANES));
  }
  std::string result;
  for (const auto& [what, warps] : groups) {
    if (!result.empty()) result += "; ";
    result += (warps.size() == 1 ? "warp " : "warps ") + ranges(warps) + ", " + what;
  }
  return result;
}

std::string kernel_name(void (*kernel)(), const char* arguments_type) {
  void* address = reinterpret_cast<void*>(kernel);
  Dl_info info{};
  if (!dladdr(address, &info) || !info.dli_sname || info.dli_saddr != address) {
    return "with arguments " + demangled(arguments_type);
  }
  std::string name = demangled(info.dli_sname);
  name.resize(std::min(name.rfind('('), name.size()));  // its parameters
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);    // templates are printed with what they return
  return name;
}

}  // namespace simt
