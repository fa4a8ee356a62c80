// Streams: the loop of csrc/overlap on groups of csrc/shm. A rank's own thread submits, another one runs the loop.
#include "shm_ranks.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "overlap/progress.h"

namespace pycomm::shm::test {
namespace {

using overlap::Frame;
using overlap::Granted;
using overlap::Progress;

constexpr std::size_t kSegmentNumel = 3000;
constexpr std::size_t kOneAGrant = 4 << 20;  // bytes that the credit has room for once, as long as nothing is measured
constexpr std::size_t kNeverMeasured = std::size_t{1} << 60;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A stream of one rank: what it moved, in order, and what ended; each written by a thread of its own until `finish`.
class Stream : Progress::Outside {
 public:
  explicit Stream(Group& group)
      : progress(group.ranks(), kNeverMeasured), group_(group), loop_([this] { progress.run(*this); }), ends_([this] { await_ended(); }) {}

  // An item whose every segment adds up `numel` floats.
  std::uint64_t submit(int priority, std::size_t segments, std::size_t numel, std::function<void()> then = [] {},
                       std::uint64_t digest = 7) {
    const std::uint64_t number = ++submitted_;  // items are submitted by one thread at a time
    progress.submit({priority, digest, segments, kOneAGrant, [=](std::size_t segment) {
                       moved.push_back(static_cast<float>(100 * number + segment));
                       std::vector<float> data = input_of(group_.rank(), numel);
                       group_.all_reduce(data.data(), data.data(), call_of(Verb::kAllReduce, numel));
                       expect(same(data.data(), sums_of(group_.ranks()), numel), "a sum on a stream");
                       if (segment == 0) then();
                       ++moves;
                     }});
    return number;
  }

  void finish() {
    progress.close();
    loop_.join();
    ends_.join();
  }

  Progress progress;
  std::vector<float> moved;
  std::atomic<std::size_t> moves{0};  // of which ``then`` has been called
  std::vector<Progress::Ended> ended;

 private:
  void exchange(Frame* frames, const Frame& mine) override {
    Call call{Verb::kAllGather};
    call.numel = sizeof mine;
    group_.agree(frames, &mine, sizeof mine, call);
  }
  void refuse(std::uint64_t number) override { throw Refused(std::to_string(number)); }
  void move(const Granted&) override { expect(false, "nothing is moved outside"); }
  void ended_unmoved() override {}
  void end_grant() override {}
  void rest() override {}
  void await_ended() {
    for (auto some = progress.await_ended(); !some.empty(); some = progress.await_ended())
      ended.insert(ended.end(), some.begin(), some.end());
  }

  Group& group_;
  std::atomic<std::uint64_t> submitted_{0};
  std::thread loop_, ends_;
};

void move_in_one_order(int rank, Group& world) {
  Stream stream(world);
  std::atomic<std::uint64_t> urgent{0};
  stream.submit(0, 5, kSegmentNumel, [&] { urgent = stream.submit(9, 1, 1); });
  while (stream.moves < 3) std::this_thread::yield();  // what comes next might overtake, too
  for (int i = 0; i < 30; ++i) {
    if (rank == i % 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stream.submit(i % 3, 1 + i % 4, i % 5 == 0 ? kSegmentNumel : 1);
  }
  stream.finish();
  expect(stream.ended.size() == 32, "every item has ended");
  for (const auto& each : stream.ended) expect(each.error == nullptr, "and ended well");
  std::vector<float> first = stream.moved;
  world.broadcast(first.data(), call_of(Verb::kBroadcast, first.size()));
  expect(first == stream.moved, "all ranks move the same in one order");
  expect(urgent == 2 && stream.moved[0] == 100 && stream.moved[1] == 200 && stream.moved[2] == 101, "the urgent overtakes");
  const Progress::Moved moved = stream.progress.take_moved();
  expect(moved.ns > 0 && moved.bytes == stream.moved.size() * kOneAGrant, "what was moved is counted");
}

// An item that differs, by its digest, is refused on every rank before anything of it moves, and the stream goes on.
void submit_what_differs(int rank, Group& world) {
  Stream stream(world);
  stream.submit(0, 1, 5);
  stream.submit(9, rank == 0 ? 2 : 3, kSegmentNumel, [] {}, rank == 0 ? 8 : 9);
  stream.submit(0, 2, 5);
  stream.finish();
  expect(stream.moved == std::vector<float>{100, 300, 301}, "nothing of what differs is moved");
  expect(stream.ended.size() == 3, "every item ends");
  for (const auto& each : stream.ended)
    if (each.number == 2)
      expect_throw<Refused>("what differs", [&] { std::rethrow_exception(each.error); });
    else
      expect(each.error == nullptr, "what is the same ends well");
}

// An item of which a segment fails ends with its error, on every rank, and the stream goes on.
void offer_what_differs(int rank, Group& world) {
  Stream stream(world);
  stream.submit(0, 3, rank == 0 ? 5 : 6);
  stream.submit(0, 2, 5);
  stream.finish();
  expect(stream.ended.size() == 2 && stream.ended[0].number == 1 && stream.ended[1].error == nullptr, "the next one ends well");
  expect(stream.moved == std::vector<float>{100, 200, 201}, "what failed goes no further");
  expect_throw<Mismatch>("the error of an item", [&] { std::rethrow_exception(stream.ended[0].error); });
}

// A rank whose process dies: the items of the others end with an error, what is submitted later too.
void lose_a_rank(int rank, Group& world, const Host& host) {
  if (rank == 2) return host.lives[2]->kill();
  Stream stream(world);
  for (int i = 0; i < 5; ++i) stream.submit(i, 2, 10);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  stream.submit(0, 1, 10);
  stream.finish();
  expect(stream.ended.size() == 6 && stream.moved.empty(), "all items end");
  for (const auto& each : stream.ended) expect_throw<PeerLost>("a dead rank", [&] { std::rethrow_exception(each.error); });
}

}  // namespace

void test_streams() {
  Host host(3);
  run("streams", host, move_in_one_order);
  run("items that differ", host, submit_what_differs);
  run("segments that disagree", host, offer_what_differs);
  run("a stream without a rank", host, [&](int rank, Group& world) { lose_a_rank(rank, world, host); });
}

}  // namespace pycomm::shm::test
