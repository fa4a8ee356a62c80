// The collectives over shared memory. group.h has the notes that they rest on.
#include <algorithm>
#include <cstring>

#include "../kernels/reduce.h"
#include "group.h"
#include "stores.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kPieces = 8, kRootedPieces = 16;  // to a window, where every rank has a core
constexpr std::size_t kStreamOutputFrom = 4u << 20;  // a result that long leaves the caches anyway
constexpr std::size_t kHeapsFrom = 4096;  // below, copying costs less than a second synchronization

unsigned char* bytes_of(void* data) { return static_cast<unsigned char*>(data); }
const unsigned char* bytes_of(const void* data) { return static_cast<const unsigned char*>(data); }

// Copies to or from a caller's buffer, which has no address where it has no elements; memcpy must not see that.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

// Whether a result of `bytes` is to be written past the caches.
bool streams_output(std::size_t bytes) { return bytes >= kStreamOutputFrom && memory_prefers_streams(); }

// Copies what others have staged to where only its owner reads it.
void keep(void* to, const void* from, std::size_t bytes, bool is_streamed = false) {
  if (is_streamed) return copy_streamed(to, from, bytes);
  ask_to_write(to, bytes);
  copy(to, from, bytes);
}

// The part of `numel` elements that rank `rank` of `ranks` reduces: whole cache lines, so that no two ranks write one.
struct Part {
  std::size_t start, numel;
};
Part part_of(std::size_t numel, int rank, int ranks, std::size_t item) {
  const std::size_t per_line = std::max<std::size_t>(1, kLine / item);
  const std::size_t lines = (numel + per_line - 1) / per_line;
  const auto cut = [&](int r) {
    return std::min(numel, lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranks) * per_line);
  };
  return {cut(rank), cut(rank + 1) - cut(rank)};
}

// No part is longer.
std::size_t part_bound(std::size_t numel, int ranks, std::size_t item) {
  return numel / static_cast<std::size_t>(ranks) + 2 * std::max<std::size_t>(1, kLine / item);
}

}  // namespace

// The exchange of a message that fits a slot; `bytes` is 0 on a rank that only reads.
void Group::exchange(const Call& call, const void* data, std::size_t bytes) {
  if (bytes > 0) put(payload(rank_, bytes), data, bytes);
  publish(call);
  meet(call, bytes);
}

template <class Fill, class Use>
void Group::in_windows(const Call& call, const Load& load, Fill fill, Use use) {
  if (load.total == 0) return;
  const char* const verb = verb_name(call.verb);
  // From one root to the others, or to it, small pieces, so that the root is soon read, or soon reads; where a piece costs switches
  // between ranks that share a core, large ones.
  const std::size_t pieces = take_turns() ? 1 : has_root(call.verb) ? kRootedPieces : kPieces;
  const std::size_t piece = at_.window_bytes / pieces / load.parts / kLine * kLine;
  const std::size_t block = streams_ || load.is_streamed ? piece : kBlock;  // a fence after each block would cost more than it gains
  // Who reads nothing only has to leave the others the time to read; [Note: the ring].
  const bool reads = !has_root(call.verb) || (rank_ == call.root) == (call.verb == Verb::kReduce || call.verb == Verb::kGather);
  const std::uint64_t ahead = reads ? 0 : pieces - 1;
  struct Window {
    std::size_t offset, bytes, stride, place;
  };
  const auto take_window = [&](std::size_t offset) {
    const std::size_t bytes = std::min(piece, load.total - offset), stride = round_up(bytes, kLine);
    return Window{offset, bytes, stride, take(load.parts * stride)};
  };
  const auto apply = [&](auto& function, const Window& window, std::size_t at) {
    if (at >= window.bytes) return;
    const auto part = [&](int rank, std::size_t i) { return staged(rank, window.place + i * window.stride + at); };
    function(part, window.offset + at, std::min(block, window.bytes - at));
  };
  use_ring();
  Window now = take_window(0);
  for (std::size_t at = 0; at < now.bytes; at += block) apply(fill, now, at);
  bool has_come = false;  // everybody's first window, with the header, if all ranks filled theirs before they met
  if (!load.has_met) {
    publish(call, Places{});  // none: the header still holds what an earlier call left there
    meet(call);
    has_come = count_shared() == 0;
  }
  if (!has_come) publish_window(window_);
  bool is_last = false;
  for (std::uint64_t i = 0; !is_last; ++i, ++window_) {
    if (!has_come && i >= ahead) await_windows(verb, ahead);
    has_come = false;
    is_last = now.offset + now.bytes == load.total;
    const Window next = is_last ? Window{} : take_window(now.offset + now.bytes);
    for (std::size_t at = 0; at < now.bytes; at += block) {  // [Note: by turns]
      apply(fill, next, at);
      apply(use, now, at);
    }
    if (!is_last) publish_window(window_ + 1);
    now = next;
  }
  account(load.total, verb);
}

