#include "fast_path.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "autograd.h"
#include "direct.h"

namespace xlnet_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

#define TYPE(type, name) const type&
using Operator = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(DIFFERENTIABLE_INPUTS(TYPE, COMMA),
                                                                    OTHER_INPUTS(TYPE, COMMA), c10::SymInt, double,
                                                                    double, bool, int64_t, bool);
#undef TYPE
constexpr Py_ssize_t ARGUMENTS = TENSORS NUMBERS(ONE, );

// The tensors of a call, null where there is none, as the caller holds them
struct Given {
#define POINTER(type, name) const Tensor* name;
  DIFFERENTIABLE_INPUTS(POINTER, )
  OTHER_INPUTS(POINTER, )
#undef POINTER
};
static_assert(sizeof(Given) == TENSORS * sizeof(Tensor*));

// Takes the arguments one after the other.
struct Reader {
  PyObject* const* next;
  bool fit = true;
  std::optional<c10::Device> device{};  // of the first tensor

  template <typename T>
  const Tensor* take() {
    PyObject* const given = *next++;
    if (given == Py_None) {
      fit = fit && std::is_same_v<T, OptionalTensor>;
      return nullptr;
    }
    if (!THPVariable_CheckExact(given) || !is_plain(THPVariable_Unpack(given))) {
      fit = false;
      return nullptr;
    }
    const Tensor& found = THPVariable_Unpack(given);
    if (!device) device = found.device();
    fit = fit && found.device() == *device;
    return &found;
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

int64_t keys_before(const Given& in) { return in.memory_key && in.memory_key->dim() == 4 ? in.memory_key->size(2) : 0; }

// Conditions that csrc/call.cpp takes for granted, because Python checks them, or has an error of its own.
bool fits(const Given& in, const Numbers& numbers) {
  const Tensor& query = *in.query;
  const auto dtype = query.scalar_type();
  const bool served = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!served || query.dim() != 4 || in.key->dim() != 4 || query.size(3) == 0) return false;
  if (in.rel_key->dim() != 3 && in.rel_key->dim() != 4) return false;
  if (!query.is_cpu() && (query.numel() == 0 || keys_before(in) + in.key->size(2) == 0)) return false;
  if (in.mask || in.dropout_state || numbers.dropout_p != 0 || !std::isfinite(numbers.scale)) return false;
  if (!in.query_positions) return true;
  return in.query_positions->scalar_type() == at::kInt || in.query_positions->scalar_type() == at::kLong;
}

// Whether rel_key has the rows that `_check_distances` of functional.py asks for.
bool has_rows(const Given& in, int64_t max_distance, bool is_window) {
  const int64_t rows = in.rel_key->size(-2), keys = in.key->size(2), whole = max_distance + keys;
  if (is_window && 1 <= rows && rows <= whole) return true;
  return (rows == whole || rows == max_distance + 1) && (rows > 0 || keys == 0);
}

// Float32Precision, as `float32_precision` of xlnet_kernels/_precision.py
int64_t float32_precision(const Tensor& query) {
  if (query.scalar_type() != at::kFloat) return IEEE;
  const auto backend = query.is_cpu() ? at::Float32Backend::MKLDNN : at::Float32Backend::CUDA;
  const auto precision = at::globalContext().float32Precision(backend, at::Float32Op::MATMUL);
  if (query.is_cpu() && precision == at::Float32Precision::BF16) return BF16;
  return precision == at::Float32Precision::TF32 ? TF32 : IEEE;
}

bool wants_gradients(const Given& in) {
  if (!at::GradMode::is_enabled()) return false;
#define WANTS(type, name) || (in.name && in.name->requires_grad())
  return false DIFFERENTIABLE_INPUTS(WANTS, );
#undef WANTS
}

std::pair<Tensor, Tensor> enter(const Entry& entry, const Given& in, const Numbers& numbers, bool needs_backward) {
  std::array<const Tensor*, TENSORS> tensors;
  std::memcpy(tensors.data(), &in, sizeof in);
  if (needs_backward) {
    Arguments arguments{{}, numbers};
    for (size_t i = 0; i < TENSORS; ++i)
      if (tensors[i] != nullptr) arguments.tensors[i] = *tensors[i];
    return attend_with_gradients(entry, arguments);
  }
  Results found = forward(entry, tensors.data(), numbers, false);
  return {std::move(found[0]), std::move(found[1])};
}

std::pair<Tensor, Tensor> dispatch(const Given& in, const Numbers& numbers, bool needs_backward) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(XLNET_KERNELS_QUOTE(XLNET_KERNELS_NAMESPACE) "::rel_attention", "")
                             .typed<Operator>();
#define OPTIONAL(type, name) (in.name ? type(*in.name) : type())
#define NUMBER(type, name) numbers.name
  auto found = op.call(DIFFERENTIABLE_INPUTS(OPTIONAL, COMMA), OTHER_INPUTS(OPTIONAL, COMMA), NUMBERS(NUMBER, COMMA),
                       needs_backward);
#undef OPTIONAL
#undef NUMBER
  return {std::move(std::get<0>(found)), std::move(std::get<1>(found))};
}

