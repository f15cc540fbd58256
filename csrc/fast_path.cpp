#include "fast_path.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cmath>
#include <cstdlib>
#include <tuple>

#include "call.h"

namespace xlnet_kernels {
namespace {

#define TYPE(type, name) const type&
using Operator = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(DIFFERENTIABLE_INPUTS(TYPE, COMMA),
                                                                    OTHER_INPUTS(TYPE, COMMA), c10::SymInt, double,
                                                                    double, bool, bool);
#define ONE(type, name) +1
constexpr Py_ssize_t TENSORS = DIFFERENTIABLE_INPUTS(ONE, ) OTHER_INPUTS(ONE, ), ARGUMENTS = TENSORS + 4;
#undef ONE

c10::DispatchKeySet usual_keys(c10::DispatchKey device, c10::BackendComponent backend) {
  return c10::DispatchKeySet(device) | c10::getAutogradRelatedKeySetFromBackend(backend) |
         c10::getAutocastRelatedKeySetFromBackend(backend);
}

// On the CPU or a GPU, and no transform, mode or view of torch's has put more into it than autograd.
bool is_plain(const Tensor& t) {
  static const auto cpu = usual_keys(c10::DispatchKey::CPU, c10::BackendComponent::CPUBit);
  static const auto cuda = usual_keys(c10::DispatchKey::CUDA, c10::BackendComponent::CUDABit);
  return (t.key_set() | cpu) == cpu || (t.key_set() | cuda) == cuda;
}

// Takes the arguments one after the other.
struct Arguments {
  PyObject* const* next;
  bool fit = true;
  std::optional<c10::Device> device{};  // of the first tensor

  OptionalTensor optional() {
    PyObject* const given = *next++;
    if (given == Py_None) return {};
    if (!THPVariable_CheckExact(given) || !is_plain(THPVariable_Unpack(given))) {
      fit = false;
      return {};
    }
    const Tensor& found = THPVariable_Unpack(given);
    if (!device) device = found.device();
    fit = fit && found.device() == *device;
    return found;
  }

  template <typename T>
  T take() {
    OptionalTensor found = optional();
    if constexpr (std::is_same_v<T, OptionalTensor>) {
      return found;
    } else {
      fit = fit && found;
      return fit ? *found : Tensor();
    }
  }

  // `missing` for None
  int64_t integer(int64_t missing) {
    PyObject* const given = *next++;
    if (given == Py_None) return missing;
    int overflows = 0;
    const int64_t found = PyLong_CheckExact(given) ? PyLong_AsLongLongAndOverflow(given, &overflows) : 0;
    fit = fit && PyLong_CheckExact(given) && overflows == 0 && std::abs(found) < int64_t{1} << 30;  // as call.cpp asks
    return found;
  }

  double number(double missing) {
    PyObject* const given = *next++;
    if (given == Py_None) return missing;
    fit = fit && PyFloat_CheckExact(given);
    return PyFloat_CheckExact(given) ? PyFloat_AS_DOUBLE(given) : 0.0;
  }

  bool flag(bool missing) {
    PyObject* const given = *next++;
    if (given == Py_None) return missing;
    fit = fit && PyBool_Check(given);
    return given == Py_True;
  }
};

int64_t keys_before(const Inputs& in) {
  return in.memory_key && in.memory_key->dim() == 4 ? in.memory_key->size(2) : 0;
}

// What csrc/call.cpp takes for granted, as Python has looked at it, or would word in its own way.
bool fits(const Inputs& in) {
  const auto dtype = in.query.scalar_type();
  const bool served = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!served || in.query.dim() != 4 || in.key.dim() != 4 || in.query.size(3) == 0) return false;
  if (in.rel_key.dim() != 3 && in.rel_key.dim() != 4) return false;
  if (!in.query.is_cpu() && (in.query.numel() == 0 || keys_before(in) + in.key.size(2) == 0)) return false;
  if (in.mask || in.dropout_state || in.dropout_p != 0 || !std::isfinite(in.scale)) return false;
  if (!in.query_positions) return true;
  return in.query_positions->scalar_type() == at::kInt || in.query_positions->scalar_type() == at::kLong;
}

// Whether rel_key has the rows that `_check_distances` of functional.py asks for.
bool has_rows(const Inputs& in, bool is_window) {
  const int64_t rows = in.rel_key.size(-2), keys = in.key.size(2), whole = in.max_distance + keys;
  if (is_window && 1 <= rows && rows <= whole) return true;
  return (rows == whole || rows == in.max_distance + 1) && (rows > 0 || keys == 0);
}

bool wants_gradients(const Inputs& in) {
  if (!at::GradMode::is_enabled()) return false;
  const auto wants = [](const OptionalTensor& t) { return t && t->requires_grad(); };
#define WANTS(type, name) || wants(in.name)
  return false DIFFERENTIABLE_INPUTS(WANTS, );
#undef WANTS
}

PyObject* fast_path(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == ARGUMENTS, "fast_path takes ", ARGUMENTS, " arguments, got ", count);
  if (at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing()) Py_RETURN_NONE;
  Arguments arguments{given};
#define TAKE(type, name) arguments.take<type>()
  Inputs in{DIFFERENTIABLE_INPUTS(TAKE, COMMA), OTHER_INPUTS(TAKE, COMMA)};
#undef TAKE
  const bool is_window = *arguments.next != Py_None;
  in.max_distance = arguments.integer(0);
  in.dropout_p = arguments.number(0);
  in.scale = arguments.number(1);
  const bool has_scale = given[ARGUMENTS - 2] != Py_None;
  in.deterministic = arguments.flag(at::globalContext().deterministicAlgorithms());
  if (!arguments.fit || !fits(in)) Py_RETURN_NONE;
  if (at::autocast::is_autocast_enabled(in.query.device().type())) Py_RETURN_NONE;
  if (!is_window) in.max_distance = keys_before(in) + in.key.size(2);
  if (!has_scale) in.scale = std::pow(static_cast<double>(in.query.size(3)), -0.5) /* as Python does */;
  if (!has_rows(in, is_window)) Py_RETURN_NONE;

  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(XLNET_KERNELS_QUOTE(XLNET_KERNELS_NAMESPACE) "::rel_attention", "")
                             .typed<Operator>();
  Tensor out, lse;
  try {
    const pybind11::gil_scoped_release released;
#define GIVE(type, name) in.name
    std::tie(out, lse, std::ignore, std::ignore, std::ignore) =
        op.call(DIFFERENTIABLE_INPUTS(GIVE, COMMA), OTHER_INPUTS(GIVE, COMMA), in.max_distance, in.dropout_p, in.scale,
                in.deterministic, wants_gradients(in));
#undef GIVE
  } catch (const c10::ValueError&) {  // Python has better words for it
    Py_RETURN_NONE;
  }
  return pybind11::make_tuple(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(out))),
                              pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(lse))))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

void add_fast_path(PyObject* module) {
  static PyMethodDef methods[] = {{"fast_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fast_path)),
                                   METH_FASTCALL, "A call of the operator, or None (csrc/fast_path.h)."},
                                  {}};
  if (PyModule_AddFunctions(module, methods) != 0) throw pybind11::error_already_set();
}

}  // namespace xlnet_kernels
