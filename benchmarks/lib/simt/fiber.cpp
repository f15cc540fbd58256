#include "fiber.h"

#include <cstdint>
#include <cstring>

#ifdef SIMT_UCONTEXT

namespace simt {

void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

}  // namespace simt

#else

// simt_switch(keep, next): pushes the registers that a function must preserve, stores the stack pointer to *keep, and
// pops the same registers from the stack `next`.
#if defined(__x86_64__)
asm(R"(
  .text
  .hidden simt_switch
  .globl simt_switch
  .type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch, . - simt_switch
)");
constexpr size_t SAVED = 8, RETURN_ADDRESS = 6;  // words, the last keeps the stack aligned as after a call
#else
asm(R"(
  .text
  .hidden simt_switch
  .globl simt_switch
  .type simt_switch, %function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size simt_switch, . - simt_switch
)");
constexpr size_t SAVED = 20, RETURN_ADDRESS = 11;
#endif

extern "C" void simt_switch(void** keep, void* next);

namespace simt {

void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15)) - SAVED;
  std::memset(top, 0, SAVED * sizeof(void*));
  top[RETURN_ADDRESS] = reinterpret_cast<void*>(entry);
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

}  // namespace simt

#endif
