// Groups made from groups, and their end; and memory that is not to be had.
#include "shm_ranks.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

namespace pycomm::shm::test {
namespace {

// Ranks 0 and 2, or all three, of a world of three, again and again; each group is used and left.
void make_and_leave(int rank, Group& world, const Host& host) {
  std::uint64_t key = 0;
  for (int i = 0; i < 20; ++i) {
    const std::vector<int> members = i % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 2, 0};
    ++key;
    if (i % 2 == 0 && rank == 1) continue;
    const std::uint64_t area = world.area_of_child(members[0], key);
    const std::unique_ptr<Group> group = host.group(rank, members, area);
    std::vector<float> large(i < 4 ? 50'000 : 3, 1.0f);
    group->all_reduce(large.data(), large.data(), call_of(Verb::kAllReduce, large.size()));
    expect(large == std::vector<float>(large.size(), static_cast<float>(members.size())), "a sum in a group of a group");
    group->close();
    expect_throw<Misuse>("a call after close", [&] { group->barrier({Verb::kBarrier}); });
  }
  world.barrier({Verb::kBarrier});
}

void leave_early() {
  Host host(2);
  run("a rank that left", host, [](int rank, Group& world) {
    if (rank == 1) return world.close();
    const std::string text = expect_throw<PeerLost>("a rank that left", [&] { world.barrier({Verb::kBarrier}); });
    expect(contains(text, "closed "), "what it did: " + text);
  });
}

void mean_different_groups() {
  Host host(3);
  run("members", host, [&](int rank, Group&) {
    if (rank == 2) return;
    // Rank 0 means {0, 1}; rank 1 means {2, 1}.
    expect_throw<Mismatch>("different members", [&] { host.group(rank, {rank == 0 ? 0 : 2, 1}, 20); });
  });
}

// A shared heap: blocks do not touch, come back, and carry what other ranks see.
void allocate() {
  Host host(2);
  Heaps& heaps = *host.heaps[0];
  std::vector<void*> blocks;
  for (const std::size_t bytes : {1, 64, 100, 5000, 3 << 20, 10, 1 << 20}) {
    blocks.push_back(heaps.allocate(bytes));
    std::memset(blocks.back(), static_cast<int>(blocks.size()), bytes);
    expect(reinterpret_cast<std::uintptr_t>(blocks.back()) % kLine == 0, "a block is aligned");
    const unsigned char* seen = host.heaps[1]->address(0, heaps.place(blocks.back(), bytes), bytes);
    expect(seen[0] == blocks.size() && seen[bytes - 1] == blocks.size(), "another rank sees it");
  }
  for (void* block : blocks) heaps.free(block);
  expect(heaps.allocate(3 << 20) <= blocks.back(), "freed memory is used again");
  expect_throw<Broken>("a place outside", [&] { host.heaps[1]->address(0, kHeapBytes + 1, 8); });
  expect_throw<Broken>("an end outside", [&] { host.heaps[1]->address(0, kHeapBytes - 3, 8); });
  expect_throw<Broken>("no place", [&] { host.heaps[1]->address(0, 0, 8); });
}

}  // namespace

void test_groups() {
  {
    Host host(3);
    run("groups", host, [&](int rank, Group& world) { make_and_leave(rank, world, host); });
  }
  leave_early();
  mean_different_groups();
  allocate();
}

// On a file system that is full, memory is refused by an error that says how much was needed, and never by SIGBUS.
void test_memory(const char* path) {
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  expect(fd >= 0 && ftruncate(fd, 64 << 20) == 0, "a sparse file, larger than its file system");
  Mapping mapping(fd, 0, 64 << 20);
  mapping.populate(0, 64 << 10, false);
  std::memset(mapping.data(), 1, 64 << 10);
  const std::string text = expect_throw<Broken>("a full file system", [&] { mapping.populate(0, 8 << 20, true); });
  expect(contains(text, "could not allocate 8192 KiB"), "it says how much: " + text);
  close(fd);
}

}  // namespace pycomm::shm::test
