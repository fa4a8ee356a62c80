// The ranks of one group on one host: the exchange that every collective begins with, and the collectives.
//
// [Note: every collective is a full exchange]
// Each collective, a broadcast too, begins with every rank publishing a header (what it calls, with what arguments) in
// its own slot and reading everybody's. That one exchange is
//   - the synchronization: a rank that has read all headers #s knows that every rank has finished collective #s-1;
//   - the check: ranks that disagree see it before anything is written to a caller's buffer, on every rank;
//   - for small messages the whole transfer, since the payload lies behind the header, or inside its cache line.
//
// [Note: two slots]
// A rank has two slots, used in turn. It writes slot s%2 for collective #s after it finished #s-1, that is, after it
// read all headers #s-1, each of which its owner published after it had finished reading everybody's slot #s-2. So
// nobody reads what is overwritten, and no rank ever waits for permission to write.
//
// [Note: the ring]
// What is not short is staged in the rank's ring, a window at a time. Every rank takes the same places of its own
// ring in the same order, so no place is ever told. A window is counted in `published` once it is filled (the first of a call
// comes with the header, where all ranks filled theirs before they met) and a second phase in `reduced`; window w is filled after
// everybody's window w-1 was seen (in [Note: chains] the results of w-2), so everybody is done with w-3, and the ring is long
// enough that w-2, w-1 and w do not touch.
// A rank that only fills, the root of a broadcast, may be further ahead, by small windows: all that it is ahead is less than one
// large one, which is what the others may still read when it fills the first of its next call.
// The ring is longer than that for speed: on AMD's Zen 3 a line that both cores still hold in their L2 costs 10 ns to write and
// read again, one that has gone to the L3 4 ns. So a rank walks through more memory than its L2 holds.
//
// [Note: the common ring]
// Of two ranks, what only one of them fills lies in a ring of its own that both fill. When the other one sends, it has read all that was ever
// sent to it, and nobody reads what it sent before: so it may begin where the last message began, in lines that it has just read, and they cross
// once instead of twice (as regions do that are swapped; a broadcast of 256 KiB by either in turn on Zen 5: 0.87 of the time). Who sends again goes
// on behind its last message, which the other one may be reading still.
//
// [Note: started calls]
// A call that does not block is begun by who makes it: what it sends lies where the others look for it, and its header is published,
// so they need nothing more of this rank. The rest is done when its caller waits or asks for it, or at this rank's next call, which comes
// after it. So no thread has to be woken (two of Zen 5's cores: 42 us), and nobody waits in the middle of it. The function that does the call
// runs twice, up to where it would wait and on from there (Call::step). What has more to send than it may lay down at once is not started.
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../types.h"
#include "blocks.h"
#include "board.h"
#include "by_length.h"
#include "heap.h"
#include "layout.h"
#include "mailbox.h"
#include "memory.h"
#include "mapping.h"
#include "results.h"
#include "ring.h"
#include "stores.h"
#include "wait.h"

namespace pycomm::shm {

inline constexpr int kSpinsAlone = 1000;  // about 20 us, where every rank has a core

enum class Verb : std::uint8_t {
  kBarrier = 0, kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kAllToAll, kGather, kScatter, kNewGroup,
};

inline constexpr std::size_t kVerbs = static_cast<std::size_t>(Verb::kNewGroup) + 1;

// How much of a call its function is to do; [Note: started calls].
enum class Step : std::uint8_t { kWhole, kStart, kEnd };

// What a rank calls; compared with what the others call.
struct Call {
  Verb verb;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::size_t numel = 0;
  double factor = 1.0;
  std::int64_t timeout_ns = 0;  // 0: the group's
  bool is_plan = false;         // this exchange is only the start of it: a plan follows, or a new group
  Step step = Step::kWhole;     // of this rank alone
};

const char* verb_name(Verb verb);
bool has_root(Verb verb);

struct Part;  // parts.h

// A call under way; [Note: started calls].
struct Started {
  Verb verb;
  std::size_t bytes;                   // so many at most are read or written when it ends
  Deadline deadline;                   // its own; the clock runs from the first look on
  std::function<void(Step)> run;
  std::atomic<bool> is_done{false};
  std::exception_ptr error;            // what it ended with, if not well

