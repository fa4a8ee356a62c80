// Messages that a rank reads in the memory of another (csrc/shm/direct.cpp), where it can and where it cannot. The kernel's call is
// replaced: ranks are threads here, and a sanitizer sees what is copied.
#include "shm/direct.h"
#include "shm_ranks.h"

#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

namespace {

std::atomic<int> reads{0};
// What becomes of this thread's next reads.
thread_local bool is_forbidden = false, finds_another = false;
thread_local const std::atomic<bool>* comes_after = nullptr;

}  // namespace

extern "C" ssize_t process_vm_readv(pid_t, const struct iovec* local, unsigned long locals, const struct iovec* remote, unsigned long,
                                    unsigned long) {
  ++reads;
  while (comes_after != nullptr && !*comes_after) std::this_thread::yield();
  if (is_forbidden) {
    errno = EPERM;
    return -1;
  }
  ssize_t bytes = 0;
  for (unsigned long i = 0; i < locals; ++i) {
    std::memcpy(local[i].iov_base, remote[i].iov_base, local[i].iov_len);
    bytes += static_cast<ssize_t>(local[i].iov_len);
  }
  if (finds_another) ++*static_cast<unsigned char*>(local[locals - 1].iov_base);
  return bytes;
}

namespace pycomm::shm::test {
namespace {

constexpr std::size_t kNumel = 20'000;
constexpr int kTries = 100;

void move_all(int rank, Group& world, const std::string& what) {
  std::vector<float> data = input_of(rank, kNumel), all;
  world.broadcast(data.data(), call_of(Verb::kBroadcast, kNumel, 1));
  expect(data == input_of(1, kNumel), "broadcast, " + what);
  std::vector<float> gathered(static_cast<std::size_t>(world.ranks()) * kNumel);
  world.all_gather(gathered.data(), input_of(rank, kNumel).data(), call_of(Verb::kAllGather, kNumel));
  for (int r = 0; r < world.ranks(); ++r) {
    const std::vector<float> its = input_of(r, kNumel);
    all.insert(all.end(), its.begin(), its.end());
  }
  expect(gathered == all, "all_gather, " + what);
  std::vector<std::size_t> sends, takes;  // uneven
  std::vector<float> input, expected;
  for (int r = 0; r < world.ranks(); ++r) {
    sends.push_back(kNumel + static_cast<std::size_t>(10 * rank + r));
    takes.push_back(kNumel + static_cast<std::size_t>(10 * r + rank));
    for (std::size_t i = 0; i < sends.back(); ++i) input.push_back(value(rank, i + static_cast<std::size_t>(r)));
    for (std::size_t i = 0; i < takes.back(); ++i) expected.push_back(value(r, i + static_cast<std::size_t>(rank)));
  }
  std::vector<float> output(expected.size());
  world.all_to_all(output.data(), input.data(), takes.data(), sends.data(), call_of(Verb::kAllToAll, 0));
  expect(output == expected, "all_to_all, " + what);
}

void read_directly() {
  Host host(3);
  reads = 0;
  run("direct", host, [](int rank, Group& world) {
    for (int i = 0; i < 3; ++i) move_all(rank, world, "read directly, and in trials by both ways");
  });
  const int a_broadcast = 2, a_gathering = 3 * 2, trials = 1 + kTrials * kRepeats;
  expect(reads >= trials * (a_broadcast + a_gathering), "every rank has read every other one");
}

// One rank may not read, or reads a later process of that pid: all take the other way, in this call and from then on.
void be_refused(bool& refusal_of_this_thread(), const std::string& what) {
  Host host(3);
  reads = 0;
  run(what, host, [&](int rank, Group& world) {
    refusal_of_this_thread() = rank == 2;
    for (int i = 0; i < 3; ++i) move_all(rank, world, what);
    refusal_of_this_thread() = false;
  });
  expect(reads == 2, what + ": only the first broadcast was tried");
}

// Rank 1 gives the call up before rank 0 reads: by then its buffer may hold anything, and rank 0 may not take it for the message.
// Returns whether the ranks had chosen to read directly; that is a matter of how fast each way was.
bool read_too_late() {
  Host host(2);
  std::atomic<bool> has_given_up{false};
  std::vector<float> data[] = {std::vector<float>(kNumel), std::vector<float>(kNumel)};
  int reads_before = 0, reads_after = 0;
  run("late", host, [&](int rank, Group& world) {
    const auto broadcast = [&](double timeout_s) { world.broadcast(data[rank].data(), call_of(Verb::kBroadcast, kNumel, 1, timeout_s)); };
    broadcast(0);  // by both ways
    if (rank == 0) reads_before = reads;
    broadcast(0);
    if (rank == 0) {
      reads_after = reads;
      comes_after = &has_given_up;
    }
    world.barrier(0);
    if (reads_after == reads_before) return;
    expect_throw<Timeout>("a call that was given up", [&] { broadcast(rank == 1 ? 0.02 : 0); });
    comes_after = nullptr;
    has_given_up = true;
  });
  return reads_after > reads_before;
}

}  // namespace

void test_direct() {
  read_directly();
  be_refused([]() -> bool& { return is_forbidden; }, "reading forbidden");
  be_refused([]() -> bool& { return finds_another; }, "another process");
  bool was_late = false;
  for (int i = 0; i < kTries && !was_late; ++i) was_late = read_too_late();
  expect(was_late, "direct reads are faster in one of many groups");
}

}  // namespace pycomm::shm::test
