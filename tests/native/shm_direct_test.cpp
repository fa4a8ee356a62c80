// Messages that a rank reads in the memory of another, or writes into it (csrc/shm/direct.cpp), where it can and where it cannot. The
// kernel's calls are replaced: ranks are threads here, and a sanitizer sees what is copied.
#include "shm/direct.h"
#include "shm_ranks.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

namespace {

std::atomic<int> reads{0}, writes{0};
// What becomes of this thread's next reads.
thread_local bool is_forbidden = false, finds_another = false;
// What every read waits for: whichever thread reads, as a mailbox's helper may when its rank is slow.
std::atomic<const std::atomic<bool>*> comes_after{nullptr};
// What this thread does in the middle of its next write.
thread_local std::function<void()> on_write = nullptr;
// This thread's clock, if it does not go by itself: how soon a thread wakes that slept, on cores that others want, is no law.
thread_local std::int64_t stands_at_ns = 0;

struct StandingClock {
  StandingClock() { stands_at_ns = 1; }
  ~StandingClock() { stands_at_ns = 0; }
  static void go_on(std::int64_t us) { stands_at_ns += us * 1000; }
};

}  // namespace

extern "C" int clock_gettime(clockid_t clock, struct timespec* now) {
  if (stands_at_ns == 0) return static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  *now = {stands_at_ns / 1'000'000'000, stands_at_ns % 1'000'000'000};
  return 0;
}

