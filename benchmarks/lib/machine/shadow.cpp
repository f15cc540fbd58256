#include "shadow.h"

#include <algorithm>

namespace machine {
namespace {

constexpr uint32_t UNWRITTEN = NO_ONE;         // at time 0
constexpr uint32_t FLYING = ~63u | IN_FLIGHT;  // later than anything known

}  // namespace

Shadow::Shadow(size_t bytes, int warps)
    : known(warps, std::vector<Clock>(AGENTS, 0)),
      writer_(bytes + 64, UNWRITTEN),
      readers_(warps, std::vector<Clock>(bytes / 4 + 16, 0)),
      unfenced_(bytes + 64, 0),
      operand_(bytes / 4 + 16, 0),
      fenced_(warps, 0),
      oldest_(warps, 0) {}

// A byte may be read by a warp that knows of its last write, and be written by one that knows of its last reads too.
// Returns false where two warps write the same, as Triton lets those do that hold the same numbers.
template <int BYTES>
bool Shadow::check_bytes(Warp& warp, uint64_t address, int lane, bool atomic, const uint8_t* data, bool reads) {
  const uint32_t* tags = writer_.data() + address;
  uint32_t latest = 0, none = 0, others = 0;
  for (int byte = 0; byte < BYTES; ++byte) {
    latest = std::max(latest, tags[byte]);
    none |= tags[byte] == UNWRITTEN;
    others |= (tags[byte] & 63) ^ warp.index;
  }
  if ((latest < (oldest_[warp.index] + 1) << 6 && !(reads && none)) || !others) return true;
  for (int byte = 0; byte < BYTES; ++byte) {
    const uint32_t agent = tags[byte] & 63;
    const bool own = agent == static_cast<uint32_t>(warp.index), ordered = tags[byte] >> 6 <= known[warp.index][agent];
    if ((!reads && agent == NO_ONE) || (agent != NO_ONE && (own || ordered || (atomic && agent == ATOMICS)))) continue;
    if (agent < ATOMICS && data && std::memcmp(data, warp.block->shared.data() + address, BYTES) == 0) return false;
    conflict(agent, address + byte, lane, reads ? "read" : "written");
  }
  return true;
}

bool Shadow::check_written(Warp& warp, uint64_t address, int bytes, int lane, bool atomic, const uint8_t* data,
                           bool reads) {
  switch (bytes) {
    case 16:
      return check_bytes<16>(warp, address, lane, atomic, data, reads);
    case 8:
      return check_bytes<8>(warp, address, lane, atomic, data, reads);
    case 4:
      return check_bytes<4>(warp, address, lane, atomic, data, reads);
    case 2:
      return check_bytes<2>(warp, address, lane, atomic, data, reads);
    case 1:
      return check_bytes<1>(warp, address, lane, atomic, data, reads);
    default:
      return check_bytes<32>(warp, address, lane, atomic, data, reads);
  }
}

void Shadow::conflict(int agent, uint64_t address, int lane, const char* what) {
  const std::string where = "shared byte " + hex(address) + " is " + what;
  if (agent == NO_ONE) throw Fault{"uninitialized", where + " and was never written", lane};
  if (agent == IN_FLIGHT) throw Fault{"asynchronous", where + " while a copy into it was not waited for", lane};
  const std::string by = agent < 32 ? "warp " + std::to_string(agent) : agent == ATOMICS ? "an atomic" : "a bulk copy";
  throw Fault{agent == COPIES ? "asynchronous" : "race", where + " without a barrier since it was written by " + by,
              lane};
}

void Shadow::read(Warp& warp, uint64_t address, int bytes, int lane) {
  check_written(warp, address, bytes, lane, false, nullptr, true);
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) readers_[warp.index][word] = now;
}

