// Loads and stores of all spaces.

#include "memory.h"

#include <algorithm>

#include "shadow.h"

namespace machine {
namespace {

thread_local uint8_t nowhere[64];

void misaligned(uint64_t address, int bytes, int lane) {
  throw Fault{"alignment", "address " + hex(address) + " is no multiple of " + std::to_string(bytes), lane};
}

const Region* region_of(const Launch& launch, uint64_t address, uint64_t bytes) {
  if (const uint64_t number = address >> REGION_BIT) {
    if (number > launch.regions.size()) return nullptr;
    const Region& own = launch.regions[number - 1];
    const uint64_t offset = memory_address(address) - own.address;
    return offset < own.bytes && bytes <= own.bytes - offset ? &own : nullptr;
  }
  auto after = std::upper_bound(launch.regions.begin(), launch.regions.end(), address,
                                [](uint64_t value, const Region& region) { return value < region.address; });
  if (after == launch.regions.begin()) return nullptr;
  const Region& found = *--after;
  return address - found.address < found.bytes && bytes <= found.bytes - (address - found.address) ? &found : nullptr;
}

[[noreturn]] void out_of_bounds(const Launch& launch, uint64_t address, uint64_t bytes, bool writes, int lane) {
  std::string message = (writes ? "a write of " : "a read of ") + std::to_string(bytes) + " bytes at " +
                        hex(memory_address(address));
  const Region* nearest = nullptr;
  int64_t least = INT64_MAX;
  const uint64_t number = address >> REGION_BIT;
  if (number && number <= launch.regions.size()) nearest = &launch.regions[number - 1];
  address = memory_address(address);
  for (const Region& region : launch.regions) {
    if (nearest && number) break;
    const int64_t before = region.address - address, behind = address - (region.address + region.bytes);
    const int64_t distance = std::max<int64_t>({before, behind, 0});
    if (distance < least) least = distance, nearest = &region;
  }
  if (nearest) {
    const int64_t offset = address - nearest->address;
    message += std::string(", offset ") + std::to_string(offset) + " of " + nearest->name + " (" +
               std::to_string(nearest->bytes) + " bytes" + (nearest->writable ? ")" : ", read only)");
  }
  throw Fault{"bounds", message, lane};
}

uint64_t sectors(const Access& access, uint32_t lanes) {
  uint64_t found[2 * LANES];
  int count = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    for (uint64_t sector = access.address[lane] >> 5; sector <= (access.address[lane] + access.bytes - 1) >> 5;
         ++sector)
      if (!count || found[count - 1] != sector) found[count++] = sector;
  }
  if (!std::is_sorted(found, found + count)) std::sort(found, found + count);
  return std::unique(found, found + count) - found;
}

void locate_global(Warp& warp, Access& access) {
  Launch& launch = *warp.launch;
  for (int lane = 0; lane < LANES; ++lane) {
    access.pointer[lane] = nowhere;
    if (!(warp.exec >> lane & 1)) continue;
    access.low = std::min(access.low, access.address[lane]);
    access.high = std::max(access.high, access.address[lane] + access.bytes);
    if (access.address[lane] % access.bytes) misaligned(access.address[lane], access.bytes, lane);
  }
  const Region* all = region_of(launch, access.low, access.high - access.low);
  for (int lane = 0; lane < LANES && !(all && (all->writable || !access.writes)); ++lane) {
    if (!(warp.exec >> lane & 1)) continue;
    const Region* one = region_of(launch, access.address[lane], access.bytes);
    if (!one || (access.writes && !one->writable))
      out_of_bounds(launch, access.address[lane], access.bytes, access.writes, lane);
  }
  access.low = ~0ull, access.high = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(warp.exec >> lane & 1)) continue;
    access.address[lane] = memory_address(access.address[lane]);
    access.pointer[lane] = reinterpret_cast<uint8_t*>(access.address[lane]);
    access.low = std::min(access.low, access.address[lane]);
    access.high = std::max(access.high, access.address[lane] + access.bytes);
  }
  uint64_t& counted = access.atomic   ? launch.totals.atomic_sectors
                      : access.writes ? launch.totals.global_sectors_written
                                      : launch.totals.global_sectors_read;
  counted += sectors(access, warp.exec);
  if (!access.writes || access.atomic) flush(warp, access.low, access.high);
}