void Group::agree(void* output, const void* input, std::size_t bytes, const Call& call) {
  const Entry entry(*this, call);
  exchange(call, input, bytes);
  for (int r = 0; r < ranks_; ++r) std::memcpy(bytes_of(output) + static_cast<std::size_t>(r) * bytes, payload(r, bytes), bytes);
}

void Group::barrier(std::int64_t timeout_ns) {
  Call call{Verb::kBarrier};
  call.timeout_ns = timeout_ns;
  const Entry entry(*this, call);
  publish(call);
  meet(call);
}

// -- all_reduce -----------------------------------------------------------------------------------------------------------

void Group::all_reduce(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  if (ranks_ == 1) {
    inputs_[0] = input;
    factors_[0] = call.factor;
    return reduce_from(output, inputs_.data(), call.numel, call);
  }
  if (bytes < kHeapsFrom && is_short(bytes)) {
    exchange(call, input, bytes);
    return all_reduce_in_slots(output, call);
  }
  const Places mine = bytes < kHeapsFrom ? Places{} : Places{setup_.heaps->place(input, bytes), setup_.heaps->place(output, bytes)};
  if (is_short(bytes)) return all_reduce_in_slots_or_heaps(output, input, call, mine);
  if (ranks_ == 2) return all_reduce_in_one_shot(bytes_of(output), bytes_of(input), call, mine);
  all_reduce_in_windows(bytes_of(output), bytes_of(input), call, mine);
}

void Group::all_reduce_in_slots_or_heaps(void* output, const void* input, const Call& call, const Places& mine) {
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  if (!mine.are_shared()) put(payload(rank_, bytes), input, bytes);
  publish(call, mine);
  meet(call);
  const int shared = count_shared();
  if (shared == ranks_) return all_reduce_in_heaps(call);
  if (mine.are_shared()) put(payload(rank_, bytes), input, bytes);
  if (shared > 0) sync("all_reduce");  // those with shared buffers have put theirs only now
  all_reduce_in_slots(output, call);
}

// Reduces `inputs_` to `sum` and to where the others read it.
void Group::reduce_to_both(void* sum, void* staged, std::size_t numel, const Call& call) {
  if (!streams_) {
    void* const outputs[] = {sum, staged};
    return pycomm::reduce_to_all(outputs, 2, inputs_.data(), ranks_, numel, call.dtype, call.op, factors_.data());
  }
  reduce_from(sum, inputs_.data(), numel, call);
  put(staged, sum, numel * item_bytes(call.dtype));
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
  if (has_met) {
    publish(call, mine);
    meet(call);
    if (count_shared() == ranks_) return all_reduce_in_heaps(call);
  }
  const bool is_streamed = output != input && streams_output(bytes);  // in place the lines have just been read
  in_windows(
      call, {bytes, 1, has_met, is_streamed},
      [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), input + offset, length); },
      [&](auto part, std::size_t offset, std::size_t length) {
        load_factors(call);
        for (int r = 0; r < ranks_; ++r) inputs_[r] = r == rank_ ? input + offset : part(r, 0);
        if (output != input && !is_streamed) ask_to_write(output + offset, length);
        reduce_from(output + offset, inputs_.data(), length / item, call, is_streamed);
      });
}