bool Shadow::check_readers(Warp& warp, uint64_t address, int bytes, int lane, const uint8_t* data) {
  const std::vector<Clock>& knows = known[warp.index];
  const uint64_t begin = address / 4, end = (address + bytes - 1) / 4 + 1;
  for (int other = 0; other < static_cast<int>(readers_.size()); ++other) {
    Clock latest = 0;
    for (uint64_t word = begin; word < end; ++word) latest = std::max(latest, readers_[other][word]);
    if (other == warp.index || latest <= knows[other]) continue;
    if (data && std::memcmp(data, warp.block->shared.data() + address, bytes) == 0) return false;
    throw Fault{"race",
                "shared memory at " + hex(address) + " is written without a barrier since warp " +
                    std::to_string(other) + " read it",
                lane};
  }
  for (uint64_t word = begin; operands_ && word < end; ++word)
    if (operand_[word])
      throw Fault{"in_flight", "shared word " + hex(word * 4) + " is written while wgmma reads it", lane};
  return true;
}

void Shadow::write(Warp& warp, uint64_t address, int bytes, int lane, bool atomic, const uint8_t* data) {
  if (!check_written(warp, address, bytes, lane, atomic, data, false)) return;
  if (!check_readers(warp, address, bytes, lane, data)) return;
  const uint32_t tag = now << 6 | (atomic ? ATOMICS : warp.index);
  std::fill(writer_.begin() + address, writer_.begin() + address + bytes, tag);
  std::fill(unfenced_.begin() + address, unfenced_.begin() + address + bytes, 1);
  if (atomic) known[warp.index][ATOMICS] = now;
}

void Shadow::begin_copy(Warp& warp, uint64_t address, int bytes, int lane) {
  write(warp, address, bytes, lane, false, nullptr);
  std::fill(writer_.begin() + address, writer_.begin() + address + bytes, FLYING);
  if (!undefined.empty()) std::fill(undefined.begin() + address, undefined.begin() + address + bytes, 0);
}

bool Shadow::is_undefined(uint64_t address, int bytes) const {
  return !undefined.empty() && std::any_of(undefined.begin() + address, undefined.begin() + address + bytes,
                                           [](uint8_t byte) { return byte; });
}

void Shadow::end_copy(int agent, uint64_t address, int bytes, bool fenced) {
  if (fenced) std::fill(unfenced_.begin() + address, unfenced_.begin() + address + bytes, 0);
  std::fill(writer_.begin() + address, writer_.begin() + address + bytes, now << 6 | agent);
  copies_ |= agent == COPIES;
}

void Shadow::begin_operand(Warp& warp, uint64_t address, int bytes) {
  read(warp, address, bytes, -1);
  for (int byte = 0; byte < bytes; ++byte) {
    const uint32_t tag = writer_[address + byte], agent = tag & 63;
    if (unfenced_[address + byte] && agent < known.size() && tag >> 6 > fenced_[agent] &&
        tag >> 6 > fenced_[warp.index])
      throw Fault{"proxy",
                  "shared byte " + hex(address + byte) +
                      " is read through the asynchronous proxy without "
                      "fence.proxy.async since warp " +
                      std::to_string(agent) + " wrote it",
                  -1};
  }
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) ++operand_[word], ++operands_;
}

void Shadow::end_operand(uint64_t address, int bytes) {
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) --operand_[word], --operands_;
}

void Shadow::release(int warp, std::vector<Clock>& into) {
  into.resize(AGENTS, 0);
  for (int agent = 0; agent < AGENTS; ++agent) into[agent] = std::max(into[agent], known[warp][agent]);
  into[warp] = now++;
}

void Shadow::acquire(int warp, const std::vector<Clock>& from) {
  for (int agent = 0; agent < AGENTS && !from.empty(); ++agent)
    known[warp][agent] = std::max(known[warp][agent], from[agent]);
  Clock least = copies_ ? known[warp][COPIES] : now;
  for (int other = 0; other < static_cast<int>(known.size()); ++other)
    if (other != warp) least = std::min(least, known[warp][other]);
  oldest_[warp] = least;
}

}  // namespace machine
