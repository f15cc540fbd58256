#pragma once
// Shared part of the decoders of instruction families: operands become places in a warp's registers or constants.

#include <algorithm>
#include <map>
#include <set>

#include "program.h"

namespace machine {

class Decoder {
 public:
  Decoder(Module& module, Function& function);
  void run();
  static std::string opcodes();

 private:
  using Family = void (Decoder::*)();
  static const std::map<std::string, Family>& families();

  // Operands
  Ref value(const Operand& operand, int bits);  // read or written; a sink is an unread place
  Ref constant(int64_t bits_of_value, int bits);
  int bits_of(const Operand& operand) const;  // as declared; 0 for what is no register
  const Variable& variable(const std::string& name) const;
  int64_t address_of(const Variable& variable) const;
  void address(const Operand& operand, const char* space);  // appends the base to refs; sets value and extent[0]
  void values(const Operand& operand, int bits);            // appends those of a vector, or one
  uint32_t predicate_flag(const Operand& operand, Ref& ref);

  // Words of the instruction's name
  bool has(const char* word) const { return std::find(parts_.begin(), parts_.end(), word) != parts_.end(); }
  void only(std::initializer_list<const char*> known);  // unknown words end the decoding
  [[noreturn]] void unknown(const std::string& why = "") const;
  const Operand& operand(size_t index) const;
  void counts_as(const std::string& name);  // of tensor cores

  void statement(int index);
  void generic();
  void notes_registers();

  // Families; see decode.cpp, decode_memory.cpp, decode_tensor.cpp
  void decode_branch();
  void decode_leave();
  void decode_call();
  void decode_barrier();
  void decode_fence();
  void decode_setp();
  void decode_mov();
  void decode_cvta();
  void decode_shfl();
  void decode_vote();
  void decode_redux();
  void decode_nothing();
  void decode_load();
  void decode_store();
  void decode_atomic();
  void decode_cp();
  void decode_mbarrier();
  void decode_prefetch();
  void decode_bulk();
  void decode_tensor_map();
  void decode_mma();
  void decode_matrix();
  void decode_wgmma();
  void memory_words(std::initializer_list<const char*> more);

  Module& module_;
  Function& function_;
  Program& program_;
  Flow flow_;
  std::map<std::pair<int, int64_t>, Ref> constants_;
  std::map<Ref, int> tracked_;  // indices of registers that may be undefined
  const Statement* at_ = nullptr;
  Inst* inst_ = nullptr;
  std::vector<std::string> parts_;
};

inline std::vector<std::string> split(const std::string& name) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace machine
