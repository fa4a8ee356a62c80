// Point-to-point messages: around the channel's end, matched by tag, from anyone, to oneself, of the wrong length.
#include "shm_ranks.h"

#include <thread>

namespace pycomm::shm::test {
namespace {

constexpr std::int64_t kTimeoutNs = 600'000'000'000;

void send(Group& group, const std::vector<float>& data, int peer, std::int64_t tag) {
  Mailbox& box = group.mailbox();
  box.wait(box.send(data.data(), data.size() * sizeof(float), peer, tag), kTimeoutNs);
}

std::vector<float> receive(Group& group, std::size_t numel, int peer, std::int64_t tag, int* source = nullptr) {
  std::vector<float> data(numel, -1.0f);
  Mailbox& box = group.mailbox();
  const auto message = box.receive(data.data(), numel * sizeof(float), peer, tag);
  box.wait(message, kTimeoutNs);
  if (source != nullptr) *source = message->peer;
  return data;
}

// More bytes than a channel holds, in messages of many lengths, so that frames and bytes meet its end everywhere.
void around_the_end(int rank, Group& group) {
  const int to = (rank + 1) % group.ranks(), from = (rank + group.ranks() - 1) % group.ranks();
  std::vector<std::shared_ptr<Message>> sends;
  std::vector<std::vector<float>> sent;
  sent.reserve(60);
  for (std::size_t i = 0; i < 60; ++i) {
    sent.push_back(input_of(rank, i * 517 + (i == 50 ? 700'000 : 0)));
    sends.push_back(group.mailbox().send(sent[i].data(), sent[i].size() * sizeof(float), to, 1));
  }
  for (std::size_t i = 0; i < 60; ++i) expect(same(receive(group, sent[i].size(), from, 1), input_of(from, sent[i].size())), "a message in order");
  for (const auto& message : sends) group.mailbox().wait(message, kTimeoutNs);
}

// Of lengths around those of pieces: there and back; to each other; one way until the sender has no pieces left, then back, more than it began
// with; and some that nobody has asked for when they come.
void in_pieces(int rank, Group& group) {
  const int peer = rank ^ 1;
  if (peer >= group.ranks()) return;
  const bool is_first = rank < peer;
  const auto numel_of = [](std::size_t bytes) { return bytes / sizeof(float); };
  const auto take = [&](std::size_t numel, std::int64_t tag, const char* what) { expect(same(receive(group, numel, peer, tag), input_of(peer, numel)), what); };
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t bytes : {kPieceBytes / 8 - 4, kPieceBytes / 8, kPieceBytes - 4, kPieceBytes, kPieceBytes + 4, 3 * kPieceBytes + 400, kPiecesEach * kPieceBytes,
                                    kPiecesEach * kPieceBytes + 4, 2 * kPiecesEach * kPieceBytes, 2 * kPiecesEach * kPieceBytes + 4}) {
      const std::size_t numel = numel_of(bytes);
      const std::vector<float> data = input_of(rank, numel);
      if (is_first) send(group, data, peer, 11);
      take(numel, 11, "there and back");
      if (!is_first) send(group, data, peer, 11);
      const auto message = group.mailbox().send(data.data(), bytes, peer, 12);
      take(numel, 12, "to each other");
      group.mailbox().wait(message, kTimeoutNs);
    }
    for (const bool first_sends : {true, false}) {
      for (std::size_t i = 0; i < 3 * kPiecesEach; ++i) {
        const std::size_t numel = 600 + 997 * i;
        if (is_first == first_sends) send(group, input_of(rank, numel), peer, 13);
        else take(numel, 13, "one way");
      }
    }
    const std::vector<float> one = input_of(rank, 5000), other = input_of(rank, 9001);
    const auto before = group.mailbox().send(one.data(), one.size() * sizeof(float), peer, 14);
    const auto after = group.mailbox().send(other.data(), other.size() * sizeof(float), peer, 15);
    take(9001, 15, "past one that is set aside");
    take(5000, 14, "one that was set aside");
    group.mailbox().wait(before, kTimeoutNs), group.mailbox().wait(after, kTimeoutNs);
  }
}

void by_tag(int rank, Group& group) {
  if (rank == 0) {
    for (int tag = 0; tag < 5; ++tag) send(group, input_of(tag, 1000 + static_cast<std::size_t>(tag)), 1, tag);
  } else if (rank == 1) {
    for (int tag = 4; tag >= 0; --tag) {
      const std::size_t numel = 1000 + static_cast<std::size_t>(tag);
      expect(same(receive(group, numel, 0, tag), input_of(tag, numel)), "a message by its tag");
    }
  }
}

void from_anyone(int rank, Group& group) {
  if (rank != 0) return send(group, input_of(rank, 3000), 0, 9);
  std::vector<int> seen(static_cast<std::size_t>(group.ranks()));
  for (int i = 1; i < group.ranks(); ++i) {
    int source = -1;
    const std::vector<float> data = receive(group, 3000, -1, 9, &source);
    expect(source > 0 && same(data, input_of(source, 3000)), "a message from anyone names its sender");
    if (source > 0) ++seen[static_cast<std::size_t>(source)];
  }
  for (int r = 1; r < group.ranks(); ++r) expect(seen[static_cast<std::size_t>(r)] == 1, "each sender once");
}

void to_oneself(int rank, Group& group) {
  const std::vector<float> data = input_of(rank, 600'000);  // more than the channel holds
  std::vector<float> output(data.size());
  Mailbox& box = group.mailbox();
  const auto incoming = box.receive(output.data(), output.size() * sizeof(float), rank, 3);
  const auto outgoing = box.send(data.data(), data.size() * sizeof(float), rank, 3);
  box.wait(outgoing, kTimeoutNs);
  box.wait(incoming, kTimeoutNs);
  expect(output == data, "a message to oneself");
}

void of_wrong_length(int rank, Group& group) {
  if (rank == 0) {
    send(group, input_of(0, 5000), 1, 4);
    send(group, input_of(0, 10), 1, 4);
  } else if (rank == 1) {
    std::vector<float> small(7, -1.0f);
    Mailbox& box = group.mailbox();
    const std::string text = expect_throw<Mismatch>("a wrong length", [&] { box.wait(box.receive(small.data(), 28, 0, 4), kTimeoutNs); });
    expect(contains(text, "size 0 4 28 20000"), "both lengths are named: " + text);
    expect(small == std::vector<float>(7, -1.0f), "no buffer was written");
    expect(same(receive(group, 10, 0, 4), input_of(0, 10)), "the next message comes");
  }
}

// Somebody waits while another thread of the same rank starts more: the helper, the driver and the starter meet.
void from_two_threads(int rank, Group& group) {
  const int peer = rank ^ 1;
  if (peer >= group.ranks()) return;
  std::thread second([&] {
    for (int i = 0; i < 40; ++i) expect(same(receive(group, 2000, peer, 7), input_of(peer, 2000)), "received by a second thread");
  });
  for (int i = 0; i < 40; ++i) send(group, input_of(rank, 2000), peer, 7);
  second.join();
}

// The receiver comes long after the send was started and left to itself: the helper thread moves the bytes.
void by_the_helper(int rank, Group& group) {
  const std::vector<float> data = input_of(rank, 600'000);  // more than the channel holds
  Mailbox& box = group.mailbox();
  const int peer = (rank + 1) % group.ranks(), from = (rank + group.ranks() - 1) % group.ranks();
  const auto message = box.send(data.data(), data.size() * sizeof(float), peer, 8);
  const struct timespec nap{0, 3'000'000};
  nanosleep(&nap, nullptr);
  expect(same(receive(group, data.size(), from, 8), input_of(from, data.size())), "a message that the helper moved");
  while (!box.test(message)) nanosleep(&nap, nullptr);
}

// A frame whose length no memory holds is an error at its receiver, not its end. Only the channel's worth of it is read.
void of_absurd_length(int rank, Group& group) {
  static const std::vector<float> data(600'000);
  if (rank == 0) (void)group.mailbox().send(data.data(), std::size_t{1} << 63, 1, 6);
  group.barrier({Verb::kBarrier});
  if (rank != 1) return;
  float one = 0;
  const std::string text = expect_throw<Failed>("an absurd length", [&] {
    Mailbox& box = group.mailbox();
    box.wait(box.receive(&one, sizeof one, 0, 5), kTimeoutNs);
  });
  expect(contains(text, "no memory 0 6 -9223372036854775808"), "the length is named: " + text);
}

}  // namespace

void test_messages() {
  for (const int ranks : {2, 3}) {
    Host host(ranks);
    run("messages", host, [](int rank, Group& group) {
      for (const auto part : {around_the_end, in_pieces, by_tag, from_anyone, to_oneself, of_wrong_length, from_two_threads, by_the_helper}) {
        part(rank, group);
        group.barrier({Verb::kBarrier});
      }
      of_absurd_length(rank, group);  // the last: it breaks the mailbox
    });
  }
}

}  // namespace pycomm::shm::test