// Two shots, window by window: rank r reduces part r of each piece, then everybody copies all parts.
void Group::all_reduce_in_windows(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine) {
  const char* verb = verb_name(call.verb);
  const std::size_t item = item_bytes(call.dtype), piece = at_.window_bytes / item;
  const auto result_of = [&](std::size_t place, std::size_t numel) { return place + round_up(numel * item, kLine); };  // behind the contributions
  const auto fill = [&](std::size_t first, std::uint64_t window) {  // what the others reduce
    const std::size_t numel = std::min(piece, call.numel - first);
    const std::size_t place = take(round_up(numel * item, kLine) + part_bound(numel, ranks_, item) * item);
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_) continue;
      const Part part = part_of(numel, r, ranks_, item);
      put(staged(rank_, place) + part.start * item, input + (first + part.start) * item, part.numel * item);
    }
    publish_window(window);
    return place;
  };
  use_ring();
  std::size_t place = 0;
  if (!mine.are_shared()) place = fill(0, window_);
  publish(call, mine);
  meet(call);
  if (count_shared() == ranks_) return all_reduce_in_heaps(call);
  load_factors(call);
  if (mine.are_shared()) place = fill(0, window_);
  for (std::size_t first = 0; first < call.numel; first += piece) {
    const std::size_t numel = std::min(piece, call.numel - first);
    std::size_t next = 0;
    await_windows(verb);
    // The next window fills while others are still reducing this one.
    if (first + piece < call.numel) next = fill(first + piece, window_ + 1);
    const Part part = part_of(numel, rank_, ranks_, item);
    unsigned char* const sum = output + (first + part.start) * item;
    for (int r = 0; r < ranks_; ++r) inputs_[r] = r == rank_ ? input + (first + part.start) * item : staged(r, place) + part.start * item;
    reduce_to_both(sum, staged(rank_, result_of(place, numel)), part.numel, call);
    publish_result();
    await_results(verb);
    for (int i = 1; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;
      const Part theirs = part_of(numel, r, ranks_, item);
      std::memcpy(output + (first + theirs.start) * item, staged(r, result_of(place, numel)), theirs.numel * item);
    }
    place = next;
    ++window_;
  }
  account(call.numel * item, verb);
}

