#include "batch_kinds.h"

#include <memory>
#include <string>

#include "handle.h"

namespace py = pybind11;

namespace pycomm {
namespace {

constexpr const char* kName = "pycomm.BatchKinds";
constexpr const char* kFieldNames[BatchKinds::kFields] = {"op", "tensor", "peer", "group", "tag", "group_peer"};

// They live as long as the process does, as pycomm's modules do.
py::capsule batch_kinds(const py::type& handle, const py::type& message, const py::object& isend, const py::object& irecv) {
  if (!is_handle_type(handle.ptr())) throw py::type_error("expected a class of handles");
  const auto as_type = [](const py::type& type) { return reinterpret_cast<PyTypeObject*>(Py_NewRef(type.ptr())); };
  auto kinds = std::make_unique<BatchKinds>(BatchKinds{as_type(handle), as_type(message), Py_NewRef(isend.ptr()), Py_NewRef(irecv.ptr()), {}});
  for (int i = 0; i < BatchKinds::kFields; ++i) {
    kinds->places[i] = place_of_slot(kinds->message, py::str(kFieldNames[i]).ptr());
    if (kinds->places[i] == 0) throw py::type_error(std::string("expected a slot: ") + kFieldNames[i]);
  }
  return py::capsule(kinds.release(), kName);
}

}  // namespace

const BatchKinds* BatchKinds::of(PyObject* capsule) {
  return PyCapsule_IsValid(capsule, kName) ? static_cast<const BatchKinds*>(PyCapsule_GetPointer(capsule, kName)) : nullptr;
}

void bind_batch_kinds(py::module_& m) {
  m.def("batch_kinds", &batch_kinds, py::arg("handle"), py::arg("message"), py::arg("isend"), py::arg("irecv"));
}

}  // namespace pycomm
