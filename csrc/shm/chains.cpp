// all_reduce of long messages among more than two ranks.
//
// [Note: chains]
// Window by window, in two shots: first the ranks stage what they have, then each of some ranks reduces a part of the window from
// what is staged, and everybody copies the results. Where every rank has a core, every rank stages its own and reduces a part.
//
// Where a few ranks take turns on a core, they form a chain: the first stages its window, the others add their own to what is staged
// there, and the last reduces. So what a core's ranks add up stays in its L2 and crosses to another core once, fewer lines are staged,
// and each rank gets its turn once a window. (On 2 cores of Sapphire Rapids, each apart and by chains: 4 ranks, 4 MiB 1.76 and 1.50 ms,
// 64 MiB 27 and 24; 8 ranks 3.5 and 3.2, 55 and 49.) In chains of eight ranks wait for one turn after the other: four times as long.
//
// While window w is reduced, w + 1 is staged already. Who stages w + 1 has seen the results of w - 1, whose ranks had all of w
// before; so every rank is done with w - 2, as [Note: the ring] asks.
#include <algorithm>
#include <cstring>

#include "../kernels/reduce.h"
#include "await.h"
#include "parts.h"
#include "windows.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kChainFrom = 512u << 10;    // shorter messages wait longer for turns than they save
// A window takes a turn of every rank, so the longer, the fewer; but a rank alone on its core has nothing to do until the other core's
// ranks have had theirs, so that shorter ones are better there, unless the results leave the caches anyway. (AMD's Zen 3, 1 and 2 MiB,
// 256 KiB for 128: 4 to 8 ranks 0.82 to 0.91 of the time, 3 ranks 0.9 to 1.3.)
constexpr std::size_t kChainWindow = 256u << 10, kWindowBesideOne = 128u << 10;
constexpr int kMostInChain = 4;

// Whether adding one after the other rounds as adding all at once does: 16- and 8-bit floats are added up in float32.
bool adds_stepwise(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: case DType::kBFloat16: case DType::kFloat8E4M3FN: case DType::kFloat8E5M2: case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ: return false;
    default: return true;
  }
}

}  // namespace

// How many ranks reduce a part each; the others only add to a chain. Two at least: a window's results take half its length at most.
int Group::chains_of(const Call& call) const {
  const bool may_chain = take_turns() && setup_.ranks_per_core <= kMostInChain && adds_stepwise(call.dtype);
  const bool pays = call.numel * item_bytes(call.dtype) >= kChainFrom;
  return may_chain && pays ? std::min(ranks_, std::max(2, cores())) : ranks_;
}

// Reduces the first `terms` of `inputs_` to `sum` and to where the others read it.
void Group::reduce_to_both(void* sum, void* staged, int terms, std::size_t numel, const Call& call) {
  if (stores_ == Stores::kPlain) {
    void* const outputs[] = {sum, staged};
    return pycomm::reduce_to_all(outputs, 2, inputs_.data(), terms, numel, call.dtype, call.op, weights_.data(), ranks_);
  }
  pycomm::reduce_to_all(&sum, 1, inputs_.data(), terms, numel, call.dtype, call.op, weights_.data(), ranks_);
  put(staged, sum, numel * item_bytes(call.dtype));
}

// Adds this rank's `input` to what the ranks before it in the chain have staged: by plain stores, as the next one is on this core.
void Group::add_to_chain(void* staged, const void* input, std::size_t numel, const Call& call, bool is_first) {
  const ReduceOp op = call.op == ReduceOp::kAvg ? ReduceOp::kSum : call.op;  // who reduces divides
  if (is_first && op != ReduceOp::kPremulSum) return copy_by_blocks(staged, input, numel * item_bytes(call.dtype));
  const void* const terms[] = {staged, input};
  const double weights[] = {1.0, call.factor};
  const int skipped = is_first ? 1 : 0;
  pycomm::reduce(staged, terms + skipped, 2 - skipped, numel, call.dtype, op, weights + skipped, false);
}