// Every buffer lies where everybody can reach it: each rank adds its part and stores the sum into all outputs. No copy in,
// 4 x bytes of DRAM traffic in all for two ranks, two synchronizations.
void Group::all_reduce_in_heaps(const Call& call) {
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item;
  const Part part = part_of(call.numel, rank_, ranks_, item);
  load_factors(call);
  for (int r = 0; r < ranks_; ++r) {
    const Places theirs = places(r);
    const int host_rank = setup_.host_rank_of[r];
    inputs_[r] = setup_.heaps->address(host_rank, theirs.input, bytes) + part.start * item;
    outputs_[r] = setup_.heaps->address(host_rank, theirs.output, bytes) + part.start * item;
  }
  pycomm::reduce_to_all(outputs_.data(), ranks_, inputs_.data(), ranks_, part.numel, call.dtype, call.op, factors_.data());
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
  if (is_short(bytes)) {
    exchange(call, input, bytes);
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

void Group::reduce_scatter(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item, n = static_cast<std::size_t>(ranks_);
  const auto mine = static_cast<std::size_t>(rank_);
  const auto row = [&, apart = call.row > 0 ? call.row * item : bytes](std::size_t r) { return bytes_of(input) + r * apart; };
  if (is_short(n * bytes)) {
    const std::size_t length = call.row > 0 ? bytes : n * bytes;  // parts that touch go at once
    for (std::size_t at = 0; at < n * bytes; at += length) put(payload(rank_, n * bytes) + at, row(at / bytes), length);
    publish(call);
    meet(call, n * bytes);
    load_factors(call);
    for (int r = 0; r < ranks_; ++r) inputs_[r] = payload(r, n * bytes) + mine * bytes;
    return reduce_from(output, inputs_.data(), call.numel, call);
  }
  // In place the lines have just been read: to write them past the caches would throw them out.
  const bool is_streamed = output != row(mine) && streams_output(n * bytes);
  const std::size_t whole = static_cast<std::size_t>(row(n - 1) - row(0)) + bytes;
  const Place place = setup_.heaps->place(input, whole);
  const bool has_met = place != 0;
  if (has_met) {
    publish(call, {place, place});
    meet(call);
    if (count_shared() == ranks_) {  // each reads the part that is its own from the inputs themselves
      load_factors(call);
      for (int r = 0; r < ranks_; ++r)
        inputs_[r] = setup_.heaps->address(setup_.host_rank_of[r], places(r).input, whole) + (row(mine) - row(0));
      reduce_from(output, inputs_.data(), call.numel, call, is_streamed);
      sync("reduce_scatter");
      return account(n * bytes, "reduce_scatter");
    }
  }
  in_windows(
      call, {bytes, n, has_met, is_streamed},
      [&](auto part, std::size_t offset, std::size_t length) {
        for (std::size_t r = 0; r < n; ++r)
          if (r != mine) put(part(rank_, r), row(r) + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        load_factors(call);
        for (int r = 0; r < ranks_; ++r) inputs_[r] = r == rank_ ? row(mine) + offset : part(r, mine);
        if (output != row(mine) && !is_streamed) ask_to_write(bytes_of(output) + offset, length);
        reduce_from(bytes_of(output) + offset, inputs_.data(), length / item, call, is_streamed);
      });
}

// -- moving ---------------------------------------------------------------------------------------------------------------

void Group::broadcast(void* data, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  const bool is_root = rank_ == call.root;
  if (is_short(bytes)) {
    exchange(call, data, is_root ? bytes : 0);
    if (!is_root) copy(data, payload(call.root, bytes), bytes);
    return;
  }
  const bool is_streamed = streams_output(bytes);
  in_windows(
      call, {bytes, 1, /*has_met=*/false, is_streamed},
      [&](auto part, std::size_t offset, std::size_t length) {
        if (is_root) put(part(rank_, 0), bytes_of(data) + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        if (!is_root) keep(bytes_of(data) + offset, part(call.root, 0), length, is_streamed);
      });
}

void Group::all_gather(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), bytes = call.numel * item, n = static_cast<std::size_t>(ranks_);
  const auto block = [&, apart = call.row > 0 ? call.row * item : bytes](int r) { return bytes_of(output) + static_cast<std::size_t>(r) * apart; };
  if (is_short(bytes)) {
    exchange(call, input, bytes);
    for (int r = 0; r < ranks_; ++r) copy(block(r), payload(r, bytes), bytes);
    return;
  }
  const bool is_streamed = streams_output(n * bytes);
  in_windows(
      call, {bytes, 1, /*has_met=*/false, is_streamed},
      [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), bytes_of(input) + offset, length); },
      [&](auto part, std::size_t offset, std::size_t length) {
        for (int r = 0; r < ranks_; ++r) {
          const unsigned char* const from = r == rank_ ? bytes_of(input) + offset : part(r, 0);
          if (block(r) + offset != from) keep(block(r) + offset, from, length, is_streamed);
        }
      });
}

void Group::gather(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype);
  const bool is_root = rank_ == call.root;
  const auto block = [&](int r) { return bytes_of(output) + static_cast<std::size_t>(r) * bytes; };
  if (is_short(bytes)) {
    exchange(call, input, bytes);
    for (int r = 0; is_root && r < ranks_; ++r) copy(block(r), payload(r, bytes), bytes);
    return;
  }
  in_windows(
      call, {bytes},
      [&](auto part, std::size_t offset, std::size_t length) {
        if (!is_root) put(part(rank_, 0), bytes_of(input) + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        for (int r = 0; is_root && r < ranks_; ++r) keep(block(r) + offset, r == rank_ ? bytes_of(input) + offset : part(r, 0), length);
      });
}

void Group::scatter(void* output, const void* input, const Call& call) {
  const Entry entry(*this, call);
  const std::size_t bytes = call.numel * item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_);
  const auto mine = static_cast<std::size_t>(rank_);
  const bool is_root = rank_ == call.root;
  if (is_short(n * bytes)) {
    exchange(call, input, is_root ? n * bytes : 0);
    copy(output, payload(call.root, n * bytes) + mine * bytes, bytes);
    return;
  }
  in_windows(
      call, {bytes, n},
      [&](auto part, std::size_t offset, std::size_t length) {
        for (std::size_t r = 0; is_root && r < n; ++r)
          if (r != mine) put(part(rank_, r), bytes_of(input) + r * bytes + offset, length);
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        const unsigned char* from = is_root ? bytes_of(input) + mine * bytes + offset : part(call.root, mine);
        keep(bytes_of(output) + offset, from, length);
      });
}

