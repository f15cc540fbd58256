// Instructions by which the lanes of a warp exchange what they have, and moves between registers of different widths.

#include "program.h"

namespace machine {
namespace {

std::string lanes_text(uint32_t lanes) { return hex(lanes); }

// The value that all lanes of exec give for the mask of a collective instruction.
uint32_t named_lanes(Warp& warp, Ref ref, const char* what) {
  const uint32_t* masks = warp.at<uint32_t>(ref);
  for (int lane = 0; lane < LANES; ++lane)
    if (warp.exec >> lane & 1) collective(warp, masks[lane], what);
  return warp.exec;
}

void write_mask(Warp& warp, Ref ref, uint32_t lanes) {
  uint32_t& into = *warp.at<uint32_t>(ref);
  into = (into & ~warp.exec) | (lanes & warp.exec);
}

template <class T>
void write_lanes(Warp& warp, Ref ref, const T* values) {
  T* into = warp.at<T>(ref);
  for (int lane = 0; lane < LANES; ++lane) into[lane] = warp.exec >> lane & 1 ? values[lane] : into[lane];
}

}  // namespace

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

void collective(Warp& warp, uint32_t named, const char* what) {
  const uint32_t missing = named & warp.live() & ~warp.exec;
  const uint32_t unnamed = warp.exec & ~named;
  if (missing)
    throw Fault{"divergence", std::string(what) + " names lanes that do not execute it: " + lanes_text(missing),
                __builtin_ctz(missing)};
  if (unnamed)
    throw Fault{"divergence", std::string(what) + " is executed by lanes that it does not name: " + lanes_text(unnamed),
                __builtin_ctz(unnamed)};
}

void aligned(Warp& warp, const char* what) {
  if (const uint32_t missing = warp.live() & ~warp.exec)
    throw Fault{"divergence", std::string(what) + " is not executed by all lanes, not by " + lanes_text(missing),
                __builtin_ctz(missing)};
}

// d[|p], a, b, c, mask; mode 0 bfly, 1 idx, 2 up, 3 down
uint32_t shuffle_sources(Warp& warp, const Inst& inst, int* sources) {
  uint32_t inside = 0;
  const uint32_t *by = warp.at<uint32_t>(inst.refs[2]), *clamp = warp.at<uint32_t>(inst.refs[3]);
  for (int lane = 0; lane < LANES; ++lane) {
    const int segment = clamp[lane] >> 8 & 31, bound = clamp[lane] & 31, b = by[lane] & 31;
    const int last = (lane & segment) | (bound & ~segment), first = lane & segment;
    const int source = inst.mode == 0   ? lane ^ b
                       : inst.mode == 1 ? first | (b & ~segment)
                       : inst.mode == 2 ? lane - b
                                        : lane + b;
    const bool valid = inst.mode == 2 ? source >= last : source <= last;
    inside |= static_cast<uint32_t>(valid) << lane;
    sources[lane] = valid ? source & 31 : lane;
  }
  return inside;
}

void shuffle(Warp& warp, const Inst& inst) {
  named_lanes(warp, inst.refs[4], "shfl");
  int sources[LANES];
  const uint32_t inside = shuffle_sources(warp, inst, sources);
  alignas(64) uint32_t out[LANES];
  const uint32_t* from = warp.at<uint32_t>(inst.refs[1]);
  for (int lane = 0; lane < LANES; ++lane) {
    const int source = sources[lane];
    out[lane] = from[source];
    if ((warp.exec >> lane & 1) && !(warp.exec >> source & 1))
      throw Fault{"divergence", "shfl reads lane " + std::to_string(source) + ", which does not execute it", lane};
  }
  write_lanes(warp, inst.refs[0], out);
  write_mask(warp, inst.refs[5], inside);
}

// d, p, mask; mode 0 all, 1 any, 2 uni, 3 ballot
void vote(Warp& warp, const Inst& inst) {
  named_lanes(warp, inst.refs[2], "vote");
  const uint32_t yes = (*warp.at<uint32_t>(inst.refs[1]) ^ (inst.bits ? ALL : 0)) & warp.exec;
  if (inst.mode == 3) {
    alignas(64) uint32_t out[LANES];
    std::fill(out, out + LANES, yes);
    return write_lanes(warp, inst.refs[0], out);
  }
  const bool all = yes == warp.exec, any = yes != 0;
  write_mask(warp, inst.refs[0], (inst.mode == 0 ? all : inst.mode == 1 ? any : all || !any) ? ALL : 0);
}

// d[|p], a, mask; mode 1: all
void match(Warp& warp, const Inst& inst) {
  named_lanes(warp, inst.refs[2], "match");
  alignas(64) uint32_t out[LANES] = {};
  const auto value = [&](int lane) -> uint64_t {
    return inst.bits == 64 ? warp.at<uint64_t>(inst.refs[1])[lane] : warp.at<uint32_t>(inst.refs[1])[lane];
  };
  bool same = true;
  for (int lane = 0; lane < LANES; ++lane) {
    for (int other = 0; other < LANES && (warp.exec >> lane & 1); ++other)
      if ((warp.exec >> other & 1) && value(other) == value(lane)) out[lane] |= 1u << other;
    if ((warp.exec >> lane & 1) && out[lane] != warp.exec) same = false;
  }
  if (inst.mode && !same) std::fill(out, out + LANES, 0);
  write_lanes(warp, inst.refs[0], out);
  write_mask(warp, inst.refs[3], same ? ALL : 0);
}

// d, a, mask; mode 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; count: signed
void reduce_lanes(Warp& warp, const Inst& inst) {
  named_lanes(warp, inst.refs[2], "redux");
  const uint32_t* in = warp.at<uint32_t>(inst.refs[1]);
  bool first = true;
  uint32_t total = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(warp.exec >> lane & 1)) continue;
    const uint32_t a = in[lane];
    const bool less = inst.count ? static_cast<int32_t>(a) < static_cast<int32_t>(total) : a < total;
    const uint32_t joined[] = {total + a, less ? a : total, less ? total : a, total & a, total | a, total ^ a};
    total = first ? a : joined[inst.mode];
    first = false;
  }
  alignas(64) uint32_t out[LANES];
  std::fill(out, out + LANES, total);
  write_lanes(warp, inst.refs[0], out);
}