extern "C" ssize_t process_vm_readv(pid_t, const struct iovec* local, unsigned long locals, const struct iovec* remote, unsigned long,
                                    unsigned long) {
  ++reads;
  const std::atomic<bool>* const after = comes_after;
  while (after != nullptr && !*after) std::this_thread::yield();
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

extern "C" ssize_t process_vm_writev(pid_t, const struct iovec* local, unsigned long, const struct iovec* remote, unsigned long, unsigned long) {
  ++writes;
  if (is_forbidden) {
    errno = EPERM;
    return -1;
  }
  if (on_write) on_write();
  std::memcpy(remote->iov_base, local->iov_base, local->iov_len);
  return static_cast<ssize_t>(local->iov_len);
}

namespace pycomm::shm::test {
namespace {

constexpr std::size_t kNumel = 40'000;

void move_all(int rank, Group& world, const std::string& what) {
  std::vector<float> data = input_of(rank, kNumel), all;
  world.broadcast(data.data(), call_of(Verb::kBroadcast, kNumel, 1));
  expect(same(data, input_of(1, kNumel)), "broadcast, " + what);
  std::vector<float> gathered(static_cast<std::size_t>(world.ranks()) * kNumel);
  world.all_gather(rows_at(gathered.data(), kNumel), input_of(rank, kNumel).data(), call_of(Verb::kAllGather, kNumel));
  for (int r = 0; r < world.ranks(); ++r) all.insert(all.end(), values_of(r), values_of(r) + kNumel);
  expect(same(gathered, all), "all_gather, " + what);
  const std::size_t n = static_cast<std::size_t>(world.ranks());
  std::vector<float> blocks(n * kNumel), part(kNumel);
  std::vector<void*> outputs;
  std::vector<const void*> parts;
  for (std::size_t r = 0; r < n && rank == 1; ++r) outputs.push_back(blocks.data() + r * kNumel), parts.push_back(all.data() + r * kNumel);
  world.gather(outputs.data(), input_of(rank, kNumel).data(), call_of(Verb::kGather, kNumel, 1));
  expect(same(blocks, rank == 1 ? all : std::vector<float>(n * kNumel)), "gather, " + what);
  world.scatter(part.data(), parts.data(), call_of(Verb::kScatter, kNumel, 1));
  expect(same(part, input_of(rank, kNumel)), "scatter, " + what);
  std::vector<std::size_t> sends, takes;  // uneven
  std::vector<float> input, expected;
  for (int r = 0; r < world.ranks(); ++r) {
    sends.push_back(kNumel + static_cast<std::size_t>(10 * rank + r));
    takes.push_back(kNumel + static_cast<std::size_t>(10 * r + rank));
    const float *const mine = values_of(rank, static_cast<std::size_t>(r)), *const its = values_of(r, static_cast<std::size_t>(rank));
    input.insert(input.end(), mine, mine + sends.back());
    expected.insert(expected.end(), its, its + takes.back());
  }
  std::vector<float> output(expected.size());
  world.all_to_all(output.data(), input.data(), takes.data(), sends.data(), call_of(Verb::kAllToAll, 0));
  expect(same(output, expected), "all_to_all, " + what);
}

void read_directly() {
  Host host(3);
  reads = writes = 0;
  run("direct", host, [](int rank, Group& world) {
    for (int i = 0; i < 3; ++i) move_all(rank, world, "read directly, and in trials by both ways");
  });
  const int of_one_root = 2, of_all = 3 * 2, trials = 1 + kTrials * kRepeats;
  expect(reads >= trials * (2 * of_one_root + of_all), "every rank has read every other one, or the root");
  expect(writes >= trials * 2 * of_one_root, "the root has written to every other rank, and they to it");
}

// Where nothing need be tried, each message goes once, and directly; where ranks share cores, only what one root sends or receives as blocks.
void move_at_once(int ranks, int ranks_per_core) {
  Host host(ranks, ranks_per_core);
  host.choices.delivers_directly = host.choices.exchanges_directly = host.choices.gathers_directly = host.choices.scatters_directly = true;
  reads = writes = 0;
  run("at once", host, [](int rank, Group& world) { move_all(rank, world, "directly"); });
  const int others = ranks - 1, broadcasts = ranks_per_core == 1 ? others : 0, exchanges = ranks_per_core == 1 ? 2 * ranks * others : 0;
  expect(reads == broadcasts + exchanges + others, "each rank reads what it lacks");
  expect(writes == broadcasts + others, "who is read writes its share, and what a root gathers all of its own");
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

// The same of a gather: who may not write says so, and nothing goes directly any more.
void be_refused_by_the_root() {
  Host host(3);
  reads = writes = 0;
  run("writing forbidden", host, [&](int rank, Group& world) {
    is_forbidden = rank == 2;
    std::vector<float> blocks(3 * kNumel), all;
    std::vector<void*> outputs;
    for (int r = 0; r < 3; ++r) outputs.push_back(blocks.data() + r * kNumel), all.insert(all.end(), values_of(r), values_of(r) + kNumel);
    for (int i = 0; i < 2; ++i) {
      world.gather(outputs.data(), input_of(rank, kNumel).data(), call_of(Verb::kGather, kNumel, 1));
      expect(rank != 1 || same(blocks, all), "a gather by the other way");
      std::fill(blocks.begin(), blocks.end(), -1.0f);
    }
    move_all(rank, world, "after a refusal");
    is_forbidden = false;
  });
  expect(writes == 2 && reads == 0, "only the first gather was tried");
}

// Rank 1 gives the call up before rank 0 reads: by then its buffer may hold anything, and rank 0 may not take it for the message.
void read_too_late() {
  Host host(2);
  host.choices.delivers_directly = true;
  std::atomic<bool> has_given_up{false};
  std::vector<float> data[] = {std::vector<float>(kNumel), std::vector<float>(kNumel)};  // of both, for as long as they are read
  comes_after = &has_given_up;  // rank 0, who alone reads
  run("a late reader", host, [&](int rank, Group& world) {
    world.barrier({Verb::kBarrier});
    expect_throw<Timeout>("a call that was given up", [&] { world.broadcast(data[rank].data(), call_of(Verb::kBroadcast, kNumel, 1, rank == 1 ? 0.02 : 0)); });
    has_given_up = true;
  });
  comes_after = nullptr;
}

// While root 1 writes into the memory of rank 2, rank 0 gives the call up, and so does rank 2. Then the root must be out of the memory
// of rank 2 before that leaves the call, and not come to rank 0 at all.
void write_too_late() {
  Host host(3);
  std::atomic<bool> has_left{false}, has_written{false};
  std::vector<float> kept(kNumel, -1.0f);
  run("a late writer", host, [&](int rank, Group& world) {
    std::vector<float> own = input_of(rank, kNumel);
    float* const data = rank == 0 ? kept.data() : own.data();
    if (rank == 1) on_write = [&] {
      while (!has_left) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      has_written = true;
    };
    expect_throw<Timeout>("a call that was given up", [&] { world.broadcast(data, call_of(Verb::kBroadcast, kNumel, 1, rank == 0 ? 0.05 : 0)); });
    if (rank == 0) has_left = true;
    if (rank == 2) expect(has_written, "a reader waits for the writer that is inside its memory");
    on_write = nullptr;
  });
  expect(kept[0] == -1.0f, "nothing is written into the memory of who has left");
}

// While rank 2 writes into the memory of root 1, the root's time is up: then rank 2 must be out of there before the root leaves the call.
void write_blocks_too_late() {
  Host host(3);
  host.choices.gathers_directly = true;
  std::atomic<bool> is_inside{false}, has_written{false};
  std::vector<float> blocks(3 * kNumel, -1.0f);
  run("late writers of blocks", host, [&](int rank, Group& world) {
    std::vector<float> own = input_of(rank, kNumel);
    std::vector<void*> outputs;
    for (std::size_t r = 0; r < 3; ++r) outputs.push_back(blocks.data() + r * kNumel);
    if (rank == 2) on_write = [&] {
      is_inside = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      has_written = true;
    };
    expect_throw<Timeout>("a call that was given up", [&] { world.gather(outputs.data(), own.data(), call_of(Verb::kGather, kNumel, 1, rank == 1 ? 0.3 : 0)); });
    if (rank == 1) expect(!is_inside || has_written, "a root waits for the writer that is inside its memory");
    on_write = nullptr;
  });
}

// -- offers of messages -------------------------------------------------------------------------------------------------------

constexpr std::int64_t kPatienceNs = 600'000'000'000;
constexpr std::size_t kOffered = 30'000, kOfferedBytes = kOffered * sizeof(float);  // a channel has room for it

using Sent = std::shared_ptr<Message>;
Sent start_receive(Group& group, std::vector<float>& data, std::int64_t tag) {
  return group.mailbox().receive(data.data(), data.size() * sizeof(float), 1 - group.rank(), tag);
}
Sent start_send(Group& group, const std::vector<float>& data, std::int64_t tag) {
  return group.mailbox().send(data.data(), data.size() * sizeof(float), 1 - group.rank(), tag);
}

// What two ranks send each other is read, also if it is asked for later, or its length is wrong; what only one of them sends is not.
void exchange_offers(int rank, Group& group, const std::string& what) {
  Mailbox& box = group.mailbox();
  const std::vector<float> data = input_of(rank, kOffered), expected = input_of(1 - rank, kOffered);
  std::vector<float> got(kOffered), other(kOffered);
  const Sent receive = start_receive(group, got, 1), send = start_send(group, data, 1);
  box.wait(send, kPatienceNs), box.wait(receive, kPatienceNs);
  expect(same(got, expected), "an exchange, " + what);
  const Sent later = start_receive(group, got, 3), first = start_send(group, data, 2), second = start_send(group, data, 3);
  box.wait(later, kPatienceNs);
  box.wait(start_receive(group, other, 2), kPatienceNs);
  box.wait(first, kPatienceNs), box.wait(second, kPatienceNs);
  expect(same(got, expected) && same(other, expected), "one that is set aside, " + what);
  std::vector<float> shorter(kOffered - 1, -1.0f);
  const Sent wrong = start_receive(group, shorter, 4), sent = start_send(group, data, 4);
  expect_throw<Mismatch>("an offer of another length, " + what, [&] { box.wait(wrong, kPatienceNs); });
  box.wait(sent, kPatienceNs);
  expect(shorter == std::vector<float>(kOffered - 1, -1.0f), "that writes nothing, " + what);
  group.barrier({Verb::kBarrier});
}

void take_offers() {
  Host host(2);
  host.choices.offers_messages = true;
  reads = 0;
  run("offers", host, [](int rank, Group& group) { exchange_offers(rank, group, "read"); });
  // Either may have sent the second message before it posted the receive of it, or withdrawn one while the other was being scheduled.
  expect(reads > 0, "messages are read where they lie");
}

void refuse_offers() {
  Host host(2);
  host.choices.offers_messages = true;
  reads = 0;
  run("refused offers", host, [](int rank, Group& group) {
    is_forbidden = rank == 1;
    for (int i = 0; i < 3; ++i) exchange_offers(rank, group, "refused by one");
    is_forbidden = false;
  });
}

// Exchanges of one length, of which some go either way.
void try_offers() {
  Host host(2);
  reads = 0;
  run("exchanges that find out how to go", host, [](int rank, Group& group) {
    const std::vector<float> expected = input_of(1 - rank, kOffered);
    std::vector<float> data = input_of(rank, kOffered), got(kOffered);
    for (std::size_t i = 0; i < 200; ++i) {  // by turns, offered, at once, by turns
      data[i] = got[i] = -1.0f;  // other bytes each time
      const Sent receive = start_receive(group, got, 1), send = start_send(group, data, 1);
      group.mailbox().wait(send, kPatienceNs), group.mailbox().wait(receive, kPatienceNs);
      expect(got[i] == -1.0f && same(got.data() + i + 1, expected.data() + i + 1, kOffered - i - 1), "one of many exchanges");
      group.barrier({Verb::kBarrier});  // so that neither withdraws what it offers
    }
  });
  expect(reads > 0, "offers are tried");
}

// The way that usually took less time is gone until it is time to try again; here others take 2 ms.
void choose_by_time(Going way, int way_us) {
  const StandingClock clock;
  ExchangeTrials trials;
  std::vector<Going> gone;
  constexpr int kEach = 64, kWays = 3, kTried = 2 * kWays * kEach, kEvery = 4096;
  for (int i = 0; i < kEvery + kTried; ++i) {
    const auto sent = std::make_shared<Message>(true, 1, 0, nullptr, kOfferedBytes), received = std::make_shared<Message>(*sent);
    gone.push_back(trials.way(sent, received, /*may_offer=*/true));
    if (i < kTried) clock.go_on(gone.back() == way ? way_us : 2000);
    sent->is_done = true;
    trials.look();
    received->is_done = true;
    trials.look();
  }
  for (int at = 0; at < kTried; at += kEach)
    for (const auto start : {gone.begin() + at, gone.begin() + kEvery + at})
      expect(std::count(start, start + kEach, static_cast<Going>(at / kEach % kWays)) == kEach, "all ways are tried");
  expect(std::count(gone.begin() + kTried, gone.begin() + kEvery, way) == (way_us < 2000) * (kEvery - kTried), "what took less time is chosen");
}

// Where there can be no offers, none is made.
void choose_without_offers() {
  ExchangeTrials trials;
  for (int i = 0; i < 1000; ++i) {
    const auto sent = std::make_shared<Message>(true, 1, 0, nullptr, kOfferedBytes), received = std::make_shared<Message>(*sent);
    expect(trials.way(sent, received, /*may_offer=*/false) != Going::kOffered, "no offer");
    sent->is_done = received->is_done = true;
    trials.look();
  }
}

// Results are written the way that took less from when they began; one that never began, as its call failed, says nothing.
void choose_results(bool begins) {
  const StandingClock clock;
  FewWays<2> ways;
  constexpr unsigned kEach = 16, kTried = 2 * 2 * kEach;
  for (unsigned i = 0; i < kTried; ++i) {
    Attempt<2> attempt(ways, 1000, kEach);
    const unsigned way = attempt.way();
    expect(way == i / kEach % 2, "the ways by turns");
    if (!ways.is_timed()) continue;
    Result moved(/*is_streamed=*/true, std::move(attempt));
    if (way == 0 || begins) moved.begin();
    clock.go_on(way == 0 ? 2000 : 100);
  }
  for (unsigned i = 0; i < kEach; ++i) expect(ways.choose(kEach) == (begins ? 1u : 0u), "the faster way, of those that are known");
}

// Nobody comes: what the channel has room for is sent all the same.
void withdraw_offers() {
  Host host(2);
  host.choices.offers_messages = true;
  std::atomic<bool> has_sent{false};
  run("an offer that nobody takes", host, [&](int rank, Group& group) {
    const std::vector<float> data = input_of(rank, kOffered);
    std::vector<float> got(kOffered);
    while (rank == 1 && !has_sent) std::this_thread::yield();
    const int before = reads;
    const Sent receive = start_receive(group, got, 1), send = start_send(group, data, 1);
    group.mailbox().wait(send, kPatienceNs);
    has_sent = true;
    if (rank == 0) expect(reads == before, "it went through the channel");
    group.mailbox().wait(receive, kPatienceNs);
    expect(same(got, input_of(1 - rank, kOffered)), "and is whole");
    group.barrier({Verb::kBarrier});
  });
}

// Rank 1 reads when rank 0's time is up, or dies then: rank 0 keeps its memory for that long, and no longer.
void give_up_an_offer(bool dies) {
  Host host(2);
  host.choices.offers_messages = true;
  std::atomic<bool> is_late{false}, has_read{false}, has_left{false};
  constexpr std::size_t kLong = 600'000;  // no channel has room for it: so the offer stands until it is taken
  static const std::vector<float> data = input_of(0, kLong);  // a thread reads it when its process is dead
  comes_after = dies ? &has_left : &is_late;  // rank 1, who alone reads
  run(dies ? "the death of who takes an offer" : "an offer that is taken too long", host, [&](int rank, Group& group) {
    std::vector<float> got(kLong);
    Mailbox& box = group.mailbox();
    const Sent receive = start_receive(group, got, 1);
    if (rank == 0) {
      const int before = reads;
      const Sent send = start_send(group, data, 1);
      while (reads == before) std::this_thread::yield();
      std::thread clock([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(dies ? 50 : 1500));
        has_read = true;  // before either of what lets rank 0 go
        if (dies) host.lives[1]->kill();
        is_late = true;
      });
      const auto give_up = [&] { box.wait(send, dies ? kPatienceNs : 200'000'000); };
      dies ? expect_throw<PeerLost>("a dead receiver", give_up) : expect_throw<Late>("a slow receiver", give_up);
      if (!dies) box.wait(send, kPatienceNs);  // it goes on
      expect(has_read, "the memory was kept until it had been read");
      has_left = true;
      clock.join();
    } else {
      try {
        box.wait(receive, kPatienceNs);
        expect(got == data, "what was read is whole");
      } catch (const Failed&) {  // or rank 0 has given up
      }
    }
  });
  comes_after = nullptr;
}

}  // namespace

void test_direct() {
  take_offers();
  refuse_offers();
  try_offers();
  choose_by_time(Going::kOffered, 0);
  choose_by_time(Going::kAtOnce, 0);
  choose_by_time(Going::kOffered, 10'000);
  choose_without_offers();
  choose_results(true);
  choose_results(false);
  withdraw_offers();
  give_up_an_offer(false);
  give_up_an_offer(true);
  move_at_once(2, 1);
  move_at_once(3, 1);
  move_at_once(4, 2);
  write_too_late();
  write_blocks_too_late();
  be_refused_by_the_root();
  read_directly();
  be_refused([]() -> bool& { return is_forbidden; }, "reading forbidden");
  be_refused([]() -> bool& { return finds_another; }, "another process");
  read_too_late();
}

}  // namespace pycomm::shm::test
