// Looks at thousands of tensors in one call. Python takes some 65 ns for each attribute of each
// tensor (4,000 small parameters: 4 ms a step), this some 8 ns for all of them. The meaning of every
// function is given by its Python twin in watch.py.

#include <torch/csrc/autograd/python_variable.h>
#include <pybind11/numpy.h>
#include <torch/extension.h>

#include <cstdint>

namespace {

std::int64_t kind_of(const at::Tensor& tensor) {
  std::int64_t kind = static_cast<std::int64_t>(tensor.scalar_type());
  kind = kind * 2 + (tensor.layout() == at::kStrided && tensor.is_contiguous());
  kind = kind * 64 + static_cast<std::int64_t>(tensor.device().type());
  kind = kind * 256 + tensor.device().index() + 1;
  // a shape of as many elements is told apart by its digest
  std::uint32_t digest = 0;
  for (const std::int64_t size : tensor.sizes()) {
    digest = (digest ^ static_cast<std::uint32_t>(size)) * 0x9E3779B1u + 1;
  }
  return kind << 32 | digest;
}

// addresses, numels and kinds: int64 arrays with an entry for each tensor of the list.
int look(const py::list& tensors, py::array_t<std::int64_t> addresses,
         py::array_t<std::int64_t> numels, py::array_t<std::int64_t> kinds) {
  auto address = addresses.mutable_unchecked<1>();
  auto numel = numels.mutable_unchecked<1>();
  auto kind = kinds.mutable_unchecked<1>();
  const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
  TORCH_CHECK(count == address.shape(0) && count == numel.shape(0) && count == kind.shape(0));
  int found = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.ptr(), i));
    const bool strided = tensor.layout() == at::kStrided;
    const auto now = strided ? reinterpret_cast<std::int64_t>(tensor.const_data_ptr()) : 0;
    const std::int64_t kind_now = kind_of(tensor);
    if (tensor.numel() != numel(i) || kind_now != kind(i)) found = 2;
    if (now != address(i) && found == 0) found = 1;
    address(i) = now;
    numel(i) = tensor.numel();
    kind(i) = kind_now;
  }
  return found;
}

py::list grads(const py::list& params) {
  const Py_ssize_t count = PyList_GET_SIZE(params.ptr());
  py::list result(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const at::Tensor& grad = THPVariable_Unpack(PyList_GET_ITEM(params.ptr(), i)).grad();
    // THPVariable_Wrap gives None for a tensor that is not defined
    PyList_SET_ITEM(result.ptr(), i, THPVariable_Wrap(grad));
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("look", &look);
  module.def("grads", &grads);
}
