// Every collective, at sizes that walk every path: the header's own line, a slot, shared heaps, one window, several, and
// the ring around.
#include "shm/windows.h"
#include "shm_ranks.h"

#include <algorithm>
#include <random>

namespace pycomm::shm::test {
namespace {

// In elements of 4 bytes: nothing, one, the header's line and past it, at and above kCopiedTo, past a slot (of 2 or 4
// KiB), windows with a rest. The ring of 2 to 4 MiB is walked around by the many calls.
constexpr std::size_t kLongest = 200003;
const std::size_t kNumels[] = {0, 1, 8, 9, 128, 129, 500, 513, 1024, 1025, 4673, 9345, 60001, kLongest};

std::string named(const char* what, int rank, std::size_t numel) {
  return std::string(what) + " on rank " + std::to_string(rank) + ", " + std::to_string(numel) + " elements";
}

void reductions(int rank, Group& world, std::size_t numel) {
  const int ranks = world.ranks(), root = static_cast<int>(numel) % ranks;
  const std::size_t n = static_cast<std::size_t>(ranks);
  const std::vector<float> input = input_of(rank, numel);
  const float* const sum = sums_of(ranks);
  std::vector<float> output(numel), in_place = input;
  world.all_reduce(output.data(), input.data(), call_of(Verb::kAllReduce, numel));
  expect(same(output.data(), sum, numel), named("all_reduce", rank, numel));
  world.all_reduce(in_place.data(), in_place.data(), call_of(Verb::kAllReduce, numel));
  expect(same(in_place.data(), sum, numel), named("all_reduce in place", rank, numel));
  in_place = input;
  world.reduce(in_place.data(), in_place.data(), call_of(Verb::kReduce, numel, root));
  expect(same(in_place.data(), rank == root ? sum : input.data(), numel), named("reduce", rank, numel));
  const std::vector<float> wide = input_of(rank, n * numel);
  world.reduce_scatter(output.data(), rows_at(wide.data(), numel), call_of(Verb::kReduceScatter, numel));
  expect(same(output.data(), sums_of(ranks, static_cast<std::size_t>(rank) * numel), numel), named("reduce_scatter", rank, numel));
  std::vector<std::vector<float>> list;
  std::vector<const void*> each;
  for (std::size_t r = 0; r < n; ++r) list.emplace_back(wide.data() + r * numel, wide.data() + (r + 1) * numel);
  for (const auto& one : list) each.push_back(one.data());
  output.assign(numel, 0);
  world.reduce_scatter(output.data(), Blocks(each.data()), call_of(Verb::kReduceScatter, numel));
  expect(same(output.data(), sums_of(ranks, static_cast<std::size_t>(rank) * numel), numel), named("reduce_scatter of a list", rank, numel));
  const std::size_t row = numel + 3;
  const std::vector<float> apart = input_of(rank, n * row);
  const Call call = call_of(Verb::kReduceScatter, numel);
  world.reduce_scatter(output.data(), rows_at(apart.data(), row), call);
  expect(same(output.data(), sums_of(ranks, static_cast<std::size_t>(rank) * row), numel), named("reduce_scatter of rows", rank, numel));
}

void moves(int rank, Group& world, std::size_t numel) {
  const int ranks = world.ranks(), root = static_cast<int>(numel + 1) % ranks;
  const std::size_t n = static_cast<std::size_t>(ranks), mine = static_cast<std::size_t>(rank) * numel;
  const std::vector<float> input = input_of(rank, numel), wide = input_of(root, n * numel);
  std::vector<float> all(n * numel), output = input, gathered(n * numel);
  for (std::size_t r = 0; r < n; ++r) std::copy_n(values_of(static_cast<int>(r)), numel, all.data() + r * numel);
  world.broadcast(output.data(), call_of(Verb::kBroadcast, numel, root));
  expect(same(output.data(), values_of(root), numel), named("broadcast", rank, numel));
  world.all_gather(rows_at(gathered.data(), numel), input.data(), call_of(Verb::kAllGather, numel));
  expect(same(gathered, all), named("all_gather", rank, numel));
  const std::size_t row = numel + 3;
  std::vector<float> apart(n * row), rows = apart;  // of what lies between the rows nothing may be written
  for (std::size_t r = 0; r < n; ++r) std::copy_n(values_of(static_cast<int>(r)), numel, rows.data() + r * row);
  const Call call = call_of(Verb::kAllGather, numel);
  world.all_gather(rows_at(apart.data(), row), input.data(), call);
  expect(same(apart, rows), named("all_gather into rows", rank, numel));
  std::vector<std::vector<float>> list(n, std::vector<float>(numel));
  std::vector<const void*> each;
  for (auto& one : list) each.push_back(one.data());
  world.all_gather(Blocks(each.data()), input.data(), call_of(Verb::kAllGather, numel));
  for (std::size_t r = 0; r < n; ++r) expect(same(list[r].data(), values_of(static_cast<int>(r)), numel), named("all_gather into a list", rank, numel));
  gathered.assign(n * numel, 0);
  std::vector<void*> blocks;
  for (std::size_t r = 0; rank == root && r < n; ++r) blocks.push_back(gathered.data() + r * numel);
  world.gather(blocks.data(), input.data(), call_of(Verb::kGather, numel, root));
  expect(same(gathered, rank == root ? all : std::vector<float>(n * numel)), named("gather", rank, numel));
  std::vector<const void*> parts;
  for (std::size_t r = 0; rank == root && r < n; ++r) parts.push_back(wide.data() + r * numel);
  world.scatter(output.data(), parts.data(), call_of(Verb::kScatter, numel, root));
  expect(same(output.data(), wide.data() + mine, numel), named("scatter", rank, numel));
}

// Rank i sends numel + i + 2 j elements to rank j, the values of its own input from i + j on.
void all_to_all(int rank, Group& world, std::size_t numel) {
  const std::size_t n = static_cast<std::size_t>(world.ranks()), me = static_cast<std::size_t>(rank);
  const auto length = [&](std::size_t from, std::size_t to) { return numel == 0 ? 0 : numel + from + 2 * to; };
  std::vector<std::size_t> sends(n), takes(n);
  std::vector<float> input, expected;
  const auto append = [](std::vector<float>& to, std::size_t from, std::size_t start, std::size_t length) {
    const float* const values = values_of(static_cast<int>(from), start);
    to.insert(to.end(), values, values + length);
  };
  for (std::size_t r = 0; r < n; ++r) {
    sends[r] = length(me, r), takes[r] = length(r, me);
    append(input, me, me + r, sends[r]);
    append(expected, r, me + r, takes[r]);
  }
  std::vector<float> output(expected.size());
  world.all_to_all(output.data(), input.data(), takes.data(), sends.data(), call_of(Verb::kAllToAll, 0));
  expect(same(output, expected), named("all_to_all", rank, numel));
  if (Group::may_be_read(*std::max_element(sends.begin(), sends.end()) * sizeof(float))) return;
  std::vector<std::vector<float>> sent, taken;  // by themselves
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (std::size_t r = 0, at = 0; r < n; at += sends[r], ++r) sent.emplace_back(input.data() + at, input.data() + at + sends[r]), taken.emplace_back(takes[r]);
  for (std::size_t r = 0; r < n; ++r) inputs.push_back(sent[r].data()), outputs.push_back(taken[r].data());
  world.all_to_all(outputs.data(), inputs.data(), takes.data(), sends.data(), call_of(Verb::kAllToAll, 0));
  output.clear();
  for (const auto& one : taken) output.insert(output.end(), one.begin(), one.end());
  expect(same(output, expected), named("all_to_all of lists", rank, numel));
}

// What is reduced and scattered lies in the heap, on all ranks and on some; its parts lie apart.
void shared_parts(int rank, Group& world, Heaps& heaps, std::size_t numel) {
  const std::size_t n = static_cast<std::size_t>(world.ranks()), row = numel + 3, mine = static_cast<std::size_t>(rank) * row;
  const std::vector<float> wide = input_of(rank, n * row);
  const float* const sum = sums_of(world.ranks(), mine);
  auto* const shared = static_cast<float*>(heaps.allocate(wide.size() * sizeof(float)));
  const Call call = call_of(Verb::kReduceScatter, numel);
  for (const int sharing : {world.ranks(), 1}) {
    std::vector<float> own = wide, output(numel);
    float* const input = rank < sharing ? shared : own.data();
    for (float* const to : {output.data(), input + mine}) {  // in place, and not
      std::copy(wide.begin(), wide.end(), input);
      world.reduce_scatter(to, rows_at(input, row), call);
      expect(same(to, sum, numel), named("reduce_scatter of shared buffers", rank, numel));
    }
  }
  heaps.free(shared);
}

// Buffers of the shared heap: of all ranks, where nothing is copied in, and of some.
void shared_buffers(int rank, Group& world, Heaps& heaps, std::size_t numel) {
  const std::size_t bytes = numel * sizeof(float);
  const std::vector<float> input = input_of(rank, numel);
  auto* const shared = static_cast<float*>(heaps.allocate(bytes));
  auto* const result = static_cast<float*>(heaps.allocate(bytes));
  for (const int sharing : {world.ranks(), 1}) {
    std::vector<float> own = input;
    float* const buffer = rank < sharing ? shared : own.data();
    float* const output = rank < sharing ? result : own.data();
    for (float* const to : {buffer, output}) {  // in place, and not
      std::copy(input.begin(), input.end(), buffer);
      world.all_reduce(to, buffer, call_of(Verb::kAllReduce, numel));
      expect(same(to, sums_of(world.ranks()), numel), named("all_reduce of shared buffers", rank, numel));
    }
  }
  heaps.free(shared);
  heaps.free(result);
  shared_parts(rank, world, heaps, numel);
}

void operators(int rank, Group& world) {
  for (const std::size_t numel : {std::size_t{5}, kLongest}) {  // long ones are added up by chains
    Call call = call_of(Verb::kAllReduce, numel);
    call.op = ReduceOp::kPremulSum, call.factor = rank + 1;
    std::vector<float> output(numel), ones(numel, 1.0f);
    world.all_reduce(output.data(), ones.data(), call);
    expect(same(output, std::vector<float>(numel, static_cast<float>(world.ranks() * (world.ranks() + 1) / 2))), named("PREMUL_SUM", rank, numel));
    call.op = ReduceOp::kAvg;
    world.all_reduce(output.data(), ones.data(), call);
    expect(same(output, ones), named("AVG", rank, numel));
  }
}

// Results that leave the caches, which one rank writes in place, and so not past them.
void long_results(int rank, Group& world) {
  const std::size_t n = static_cast<std::size_t>(world.ranks()), numel = 1'050'000 / n + 1;  // kLongFrom, and a little
  const std::size_t mine = static_cast<std::size_t>(rank) * numel;
  std::vector<float> wide = input_of(rank, n * numel), whole(n * numel), part(numel);
  float* const kept = rank == 0 ? wide.data() + mine : part.data();
  world.reduce_scatter(kept, rows_at(wide.data(), numel), call_of(Verb::kReduceScatter, numel));
  expect(same(kept, sums_of(world.ranks(), mine), numel), named("reduce_scatter in place on one rank", rank, numel));
  wide = input_of(rank, n * numel);
  float* const reduced = rank == 0 ? wide.data() : whole.data();
  world.all_reduce(reduced, wide.data(), call_of(Verb::kAllReduce, n * numel));
  expect(same(reduced, sums_of(world.ranks()), n * numel), named("all_reduce in place on one rank", rank, n * numel));
  const int root = world.ranks() - 1;
  wide = input_of(rank, n * numel);
  world.reduce(whole.data(), wide.data(), call_of(Verb::kReduce, n * numel, root));
  if (rank == root) expect(same(whole.data(), sums_of(world.ranks()), n * numel), named("long reduce", rank, n * numel));
  world.broadcast(wide.data(), call_of(Verb::kBroadcast, n * numel, root));
  expect(same(wide, input_of(root, n * numel)), named("long broadcast", rank, n * numel));
}

// What the calls find out themselves goes each of its ways for some calls: so many that all of them come.
void ways_in_use() {
  Host host(2);
  run("ways in use", host, [&](int rank, Group& world) {
    constexpr std::size_t kNumel = (512u << 10) / sizeof(float), kShared = (2u << 20) / sizeof(float);  // from where on it does
    const std::vector<float> input = input_of(rank, kNumel), wide = input_of(rank, kShared);
    for (unsigned i = 0; i < 2 * kStringsInUse + 1; ++i) {
      std::vector<float> data = input;
      world.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, kNumel));
      expect(same(data.data(), sums_of(2), kNumel), named("all_reduce by each way", rank, i));
      const int root = static_cast<int>(i % 2);
      data = input;
      world.broadcast(data.data(), call_of(Verb::kBroadcast, kNumel, root));
      expect(same(data, input_of(root, kNumel)), named("broadcast by each way", rank, i));
    }
    auto* const shared = static_cast<float*>(host.heaps[rank]->allocate(kShared * sizeof(float)));
    for (unsigned i = 0; i < 2 * Results::kTriedAtATime + 1; ++i) {
      std::copy(wide.begin(), wide.end(), shared);
      world.all_reduce(shared, shared, call_of(Verb::kAllReduce, kShared));
      expect(same(shared, sums_of(2), kShared), named("all_reduce of shared buffers by each way", rank, i));
    }
    host.heaps[rank]->free(shared);
  });
}

