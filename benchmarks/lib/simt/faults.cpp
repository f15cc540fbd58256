#include "faults.h"

#include <pthread.h>
#include <ucontext.h>

namespace simt {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int COUNT = sizeof(SIGNALS) / sizeof(SIGNALS[0]);

struct sigaction before[COUNT];
pthread_t owner;
void (*leave_kernel)();
Fault last;

const char* access(void* context) {
#if defined(__x86_64__) && defined(__linux__)
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "writes" : "reads";
#else
  static_cast<void>(context);
  return "reads or writes";
#endif
}

void restore() {
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (pthread_equal(pthread_self(), owner)) {
    if (signal == SIGFPE) {
      last.action = "divides an integer by zero";
    } else if (signal == SIGILL || signal == SIGTRAP) {
      last.action = "does what C++ leaves undefined";
    } else if (info->si_code == SI_KERNEL) {  // the processor does not say which
      last.action = "reads or writes a misaligned vector or an impossible address";
    } else {
      last = {access(context), true, static_cast<const char*>(info->si_addr)};
    }
    leave_kernel();
    last = {};
  }
  restore();  // not ours: it traps again
}

}  // namespace

Fault take_fault() {
  const Fault fault = last;
  last = {};
  return fault;
}

FaultHandler::FaultHandler(void (*leave)()) : stack(64 << 10) {
  owner = pthread_self();
  leave_kernel = leave;
  stack_t ours{};
  ours.ss_sp = stack.data();
  ours.ss_size = stack.size();
  sigaltstack(&ours, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // it may not return
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &before[i]);
}

FaultHandler::~FaultHandler() {
  restore();
  sigaltstack(&stack_before, nullptr);
}

}  // namespace simt
