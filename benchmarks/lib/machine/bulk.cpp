// cp.async.bulk and cp.async.bulk.tensor: copies of whole tiles that one lane starts.

#include "async.h"
#include "memory.h"

namespace machine {
namespace {

// Contents of a tensor map, as written by the stand-in for cuTensorMapEncodeTiled (machine.py, tensor_map) and by
// tensormap.replace: 128 bytes.
struct TensorMap {
  uint64_t magic, address, sizes[5], strides[4];  // strides in bytes, of all dimensions but the first
  uint32_t box[5];
  uint8_t rank, element_bytes, swizzle, nan_fill;
};
constexpr uint64_t MAGIC = 0x70616d726f736e65ull;
constexpr int MAP_BYTES = 128;
static_assert(sizeof(TensorMap) <= MAP_BYTES, "has to fit into CUtensorMap");

struct Transfer {  // of one lane
  uint64_t shared = 0, global = 0, mbarrier = 0;
  uint32_t bytes = 0;
  std::vector<Piece> pieces;
  std::vector<std::pair<uint64_t, uint32_t>> touched;  // shared memory: address and bytes
};

uint64_t lane_value(Warp& warp, Ref ref, int bits, int lane) {
  return bits == 64 ? warp.at<uint64_t>(ref)[lane] : warp.at<uint32_t>(ref)[lane];
}

// Addresses of a bulk instruction: refs[index] with its bits and offset in `operands`.
uint64_t address(Warp& warp, const Inst& inst, int index, int lane) {
  return lane_value(warp, inst.refs[index], inst.bulk_bits[index], lane) + inst.bulk_offset[index];
}

uint64_t swizzled(uint64_t at, int width) { return at ^ ((at >> 7 & (width / 16 - 1)) << 4); }

TensorMap map_at(Warp& warp, uint64_t at, int lane) {
  TensorMap map;
  const std::vector<uint8_t>& params = warp.launch->params;
  if (at >> 56 == PARAM_WINDOW >> 56) {
    const uint64_t offset = at - PARAM_WINDOW;
    if (offset + 128 > params.size()) throw Fault{"bounds", "a tensor map beyond the parameters", lane};
    std::memcpy(&map, params.data() + offset, sizeof map);
  } else {
    std::memcpy(&map, global_range(warp, at, 128, false, lane), sizeof map);
  }
  if (map.magic != MAGIC || map.rank < 1 || map.rank > 5) throw Fault{"undefined", "no tensor map at " + hex(at), lane};
  return map;
}

// One element of the box after another, those outside of the tensor as zeros; stores leave them out.
void tile(Warp& warp, const TensorMap& map, const int32_t* origin, Transfer& of, bool stores, int lane) {
  static thread_local uint8_t zeros[16];
  uint64_t count = 1;
  for (int axis = 0; axis < map.rank; ++axis) count *= map.box[axis];
  of.bytes = count * map.element_bytes;
  if (of.shared % 128)
    throw Fault{"alignment", "a tile at " + hex(of.shared) + " of shared memory, no multiple of 128", lane};
  for (uint64_t index = 0; index < count; ++index) {
    uint64_t rest = index, from = map.address;
    bool inside = true;
    for (int axis = 0; axis < map.rank; ++axis) {
      const int64_t at = origin[axis] + static_cast<int64_t>(rest % map.box[axis]);
      rest /= map.box[axis];
      inside &= at >= 0 && at < static_cast<int64_t>(map.sizes[axis]);
      from += at * (axis ? map.strides[axis - 1] : map.element_bytes);
    }
    const uint64_t to = swizzled(of.shared + index * map.element_bytes, map.swizzle);
    uint8_t* shared = shared_range(warp, to, map.element_bytes, map.element_bytes, lane);
    if (stores && !inside) continue;
    uint8_t* global = inside ? global_range(warp, from, map.element_bytes, stores, lane) : zeros;
    of.pieces.push_back(stores ? Piece{shared, global, map.element_bytes, 0}
                               : Piece{global, shared, map.element_bytes, 0});
  }
  of.touched.push_back({of.shared, of.bytes});
}

void perform(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) std::memcpy(piece.into, piece.from, piece.bytes);
}

// Starts a copy to shared memory; it lands at once or when the schedule says so.
void start(Warp& warp, Transfer&& of, int lane) {
  Block& block = *warp.block;
  mbarrier_at(block, of.mbarrier, lane);
  for (const auto& [at, bytes] : of.touched) {
    shared_range(warp, at, bytes, 16, lane);
    for (uint32_t done = 0; block.shadow && done < bytes; done += 16)
      block.shadow->begin_copy(warp, at + done, 16, lane);
  }
  auto land = [&block, of = std::move(of)] {
    perform(of.pieces);
    for (const auto& [at, bytes] : of.touched)
      if (block.shadow) block.shadow->end_copy(COPIES, at, bytes);
    complete_bytes(block, of.mbarrier, of.bytes);
    ++block.progress;
  };
  if (warp.launch->late_copies) {
    block.async->under_way.push_back(std::move(land));
  } else {
    land();
  }
}

// Starts a copy from shared memory, which must stay as it is until the lane's group is waited for.
void start_store(Warp& warp, Transfer&& of) {
  Block& block = *warp.block;
  for (const auto& [at, bytes] : of.touched) {
    for (uint32_t done = 0; block.shadow && done < bytes; done += 16) block.shadow->begin_operand(warp, at + done, 16);
    if (block.shadow && block.shadow->is_undefined(at, bytes))
      throw Fault{"uninitialized", "what is copied to global memory depends on a value that was never written", -1};
  }
  const bool late = warp.launch->late_copies;
  if (!late) perform(of.pieces);
  async_of(warp).bulk_open.push_back([&block, late, of = std::move(of)] {
    if (late) perform(of.pieces);
    for (const auto& [at, bytes] : of.touched)
      for (uint32_t done = 0; block.shadow && done < bytes; done += 16) block.shadow->end_operand(at + done, 16);
  });
}

template <class F>
void each_lane(Warp& warp, F&& f) {
  for (int lane = 0; lane < LANES; ++lane)
    if (warp.exec >> lane & 1) f(lane);
}

}  // namespace

