// What a shared-memory call throws: facts, not words. The binding has them worded by pycomm/transport/_wording.py, where
// the other transports' errors are worded too.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pycomm::shm {

// The group that another one is a part of: rank r of the part is its rank `ranks[r]`, of `size`. Without ranks there is none.
// Its own rank r is the job's `global_ranks[r]`; without them, r.
struct Whole {
  std::vector<int> ranks = {};
  int size = 0;
  std::vector<int> global_ranks = {};
};

// The call that failed: verb, sequence number, group, this rank; by its number there if the group is a part of another one.
struct Where {
  std::string verb;
  std::uint64_t seq;
  std::string group;
  int rank, ranks;
  std::vector<int> global_ranks = {}, ranks_there = {};  // as in Whole; in `numbers` and `calls` below ranks have their own numbers
};

// `kind` and `numbers` are those of from_native() in _wording.py; `calls` has a header's call and numel for each rank.
struct Failed : std::runtime_error {
  Failed(const char* kind_, Where where_, std::vector<std::int64_t> numbers_ = {},
         std::vector<std::pair<std::uint64_t, std::uint64_t>> calls_ = {})
      : std::runtime_error(text(kind_, where_, numbers_, calls_)),
        kind(kind_), where(std::move(where_)), numbers(std::move(numbers_)), calls(std::move(calls_)) {}
  const char* kind;
  Where where;
  std::function<void()> why = {};  // for who tells a program of this: throws what made another rank give up the call, if it finds that
  std::vector<std::int64_t> numbers;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> calls;

 private:
  // For programs that are not Python's: "all_reduce #3 on group 'world': lost 1 4242 9".
  static std::string text(const char* kind, const Where& where, const std::vector<std::int64_t>& numbers,
                          const std::vector<std::pair<std::uint64_t, std::uint64_t>>& calls) {
    std::string text = where.verb + " #" + std::to_string(where.seq) + " on group '" + where.group + "': " + kind;
    for (const std::int64_t number : numbers) text += ' ' + std::to_string(number);
    for (const auto& call : calls) text += ' ' + std::to_string(call.first) + '/' + std::to_string(call.second);
    return text;
  }
};

struct PeerLost : Failed {  // "lost", "closed" or "interrupted"
  PeerLost(const char* kind_, Where where_, int rank_, int pid, int status) : Failed(kind_, std::move(where_), {rank_, pid, status}), rank(rank_) {}
  int rank;
};
struct Timeout : Failed {  // "timeout", a rank's of this group, or "late": this call's own
  using Failed::Failed;
};
struct Late : Timeout {  // "late message": a message that is under way still; nothing is broken
  using Timeout::Timeout;
};
struct Mismatch : Failed {  // "calls", "splits" or "size"
  using Failed::Failed;
};
struct Misuse : Failed {  // "closed by this rank", "other thread" or "forked"
  using Failed::Failed;
};
struct Broken : std::runtime_error {  // no memory, or a system call that failed
  using std::runtime_error::runtime_error;
};

}  // namespace pycomm::shm
