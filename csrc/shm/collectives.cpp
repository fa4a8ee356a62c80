// The collectives that reduce, and the exchanges, over shared memory. group.h has the notes that they rest on.
#include <algorithm>
#include <cstring>

#include "../kernels/reduce.h"
#include "parts.h"
#include "windows.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kCopiedTo = 4096;  // up to here copying costs less than a second synchronization

}  // namespace

// The exchange of a message that fits a slot; `bytes` is 0 on a rank that only reads.
bool Group::exchange(const Call& call, const void* data, std::size_t bytes) {
  if (call.step != Step::kEnd) {
    if (bytes > 0) put(payload(rank_, bytes), data, bytes);
    publish(call);
  }
  if (call.step == Step::kStart) return false;
  meet(call, bytes);
  return true;
}

void Group::agree(void* output, const void* input, std::size_t bytes, const Call& call) {
  const Entry entry(*this, call);
  exchange(call, input, bytes);
  for (int r = 0; r < ranks_; ++r) std::memcpy(bytes_of(output) + static_cast<std::size_t>(r) * bytes, payload(r, bytes), bytes);
}

void Group::barrier(const Call& call) {
  const Entry entry(*this, call);
  exchange(call, nullptr, 0);
}

// -- all_reduce -----------------------------------------------------------------------------------------------------------

void Group::all_reduce(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  if (ranks_ == 1) {
    if (call.step == Step::kStart) return;
    inputs_[0] = input;
    factors_[0] = call.factor;
    return reduce_from(output, inputs_.data(), call.numel, call);
  }
  if (is_short(call.verb, bytes)) {
    if (exchange(call, input, bytes)) all_reduce_in_slots(output, call);
    return;
  }
  const Places mine = bytes <= kCopiedTo ? Places{} : Places{setup_.heaps->place(input, bytes), setup_.heaps->place(output, bytes)};
  if (call.step == Step::kStart && (mine.are_shared() || ranks_ > 2)) return;
  if (ranks_ == 2) return all_reduce_in_one_shot(bytes_of(output), bytes_of(input), call, mine);
  all_reduce_in_windows(bytes_of(output), bytes_of(input), call, mine);
}

// Everybody reads everybody's payload and adds in rank order.
void Group::all_reduce_in_slots(void* output, const Call& call) {
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  for (int r = 0; r < ranks_; ++r) inputs_[r] = payload(r, bytes);
  load_factors(call);
  reduce_from(output, inputs_.data(), call.numel, call);
  account(bytes, "all_reduce");
}

// Two ranks: each sends all that it has and adds up all of it. No more lines cross than by parts, half there and half back,
// and nobody waits for a result.
void Group::all_reduce_in_one_shot(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine) {
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item;
  const bool has_met = mine.are_shared();
  if (has_met && meet_in_heaps(output, input, call, mine)) return;
  Result result = output != input ? result_into(call, output, bytes, bytes) : Result(false);  // in place the lines have just been read
  in_windows(  // in small pieces at any length: it is in place as a rule, and the ranks need not all do it alike
      call, {bytes, 1, has_met, /*is_long=*/false, &result},
      [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), input + offset, length); },
      [&](auto part, std::size_t offset, std::size_t length) {
        load_factors(call);
        for (int r = 0; r < ranks_; ++r) inputs_[r] = r == rank_ ? input + offset : part(r, 0);
        if (output != input && !result.is_streamed()) ask_to_write(output + offset, length);
        reduce_from(output + offset, inputs_.data(), length / item, call, result.is_streamed());
      });
}

bool Group::meet_in_heaps(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine) {
  try {
    publish(call, mine);
    const Part part = part_of(call.numel, rank_, ranks_, item_bytes(call.dtype));  // while the header is on its way
    meet(call);
    if (count_shared() != ranks_) return false;
    or_tell([&] { all_reduce_in_heaps(output, input, part, call); });
    return true;
  } catch (const Mismatch&) {
    throw;  // before anybody writes
  } catch (...) {
    // A rank that was stopped may write there when it goes on, long after this call.
    if (mine.are_shared()) setup_.heaps->retire(output);
    throw;
  }
}