void locate_shared(Warp& warp, Access& access) {
  Shadow* shadow = warp.block->shadow.get();
  const uint64_t size = warp.launch->shared_bytes, bytes = access.bytes;
  uint8_t* shared = warp.block->shared.data();
  for (int lane = 0; lane < LANES; ++lane) {
    access.pointer[lane] = nowhere;
    if (!(warp.exec >> lane & 1)) continue;
    const uint64_t address = access.address[lane];
    if (address + bytes > size || address >= SHARED_WINDOW || address & (bytes - 1))
      shared_range(warp, address, bytes, bytes, lane);
    access.pointer[lane] = shared + address;
    if (!shadow) continue;
    if (access.writes)
      shadow->write(warp, address, bytes, lane, access.atomic, access.data ? access.data[lane] : nullptr);
    if (!access.writes) shadow->read(warp, address, bytes, lane);
  }
  count_wavefronts(warp, access.address, bytes);
}

void locate_local(Warp& warp, Access& access) {
  const uint64_t bytes = warp.launch->function->local_bytes;
  for (int lane = 0; lane < LANES; ++lane) {
    access.pointer[lane] = nowhere;
    if (!(warp.exec >> lane & 1)) continue;
    const uint64_t address = access.address[lane];
    if (address > bytes || bytes - address < static_cast<uint64_t>(access.bytes))
      throw Fault{"local", "local address " + hex(address) + " of " + std::to_string(bytes) + " bytes", lane};
    if (address % access.bytes) misaligned(address, access.bytes, lane);
    access.pointer[lane] = warp.local.data() + lane * bytes + address;
    warp.launch->totals.local_bytes += access.bytes;
  }
}

void locate_param(Warp& warp, Access& access) {
  std::vector<uint8_t>& params = warp.launch->params;
  for (int lane = 0; lane < LANES; ++lane) {
    access.pointer[lane] = nowhere;
    if (!(warp.exec >> lane & 1)) continue;
    if (access.writes || access.address[lane] + access.bytes > params.size())
      throw Fault{"bounds", "parameter at " + hex(access.address[lane]), lane};
    access.pointer[lane] = params.data() + access.address[lane];
  }
}

template <class T, class S>
void gather(Warp& warp, const Inst& inst, const Access& access) {
  for (int part = 0; part < inst.count; ++part) {
    alignas(64) S out[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      T value;
      std::memcpy(&value, access.pointer[lane] + part * sizeof(T), sizeof(T));
      out[lane] = static_cast<S>(value);
    }
    S* into = warp.at<S>(inst.refs[part]);
    for (int lane = 0; lane < LANES; ++lane) into[lane] = warp.exec >> lane & 1 ? out[lane] : into[lane];
  }
}

template <class S>
void gather_as(Warp& warp, const Inst& inst, const Access& access) {
  switch (inst.size * 2 + inst.mode) {
    case 2:
      return gather<uint8_t, S>(warp, inst, access);
    case 3:
      return gather<int8_t, S>(warp, inst, access);
    case 4:
      return gather<uint16_t, S>(warp, inst, access);
    case 5:
      return gather<int16_t, S>(warp, inst, access);
    case 8:
      return gather<uint32_t, S>(warp, inst, access);
    case 9:
      return gather<int32_t, S>(warp, inst, access);
    default:
      return gather<uint64_t, S>(warp, inst, access);
  }
}

void load_located(Warp& warp, const Inst& inst, const Access& access) {
  inst.bits == 64 ? gather_as<uint64_t>(warp, inst, access) : gather_as<uint32_t>(warp, inst, access);
}

