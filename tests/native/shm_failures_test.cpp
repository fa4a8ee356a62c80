// What breaks: a rank that dies at any call, time that runs out, ranks that disagree, an interrupt, two threads in one
// group. Every survivor raises, and goes on in a new group.
#include "shm_ranks.h"

#include <time.h>

#include <atomic>
#include <functional>
#include <thread>

namespace pycomm::shm::test {
namespace {

void nap_ms(long ms) {
  const struct timespec nap{ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&nap, nullptr);
}

// One call of each verb, small and large, in an order that all ranks share.
constexpr int kCalls = 18;
void call(Group& group, int which) {
  const std::size_t n = static_cast<std::size_t>(group.ranks()), numel = which % 2 == 0 ? 3 : 60'000;
  std::vector<float> input(n * numel, 1.0f), output(n * numel);
  std::vector<void*> blocks;
  for (std::size_t r = 0; r < n; ++r) blocks.push_back(output.data() + r * numel);
  std::vector<std::size_t> splits(n, numel);
  switch (which / 2) {
    case 0: return group.barrier({Verb::kBarrier});
    case 1: return group.all_reduce(output.data(), input.data(), call_of(Verb::kAllReduce, numel));
    case 2: return group.reduce(output.data(), input.data(), call_of(Verb::kReduce, numel));
    case 3: return group.reduce_scatter(output.data(), rows_at(input.data(), numel), call_of(Verb::kReduceScatter, numel));
    case 4: return group.broadcast(output.data(), call_of(Verb::kBroadcast, numel));
    case 5: return group.all_gather(rows_at(output.data(), numel), input.data(), call_of(Verb::kAllGather, numel));
    case 6: return group.gather(blocks.data(), input.data(), call_of(Verb::kGather, numel));
    case 7: return group.scatter(input.data(), blocks.data(), call_of(Verb::kScatter, numel));
    default: return group.all_to_all(output.data(), input.data(), splits.data(), splits.data(), call_of(Verb::kAllToAll, 0));
  }
}

// Rank 1 makes `which` calls and dies; every survivor raises at the next one that needs it, and reduces without it.
void die_after(int which) {
  Host host(3);
  const std::string name = "death after call " + std::to_string(which);
  const std::uint64_t next = host.heaps[0]->take_area() + 10;
  run(name, host, [&](int rank, Group& world) {
    if (rank == 1) {
      for (int i = 0; i < which; ++i) call(world, i);
      if (which % 3 == 0) nap_ms(2);  // the others sleep already
      return host.lives[1]->kill();
    }
    const std::string text = expect_throw<PeerLost>(name, [&] {
      for (int i = 0; i <= which; ++i) call(world, i % kCalls);
      for (;;) world.barrier({Verb::kBarrier});  // if rank 1's part was there already
    });
    expect(contains(text, "lost 1 " + std::to_string(host.lives[1]->pid()) + " 9"), name + " names who: " + text);
    expect_throw<PeerLost>(name + ", later", [&] { world.barrier({Verb::kBarrier}); });
    const std::unique_ptr<Group> rest = host.group(rank, {0, 2}, next);
    float one = 1;
    rest->all_reduce(&one, &one, call_of(Verb::kAllReduce, 1));
    expect(one == 2, name + ": the survivors reduce");
  });
}

void run_out_of_time() {
  Host host(3);
  std::atomic<bool> is_out{false};
  run("timeout", host, [&](int rank, Group& world) {
    while (rank == 2 && !is_out) nap_ms(1);  // comes when it is too late, however busy the machine is
    const auto late = [&] { world.all_reduce(nullptr, nullptr, call_of(Verb::kAllReduce, 0, 0, rank == 0 ? 0.02 : 0)); };
    const std::string text = expect_throw<Timeout>("timeout", late);
    is_out = true;
    expect(contains(text, rank == 0 ? "late " : "timeout 0 "), "whose time ran out: " + text);
    expect_throw<Timeout>("after a timeout", [&] { world.barrier({Verb::kBarrier}); });
  });
}

void disagree() {
  Host host(3);
  run("mismatch", host, [](int rank, Group& world) {
    for (int which = 0; which < kCalls; ++which) {
      if (which == 2) continue;  // what rank 1 calls below
      const std::string text = expect_throw<Mismatch>("mismatch", [&] { call(world, rank == 1 ? 2 : which); });
      expect(contains(text, "calls ") && contains(text, std::to_string(1 | 11 << 16) + "/3 "), "both sides: " + text);
      float one = 1;
      world.all_reduce(&one, &one, call_of(Verb::kAllReduce, 1));
      expect(one == 3, "the group goes on");
      std::vector<float> large(50'000, 1.0f);
      world.all_reduce(large.data(), large.data(), call_of(Verb::kAllReduce, large.size()));
      expect(large == std::vector<float>(large.size(), 3.0f), "and its ring is in step");
    }
    std::vector<float> buffer(30, 1.0f);
    std::vector<std::size_t> splits(3, 10), others(3, rank == 2 ? 9 : 10);
    const auto split = [&] { world.all_to_all(buffer.data(), buffer.data(), splits.data(), others.data(), call_of(Verb::kAllToAll, 0)); };
    expect(contains(expect_throw<Mismatch>("splits", split), "splits 2 0 9 10"), "the splits are named");
    world.barrier({Verb::kBarrier});
  });
}

// What two ranks have staged for a call that is refused must not pass for a part of the next one.
void disagree_about_lengths() {
  Host host(2);
  host.choices.swaps = true;
  run("mismatch of two", host, [](int rank, Group& world) {
    for (const std::size_t refused : {100, 1500, 33'000, 70'000}) {
      std::vector<float> wrong(refused + static_cast<std::size_t>(rank), 1.0f);
      expect_throw<Mismatch>("lengths", [&] { world.all_reduce(wrong.data(), wrong.data(), call_of(Verb::kAllReduce, wrong.size())); });
      for (const std::size_t numel : {70'000, 1500}) {
        std::vector<float> ones(numel, 1.0f);
        world.all_reduce(ones.data(), ones.data(), call_of(Verb::kAllReduce, numel));
        expect(ones == std::vector<float>(numel, 2.0f), "and its regions are in step");
      }
    }
  });
}

void interrupt() {
  Host host(2);
  std::atomic<bool> has_left{false};
  run("interrupt", host, [&](int rank, Group& world) {
    if (rank == 1) {
      while (!has_left) nap_ms(1);
      const std::string text = expect_throw<PeerLost>("the other is told", [&] { world.barrier({Verb::kBarrier}); });
      return expect(contains(text, "interrupted 0 "), "and who it was: " + text);
    }
    is_interrupted = true;
    expect_throw<Interrupt>("interrupt", [&] { world.barrier({Verb::kBarrier}); });
    is_interrupted = false;
    has_left = true;
  });
}

void use_from_two_threads() {
  Host host(2);
  std::atomic<int> refused{0};
  run("two threads", host, [&](int rank, Group& world) {
    if (rank == 0) {
      std::thread second([&] {
        nap_ms(100);  // the first is in the barrier by then
        expect_throw<Misuse>("a second thread", [&] { world.barrier({Verb::kBarrier}); });
        ++refused;
      });
      world.barrier({Verb::kBarrier});
      second.join();
      expect(refused == 1, "the second thread was refused");
    } else {
      while (refused == 0) nap_ms(1);
      world.barrier({Verb::kBarrier});
    }
  });
}

void lose_messages() {
  Host host(2);
  run("messages and death", host, [&](int rank, Group& world) {
    if (rank == 1) {
      nap_ms(5);
      return host.lives[1]->kill();
    }
    float one = 0;
    Mailbox& box = world.mailbox();
    const auto forgotten = box.receive(&one, sizeof one, 1, 1);  // nobody waits for it: the helper finds out
    const auto awaited = box.receive(&one, sizeof one, 1, 2);
    expect_throw<PeerLost>("a message from the dead", [&] { box.wait(awaited, 20'000'000'000); });
    expect_throw<PeerLost>("another one", [&] { box.wait(forgotten, 20'000'000'000); });
  });
  Host other(2);
  run("messages and time", other, [](int rank, Group& world) {
    float one = 0;
    Mailbox& box = world.mailbox();
    if (rank == 1) {
      world.barrier({Verb::kBarrier});
      box.wait(box.send(&rank, sizeof rank, 0, 1), 20'000'000'000);
      return;
    }
    const auto message = box.receive(&one, sizeof one, 1, 1);
    expect_throw<Late>("a message in time", [&] { box.wait(message, 5'000'000); });
    const auto other = box.receive(&one, sizeof one, 1, 2);
    expect(box.give_up(other) && box.test(other), "a receive is taken back");
    world.barrier({Verb::kBarrier});
    box.wait(message, 20'000'000'000);  // which is under way still
    const auto part = box.receive(&one, sizeof one, 1, kLastTag + 1);
    expect_throw<Timeout>("part of a collective", [&] { box.wait(part, 5'000'000); });
    expect_throw<Timeout>("after that", [&] { box.wait(box.receive(&one, sizeof one, 1, 1), 20'000'000'000); });
  });
  Host third(3);
  run("messages from nobody", third, [](int rank, Group& world) {
    float one = 0;
    Mailbox& box = world.mailbox();
    if (rank > 0) return world.close();
    expect_throw<PeerLost>("from anyone", [&] { box.wait(box.receive(&one, sizeof one, -1, 1), 20'000'000'000); });
  });
}

// Rank 0 waits for rank 1, which goes on in another group: it looks there from then on, and abandons this one.
void wait_for_one_that_goes_on(const std::string& what, const std::function<void(Group&)>& wait) {
  Host host(2);
  std::atomic<int> looks{0};
  std::atomic<bool> has_left{false};
  run(what, host, [&](int rank, Group& world) {
    if (rank == 1) {
      nap_ms(30);
      expect(looks == 0, what + ": nobody looks elsewhere while nobody has gone on");
      world.tell_going_on();
      while (!has_left) nap_ms(1);
      const std::string text = expect_throw<PeerLost>(what + ", later", [&] { world.barrier({Verb::kBarrier}); });
      return expect(contains(text, "interrupted 0 "), what + ": who has left is named: " + text);
    }
    world.look_elsewhere_by([&](int whom, const std::function<bool()>& has_come) {
      expect(whom == 1 && !has_come(), what + ": whom it waits for");
      ++looks;
      world.abandon();
      throw Interrupt("elsewhere");
    }, /*always=*/false);
    expect_throw<Interrupt>(what, [&] { wait(world); });
    expect(looks == 1, what + ": it has looked once");
    has_left = true;
  });
}

void look_elsewhere() {
  static float one = 0;
  const auto receive = [](Group& group) { return group.mailbox().receive(&one, sizeof one, 1, 1); };
  const auto start = [](Group& group) {
    return group.start(Verb::kBarrier, 0, [&group](Step step) {
      Call call{Verb::kBarrier};
      call.step = step;
      group.barrier(call);
    });
  };
  wait_for_one_that_goes_on("a collective in vain", [](Group& group) { group.barrier({Verb::kBarrier}); });
  wait_for_one_that_goes_on("a message in vain", [&](Group& group) {
    const auto message = receive(group);
    try {
      group.mailbox().wait(message, 20'000'000'000);
    } catch (const Interrupt&) {
      expect(message->error != nullptr, "it is under way no more");
      throw;
    }
  });
  wait_for_one_that_goes_on("a started call in vain", [&](Group& group) {
    const auto started = start(group);
    try {
      group.wait(*started, 0);
    } catch (const Interrupt&) {
      expect_throw<PeerLost>("it has ended", [&] { group.wait(*started, 0); });
      throw;
    }
  });
  wait_for_one_that_goes_on("asking in vain for a message", [&](Group& group) {
    const auto message = receive(group);
    while (!group.mailbox().test(message)) nap_ms(1);
  });
  wait_for_one_that_goes_on("asking in vain for a started call", [&](Group& group) {
    const auto started = start(group);
    while (!group.test(*started)) nap_ms(1);
  });
}

}  // namespace

void test_failures() {
  for (int which = 0; which < kCalls; ++which) die_after(which);
  run_out_of_time();
  disagree();
  disagree_about_lengths();
  interrupt();
  use_from_two_threads();
  lose_messages();
  look_elsewhere();
}

}  // namespace pycomm::shm::test
