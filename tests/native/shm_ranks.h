// Ranks as threads of one process, on one segment: what the native tests of csrc/shm run on. A sanitizer sees only one
// process, so this is how it gets to see races between ranks.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shm/errors.h"
#include "shm/group.h"

namespace pycomm::shm::test {

extern int failures, checks;  // of the whole program; counted under a lock

void expect(bool holds, const std::string& what);

// Runs `body`, which must throw E; returns what it said, for a look at the words.
template <class E, class Body>
std::string expect_throw(const std::string& what, Body body) {
  try {
    body();
  } catch (const E& error) {
    expect(true, what);
    return error.what();
  } catch (const std::exception& error) {
    expect(false, what + ": threw another error: " + error.what());
    return "";
  }
  expect(false, what + ": threw nothing");
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A process that stands for a rank's: it lives until kill(). A rank that is a thread cannot die, but its process can.
class Life {
 public:
  Life();
  ~Life();
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;
  void kill();
  int pidfd() const { return pidfd_; }
  int pid() const { return pid_; }

 private:
  int pid_, pidfd_ = -1;
  bool is_alive_ = true;
};

// What the ranks of a host share. Lives longer than its groups.
struct Host {
  explicit Host(int ranks, int ranks_per_core = 1);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // Rank `rank`'s member of the group of `members` in area `area`; blocks until all members have come.
  std::unique_ptr<Group> group(int rank, std::vector<int> members, std::uint64_t area, double timeout_s = 600) const;

  const int ranks, ranks_per_core, fd;
  Group::Choices choices;  // of its groups
  std::size_t measure_every = Group::Setup{}.measure_every;
  unsigned choose_every = Group::Setup{}.choose_every;
  std::vector<std::unique_ptr<Life>> lives;
  std::vector<std::shared_ptr<Heaps>> heaps;
};

// Runs `body(rank, world)` on a thread a rank; an exception that leaves it is a failure. The groups live until the last
// thread has ended, as those of processes do that die without a close.
using Body = std::function<void(int rank, Group& world)>;
void run(const std::string& name, Host& host, const Body& body);

// While this is set, the thread's next long wait ends with Interrupt, as Ctrl-C ends a Python thread's.
struct Interrupt : std::runtime_error {
  using std::runtime_error::runtime_error;
};
extern thread_local bool is_interrupted;

// Rank `rank`'s input, and the sums of the first `ranks` ranks' inputs, from element `start` on: (kMostNumel,). Small
// integers, so that every sum is exact.
constexpr std::size_t kMostNumel = 1'100'000;
const float* values_of(int rank, std::size_t start = 0);
const float* sums_of(int ranks, std::size_t start = 0);
inline std::vector<float> input_of(int rank, std::size_t numel) { return {values_of(rank), values_of(rank) + numel}; }
// Whether two arrays have the same bytes; a sanitizer looks at each as a whole.
inline bool same(const float* left, const float* right, std::size_t numel) {
  return numel == 0 || std::memcmp(left, right, numel * sizeof(float)) == 0;
}
inline bool same(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() && same(left.data(), right.data(), left.size());
}
Call call_of(Verb verb, std::size_t numel, int root = 0, double timeout_s = 0);
// Of so many numbers each.
inline Blocks rows_at(const float* first, std::size_t numel) { return {first, numel * sizeof(float)}; }

void test_collectives();
void test_messages();
void test_failures();
void test_groups();
void test_direct();
void test_started();
void test_streams();
void test_memory(const char* path_on_a_full_file_system);

}  // namespace pycomm::shm::test