// Each lane's stored value, side by side; the low bytes of registers that are wider.
void collect(Warp& warp, const Inst& inst, uint8_t (*bytes)[64]) {
  for (int part = 0; part < inst.count; ++part) {
    for (int lane = 0; lane < LANES; ++lane) {
      const uint64_t value =
          inst.bits == 64 ? warp.at<uint64_t>(inst.refs[part])[lane] : warp.at<uint32_t>(inst.refs[part])[lane];
      std::memcpy(bytes[lane] + part * inst.size, &value, inst.size);
    }
  }
}

void store_located(Warp& warp, const Access& access) {
  for (int lane = 0; lane < LANES; ++lane)
    if (warp.exec >> lane & 1) std::memcpy(access.pointer[lane], access.data[lane], access.bytes);
}

struct LateStore {
  uint8_t bytes[LANES][64];
  uint8_t* pointer[LANES];
};

void load_from(Warp& warp, const Inst& inst, Space space) {
  Access access;
  access.bytes = inst.size * inst.count;
  access.space = space;
  addresses(warp, inst, inst.count, access);
  locate(warp, access);
  load_located(warp, inst, access);
}

void store_to(Warp& warp, const Inst& inst, Space space) {
  if (inst.releases) flush(warp);
  Access access;
  access.bytes = inst.size * inst.count;
  access.writes = true;
  access.space = space;
  uint8_t bytes[LANES][64];
  collect(warp, inst, bytes);
  access.data = bytes;
  addresses(warp, inst, inst.count, access);
  locate(warp, access);
  // Not later where it releases, because others may wait for it while this warp waits, too
  if (space != Space::Global || !warp.launch->late_stores || inst.releases) return store_located(warp, access);
  auto late = std::make_shared<LateStore>();
  std::memcpy(late->bytes, bytes, sizeof bytes);
  std::copy(access.pointer, access.pointer + LANES, late->pointer);
  later(warp, access.low, access.high, [late, lanes = warp.exec, bytes = access.bytes] {
    for (int lane = 0; lane < LANES; ++lane)
      if (lanes >> lane & 1) std::memcpy(late->pointer[lane], late->bytes[lane], bytes);
  });
}

}  // namespace

void addresses(Warp& warp, const Inst& inst, size_t index, Access& access) {
  if (inst.extent[0] == 64) {
    const uint64_t* base = warp.at<uint64_t>(inst.refs[index]);
    for (int lane = 0; lane < LANES; ++lane) access.address[lane] = base[lane] + inst.value;
  } else {
    const uint32_t* base = warp.at<uint32_t>(inst.refs[index]);
    for (int lane = 0; lane < LANES; ++lane) access.address[lane] = static_cast<uint32_t>(base[lane] + inst.value);
  }
}

void locate(Warp& warp, Access& access) {
  if (access.space == Space::Shared) return locate_shared(warp, access);
  if (access.space == Space::Local) return locate_local(warp, access);
  if (access.space == Space::Param) return locate_param(warp, access);
  locate_global(warp, access);
}

void locate_generic(Warp& warp, Access& access) {
  const uint32_t exec = warp.exec;
  uint8_t* pointers[LANES];
  std::fill(pointers, pointers + LANES, static_cast<uint8_t*>(nowhere));
  const Space spaces[] = {Space::Global, Space::Shared, Space::Local, Space::Param};
  for (uint64_t window = 0; window < 4; ++window) {
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; ++lane)
      if ((exec >> lane & 1) && std::min<uint64_t>(access.address[lane] >> 56, 4) % 4 == window) lanes |= 1u << lane;
    if (!lanes) continue;
    Access part = access;
    part.space = spaces[window];
    if (window)
      for (uint64_t& address : part.address) address &= (1ull << 56) - 1;
    warp.exec = lanes;
    locate(warp, part);
    for (int lane = 0; lane < LANES; ++lane)
      if (lanes >> lane & 1) pointers[lane] = part.pointer[lane];
  }
  warp.exec = exec;
  std::copy(pointers, pointers + LANES, access.pointer);
}

