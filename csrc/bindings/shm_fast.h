#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../shm/group.h"

namespace pycomm {

// Python functions by verb, for Transport.fast; none if the tensor type does not offer DLPack's C exchange.
pybind11::dict short_cuts(std::shared_ptr<shm::Group> group, const pybind11::object& tensor, const pybind11::object& parameter);

// torch's own operators, at the places of ours but for PREMUL_SUM: short cuts take them from then on.
void know_torch_operators(const pybind11::tuple& operators);

}  // namespace pycomm