  bool has_ended() const { return is_done.load(std::memory_order_acquire); }
  void throw_if_failed() const {  // once it has ended
    if (error != nullptr) std::rethrow_exception(error);
  }
};

class Group {
 public:
  // Which way of two is the faster one; nothing before it was tried.
  using Way = std::optional<bool>;
  template <class Choice>
  using Chosen = ByLength<std::optional<Choice>, 5, 32u << 10, 4>;
  struct Choices {
    Chosen<bool> swaps;                 // two ranks swap regions, or read each other's rings
    Chosen<Stores> swaps_by, rings_by;  // how they fill those
    Chosen<Stores> one_way_by;          // and how those do that only fill: of a message from one root, or to it
    Chosen<bool> goes_back;             // where such messages go by turns there and back; [Note: the common ring]
    Chosen<bool> delivers_directly;     // what one rank sends to the others, or through shared memory; [Note: direct reads]
    Chosen<bool> gathers_directly, scatters_directly;  // a block of each rank, to the root or from it
    Chosen<bool> exchanges_directly;    // what each sends to each
    Way offers_messages;                // that are exchanged; [Note: trials of exchanges]
  };
  struct Setup {
    int fd;                         // the host's memfd
    int host_ranks;                 // ranks of the host; it decides the file's layout
    std::uint64_t area;             // which area is this group's
    int rank, ranks;
    std::vector<int> host_rank_of;  // of each member
    std::vector<int> pidfds, pids;  // of each member
    std::string name;
    std::uint64_t members;          // hash of the member list
    std::int64_t timeout_ns;
    int ranks_per_core;             // of the host, rounded up: above 1 ranks take turns
    std::shared_ptr<Heaps> heaps;
    void (*about_to_block)();       // see wait.h
    void (*check_interrupt)();
    std::function<void()> look = {};  // which the wait for the members asks, too; throws if it is in vain
    Whole maker = {};                 // the group that it is made from, as errors call its ranks until it is made
    Choices choices = {};           // what they need not try
    std::size_t measure_every = 32u << 20;  // bytes of traffic, a few milliseconds' worth: then the ranks look how far apart their cores are
    unsigned choose_every = 1024;           // such measurements, 32 GiB: then they choose anew, as something may have disturbed the choice
  };

  // Takes the group's area and waits until every member has.
  explicit Group(Setup setup);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  std::int64_t timeout_ns() const { return setup_.timeout_ns; }
  bool is_in_child() const;  // this process was forked from the one that made it
  void set_timeout(std::int64_t timeout_ns) { setup_.timeout_ns = timeout_ns; }  // of calls that name none
  int ranks() const { return ranks_; }

  // Collectives. `call.numel` counts the elements of one rank's part: of the buffer itself in all_reduce, reduce and
  // broadcast, of the smaller buffer in the others. `output` may be `input` where the two are of one size.
  void barrier(const Call& call);
  void all_reduce(void* output, const void* input, const Call& call);
  void reduce(void* output, const void* input, const Call& call);
  void reduce_scatter(void* output, const Blocks& input, const Call& call);
  void broadcast(void* data, const Call& call);
  void all_gather(const Blocks& output, const void* input, const Call& call);
  // One buffer a rank, on the root; null elsewhere.
  void gather(void* const* outputs, const void* input, const Call& call);
  void scatter(void* output, const void* const* inputs, const Call& call);
  // Splits count elements, one entry a rank. Of parts that lie by themselves an input that others may read there has to be one with the rest.
  void all_to_all(void* output, const void* input, const std::size_t* output_splits, const std::size_t* input_splits, const Call& call);
  void all_to_all(void* const* outputs, const void* const* inputs, const std::size_t* output_splits, const std::size_t* input_splits,
                  const Call& call);
  static bool may_be_read(std::size_t bytes);  // a part of that length, there

  // Starts a call that `run` makes, and which moves `bytes` at most. Null, and nothing is done, if it has to be made as a whole.
  std::shared_ptr<Started> start(Verb verb, std::size_t bytes, std::function<void(Step)> run);
  // Ends it if that needs nobody any more, and says whether it has ended. Throws its error.
  bool test(Started& started);
  // Blocks until it has ended. Throws its error; or Late after `timeout_ns`, unless that is 0, and then it is under way still.
  void wait(Started& started, std::int64_t timeout_ns);
  // Waits until the one that is under way, if any, has ended, well or not; false after `timeout_ns`.
  bool drain(std::int64_t timeout_ns);

