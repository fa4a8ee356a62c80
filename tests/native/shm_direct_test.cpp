// Messages that a rank reads in the memory of another (csrc/shm/direct.cpp), where it can and where it cannot. The kernel's call is
// replaced: ranks are threads here, and a sanitizer sees what is copied.
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

void move_both(int rank, Group& world, const std::string& what) {
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
}

void read_directly() {
  Host host(3);
  reads = 0;
  run("direct", host, [](int rank, Group& world) { move_both(rank, world, "read directly"); });
  expect(reads == 2 + 3 * 2, "every rank has read every other one");
}

// One rank may not read, or reads a later process of that pid: all take the other way, in this call and from then on.
void be_refused(bool& refusal_of_this_thread(), const std::string& what) {
  Host host(3);
  reads = 0;
  run(what, host, [&](int rank, Group& world) {
    refusal_of_this_thread() = rank == 2;
    for (int i = 0; i < 3; ++i) move_both(rank, world, what);
    refusal_of_this_thread() = false;
  });
  expect(reads == 2, what + ": only the first broadcast was tried");
}

// Rank 1 gives the call up before rank 0 reads: by then its buffer may hold anything, and rank 0 may not take it for the message.
void read_too_late() {
  Host host(2);
  std::atomic<bool> has_given_up{false};
  std::vector<float> data[] = {std::vector<float>(kNumel), std::vector<float>(kNumel)};
  run("late", host, [&](int rank, Group& world) {
    if (rank == 0) comes_after = &has_given_up;
    const auto late = call_of(Verb::kBroadcast, kNumel, 1, rank == 1 ? 0.02 : 0);
    expect_throw<Timeout>("a call that was given up", [&] { world.broadcast(data[rank].data(), late); });
    comes_after = nullptr;
    has_given_up = true;
  });
}

}  // namespace

void test_direct() {
  read_directly();
  be_refused([]() -> bool& { return is_forbidden; }, "reading forbidden");
  be_refused([]() -> bool& { return finds_another; }, "another process");
  read_too_late();
}

}  // namespace pycomm::shm::test
