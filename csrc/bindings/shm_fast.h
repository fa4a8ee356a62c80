#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../shm/group.h"

namespace pycomm {

// Python functions by verb, for Transport.fast; none if the tensor type does not offer DLPack's C exchange. Users' messages have tags up to `last_tag`.
pybind11::dict short_cuts(std::shared_ptr<shm::Group> group, const pybind11::object& tensor, const pybind11::object& parameter, std::int64_t last_tag);

}  // namespace pycomm
