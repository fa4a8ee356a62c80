// The collectives that move and do not reduce, over shared memory. group.h has the notes that they rest on.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "direct.h"
#include "windows.h"

namespace pycomm::shm {
namespace {

// Where an all_gather or an all_to_all is read where it lies, in bytes of each rank. On two ranks of Sapphire Rapids 128 KiB take 0.95
// of the time, 512 KiB 0.92, 1 MiB 1.2.
constexpr std::size_t kDirectFrom = 128u << 10, kDirectTo = 512u << 10;
// A rank copies its own block in long runs, while the others fill their windows: on AMD's Zen 3 gathers of 64 KiB to 4 MiB of all ranks take
// 0.45 to 0.95 of the time that they take where own and others' blocks alternate, on Zen 5 all_gathers of 256 KiB to 64 MiB 0.6 to 0.95.
constexpr std::size_t kOwnAtOnce = 128u << 10;
constexpr std::size_t kWriteFrom = 32u << 10;  // of a broadcast: a share takes another call of the kernel, and a gate

class OwnBlock {
 public:
  OwnBlock(void* to, const void* from, std::size_t bytes, bool is_streamed) : to_(bytes_of(to)), from_(bytes_of(from)), bytes_(bytes), is_streamed_(is_streamed) {}
  // Copies at least so much of it, in all.
  void reach(std::size_t end) {
    if (to_ == from_) return;  // in place
    for (; copied_ < end; copied_ += kOwnAtOnce) copy(to_ + copied_, from_ + copied_, std::min(kOwnAtOnce, bytes_ - copied_), is_streamed_);
  }

 private:
  unsigned char* const to_;
  const unsigned char* const from_;
  const std::size_t bytes_;
  const bool is_streamed_;
  std::size_t copied_ = 0;
};

}  // namespace

void Group::broadcast(void* data, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  const bool is_root = rank_ == call.root;
  if (is_short(call.verb, bytes)) {
    if (exchange(call, data, is_root ? bytes : 0) && !is_root) copy(data, payload(call.root, bytes), bytes);
    return;
  }
  const auto stage = [&](bool has_met) {
    Result result = is_root ? Result(false) : result_into(call, data, bytes, bytes);
    in_windows(
        call, {bytes, 1, has_met, is_long(bytes), &result},
        [&](auto part, std::size_t offset, std::size_t length) {
          if (is_root) put(part(rank_, 0), bytes_of(data) + offset, length, is_long(bytes));
        },
        [&](auto part, std::size_t offset, std::size_t length) {
          if (!is_root) keep(bytes_of(data) + offset, part(call.root, 0), length, result.is_streamed());
        });
  };
  if (!may_deliver(bytes)) return stage(false);
  if (call.step == Step::kStart) return;
  const std::size_t share = bytes < kWriteFrom ? 0 : bytes / static_cast<std::size_t>(ranks_) / kLine * kLine;
  deliver(call, data, bytes, share, [&] { stage(true); });
}

void Group::all_gather(const Blocks& output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_);
  const auto block = [&](int r) { return output(static_cast<std::size_t>(r)); };
  if (is_short(call.verb, bytes)) {
    if (!exchange(call, input, bytes)) return;
    for (int r = 0; r < ranks_; ++r) copy(block(r), payload(r, bytes), bytes);
    return;
  }
  const bool are_apart = output.lie_by_themselves();
  Result result = result_into(call, block(are_apart ? (rank_ + 1) % ranks_ : 0), are_apart ? bytes : n * bytes, n * bytes);
  const auto stage = [&](bool has_met) {
    OwnBlock own(block(rank_), input, bytes, result.is_streamed());
    in_windows(
        call, {bytes, 1, has_met, is_long(n * bytes), &result},
        [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), bytes_of(input) + offset, length); },
        [&](auto part, std::size_t offset, std::size_t length) {
          own.reach(offset + length);
          for (int r = 0; r < ranks_; ++r)
            if (r != rank_) keep(block(r) + offset, part(r, 0), length, result.is_streamed());
        });
  };
  if (bytes < kDirectFrom || bytes > kDirectTo || !may_go_directly(chosen_.exchanges_directly.of(bytes))) return stage(false);
  if (call.step == Step::kStart) return;
  publish(call, source_of(input));
  meet(call);
  result.begin();
  const auto read = [&] {
    if (block(rank_) != input) copy(block(rank_), input, bytes, result.is_streamed());
    bool could = true;
    for (int i = 1; i < ranks_ && could; ++i) {  // each begins with another one
      const int r = (rank_ + i) % ranks_;
      could = read_memory(setup_.pids[r], told<Source>(r), 0, block(r), bytes);
    }
    return could;
  };
  move_directly(call, chosen_.exchanges_directly.of(bytes), n * bytes, read, [&] { stage(true); });
}