void Group::all_reduce_in_windows(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine) {
  const char* const verb = verb_name(call.verb);
  const std::size_t item = item_bytes(call.dtype);
  const int chains = chains_of(call), chain = rank_ % chains, before = rank_ - chains, last = ranks_ - chains;
  const bool is_chained = chains < ranks_, is_first = before < 0, is_last = rank_ >= last;
  const std::size_t bytes = call.numel * item;
  const std::size_t chain_window = is_long(bytes) || ranks_ >= 2 * chains ? kChainWindow : kWindowBesideOne;
  const std::size_t piece = (is_chained ? std::min(chain_window, at_.window_bytes) : at_.window_bytes) / item;
  const bool is_streamed = is_chained && is_long(bytes) && memory_prefers_streams();  // a shorter one, in place as a rule, has just been read
  const auto published_by = [this](int r) -> std::uint64_t& { return published(r); };
  const auto reduced_by = [this](int r) -> std::uint64_t& { return reduced(r); };
  const auto result_of = [&](std::size_t place, std::size_t numel) { return place + round_up(numel * item, kLine); };  // behind what is staged
  const auto stage = [&](std::size_t first, std::uint64_t window) {
    const std::size_t numel = std::min(piece, call.numel - first);
    const std::size_t place = own_.take(round_up(numel * item, kLine) + part_bound(numel, chains, item) * item);
    if (is_chained) settle(chain % cores());
    if (!is_first) await_ranks(published_by, window + 1, verb, 0, before, before + 1);
    for (int c = 0; c < chains; ++c) {
      if (is_last && c == chain) continue;  // what this rank reduces it adds then
      const Part part = part_of(numel, c, chains, item);
      unsigned char* const staged_part = staged(chain, place) + part.start * item;
      const unsigned char* const own = input + (first + part.start) * item;
      if (is_chained) add_to_chain(staged_part, own, part.numel, call, is_first);
      else put(staged_part, own, part.numel * item);
    }
    publish_window(window);
    return place;
  };
  populate(own_);
  const bool is_early = is_first && !mine.are_shared();  // nothing has to be known of the others
  std::size_t place = is_early ? stage(0, window_) : 0;
  if (meet_in_heaps(output, input, call, mine)) return;
  load_factors(call);
  if (!is_early) place = stage(0, window_);
  for (std::size_t first = 0; first < call.numel; first += piece, ++window_) {
    const std::size_t numel = std::min(piece, call.numel - first);
    const std::size_t next = first + piece < call.numel ? stage(first + piece, window_ + 1) : 0;
    const Part part = part_of(numel, chain, chains, item);
    if (is_last) {
      await_ranks(published_by, window_ + 1, verb, 0, last, ranks_);
      int terms = 0;
      const auto add = [&](const unsigned char* from, double weight) { inputs_[terms] = from, weights_[terms++] = weight; };
      for (int c = 0; c < chains; ++c) {
        if (c != chain || !is_first) add(staged(c, place) + part.start * item, is_chained ? 1.0 : factors_[c]);
        if (c == chain) add(input + (first + part.start) * item, call.factor);
      }
      reduce_to_both(output + (first + part.start) * item, staged(rank_, result_of(place, numel)), terms, part.numel, call);
      store_release(reduced(rank_), window_ + 1);
      waiter_->published();
    }
    await_ranks(reduced_by, window_ + 1, verb, 0, last, ranks_);
    for (int i = 0; i < chains; ++i) {
      const int r = last + (rank_ + i) % chains;
      if (r == rank_) continue;
      const Part theirs = part_of(numel, r % chains, chains, item);
      copy_by(is_streamed, output + (first + theirs.start) * item, staged(r, result_of(place, numel)), theirs.numel * item);
    }
    place = next;
  }
  account(bytes, verb);
}

}  // namespace pycomm::shm