void Group::all_to_all(void* output, const void* input, const std::size_t* output_splits, const std::size_t* input_splits,
                       const Call& call) {
  const Entry entry(*this, call);
  const std::size_t item = item_bytes(call.dtype), n = static_cast<std::size_t>(ranks_), me = static_cast<std::size_t>(rank_);
  std::vector<std::size_t> sent(n + 1, 0), taken(n + 1, 0);  // where each part starts, in bytes
  for (std::size_t r = 0; r < n; ++r) {
    sent[r + 1] = sent[r] + input_splits[r] * item;
    taken[r + 1] = taken[r] + output_splits[r] * item;
  }
  // First every rank tells what it sends to each other one and what it expects from each: so the ranks know how long it
  // takes, and ranks that disagree find out before anything is written.
  std::vector<std::size_t> table(input_splits, input_splits + n);
  table.insert(table.end(), output_splits, output_splits + n);
  const std::size_t table_bytes = 2 * n * sizeof(std::size_t);
  exchange(call, table.data(), table_bytes);
  std::size_t longest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      const std::size_t sends = reinterpret_cast<const std::size_t*>(payload(static_cast<int>(i), table_bytes))[j];
      const std::size_t expects = reinterpret_cast<const std::size_t*>(payload(static_cast<int>(j), table_bytes))[n + i];
      if (sends != expects) report_splits(call, i, j, sends, expects);
      longest = std::max(longest, sends * item);
    }
  }
  copy(bytes_of(output) + taken[me], bytes_of(input) + sent[me], input_splits[me] * item);
  const auto piece_of = [](std::size_t bytes, std::size_t offset, std::size_t length) {
    return offset < bytes ? std::min(length, bytes - offset) : 0;
  };
  in_windows(
      call, {longest, n, /*has_met=*/true},
      [&](auto part, std::size_t offset, std::size_t length) {
        for (std::size_t r = 0; r < n; ++r)
          if (r != me) put(part(rank_, r), bytes_of(input) + sent[r] + offset, piece_of(sent[r + 1] - sent[r], offset, length));
      },
      [&](auto part, std::size_t offset, std::size_t length) {
        for (std::size_t r = 0; r < n; ++r)
          if (r != me)
            keep(bytes_of(output) + taken[r] + offset, part(static_cast<int>(r), me), piece_of(taken[r + 1] - taken[r], offset, length));
      });
}

}  // namespace pycomm::shm