void Group::gather(void* const* outputs, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  const bool is_root = rank_ == call.root;
  if (is_short(call.verb, bytes)) {
    exchange(call, input, bytes);
    for (int r = 0; is_root && r < ranks_; ++r) copy(outputs[r], payload(r, bytes), bytes);
    return;
  }
  const std::size_t whole = static_cast<std::size_t>(ranks_) * bytes;
  Result result = is_root ? result_into(call, outputs[(rank_ + 1) % ranks_], bytes, whole) : Result(false);  // its own may be its input
  const auto stage = [&](bool has_met) {
    OwnBlock own(is_root ? outputs[rank_] : nullptr, input, bytes, result.is_streamed());
    in_windows(
        call, {bytes, 1, has_met, is_long(whole), &result},
        [&](auto part, std::size_t offset, std::size_t length) {
          if (!is_root) put(part(rank_, 0), bytes_of(input) + offset, length);
        },
        [&](auto part, std::size_t offset, std::size_t length) {
          if (!is_root) return;
          own.reach(offset + length);
          for (int r = 0; r < ranks_; ++r)
            if (r != rank_) keep(bytes_of(outputs[r]) + offset, part(r, 0), length, result.is_streamed());
        });
  };
  Way& way = chosen_.gathers_directly.of(bytes);
  if (!may_move_blocks(way, bytes)) return stage(false);
  tell_blocks(call, outputs);
  const struct Gates {
    ~Gates() {
      for (int r = 0; group.rank_ == root && r < group.ranks_; ++r)
        if (r != root) group.close_gate(r, r);
    }
    Group& group;
    int root;
  } gates{*this, call.root};
  const auto write_own = [&] {
    ++writes_;
    if (!is_root) return write_memory(/*gate=*/rank_, call.root, block_of(call.root), input, bytes, verb_name(call.verb));
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_) open_gate(r);
    result.begin();
    if (outputs[rank_] != input) copy(outputs[rank_], input, bytes, result.is_streamed());
    return true;
  };
  move_directly(call, way, bytes, write_own, [&] { stage(true); });
}

void Group::scatter(void* output, const void* const* inputs, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_);
  const auto mine = static_cast<std::size_t>(rank_);
  const bool is_root = rank_ == call.root;
  if (is_short(call.verb, n * bytes)) {
    for (std::size_t r = 0; is_root && bytes > 0 && r < n; ++r) put(payload(rank_, n * bytes) + r * bytes, inputs[r], bytes);
    publish(call);
    meet(call, n * bytes);
    copy(output, payload(call.root, n * bytes) + mine * bytes, bytes);
    return;
  }
  Result result = result_into(call, output, bytes, n * bytes);
  const auto stage = [&](bool has_met) {
    in_windows(
        call, {bytes, n, has_met, is_long(n * bytes), &result},
        [&](auto part, std::size_t offset, std::size_t length) {
          for (std::size_t r = 0; is_root && r < n; ++r)
            if (r != mine) put(part(rank_, r), bytes_of(inputs[r]) + offset, length);
        },
        [&](auto part, std::size_t offset, std::size_t length) {
          const unsigned char* from = is_root ? bytes_of(inputs[mine]) + offset : part(call.root, mine);
          keep(bytes_of(output) + offset, from, length, result.is_streamed());
        });
  };
  Way& way = chosen_.scatters_directly.of(bytes);
  if (!may_move_blocks(way, bytes)) return stage(false);
  tell_blocks(call, inputs);
  const auto read_own = [&] {
    result.begin();
    if (!is_root) return read_memory(setup_.pids[call.root], block_of(call.root), 0, output, bytes);
    if (output != inputs[mine]) copy(output, inputs[mine], bytes, result.is_streamed());
    return true;
  };
  move_directly(call, way, bytes, read_own, [&] { stage(true); });
}