void elect(Warp& warp, const Inst& inst) {
  named_lanes(warp, inst.refs[2], "elect");
  const int leader = __builtin_ctz(warp.exec);
  alignas(64) uint32_t out[LANES];
  std::fill(out, out + LANES, leader);
  write_lanes(warp, inst.refs[0], out);
  write_mask(warp, inst.refs[1], 1u << leader);
}

void active_mask(Warp& warp, const Inst& inst) {
  alignas(64) uint32_t out[LANES];
  std::fill(out, out + LANES, warp.exec);
  write_lanes(warp, inst.refs[0], out);
}

void warp_barrier(Warp& warp, const Inst& inst) { named_lanes(warp, inst.refs[0], "bar.warp.sync"); }

namespace {

// One register of `count` parts, each of which takes its share of its bits.
template <class Whole, class Part>
void pack_as(Warp& warp, const Inst& inst) {
  const int shift = 8 * inst.size / inst.count;
  const Part mask = shift >= 32 ? ~Part(0) : (Part(1) << shift) - 1;
  alignas(64) Whole out[LANES] = {};
  for (int part = 0; part < inst.count; ++part) {
    const Part* in = warp.at<Part>(inst.refs[part]);
    for (int lane = 0; lane < LANES; ++lane) out[lane] |= static_cast<Whole>(in[lane] & mask) << (shift * part);
  }
  write_lanes(warp, inst.refs[inst.count], out);
}

template <class Whole, class Part>
void unpack_as(Warp& warp, const Inst& inst) {
  const int shift = 8 * inst.size / inst.count;
  const Whole mask = (Whole(1) << shift) - 1;
  alignas(64) Whole in[LANES];
  std::memcpy(in, warp.at<Whole>(inst.refs[inst.count]), sizeof in);
  for (int part = 0; part < inst.count; ++part) {
    alignas(64) Part out[LANES];
    for (int lane = 0; lane < LANES; ++lane) out[lane] = static_cast<Part>(in[lane] >> (shift * part) & mask);
    write_lanes(warp, inst.refs[part], out);
  }
}

}  // namespace

void pack(Warp& warp, const Inst& inst) {
  inst.size == 8 ? pack_as<uint64_t, uint32_t>(warp, inst) : pack_as<uint32_t, uint32_t>(warp, inst);
}

void unpack(Warp& warp, const Inst& inst) {
  inst.size == 8 ? unpack_as<uint64_t, uint32_t>(warp, inst) : unpack_as<uint32_t, uint32_t>(warp, inst);
}

// A register of 128 bits holds its low halves of all lanes, then the high ones.
void move_b128(Warp& warp, const Inst& inst) {
  uint64_t* whole = warp.at<uint64_t>(inst.refs[2]);
  for (int half = 0; half < 2; ++half) {
    uint64_t* part = warp.at<uint64_t>(inst.refs[half]);
    for (int lane = 0; lane < LANES; ++lane) {
      if (!(warp.exec >> lane & 1)) continue;
      (inst.mode ? whole[half * LANES + lane] : part[lane]) = inst.mode ? part[lane] : whole[half * LANES + lane];
    }
  }
}

void clock(Warp& warp, const Inst& inst) {
  alignas(64) uint64_t out[LANES];
  alignas(64) uint32_t narrow[LANES];
  std::fill(out, out + LANES, warp.issued);
  std::fill(narrow, narrow + LANES, static_cast<uint32_t>(warp.issued));
  inst.bits == 64 ? write_lanes(warp, inst.refs[0], out) : write_lanes(warp, inst.refs[0], narrow);
}

}  // namespace machine