// Every buffer lies where everybody can reach it: each rank adds its part and stores the sum into all outputs. No copy in,
// 4 x bytes of DRAM traffic in all for two ranks, two synchronizations.
void Group::all_reduce_in_heaps(unsigned char* output, const unsigned char* input, const Part& part, const Call& call) {
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item, start = part.start * item;
  Result result = take_turns() ? Result(false) : results_[static_cast<std::size_t>(call.verb)].of_others(bytes);
  result.begin();
  load_factors(call);
  inputs_[rank_] = input + start;
  outputs_[0] = output + start;
  for (int r = 0, others = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const auto theirs = told<Places>(r);
    const int host_rank = setup_.host_rank_of[r];
    inputs_[r] = setup_.heaps->address(host_rank, theirs.input, bytes) + start;
    outputs_[++others] = setup_.heaps->address(host_rank, theirs.output, bytes) + start;
  }
  pycomm::reduce_to_all(outputs_.data(), ranks_, inputs_.data(), ranks_, part.numel, call.dtype, call.op, factors_.data(), ranks_,
                        result.is_streamed());
  sync("all_reduce");
  account(bytes, "all_reduce");
}

void Group::reduce(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item;
  const auto reduce_piece = [&](std::size_t offset, std::size_t length) {
    if (rank_ != call.root) return;
    load_factors(call);
    inputs_[rank_] = bytes_of(input) + offset;
    reduce_from(bytes_of(output) + offset, inputs_.data(), length / item, call);
  };
  if (is_short(call.verb, bytes)) {
    if (!exchange(call, input, bytes)) return;
    for (int r = 0; r < ranks_; ++r) inputs_[r] = payload(r, bytes);
    return reduce_piece(0, bytes);
  }
  in_windows(
      call, {bytes},
      [&](auto part, std::size_t offset, std::size_t length) {
        if (rank_ != call.root) put(part(rank_, 0), bytes_of(input) + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        for (int r = 0; r < ranks_; ++r) inputs_[r] = part(r, 0);
        reduce_piece(offset, length);
      });
}

void Group::reduce_scatter(void* output, const Blocks& row, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item, n = static_cast<std::size_t>(ranks_);
  const auto mine = static_cast<std::size_t>(rank_);
  if (is_short(call.verb, n * bytes)) {
    const std::size_t length = row.are_one(bytes) ? n * bytes : bytes;
    for (std::size_t at = 0; call.step != Step::kEnd && at < n * bytes; at += length) put(payload(rank_, n * bytes) + at, row(at / bytes), length);
    if (call.step != Step::kEnd) publish(call);
    if (call.step == Step::kStart) return;
    meet(call, n * bytes);
    load_factors(call);
    for (int r = 0; r < ranks_; ++r) inputs_[r] = payload(r, n * bytes) + mine * bytes;
    return reduce_from(output, inputs_.data(), call.numel, call);
  }
  // In place the lines have just been read: to write them past the caches would throw them out.
  Result result = output != row(mine) ? result_into(call, output, bytes, n * bytes) : Result(false);
  const std::size_t whole = row.lie_by_themselves() ? 0 : static_cast<std::size_t>(row(n - 1) - row(0)) + bytes;
  const Place place = row.lie_by_themselves() ? 0 : setup_.heaps->place(row(0), whole);
  const bool has_met = place != 0;
  if (has_met) {
    if (call.step == Step::kStart) return;
    publish(call, Places{place, place});
    meet(call);
    result.begin();
    if (count_shared() == ranks_) {  // each reads the part that is its own from the inputs themselves
      load_factors(call);
      for (int r = 0; r < ranks_; ++r)
        inputs_[r] = setup_.heaps->address(setup_.host_rank_of[r], told<Places>(r).input, whole) + (row(mine) - row(0));
      reduce_from(output, inputs_.data(), call.numel, call, result.is_streamed());
      sync("reduce_scatter");
      return account(n * bytes, "reduce_scatter");
    }
  }
  in_windows(
      call, {bytes, n, has_met, is_long(n * bytes), &result},
      [&](auto part, std::size_t offset, std::size_t length) {
        for (std::size_t r = 0; r < n; ++r)
          if (r != mine) put(part(rank_, r), row(r) + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        load_factors(call);
        for (int r = 0; r < ranks_; ++r) inputs_[r] = r == rank_ ? row(mine) + offset : part(r, mine);
        if (output != row(mine) && !result.is_streamed()) ask_to_write(bytes_of(output) + offset, length);
        reduce_from(bytes_of(output) + offset, inputs_.data(), length / item, call, result.is_streamed());
      });
}

}  // namespace pycomm::shm