  // Every rank's `input`, of `bytes` up to a slot, one after the other: how the ranks agree on a call that is not carried here.
  void agree(void* output, const void* input, std::size_t bytes, const Call& call);
  // This rank leaves in the middle of a call: the others get an error, and so do later calls here.
  void abandon() { waiter_->declare(FailureKind::kInterrupted, rank_); }
  // Looks closely at every rank's process, and throws what broke the group if one has ended.
  void check_lost(const char* doing) {
    for (int r = 0; r < ranks_; ++r) waiter_->look_around(r, doing);
  }
  // What broke the group; nothing while it is whole.
  std::optional<Failure> failure() const { return waiter_->failure(); }
  bool is_broken() const { return load_acquire(reinterpret_cast<const Control*>(area_)->failure) != 0; }
  void set_name(const std::string& name);  // as the errors call the group
  void is_part_of(const Whole& whole);     // and its ranks
  // Calls and messages that wait long ask `look`; see Waiter. The making of groups from this one does not: it may be of those
  // who live.
  void look_elsewhere_by(const LookElsewhere& look, bool always);
  void tell_going_on();  // has the others look so, where that is not always: this rank makes a group of another one, which is broken
  // From now on the calls are written on the process's board; see [Note: the board].
  void record_on(std::shared_ptr<Log> log);

  // The area of a new group that `leader` of this one is the first member of, and that its members call `key`, as no other; called
  // by them, also when this group is broken or closed. `look`, if it is any, throws if it is vain to wait for the leader.
  std::uint64_t area_of_child(int leader, std::uint64_t key, const std::function<void()>& look = {});
  // Leaves word that this rank makes a group of `ranks` of this one, by the name `key`; none: it does not any more.
  void tell_making(const std::vector<int>& ranks, std::uint64_t key);
  std::pair<std::vector<int>, std::uint64_t> made_by(int rank) const;  // what that one has left word of
  std::vector<int> ended() const;                                      // the ranks whose processes have ended

  // Point-to-point messages.
  Mailbox& mailbox() { return *mailbox_; }

  // Leaves the group. The memory goes back when the last member has left, a few pages when the last has destroyed it. Never
  // blocks.
  void close();

  // One-way latency of a cache line between two ranks' cores, the worst pair measured last, in ns; 0 before.
  double line_ns() const { return line_ns_; }

 private:
  // One collective: checks on entry that the group may be used, counts on leaving.
  class Entry {
   public:
    Entry(Group& group, const Call& call);
    ~Entry();

   private:
    Group& group_;
    const Step step_;
  };

  // One thread at a time is in a call, or ends one that was started: who has the claim.
  bool claim() { return !is_busy_.exchange(true, std::memory_order_acquire); }
  void unclaim() { is_busy_.store(false, std::memory_order_release); }
  struct Claim {
    ~Claim() { group.unclaim(); }
    Group& group;
  };
  void claim_after_waiters(const char* verb);  // where another thread has it; throws Misuse if that makes a call of its own
  // The rest of [Note: started calls], with the claim.
  bool is_published() const { return load_relaxed(header(rank_).seq) == seq_; }
  bool is_in_call(int r) const { return load_acquire(header(r).seq) >= seq_; }  // it has come to the call under way
  int not_come() const;    // the first rank that has not come to the started call; -1 if all have
  void end_started();      // waits as a call does; its errors are for who asks for it, but for those of a signal handler
  void end_before_another();  // the same, and unclaims if that throws
  void end_by_close();        // takes the claim, and closes; what has not come by then never will
  bool look_at_started();  // ends it if that needs nobody any more; whether it has looked around, as often, and not ended it
  void await_started(Deadline& deadline);
  void take_turn(int turns);  // of waiting for another thread, after so many; without the claim
  void finish_started(std::exception_ptr error);

  struct Places {  // where this rank's buffers lie; travels in the header's payload
    Place input, output;
    bool are_shared() const { return input != 0 && output != 0; }
  };

