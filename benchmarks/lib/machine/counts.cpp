// Counts of a launch, as text of `field value` and `field key value`; see Counts in machine.py.

#include <sstream>

#include "program.h"

namespace machine {
namespace {

constexpr const char* CLASS_NAMES[] = {"product", "shuffle", "special", "selection", "float", "integer", "conversion",
                                       "move",    "global",  "shared",  "local",     "copy",  "control", "barrier"};

}  // namespace

std::string report(const Launch& launch) {
  const Program& program = *launch.program;
  std::vector<uint64_t> classes(std::size(CLASS_NAMES)), tensor(program.tensor_names.size());
  std::map<int, uint64_t> lines;
  uint64_t cycles = 0;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const Inst& inst = program.code[i];
    classes[static_cast<size_t>(inst.kind)] += launch.issued[i];
    if (inst.tensor_name >= 0) {
      tensor[inst.tensor_name] += launch.issued[i];
      cycles += launch.issued[i] * program.tensor_cycles[inst.tensor_name];
    }
    if (launch.issued[i] && i < launch.function->statements.size())
      lines[launch.function->statements[i].line] += launch.issued[i];
  }
  std::ostringstream out;
  for (size_t i = 0; i < classes.size(); ++i)
    if (classes[i]) out << "instructions " << CLASS_NAMES[i] << ' ' << classes[i] << '\n';
  for (size_t i = 0; i < tensor.size(); ++i)
    if (tensor[i]) out << "tensor " << program.tensor_names[i] << ' ' << tensor[i] << '\n';
  for (const auto& [line, count] : lines) out << "lines " << line << ' ' << count << '\n';
  const Totals& of = launch.totals;
  out << "tensor_cycles " << cycles << "\nspecial_operations " << of.special_operations << "\nshared_wavefronts "
      << of.shared_wavefronts << "\nshared_conflicts " << of.shared_conflicts << "\nglobal_sectors_read "
      << of.global_sectors_read << "\nglobal_sectors_written " << of.global_sectors_written << "\natomic_sectors "
      << of.atomic_sectors << "\nbarriers " << of.barriers << "\nlocal_bytes " << of.local_bytes << '\n';
  return out.str();
}

}  // namespace machine
