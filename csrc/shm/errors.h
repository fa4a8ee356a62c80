// What a shared-memory call throws. The binding turns each into the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace pycomm::shm {

struct PeerLost : std::runtime_error {
  PeerLost(const std::string& what, int rank_) : std::runtime_error(what), rank(rank_) {}
  int rank;
};
struct Timeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Broken : std::runtime_error {  // no memory, a system call that failed, a group closed or used by two threads
  using std::runtime_error::runtime_error;
};

}  // namespace pycomm::shm