  // A rank's slot for collective #seq; [Note: two slots].
  unsigned char* slot(int rank, std::uint64_t seq) const {
    return area_ + at_.slots + (2 * static_cast<std::size_t>(rank) + (seq & 1)) * at_.slot_stride;
  }
  unsigned char* line(int rank) const { return slot(rank, seq_); }
  Header& header(int rank) const { return *reinterpret_cast<Header*>(line(rank)); }
  // Where rank `rank` puts a message of up to slot_bytes: the smallest travel in the header's own cache line.
  unsigned char* payload(int rank, std::size_t bytes) const {
    return bytes <= sizeof(Header::payload) ? header(rank).payload : line(rank) + sizeof(Header);
  }
  bool take_turns() const { return setup_.ranks_per_core > 1; }
  int cores() const { return (setup_.host_ranks + setup_.ranks_per_core - 1) / setup_.ranks_per_core; }
  bool is_short(Verb verb, std::size_t bytes) const;  // it goes through the slots
  unsigned char* staged(int ring, std::size_t place) const {
    return area_ + at_.rings + static_cast<std::size_t>(ring) * at_.ring_bytes + place;
  }
  // The region that this rank fills in a round; [Note: swapped regions].
  unsigned char* region(std::uint64_t round) const { return area_ + at_.regions + ((static_cast<std::uint64_t>(rank_) + round) & 1) * kRegionBytes; }
  std::uint64_t& published(int rank) const { return reinterpret_cast<Counter*>(area_ + at_.published)[rank].value; }
  std::uint64_t& reduced(int rank) const { return reinterpret_cast<Counter*>(area_ + at_.reduced)[rank].value; }
  Ping& ping(int rank) const { return reinterpret_cast<Ping*>(area_ + at_.pings)[rank]; }
  template <class Told>
  Told told(int rank) const;  // in the header's payload
  int count_shared() const;

  void publish(const Call& call);                       // this rank's header; its payload is written already
  template <class Told>
  void publish(const Call& call, const Told& told);     // the same, for a large message
  void meet(const Call& call, std::size_t payload_bytes = 0);  // everybody's header, compared with this rank's
  // Returns once `word(r)` >= target for every other rank r.
  template <class Word>
  void await_all(Word word, std::uint64_t target, const char* verb, std::size_t payload_bytes, int spins = kSpinsAlone) {
    await_ranks(word, target, verb, payload_bytes, 0, ranks_, spins);
  }
  // The same of the ranks from `from` on and before `to`.
  template <class Word>
  void await_ranks(Word word, std::uint64_t target, const char* verb, std::size_t payload_bytes, int from, int to, int spins = kSpinsAlone);
  [[noreturn]] void report_mismatch(const Call& call);
  [[noreturn]] void report_splits(const Call& call, std::size_t from, std::size_t to, std::size_t sent, std::size_t expected);
  void load_factors(const Call& call);                  // everybody's factor of a PREMUL_SUM

  // Runs what may fail on this rank alone (memory, descriptors); the others, who wait for it, are then told.
  template <class Run>
  void or_tell(Run run);
  void populate(Ring& ring);             // this rank's own or the common one, once
  void use_region();                     // the region that this rank fills first
  void publish_window(std::uint64_t window);  // this rank's part of it is written
  void await_windows(const char* verb, std::uint64_t ahead = 0, int spins = kSpinsAlone);  // everybody's, but for the last `ahead`
  void sync(const char* verb, int spins = kSpinsAlone);  // returns once every rank has called it

