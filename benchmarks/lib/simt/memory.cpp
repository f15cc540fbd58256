#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "machine.h"

namespace simt {

size_t page_size() {
  static const size_t size = size_t(sysconf(_SC_PAGESIZE));
  return size;
}

Pages::Pages(size_t bytes) : total(round_up(bytes, page_size()) + 2 * page_size()) {
  void* memory = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  first = static_cast<char*>(memory);
  open(begin(), end());
}

Pages::~Pages() { munmap(first, total); }

void Pages::close(char* from, char* to) const {
  if (from < to) mprotect(from, size_t(to - from), PROT_NONE);
}

void Pages::open(char* from, char* to) const {
  if (from < to && mprotect(from, size_t(to - from), PROT_READ | PROT_WRITE)) throw std::bad_alloc();
}

void Region::poison_margins() const {
  std::memset(open_begin, POISON, size_t(data - open_begin));
  std::memset(data + bytes, POISON, size_t(open_end - (data + bytes)));
}

std::string Region::damage() const {
  const auto is_damaged = [](char byte) { return static_cast<unsigned char>(byte) != POISON; };
  const auto is_intact = [&](const char* begin, const char* end) {  // each byte is like the next
    return begin == end || (!is_damaged(*begin) && std::memcmp(begin, begin + 1, size_t(end - begin - 1)) == 0);
  };
  if (!is_intact(data + bytes, open_end)) {
    return "was written " + describe(std::find_if(data + bytes, open_end, is_damaged));
  }
  if (is_intact(open_begin, data)) return "";
  const char* first = data;  // of the bytes written together, nearest to the start
  while (!is_damaged(first[-1])) --first;
  while (first > open_begin && is_damaged(first[-1])) --first;
  return "was written " + describe(first);
}

std::string Region::describe(const char* address) const {
  const std::string size = std::to_string(bytes) + " bytes";
  if (address < data) return std::to_string(data - address) + " bytes before its start (it has " + size + ")";
  if (address < data + bytes) return "at byte " + std::to_string(address - data) + " of its " + size;
  return std::to_string(address - (data + bytes)) + " bytes beyond its end of " + size;
}

namespace {

struct Allocation {
  std::unique_ptr<Pages> pages;
  Region region;
};

struct Allocations {
  std::mutex mutex;
  std::map<const char*, Allocation> by_start;
};

Allocations& allocations() {
  static auto* all = new Allocations;  // never destroyed: tensors may outlive it
  return *all;
}

}  // namespace

std::string damaged_allocation() {
  Allocations& all = allocations();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& entry : all.by_start) {
    const std::string damage = entry.second.region.damage();
    if (damage.empty()) continue;
    entry.second.region.poison_margins();
    return "an allocation in global memory " + damage;
  }
  return "";
}

std::string describe_allocation(const char* address) {
  Allocations& all = allocations();
  std::lock_guard<std::mutex> lock(all.mutex);
  const Allocation* nearest = nullptr;
  uintptr_t distance = uintptr_t(1) << 20;  // farther away it means nothing
  for (const auto& entry : all.by_start) {
    const Region& region = entry.second.region;
    const uintptr_t from = address < region.data
                               ? uintptr_t(region.data - address)
                               : uintptr_t(address - std::min<const char*>(address, region.data + region.bytes));
    if (from < distance) distance = from, nearest = &entry.second;
  }
  return nearest ? "global memory, an allocation, " + nearest->region.describe(address) : "";
}

}  // namespace simt

extern "C" void* simt_allocate(size_t bytes, int at_start) {
  using namespace simt;
  auto pages = std::make_unique<Pages>(std::max<size_t>(bytes, 1));
  Region region{at_start ? pages->begin() : pages->end() - round_up(bytes, 16), bytes, pages->begin(), pages->end()};
  region.poison_margins();
  std::memset(region.data, POISON, bytes);
  Allocations& all = allocations();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.by_start[region.data] = {std::move(pages), region};
  return region.data;
}

extern "C" void simt_free(void* memory) {
  simt::Allocations& all = simt::allocations();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.by_start.erase(static_cast<const char*>(memory));
}