uint8_t* global_range(Warp& warp, uint64_t address, uint64_t bytes, bool writes, int lane) {
  const Region* region = region_of(*warp.launch, address, bytes);
  if (!region || (writes && !region->writable)) out_of_bounds(*warp.launch, address, bytes, writes, lane);
  address = memory_address(address);
  if (!writes) flush(warp, address, address + bytes);
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* shared_range(Warp& warp, uint64_t address, uint64_t bytes, uint64_t alignment, int lane) {
  const uint64_t size = warp.launch->shared_bytes;
  if (address > size || size - address < bytes)
    throw Fault{"shared",
                "shared address " + hex(address) + ", " + std::to_string(bytes) + " bytes, where " +
                    std::to_string(size) + " were asked for",
                lane};
  if (address % alignment) misaligned(address, alignment, lane);
  return warp.block->shared.data() + address;
}

namespace {

// Words of lanes begin .. begin + group that fall on a bank at most: 1 where nothing collides.
int worst_bank(const uint64_t* address, uint32_t exec, int begin, int group, int words) {
  uint32_t first[32], taken = 0, more[32][32];
  uint8_t count[32] = {};
  int most = 1;
  for (int lane = begin; lane < begin + group; ++lane) {
    if (!(exec >> lane & 1)) continue;
    for (int word = 0; word < words; ++word) {
      const uint32_t at = static_cast<uint32_t>(address[lane] / 4) + word, bank = at % 32;
      if (!(taken >> bank & 1)) {
        taken |= 1u << bank;
        first[bank] = at;
      } else if (first[bank] != at && std::find(more[bank], more[bank] + count[bank], at) == more[bank] + count[bank]) {
        more[bank][count[bank]++] = at;
        most = std::max(most, 1 + count[bank]);
      }
    }
  }
  return most;
}

}  // namespace

void count_wavefronts(Warp& warp, const uint64_t* address, int bytes) {
  // 8 bytes a lane: half a warp at a time; 16: a quarter. In each, words of one bank take a pass each.
  const int group = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32, words = std::max(bytes / 4, 1);
  for (int begin = 0; begin < LANES; begin += group) {
    if (!(warp.exec >> begin & (~0ull >> (64 - group)))) continue;
    const int passes = worst_bank(address, warp.exec, begin, group, words);
    warp.launch->totals.shared_wavefronts += passes;
    warp.launch->totals.shared_conflicts += passes - 1;
  }
}

void load_param(Warp& warp, const Inst& inst) { load_from(warp, inst, Space::Param); }
void load_global(Warp& warp, const Inst& inst) { load_from(warp, inst, Space::Global); }
void load_shared(Warp& warp, const Inst& inst) { load_from(warp, inst, Space::Shared); }
void load_local(Warp& warp, const Inst& inst) { load_from(warp, inst, Space::Local); }
void store_global(Warp& warp, const Inst& inst) { store_to(warp, inst, Space::Global); }
void store_shared(Warp& warp, const Inst& inst) { store_to(warp, inst, Space::Shared); }
void store_local(Warp& warp, const Inst& inst) { store_to(warp, inst, Space::Local); }

void load_generic(Warp& warp, const Inst& inst) {
  Access access;
  access.bytes = inst.size * inst.count;
  addresses(warp, inst, inst.count, access);
  locate_generic(warp, access);
  load_located(warp, inst, access);
}

void store_generic(Warp& warp, const Inst& inst) {
  Access access;
  access.bytes = inst.size * inst.count;
  access.writes = true;
  uint8_t bytes[LANES][64];
  collect(warp, inst, bytes);
  access.data = bytes;
  addresses(warp, inst, inst.count, access);
  locate_generic(warp, access);
  flush(warp);
  store_located(warp, access);
}

void prefetch(Warp&, const Inst&) {}

// cvta's question: mode is not used; value: the window that is asked about.
void is_space(Warp& warp, const Inst& inst) {
  const uint64_t* address = warp.at<uint64_t>(inst.refs[1]);
  uint32_t lanes = 0;
  for (int lane = 0; lane < LANES; ++lane)
    lanes |= static_cast<uint32_t>((address[lane] >> 56 << 56) == static_cast<uint64_t>(inst.value)) << lane;
  uint32_t& into = *warp.at<uint32_t>(inst.refs[0]);
  into = (into & ~warp.exec) | (lanes & warp.exec);
}

}  // namespace machine