// Now one rank sends and now another one, what no other call has sent, and who reads is late at times: [Note: the common ring].
void to_and_fro(int rank, Group& world, unsigned seed) {
  constexpr Verb kRooted[] = {Verb::kBroadcast, Verb::kReduce, Verb::kGather, Verb::kScatter};
  std::minstd_rand dice(seed);  // every rank throws the same
  const int ranks = world.ranks();
  const std::size_t n = static_cast<std::size_t>(ranks);
  for (int i = 0; i < 150; ++i) {
    const Verb verb = kRooted[dice() % 4];
    const int root = static_cast<int>(dice() % n), late = static_cast<int>(dice() % (4 * n));
    const std::size_t longest = i % 50 == 49 ? 700'000 : 1u << (8 + dice() % 10), numel = 1 + dice() % longest;
    const auto value = [&](int of, std::size_t at) { return static_cast<float>((1009 * i + 101 * of + static_cast<int>(at % 997)) % 65536); };
    const auto filled = [&](int of) {
      std::vector<float> values(numel);
      for (std::size_t at = 0; at < numel; ++at) values[at] = value(of, at);
      return values;
    };
    std::vector<std::vector<float>> all;
    std::vector<void*> blocks;
    for (int r = 0; r < ranks; ++r) all.push_back(filled(r));
    std::vector<float> mine = all[static_cast<std::size_t>(rank)], result(numel);
    if (late == rank) {
      const struct timespec nap{0, 200'000};
      nanosleep(&nap, nullptr);
    }
    const Call call = call_of(verb, numel, root);
    const std::string what = named(verb_name(verb), rank, numel) + " to and fro";
    if (verb == Verb::kBroadcast) {
      world.broadcast(mine.data(), call);
      expect(same(mine, all[static_cast<std::size_t>(root)]), what);
    } else if (verb == Verb::kReduce) {
      world.reduce(result.data(), mine.data(), call);
      for (int r = 0; rank == root && r < ranks; ++r)
        for (std::size_t at = 0; at < numel; ++at) result[at] -= all[static_cast<std::size_t>(r)][at];  // whole numbers, so nothing is rounded
      expect(same(result, std::vector<float>(numel)), what);
    } else if (verb == Verb::kGather) {
      std::vector<float> gathered(n * numel);
      for (std::size_t r = 0; rank == root && r < n; ++r) blocks.push_back(gathered.data() + r * numel);
      world.gather(blocks.data(), mine.data(), call);
      for (std::size_t r = 0; rank == root && r < n; ++r) expect(same(gathered.data() + r * numel, all[r].data(), numel), what);
    } else {
      for (std::size_t r = 0; rank == root && r < n; ++r) blocks.push_back(all[r].data());
      world.scatter(result.data(), blocks.data(), call);
      expect(same(result, mine), what);
    }
    if (dice() % 8 == 0) world.barrier({Verb::kBarrier});
    if (dice() % 8 == 0) {  // some ranks have filled windows then, and others have not
      std::vector<float> unlike(20'000);
      expect_throw<Mismatch>("calls that differ, to and fro", [&] {
        rank == root ? world.broadcast(unlike.data(), call_of(Verb::kBroadcast, unlike.size(), root)) : world.barrier({Verb::kBarrier});
      });
    }
  }
}

// Small calls, with a pause now and then, so that some waits spin, some yield and some sleep.
void barriers(int rank, Group& world) {
  for (int i = 0; i < 300; ++i) {
    if (i % 60 == 10 * rank) {
      const struct timespec nap{0, 1'000'000};
      nanosleep(&nap, nullptr);
    }
    world.barrier({Verb::kBarrier});
    float one = 1;
    world.all_reduce(&one, &one, call_of(Verb::kAllReduce, 1));
    expect(one == static_cast<float>(world.ranks()), "a small all_reduce");
  }
}

void go_to_and_fro() {
  unsigned seed = 1;
  for (const int ranks : {2, 3}) {
    for (const bool goes_back : {true, false}) {
      for (const Stores stores : {Stores::kPlain, Stores::kStrings, Stores::kStreamed}) {
        Host host(ranks);
        host.choices.delivers_directly = false;
        host.choices.one_way_by = stores;
        host.choices.goes_back = goes_back;
        run("to and fro", host, [seed](int rank, Group& world) { to_and_fro(rank, world, seed); });
        ++seed;
      }
    }
  }
}

}  // namespace

void test_collectives() {
  go_to_and_fro();
  ways_in_use();
  constexpr unsigned kOnce = 1024, kAlways = 1;  // always: they choose anew after every MiB
  const struct { int ranks, ranks_per_core; std::optional<bool> swaps; std::optional<Stores> by; unsigned choose_every = kOnce; } kWorlds[] = {
      {2, 1, {}, {}, kAlways}, {3, 1, {}, {}, kAlways}, {1, 1, {}, {}}, {2, 1, false, Stores::kStrings}, {2, 1, true, Stores::kStrings}, {2, 1, true, Stores::kStreamed},
      {2, 2, {}, {}}, {3, 1, {}, {}}, {4, 2, {}, {}}, {5, 3, {}, {}}};
  for (const auto& world : kWorlds) {
    Host host(world.ranks, world.ranks_per_core);
    if (world.choose_every == kAlways) host.measure_every = 1u << 20, host.choose_every = kAlways;
    host.choices.swaps = world.swaps;
    host.choices.swaps_by = host.choices.rings_by = host.choices.one_way_by = world.by;
    run("collectives", host, [&](int rank, Group& group) {
      for (const std::size_t numel : kNumels) {
        if (numel == kLongest && world.ranks > 3) continue;  // a sanitizer takes minutes for what n ranks hold of n parts
        reductions(rank, group, numel);
        moves(rank, group, numel);
        all_to_all(rank, group, numel);
        shared_buffers(rank, group, *host.heaps[rank], numel);
      }
      operators(rank, group);
      long_results(rank, group);
      barriers(rank, group);
    });
  }
}

}  // namespace pycomm::shm::test