  // False where the call is only started: the payloads have yet to come.
  bool exchange(const Call& call, const void* data, std::size_t bytes);
  void put(void* to, const void* from, std::size_t bytes, bool is_long = false) const;  // into memory that others will read
  void keep(void* to, const void* from, std::size_t bytes, bool is_streamed) const;  // what others have staged, where only its owner reads it
  void reduce_from(void* output, const void* const* inputs, std::size_t numel, const Call& call, bool streams = false) const;
  Result result_into(const Call& call, const void* output, std::size_t bytes, std::size_t message_bytes) {
    return results_[static_cast<std::size_t>(call.verb)].of(output, bytes, message_bytes);
  }
  // One-phase collectives of large messages: each rank fills its window, then takes from everybody's, piece by piece. The windows
  // lie in the rings, or are regions that two ranks swap.
  // A window has `parts` parts, one behind the other, each a piece of `total` bytes. `fill(part, offset, bytes)` and
  // `use(part, offset, bytes)` are given `part(rank, i)`, the address of rank's part i, and the piece.
  struct Load {
    std::size_t total, parts = 1;
    bool has_met = false;      // the ranks have compared their headers, and filled nothing before
    bool is_long = false;      // its results leave the caches; as the numbers above the same on every rank
    Result* result = nullptr;  // of this rank
    Attempt<2>* sending = nullptr;  // [Note: strings in use]
    bool is_streamed() const { return result != nullptr && result->is_streamed(); }  // its `use` writes past the caches
  };
  // Tells of the window that this rank has filled, with its header, unless the ranks have met already.
  void publish_in_windows(const Call& call, const Load& load);
  // Then compares the headers; whether everybody's first window has come with them.
  bool meet_in_windows(const Call& call, const Load& load);
  template <class Fill, class Use>
  void in_windows(const Call& call, Load load, Fill fill, Use use);
  template <class Fill, class Use>
  void in_rings(const Call& call, const Load& load, Fill fill, Use use);
  bool reads_windows(const Call& call) const;
  struct Staging;
  template <class Fill, class Use>
  void in_swaps(const Call& call, const Load& load, Fill fill, Use use);
  bool may_swap(Verb verb) const;
  void try_exchange(const Call& call, std::size_t bytes);
  void try_one_way(const Call& call, std::size_t bytes);
  template <class Run>
  auto by(Stores stores, Run run);  // `run` by them, for is_faster
  template <class Run>
  Stores fastest_stores(const char* verb, bool may_be_strings, Run run);  // to `run` by
  std::vector<unsigned char> memory_to_try(std::size_t bytes);
  // What the ranks tell each other at the beginning of an all_to_all, in the payload: the elements that rank r sends to each, then
  // those that it expects from each; behind it, where its input lies.
  std::size_t splits_bytes() const { return 2 * static_cast<std::size_t>(ranks_) * sizeof(std::size_t); }
  const std::size_t* splits(std::size_t r) const { return reinterpret_cast<const std::size_t*>(payload(static_cast<int>(r), splits_bytes())); }
  Source& source_behind_splits(std::size_t r) const {
    return *reinterpret_cast<Source*>(line(static_cast<int>(r)) + sizeof(Header) + round_up(splits_bytes(), kLine));
  }
  struct Lengths {
    std::size_t longest, least;  // part of all, and the least of what is the longest part of a rank; elements
  };
  Lengths compare_splits(const Call& call);
  // Messages that may be read where they lie, once the ranks have met and told where: `move()` says whether it could, `stage()`
  // moves them in windows.
  bool may_go_directly(Way way, bool in_turns_too = false) const {
    return way.value_or(true) && ranks_ > 1 && !is_refused_ && (in_turns_too || !take_turns());
  }
  template <class Move, class Stage>
  void move_directly(const Call& call, Way& way, std::size_t bytes, Move move, Stage stage);
  template <class Move>
  bool move_by_all(const char* verb, std::size_t bytes, Move move);
  // What one rank sends to all others, from its `data` to theirs.
  bool may_deliver(std::size_t bytes);
  template <class Stage>
  void deliver(const Call& call, void* data, std::size_t bytes, std::size_t share, Stage stage);
  // A block of each rank, between the root's memory and theirs.
  bool may_move_blocks(Way way, std::size_t bytes) const;
  void tell_blocks(const Call& call, const void* const* blocks);  // the root's, where each lies; then the ranks have met
  Source block_of(int root) const;                                // of those, this rank's
  std::uint64_t* block_addresses(int root) const {  // behind its header
    static_assert(kMaxRanks * sizeof(std::uint64_t) <= 2048);  // the shortest slot
    return reinterpret_cast<std::uint64_t*>(line(root) + sizeof(Header));
  }
  // [Note: direct writes]
  bool write_memory(int gate, int rank, const Source& target, const void* from, std::size_t bytes, const char* verb);
  void open_gate(int gate);
  void close_gate(int gate, int writer);
  struct Gate {
    ~Gate() { group.close_gate(gate, writer); }
    Group& group;
    int gate, writer;
  };
  void all_reduce_in_slots(void* output, const Call& call);
  void all_reduce_in_one_shot(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine);
  void all_reduce_in_windows(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine);
  int chains_of(const Call& call) const;
  void add_to_chain(void* staged, const void* input, std::size_t numel, const Call& call, bool is_first);
  void reduce_to_both(void* sum, void* staged, int terms, std::size_t numel, const Call& call);
  // Tells the others where this rank's buffers lie; if all of theirs can be reached, the all_reduce is done there, and true.
  bool meet_in_heaps(unsigned char* output, const unsigned char* input, const Call& call, const Places& mine);
  void all_reduce_in_heaps(unsigned char* output, const unsigned char* input, const Part& part, const Call& call);  // `part` is this rank's
  // Does the same in two ways by turns, all ranks at once; whether the second takes less than that share of the first one's time. Nothing
  // if a rank could not.
  template <class One, class Other>
  Way is_faster(const char* verb, One one, Other other, double share = 1.0);
  // Before that: the first walk through a ring is not as the others.
  template <class Stage>
  void walk_ring(const char* verb, std::size_t bytes, Stage stage);
  // Counts what a call cost; now and then measures the machine again and chooses how to store.
  void account(std::size_t bytes, const char* verb);
  bool is_due(std::size_t bytes) const;  // whether it would measure after such a call
  void measure_soon() { traffic_bytes_ = setup_.measure_every; }  // something was tried, and the cores may have moved meanwhile
  void measure_line(const char* verb);
  template <class Round>
  std::int64_t time_rounds(Round round);
  void send_ping(std::uint64_t count);
  void await_ping(int peer, std::uint64_t count, const char* verb);
  std::uint32_t time_pings(int peer, const char* verb);
  std::uint32_t time_exchanges(int peer, bool streams, const char* verb);
  void record();  // the call that was entered on the board, unless it is inside one that is there already
  void step_aside(std::uint32_t cpu);  // to a core with fewer ranks, if this one has too many
  void settle(int core);               // on the core of that number among those that this thread may use, if it is elsewhere

