// The shared-memory protocol under the sanitizers. Prints what is wrong; returns 0 if nothing is.
#include "shm_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

namespace pycomm::shm::test {

int failures = 0, checks = 0;
thread_local bool is_interrupted = false;

void expect(bool holds, const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
  std::fflush(stdout);
}

// `cat` of a pipe that nobody writes into: it ends with the test, however that ends. A fork would burn a core: what a
// sanitizer does in the child of a fork takes seconds.
Life::Life() {
  static const int read_end = [] {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    return ends[0];
  }();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, read_end, 0);
  char name[] = "cat";
  char* const arguments[] = {name, nullptr};
  if (posix_spawnp(&pid_, name, &actions, nullptr, arguments, environ) != 0) std::abort();
  posix_spawn_file_actions_destroy(&actions);
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
}

Life::~Life() {
  kill();
  close(pidfd_);
}

void Life::kill() {
  if (!is_alive_) return;
  is_alive_ = false;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

Host::Host(int ranks_, int ranks_per_core_) : ranks(ranks_), ranks_per_core(ranks_per_core_), fd(create_memory(ranks_)) {
  check_memory(fd, ranks);
  for (int r = 0; r < ranks; ++r) {
    lives.push_back(std::make_unique<Life>());
    heaps.push_back(std::make_shared<Heaps>(fd, ranks, r));
  }
}

Host::~Host() { close(fd); }

std::unique_ptr<Group> Host::group(int rank, std::vector<int> members, std::uint64_t area, double timeout_s) const {
  Group::Setup setup{};
  setup.fd = fd, setup.host_ranks = ranks, setup.area = area;
  setup.ranks = static_cast<int>(members.size());
  for (int i = 0; i < setup.ranks; ++i) {
    const bool is_self = members[i] == rank;
    if (is_self) setup.rank = i;
    setup.pidfds.push_back(is_self ? -1 : lives[members[i]]->pidfd());
    setup.pids.push_back(lives[members[i]]->pid());
    setup.members = setup.members * 131 + static_cast<std::uint64_t>(members[i]) + 1;
  }
  setup.host_rank_of = std::move(members);
  setup.name = "test";
  setup.timeout_ns = static_cast<std::int64_t>(timeout_s * 1e9);
  setup.ranks_per_core = ranks_per_core;
  setup.heaps = heaps[rank];
  setup.choices = choices;
  setup.measure_every = measure_every, setup.choose_every = choose_every;
  setup.about_to_block = [] {};
  setup.check_interrupt = [] {
    if (is_interrupted) throw Interrupt("interrupted");
  };
  return std::make_unique<Group>(std::move(setup));
}

void run(const std::string& name, Host& host, const Body& body) {
  std::vector<int> all(host.ranks);
  std::iota(all.begin(), all.end(), 0);
  const std::uint64_t area = host.heaps[0]->take_area();
  std::vector<std::unique_ptr<Group>> worlds(host.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < host.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        worlds[rank] = host.group(rank, all, area);
        body(rank, *worlds[rank]);
      } catch (const std::exception& error) {
        expect(false, name + ", rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

namespace {

// Inputs repeat, and a rank's is another one's from some element on: so all are worked out once, not in every check.
constexpr std::size_t kPeriod = 97;

std::size_t value(int rank, std::size_t i) { return (static_cast<std::size_t>(rank) * 31 + i * 7) % kPeriod; }

std::vector<float> repeated(int ranks) {
  std::vector<float> values(kMostNumel + kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    for (int rank = 0; rank < ranks; ++rank) values[i] += static_cast<float>(value(rank, i));
  }
  for (std::size_t done = kPeriod; done < values.size(); done *= 2) {
    std::memcpy(values.data() + done, values.data(), std::min(done, values.size() - done) * sizeof(float));
  }
  return values;
}

}  // namespace

const float* sums_of(int ranks, std::size_t start) {
  static const std::vector<float> all[] = {repeated(1), repeated(2), repeated(3), repeated(4), repeated(5)};
  return all[ranks - 1].data() + start % kPeriod;
}

const float* values_of(int rank, std::size_t start) {
  std::size_t first = 0;
  while (value(0, first) != value(rank, 0)) ++first;
  return sums_of(1, first + start);
}

Call call_of(Verb verb, std::size_t numel, int root, double timeout_s) {
  Call call{verb};
  call.dtype = DType::kFloat32;
  call.numel = numel;
  call.root = root;
  call.timeout_ns = static_cast<std::int64_t>(timeout_s * 1e9);
  return call;
}

}  // namespace pycomm::shm::test

int main(int count, char** arguments) {
  using namespace pycomm::shm::test;
  if (count == 2) {
    test_memory(arguments[1]);
  } else {
    test_collectives();
    test_messages();
    test_failures();
    test_groups();
    test_direct();
    test_started();
    test_streams();
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