Group::Lengths Group::compare_splits(const Call& call) {
  const auto n = static_cast<std::size_t>(ranks_);
  Lengths lengths{0, SIZE_MAX};
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t its_longest = *std::max_element(splits(i), splits(i) + n);
    lengths = {std::max(lengths.longest, its_longest), std::min(lengths.least, its_longest)};
    for (std::size_t j = 0; j < n; ++j) {
      const std::size_t sends = splits(i)[j], expects = splits(j)[n + i];
      if (sends != expects) report_splits(call, i, j, sends, expects);
    }
  }
  return lengths;
}

bool Group::may_be_read(std::size_t bytes) { return bytes >= kDirectFrom; }

void Group::all_to_all(void* output, const void* input, const std::size_t* output_splits, const std::size_t* input_splits, const Call& call) {
  const std::size_t item = item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_);
  std::vector<void*> outputs(n);
  std::vector<const void*> inputs(n);
  for (std::size_t r = 0, taken = 0, sent = 0; r < n; taken += output_splits[r] * item, sent += input_splits[r] * item, ++r)
    outputs[r] = bytes_of(output) + taken, inputs[r] = bytes_of(input) + sent;
  all_to_all(outputs.data(), inputs.data(), output_splits, input_splits, call);
}

void Group::all_to_all(void* const* outputs, const void* const* inputs, const std::size_t* output_splits, const std::size_t* input_splits,
                       const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_), me = static_cast<std::size_t>(rank_);
  // First every rank tells what it sends to each other one and what it expects from each: so the ranks know how long it
  // takes, and ranks that disagree find out before anything is written.
  std::vector<std::size_t> mine(input_splits, input_splits + n);
  mine.insert(mine.end(), output_splits, output_splits + n);
  // On a line of its own, which is read only if all ranks have written theirs: short messages do without.
  if (may_be_read(*std::max_element(input_splits, input_splits + n) * item)) source_behind_splits(me) = source_of(inputs[0]);
  exchange(call, mine.data(), splits_bytes());
  const Lengths lengths = compare_splits(call);
  const std::size_t longest = lengths.longest * item;
  const auto piece_of = [item](std::size_t split, std::size_t offset, std::size_t length) {
    return offset < split * item ? std::min(length, split * item - offset) : 0;
  };
  const std::size_t next = (me + 1) % n;
  const bool are_one = lie_as_one(outputs, output_splits, n, item);
  const std::size_t received = are_one ? std::accumulate(output_splits, output_splits + n, std::size_t{0}) : output_splits[next];
  Result result = result_into(call, outputs[are_one ? 0 : next], received * item, n * longest);
  result.begin();
  const auto copy_own = [&] { copy(outputs[me], inputs[me], input_splits[me] * item, result.is_streamed()); };
  const auto stage = [&] {
    copy_own();
    in_windows(
        call, {longest, n, /*has_met=*/true, is_long(n * longest), &result},
        [&](auto part, std::size_t offset, std::size_t length) {
          for (std::size_t r = 0; r < n; ++r)
            if (r != me) put(part(rank_, r), bytes_of(inputs[r]) + offset, piece_of(input_splits[r], offset, length));
        },
        [&](auto part, std::size_t offset, std::size_t length) {
          for (std::size_t r = 0; r < n; ++r)
            if (r != me)
              keep(bytes_of(outputs[r]) + offset, part(static_cast<int>(r), me), piece_of(output_splits[r], offset, length), result.is_streamed());
        });
  };
  if (!may_be_read(lengths.least * item) || longest > kDirectTo || !may_go_directly(chosen_.exchanges_directly.of(longest))) return stage();
  const auto read = [&] {
    copy_own();
    bool could = true;
    for (std::size_t i = 1; i < n && could; ++i) {
      const std::size_t r = (me + i) % n;
      const std::size_t offset = std::accumulate(splits(r), splits(r) + me, std::size_t{0}) * item;
      could = read_memory(setup_.pids[r], source_behind_splits(r), offset, outputs[r], output_splits[r] * item);
    }
    return could;
  };
  move_directly(call, chosen_.exchanges_directly.of(longest), n * longest, read, stage);
}

}  // namespace pycomm::shm