  Setup setup_;
  int rank_, ranks_;
  int forks_at_start_;
  AreaLayout at_;
  std::unique_ptr<Mapping> mapping_;
  unsigned char* area_;
  std::shared_ptr<Log> log_;  // null while nothing is recorded
  const Call* unrecorded_ = nullptr;  // the call under way, until it is on the board,
  std::uint64_t entered_at_ = 0;      // since so many ticks
  bool is_recorded_ = false;
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<Mailbox> mailbox_;
  std::uint64_t seq_ = 0;      // of the collective under way, or the last one
  std::uint64_t window_ = 0;   // windows used so far
  Ring own_, common_;
  Deadline deadline_{};
  std::vector<const void*> inputs_;  // scratch: one pointer a rank
  std::vector<double> factors_, weights_;
  std::vector<void*> outputs_;
  int crowded_rounds_ = 0;     // waits on a core that has too many ranks
  std::uint64_t round_ = 0;    // of the swapped regions
  bool has_region_ = false;
  Choices chosen_;
  std::uint64_t writes_ = 0; // into the memory of others, of all ranks in turn
  bool is_refused_ = false;  // a rank could not reach another's memory
  bool is_closed_ = false;
  int lines_ = 0;            // of the payload that the call under way exchanges, to ask for ahead
  Stores stores_ = Stores::kPlain;  // by which what is staged reaches the other ranks the soonest
  bool goes_back_ = false;   // as the other rank has sent before
  std::array<Results, kVerbs> results_;  // by verbs
  std::array<ByLength<FewWays<2>, 2, 2u << 20, 4>, kVerbs> sending_ways_;  // as chosen, or by strings
  double line_ns_ = 0;
  double chosen_at_ns_ = 0;  // what line_ns_ was when that was found out
  std::size_t traffic_bytes_ = 0;    // since that was measured
  unsigned measured_ = 0;            // so often since something was chosen
  bool keeps_slots_ = false;         // what the ranks have told each other there is still needed: measuring would overwrite it
  std::atomic<bool> is_busy_{false};
  std::shared_ptr<Started> started_;   // the call that was started and has not ended; none begins before
  std::atomic<int> waiters_{0};        // threads that wait for one
  std::int64_t looked_ns_ = 0;         // when it was last looked who is lost
};

template <class Run>
void Group::or_tell(Run run) {
  try {
    run();
  } catch (const Broken&) {
    abandon();
    throw;
  }
}

template <class Told>
void Group::publish(const Call& call, const Told& told) {
  static_assert(sizeof told <= sizeof(Header::payload));
  std::memcpy(header(rank_).payload, &told, sizeof told);
  publish(call);
}

template <class Told>
Told Group::told(int rank) const {
  Told told;
  std::memcpy(&told, header(rank).payload, sizeof told);
  return told;
}

}  // namespace pycomm::shm