// refs: shared address, global address, bytes, mbarrier
void bulk_to_shared(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    Transfer of;
    of.shared = address(warp, inst, 0, lane) & ~SHARED_WINDOW;
    of.global = address(warp, inst, 1, lane);
    of.bytes = warp.at<uint32_t>(inst.refs[2])[lane];
    of.mbarrier = address(warp, inst, 3, lane) & ~SHARED_WINDOW;
    if (of.bytes % 16 || of.global % 16) throw Fault{"alignment", "a bulk copy that is no multiple of 16 bytes", lane};
    uint8_t* to = shared_range(warp, of.shared, of.bytes, 16, lane);
    of.pieces.push_back({global_range(warp, of.global, of.bytes, false, lane), to, of.bytes, 0});
    of.touched.push_back({of.shared, of.bytes});
    warp.launch->totals.global_sectors_read += of.bytes / 32;
    start(warp, std::move(of), lane);
  });
}

// refs: global address, shared address, bytes
void bulk_to_global(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    Transfer of;
    of.global = address(warp, inst, 0, lane);
    of.shared = address(warp, inst, 1, lane) & ~SHARED_WINDOW;
    of.bytes = warp.at<uint32_t>(inst.refs[2])[lane];
    if (of.bytes % 16 || of.global % 16) throw Fault{"alignment", "a bulk copy that is no multiple of 16 bytes", lane};
    uint8_t* from = shared_range(warp, of.shared, of.bytes, 16, lane);
    of.pieces.push_back({from, global_range(warp, of.global, of.bytes, true, lane), of.bytes, 0});
    of.touched.push_back({of.shared, of.bytes});
    warp.launch->totals.global_sectors_written += of.bytes / 32;
    start_store(warp, std::move(of));
  });
}

// refs: shared address, tensor map, mbarrier, coordinates (count)
void tensor_to_shared(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    Transfer of;
    of.shared = address(warp, inst, 0, lane) & ~SHARED_WINDOW;
    of.mbarrier = address(warp, inst, 2, lane) & ~SHARED_WINDOW;
    const TensorMap map = map_at(warp, address(warp, inst, 1, lane), lane);
    int32_t origin[5] = {};
    for (int axis = 0; axis < inst.count; ++axis) origin[axis] = warp.at<uint32_t>(inst.refs[3 + axis])[lane];
    if (inst.count != map.rank) throw Fault{"undefined", "a tensor map of another number of dimensions", lane};
    tile(warp, map, origin, of, false, lane);
    warp.launch->totals.global_sectors_read += of.bytes / 32;
    start(warp, std::move(of), lane);
  });
}

