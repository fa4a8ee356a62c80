// What a short cut reads of a list of tensors, one a rank.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "plain_tensor.h"

namespace pycomm {

// The memory of a list's tensors, which live as long as this does: another thread may change the list meanwhile.
class TensorList {
 public:
  // Of `ranks` tensors, each like `first`.
  bool read(const PlainTensors& tensors, int ranks, PyObject* object, const Flat& first) {
    if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
    tensors_ = pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(object));
    if (!tensors_) PyErr_Clear();
    const auto count = static_cast<std::size_t>(ranks);
    if (!tensors_ || static_cast<std::size_t>(PyTuple_GET_SIZE(tensors_.ptr())) != count) return false;
    flats_.resize(count);
    data_.resize(count);
    for (std::size_t r = 0; r < count; ++r) {
      Flat& flat = flats_[r];
      if (!tensors.read(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(r)), flat) || flat.dtype != first.dtype || flat.numel != first.numel)
        return false;
      data_[r] = flat.data;
    }
    return true;
  }
  bool are_apart() const {
    for (std::size_t r = 0; r < flats_.size(); ++r)
      for (std::size_t before = 0; before < r; ++before)
        if (do_overlap(flats_[r], flats_[before])) return false;
    return true;
  }
  // None of the tensors is in `flat`, but that of rank `rank`, which may be all of it.
  bool are_apart_from(const Flat& flat, int rank = -1) const {
    for (std::size_t r = 0; r < flats_.size(); ++r)
      if (do_overlap(flats_[r], flat) && (static_cast<int>(r) != rank || flats_[r].data != flat.data)) return false;
    return true;
  }
  bool are_apart_from(const TensorList& other) const {
    for (const Flat& flat : other.flats_)
      if (!are_apart_from(flat)) return false;
    return true;
  }
  void* const* data() const { return data_.data(); }
  void let_go() { tensors_ = {}; }

 private:
  std::vector<Flat> flats_;
  std::vector<void*> data_;
  pybind11::object tensors_;
};

}  // namespace pycomm
