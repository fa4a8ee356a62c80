// Calls that are started and ended later: how each verb's ends, whom it needs, and what becomes of it where something breaks.
#include "shm_ranks.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace pycomm::shm::test {
namespace {

using Handle = std::shared_ptr<Started>;

void pause_ms(long ms) {
  const struct timespec nap{ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&nap, nullptr);
}

Handle start_sum(Group& group, std::vector<float>& data, double timeout_s = 0) {
  return group.start(Verb::kAllReduce, data.size() * sizeof(float), [&group, &data, timeout_s](Step step) {
    Call call = call_of(Verb::kAllReduce, data.size(), 0, timeout_s);
    call.step = step;
    group.all_reduce(data.data(), data.data(), call);
  });
}

float sum_one(Group& group) {
  float one = 1;
  group.all_reduce(&one, &one, call_of(Verb::kAllReduce, 1));
  return one;
}

// One call of each verb that can be started, and what it is to result in.
struct Trial {
  Verb verb;
  std::vector<float> input, output, expected;
  int root;

  Trial(Verb verb_, int rank, int ranks, std::size_t numel) : verb(verb_), root(static_cast<int>(numel) % ranks) {
    const auto n = static_cast<std::size_t>(ranks), me = static_cast<std::size_t>(rank);
    if (verb == Verb::kBarrier) return;
    const bool scatters = verb == Verb::kReduceScatter, gathers = verb == Verb::kAllGather;
    input = input_of(rank, scatters ? n * numel : numel);
    output = verb == Verb::kBroadcast ? input : std::vector<float>(gathers ? n * numel : numel);
    const float* const sums = sums_of(ranks, scatters ? me * numel : 0);
    expected.assign(sums, sums + numel);
    if (verb == Verb::kReduce && rank != root) expected.assign(numel, 0);
    if (verb == Verb::kBroadcast) expected = input_of(root, numel);
    if (!gathers) return;
    expected.clear();
    for (int r = 0; r < ranks; ++r) expected.insert(expected.end(), values_of(r), values_of(r) + numel);
  }

