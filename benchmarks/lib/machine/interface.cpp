// Functions that Python calls; see machine.py for the other side.

#include <cstdio>

#include "program.h"

namespace {

struct FaultReport {
  char kernel[1024], source_file[1024], kind[64], message[1024];
  int ptx_line, source_line;
  uint32_t block[3];
  int warp, lane;
};

template <size_t N>
void put(char (&into)[N], const std::string& text) {
  std::snprintf(into, N, "%s", text.c_str());
}

void describe(const machine::Launch& launch, const machine::Fault& fault, FaultReport& into) {
  put(into.kind, fault.kind);
  put(into.message, fault.message);
  put(into.kernel, launch.function->name);
  into.warp = into.lane = -1;
  if (!launch.blamed) return;
  const machine::Warp& warp = *launch.blamed;
  std::copy(warp.block->index, warp.block->index + 3, into.block);
  into.warp = warp.index;
  into.lane = fault.lane;
  const auto& statements = launch.function->statements;
  if (static_cast<size_t>(warp.at_instruction) >= statements.size()) return;
  const machine::Statement& statement = statements[warp.at_instruction];
  into.ptx_line = statement.line;
  into.source_line = statement.source_line;
  const auto file = launch.module->files.find(statement.file);
  if (file != launch.module->files.end()) put(into.source_file, file->second);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* machine_load(const char* text, int architecture, FaultReport* error) {
  try {
    std::unique_ptr<machine::Module> module = machine::parse(text, architecture);
    for (auto& function : module->functions) {
      machine::decode(*module, *function);
      module->entry_names += function->name + "\n";
    }
    return module.release();
  } catch (const machine::Unknown& unknown) {
    put(error->kind, "unknown");
    put(error->source_file, unknown.name);
    put(error->message, unknown.message);
    error->ptx_line = unknown.line;
  } catch (const machine::Malformed& malformed) {
    put(error->kind, "malformed");
    put(error->message, malformed.message);
  } catch (const std::exception& other) {
    put(error->kind, "malformed");
    put(error->message, other.what());
  }
  return nullptr;
}

const char* machine_opcodes() {
  static const std::string names = machine::opcodes();
  return names.c_str();
}

void machine_unload(void* module) { delete static_cast<machine::Module*>(module); }

const char* machine_entries(void* module) { return static_cast<machine::Module*>(module)->entry_names.c_str(); }

const char* machine_counts(void* module) { return static_cast<machine::Module*>(module)->counts.c_str(); }

int machine_launch(void* handle, const machine::LaunchRequest* request, FaultReport* error) {
  auto* module = static_cast<machine::Module*>(handle);
  machine::Launch launch{};
  launch.module = module;
  launch.request = request;
  launch.architecture = module->architecture;
  for (auto& function : module->functions)
    if (function->name == request->entry) launch.function = function.get();
  if (!launch.function) {
    put(error->kind, "launch");
    put(error->message, std::string("no kernel is named ") + request->entry);
    return 1;
  }
  try {
    machine::launch(launch);
  } catch (const machine::Fault& fault) {
    describe(launch, fault, *error);
    return 1;
  }
  module->counts = machine::report(launch);
  return 0;
}
}