PyObject* fast_path(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == ARGUMENTS, "fast_path takes ", ARGUMENTS, " arguments, got ", count);
  if (at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing()) Py_RETURN_NONE;
  Reader reader{given};
#define TAKE(type, name) reader.take<type>()
  const Given in{DIFFERENTIABLE_INPUTS(TAKE, COMMA), OTHER_INPUTS(TAKE, COMMA)};
#undef TAKE
  PyObject* const* const numbers_given = reader.next;
  Numbers numbers{};
  numbers.max_distance = reader.integer(0);
  numbers.dropout_p = reader.number(0);
  numbers.scale = reader.number(1);
  numbers.deterministic = reader.flag(at::globalContext().deterministicAlgorithms());
  numbers.float32_precision = reader.integer(-1);
  if (!reader.fit || !fits(in, numbers)) Py_RETURN_NONE;
  if (at::autocast::is_autocast_enabled(in.query->device().type())) Py_RETURN_NONE;
  const bool is_window = numbers_given[0] != Py_None;
  if (!is_window) numbers.max_distance = keys_before(in) + in.key->size(2);
  if (numbers_given[2] == Py_None)
    numbers.scale = std::pow(static_cast<double>(in.query->size(3)), -0.5) /* as Python does */;
  if (numbers.float32_precision == -1) {
    numbers.float32_precision = float32_precision(*in.query);
    // The first such call goes through Python, because it logs which products are taken.
    static std::array<bool, 3> told{true};  // IEEE has nothing to tell
    if (in.query->is_cpu() && !std::exchange(told[numbers.float32_precision], true)) Py_RETURN_NONE;
  }
  if (!has_rows(in, numbers.max_distance, is_window)) Py_RETURN_NONE;

  std::pair<Tensor, Tensor> found;
  try {
    const pybind11::gil_scoped_release released;
    const bool needs_backward = wants_gradients(in);
    const Entry* const entry = find_entry(*in.query);
    found = entry != nullptr ? enter(*entry, in, numbers, needs_backward) : dispatch(in, numbers, needs_backward);
  } catch (const std::invalid_argument&) {  // Python has better words for it
    Py_RETURN_NONE;
  }
  return pybind11::make_tuple(
             pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(found.first))),
             pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(found.second))))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

void add_fast_path(PyObject* module) {
  static PyMethodDef methods[] = {{"fast_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(fast_path)),
                                   METH_FASTCALL, "A call of the operator, or None (csrc/fast_path/fast_path.h)."},
                                  {}};
  if (PyModule_AddFunctions(module, methods) != 0) throw pybind11::error_already_set();
}

}  // namespace xlnet_kernels