  void run(Group& group, std::size_t numel, Step step) {
    Call call = call_of(verb, numel, verb == Verb::kReduce || verb == Verb::kBroadcast ? root : 0);
    call.step = step;
    switch (verb) {
      case Verb::kAllReduce: return group.all_reduce(output.data(), input.data(), call);
      case Verb::kReduce: return group.reduce(output.data(), input.data(), call);
      case Verb::kReduceScatter: return group.reduce_scatter(output.data(), rows_at(input.data(), numel), call);
      case Verb::kBroadcast: return group.broadcast(output.data(), call);
      case Verb::kAllGather: return group.all_gather(rows_at(output.data(), numel), input.data(), call);
      default: return group.barrier(call);
    }
  }
};

// Some ranks start it and others make it as a whole; it is waited for, asked for, or left to the next call.
void end_well(int rank, Group& group, std::size_t numel, std::atomic<int>& started) {
  for (const Verb verb : {Verb::kAllReduce, Verb::kReduce, Verb::kReduceScatter, Verb::kBroadcast, Verb::kAllGather, Verb::kBarrier}) {
    for (int how = 0; how < 6; ++how) {
      const bool starts = how < 3 || rank % 2 == 0;
      Trial trial(verb, rank, group.ranks(), numel);
      const Handle handle = starts ? group.start(verb, trial.output.size() * sizeof(float), [&](Step step) { trial.run(group, numel, step); }) : nullptr;
      started += handle != nullptr;
      if (handle == nullptr) trial.run(group, numel, Step::kWhole);
      else if (how % 3 == 0) group.wait(*handle, 0);
      else if (how % 3 == 1) while (!group.test(*handle)) sched_yield();
      else expect(sum_one(group) == static_cast<float>(group.ranks()), "the next call");
      if (how % 3 == 2 && handle == nullptr) sum_one(group);
      expect(handle == nullptr || handle->has_ended(), "it has ended");
      expect(same(trial.output, trial.expected), std::string(verb_name(verb)) + " started, on rank " + std::to_string(rank) + " of " +
                                                     std::to_string(group.ranks()) + ", " + std::to_string(numel) + " elements, " + std::to_string(how));
    }
  }
}

// Who has started a call can be left alone: the others' calls end.
void need_nobody(bool swaps) {
  Host host(2);
  host.choices.swaps = swaps, host.choices.swaps_by = host.choices.rings_by = Stores::kPlain;
  const std::size_t longest = (swaps ? kRegionBytes : AreaLayout::of(2).window_bytes) / sizeof(float);
  std::atomic<int> ended{0};
  run("started calls need nobody", host, [&](int rank, Group& group) {
    int round = 0;
    for (const std::size_t numel : {std::size_t{3}, std::size_t{100}, std::size_t{700}, std::size_t{9'000}, longest}) {
      std::vector<float> data = input_of(rank, numel);
      ++round;
      if (rank == 1) {
        group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, numel));
        ended = round;
      } else {
        const Handle handle = start_sum(group, data);
        expect(handle != nullptr, "it is started");
        while (ended < round) pause_ms(1);
        expect(group.test(*handle), "it is there when the others have made it");
      }
      expect(same(data.data(), sums_of(2), numel), "the sum of " + std::to_string(numel));
      sum_one(group);
    }
    std::vector<float> longer(longest + 1);
    expect(start_sum(group, longer) == nullptr, "a longer one is not started");
    sum_one(group);
  });
}

void run_late() {
  Host host(2);
  std::atomic<bool> is_late{false};
  run("a started call that is late", host, [&](int rank, Group& group) {
    std::vector<float> data(3, 1.0f);
    if (rank == 1) {
      while (!is_late) pause_ms(1);
      group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, 3));
      return expect(sum_one(group) == 2, "and goes on");
    }
    const Handle handle = start_sum(group, data);
    expect(!group.test(*handle), "it has not ended");
    std::vector<float> more(3, 1.0f);
    expect(start_sum(group, more) == nullptr, "no other one is started before");
    expect_throw<Late>("time to wait is over", [&] { group.wait(*handle, 2'000'000); });
    expect(!group.drain(2'000'000), "nor by drain");
    is_interrupted = true;
    expect_throw<Interrupt>("interrupt", [&] { group.wait(*handle, 0); });
    is_interrupted = false;
    is_late = true;
    group.wait(*handle, 0);
    expect(data[2] == 2, "it has ended");
    expect(group.drain(0) && sum_one(group) == 2, "and the group goes on");
  });
}

void run_out_of_its_time(bool asks) {
  Host host(2);
  std::atomic<bool> is_out{false};
  run("a started call out of time", host, [&](int rank, Group& group) {
    std::vector<float> data(3, 1.0f);
    if (rank == 1) {
      while (!is_out) pause_ms(1);
      expect_throw<Timeout>("the other is told", [&] { group.barrier({Verb::kBarrier}); });
      return;
    }
    const Handle handle = start_sum(group, data, 0.01);
    const std::string text = expect_throw<Timeout>("its time is over", [&] {
      while (asks && !group.test(*handle)) pause_ms(1);
      group.wait(*handle, 0);
    });
    expect(contains(text, "late 1 "), "and whom it waited for: " + text);
    is_out = true;
    expect_throw<Timeout>("asked again", [&] { group.test(*handle); });
    expect_throw<Timeout>("and later", [&] { group.barrier({Verb::kBarrier}); });
  });
}

// The error is for who asks for it; the call that ends it goes on.
void disagree_when_started(bool swaps) {
  Host host(2);
  host.choices.swaps = swaps;
  if (!swaps) host.choices.rings_by = Stores::kPlain;
  run("a started call that is another", host, [](int rank, Group& group) {
    for (int how = 0; how < 4; ++how) {
      const std::size_t numel = how < 2 ? 3 : 30'000;
      std::vector<float> data(numel + static_cast<std::size_t>(rank), 1.0f);
      if (rank == 1) {
        expect_throw<Mismatch>("the other", [&] { group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, data.size())); });
      } else {
        const Handle handle = start_sum(group, data);
        expect(handle != nullptr, "it is started");
        if (how % 2 == 0 && handle != nullptr) expect_throw<Mismatch>("it", [&] { group.wait(*handle, 0); });
        else if (handle != nullptr) expect(group.drain(0), "ended, not well");
        expect_throw<Mismatch>("asked again", [&] { group.test(*handle); });
      }
      std::vector<float> large(20'000, 1.0f);
      group.all_reduce(large.data(), large.data(), call_of(Verb::kAllReduce, large.size()));
      expect(large == std::vector<float>(large.size(), 2.0f) && sum_one(group) == 2, "the group is in step");
    }
  });
}

