#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../shm/group.h"

namespace pycomm {

// Python functions by verb, for Transport.fast; none if the tensor type does not offer DLPack's C exchange.
pybind11::dict short_cuts(std::shared_ptr<shm::Group> group, const pybind11::object& tensor, const pybind11::object& parameter);

}  // namespace pycomm
