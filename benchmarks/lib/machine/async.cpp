// cp.async: copies of a warp's lanes to shared memory, in groups that are waited for.

#include "async.h"

#include "memory.h"

namespace machine {
namespace {

void move(const Piece& piece) {
  std::memcpy(piece.into, piece.from, piece.bytes);
  std::memset(piece.into + piece.bytes, 0, piece.zeros);
}

void land(Copy& copy) {
  if (!copy.landed)
    for (const Piece& piece : copy.pieces) move(piece);
  copy.landed = true;
}

void complete(Warp& warp, Group& group) {
  const bool fenced = !warp.launch->request->copies_need_fence;
  for (Copy& copy : group.copies) {
    land(copy);
    if (!warp.block->shadow) continue;
    for (const auto& [address, bytes] : copy.shared) warp.block->shadow->end_copy(warp.index, address, bytes, fenced);
  }
}

}  // namespace

WarpAsync& async_of(Warp& warp) { return warp.block->async->warps[warp.index]; }

// refs: into, from[, bytes to read (mode 1) or predicate to read none (mode 2)]; extent: bits of from, of into, offset
void copy_async(Warp& warp, const Inst& inst) {
  Access into, from;
  into.bytes = from.bytes = inst.size;
  into.writes = true;
  from.space = Space::Global;
  for (int lane = 0; lane < LANES; ++lane) {
    const uint64_t base =
        inst.extent[1] == 64 ? warp.at<uint64_t>(inst.refs[0])[lane] : warp.at<uint32_t>(inst.refs[0])[lane];
    into.address[lane] = (base + inst.extent[2]) & ~SHARED_WINDOW;
  }
  addresses(warp, inst, 1, from);
  uint32_t bytes[LANES];
  const uint32_t exec = warp.exec;
  uint32_t reads = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    bytes[lane] = inst.size;
    if (inst.mode == 1) bytes[lane] = warp.at<uint32_t>(inst.refs[2])[lane];
    if (inst.mode == 2 && *warp.at<uint32_t>(inst.refs[2]) >> lane & 1) bytes[lane] = 0;
    if (!(exec >> lane & 1)) continue;
    if (bytes[lane] > inst.size) throw Fault{"undefined", "cp.async reads more bytes than it writes", lane};
    if (bytes[lane]) reads |= 1u << lane;
  }
  warp.exec = reads;
  if (reads) locate(warp, from);
  warp.exec = exec;
  Copy copy;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(exec >> lane & 1)) continue;
    uint8_t* to = shared_range(warp, into.address[lane], inst.size, inst.size, lane);
    if (warp.block->shadow) warp.block->shadow->begin_copy(warp, into.address[lane], inst.size, lane);
    copy.pieces.push_back({from.pointer[lane], to, bytes[lane], inst.size - bytes[lane]});
    copy.shared.push_back({into.address[lane], inst.size});
  }
  count_wavefronts(warp, into.address, inst.size);
  if (!warp.launch->late_copies) land(copy);
  async_of(warp).open.copies.push_back(std::move(copy));
}

void copy_commit(Warp& warp, const Inst&) {
  WarpAsync& own = async_of(warp);
  own.groups.push_back(std::move(own.open));
  own.open = Group();
}

// value: groups that may stay under way; mode 1: wait_all, also what is in no group yet
void copy_wait(Warp& warp, const Inst& inst) {
  WarpAsync& own = async_of(warp);
  if (inst.mode) copy_commit(warp, inst);
  for (; own.groups.size() > static_cast<size_t>(inst.value); own.groups.pop_front())
    complete(warp, own.groups.front());
}

// Copies without a wait land when the block ends, if only to be checked.
void finish(Block& block) {
  for (Warp& warp : block.warps) {
    copy_wait(warp, Inst{});
    copy_commit(warp, Inst{});
    copy_wait(warp, Inst{});
  }
}

}  // namespace machine