void die() {
  for (int how = 0; how < 5; ++how) {
    Host host(2);
    std::atomic<bool> is_dead{false};
    run("a started call whose other rank dies, or leaves", host, [&](int rank, Group& group) {
      std::vector<float> data(3, 1.0f);
      if (rank == 1) {
        if (how < 3) host.lives[1]->kill();
        else group.close();
        is_dead = true;
        return;
      }
      const Handle handle = start_sum(group, data);
      if (how % 3 == 0) expect_throw<PeerLost>("waited for", [&] { group.wait(*handle, 0); });
      while (!is_dead) pause_ms(1);
      if (how % 3 == 1) expect_throw<PeerLost>("asked for", [&] { while (!group.test(*handle)) pause_ms(1); });
      expect_throw<PeerLost>("the next call", [&] { group.barrier({Verb::kBarrier}); });
      expect_throw<PeerLost>("asked again", [&] { group.test(*handle); });
    });
  }
}

// A thread that waits for a started call is no second one in the group.
void wait_in_another_thread() {
  Host host(2);
  std::atomic<bool> waits{false};
  run("a started call and two threads", host, [&](int rank, Group& group) {
    std::vector<float> data(3, 1.0f);
    if (rank == 1) {
      while (!waits) pause_ms(1);
      pause_ms(20);
      group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, 3));
      return expect(sum_one(group) == 2, "the next call");
    }
    const Handle handle = start_sum(group, data);
    std::thread second([&] {
      waits = true;
      group.wait(*handle, 0);
      expect(data[0] == 2, "it has ended");
    });
    while (!waits) pause_ms(1);
    pause_ms(5);
    expect(sum_one(group) == 2, "the next call waits for the thread that waits");
    second.join();
    expect(group.test(*handle), "known here, too");
  });
}

void close_after_all_have_come() {
  Host host(2);
  std::atomic<bool> has_come{false};
  run("a started call of a group that is closed in time", host, [&](int rank, Group& group) {
    std::vector<float> data(3, 1.0f);
    if (rank == 1) {
      group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, 3));
      has_come = true;
      return;
    }
    const Handle handle = start_sum(group, data);
    while (!has_come) pause_ms(1);
    group.close();
    expect(group.test(*handle) && data[0] == 2, "it has ended well");
  });
}

void close_before_it_ends() {
  Host host(2);
  std::atomic<bool> is_closed{false};
  run("a started call of a closed group", host, [&](int rank, Group& group) {
    std::vector<float> data(3, 1.0f);
    if (rank == 1) {
      while (!is_closed) pause_ms(1);
      group.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, 3));
      return expect(data[0] == 2, "what was started is enough for the other rank");
    }
    const Handle handle = start_sum(group, data);
    group.close();
    is_closed = true;
    expect_throw<Misuse>("waited for", [&] { group.wait(*handle, 0); });
    expect(start_sum(group, data) == nullptr, "no other one is started");
  });
}

}  // namespace

void test_started() {
  const struct { int ranks, ranks_per_core; std::optional<bool> swaps; } kWorlds[] = {{2, 1, true}, {2, 1, false}, {2, 1, {}}, {2, 2, {}}, {3, 1, {}}, {4, 2, {}}};
  for (const auto& world : kWorlds) {
    Host host(world.ranks, world.ranks_per_core);
    host.choices.swaps = world.swaps;
    std::atomic<int> started{0};
    run("started calls", host, [&](int rank, Group& group) {
      for (const std::size_t numel : {1, 8, 16, 100, 500, 1000, 2500, 9345, 40'000, 70'000}) end_well(rank, group, static_cast<std::size_t>(numel), started);
    });
    expect(started > 100, "calls are started: " + std::to_string(started));
  }
  for (const bool swaps : {false, true}) need_nobody(swaps);
  run_late();
  for (const bool asks : {false, true}) run_out_of_its_time(asks);
  for (const bool swaps : {false, true}) disagree_when_started(swaps);
  die();
  wait_in_another_thread();
  close_before_it_ends();
  close_after_all_have_come();
}

}  // namespace pycomm::shm::test