// refs: tensor map, shared address, coordinates (count)
void tensor_to_global(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    Transfer of;
    of.shared = address(warp, inst, 1, lane) & ~SHARED_WINDOW;
    const TensorMap map = map_at(warp, address(warp, inst, 0, lane), lane);
    int32_t origin[5] = {};
    for (int axis = 0; axis < inst.count; ++axis) origin[axis] = warp.at<uint32_t>(inst.refs[2 + axis])[lane];
    if (inst.count != map.rank) throw Fault{"undefined", "a tensor map of another number of dimensions", lane};
    tile(warp, map, origin, of, true, lane);
    warp.launch->totals.global_sectors_written += of.bytes / 32;
    start_store(warp, std::move(of));
  });
}

namespace {

// PTX ISA, tensormap.replace: bytes of the types that .elemtype numbers; 0: one that the machine does not know.
constexpr uint8_t ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};

enum Field { ADDRESS, RANK, BOX, SIZES, STRIDES, STEPS, ELEMENT, INTERLEAVE, SWIZZLE, FILL };

void replace(TensorMap& map, int field, uint32_t index, uint64_t value, int lane) {
  const auto check = [&](bool known) {
    if (!known) throw Fault{"undefined", "a tensor map's field " + std::to_string(value), lane};
  };
  check(index < (field == STRIDES ? 4 : 5));
  if (field == ADDRESS) map.magic = MAGIC, map.address = value;
  if (field == RANK) check(value < 5), map.rank = value + 1;
  if (field == BOX) map.box[index] = value;
  if (field == SIZES) map.sizes[index] = value;
  if (field == STRIDES) map.strides[index] = value;
  if (field == STEPS) check(value == 1);
  if (field == ELEMENT) check(value < std::size(ELEMENT_BYTES)), map.element_bytes = ELEMENT_BYTES[value];
  if (field == INTERLEAVE) check(value == 0);
  if (field == SWIZZLE) check(value < 4), map.swizzle = 16 << value;
  if (field == FILL) check(value == 0);
}

uint8_t* shared_map(Warp& warp, uint64_t at, bool writes, int lane) {
  uint8_t* found = shared_range(warp, at, MAP_BYTES, MAP_BYTES, lane);
  for (int done = 0; warp.block->shadow && done < MAP_BYTES; done += 16) {
    if (writes) warp.block->shadow->write(warp, at + done, 16, lane, false, nullptr);
    if (!writes) warp.block->shadow->read(warp, at + done, 16, lane);
  }
  return found;
}

}  // namespace

// refs: address, index, value; mode: Field; space: 1 global, 2 shared, 0 either
void replace_field(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    uint64_t at = address(warp, inst, 0, lane);
    const bool shared = inst.space == 2 || at >> 56 == SHARED_WINDOW >> 56;
    at &= SHARED_WINDOW - 1;
    uint8_t* place = shared ? shared_map(warp, at, true, lane) : global_range(warp, at, MAP_BYTES, true, lane);
    TensorMap map;
    std::memcpy(&map, place, sizeof map);
    replace(map, inst.mode, warp.at<uint32_t>(inst.refs[1])[lane], lane_value(warp, inst.refs[2], inst.bits, lane),
            lane);
    std::memcpy(place, &map, sizeof map);
  });
}

// refs: global address, shared address; all lanes copy one map, which is then visible to all
void publish_map(Warp& warp, const Inst& inst) {
  aligned(warp, "tensormap.cp_fenceproxy");
  const int lane = __builtin_ctz(warp.exec);
  const uint8_t* from = shared_map(warp, address(warp, inst, 1, lane) & (SHARED_WINDOW - 1), false, lane);
  std::memcpy(global_range(warp, address(warp, inst, 0, lane), MAP_BYTES, true, lane), from, MAP_BYTES);
  flush(warp);
}

void bulk_commit(Warp& warp, const Inst&) {
  WarpAsync& own = async_of(warp);
  own.bulk_groups.push_back(std::move(own.bulk_open));
  own.bulk_open.clear();
}

void bulk_wait(Warp& warp, const Inst& inst) {
  WarpAsync& own = async_of(warp);
  for (; own.bulk_groups.size() > static_cast<size_t>(inst.value); own.bulk_groups.pop_front())
    for (const auto& land : own.bulk_groups.front()) land();
}

// Copies to shared memory that are under way: one of them lands now and then, all before a deadlock.
bool advance_copies(Block& block, bool none_can_run) {
  auto& copies = block.async->under_way;
  if (copies.empty() || (!none_can_run && block.launch->random.below(16))) return false;
  const size_t chosen = block.launch->random.below(copies.size());
  const std::function<void()> land = std::move(copies[chosen]);
  copies.erase(copies.begin() + chosen);
  land();
  return true;
}

}  // namespace machine
