#include "group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "../kernels/reduce.h"
#include "await.h"
#include "process.h"
#include "rings.h"
#include "stores.h"
#include "swaps.h"

namespace pycomm::shm {
namespace {

constexpr const char* kVerbNames[kVerbs] = {"barrier", "all_reduce", "reduce", "reduce_scatter", "broadcast",
                                            "all_gather", "all_to_all", "gather", "scatter", "new_group"};

constexpr std::size_t kKeptAtOnce = 4 * kBlock;  // shorter copies are over before the lines that they write have come
constexpr std::size_t kStreamFrom = 768;         // where non-temporal stores win, they do from here on

std::uint64_t encode(const Call& call) {
  return static_cast<std::uint64_t>(call.verb) | static_cast<std::uint64_t>(call.op) << 8 |
         static_cast<std::uint64_t>(call.dtype) << 16 | static_cast<std::uint64_t>(call.is_plan) << 24 |
         static_cast<std::uint64_t>(call.root) << 32;
}

// Moves this thread to a core and leaves it free to be moved on.
void move_to(int cpu, const cpu_set_t& allowed) {
  cpu_set_t target;
  CPU_ZERO(&target);
  CPU_SET(cpu, &target);
  if (sched_setaffinity(0, sizeof target, &target) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

bool has_root(Verb verb) {
  return verb == Verb::kReduce || verb == Verb::kBroadcast || verb == Verb::kGather || verb == Verb::kScatter;
}

const char* verb_name(Verb verb) { return kVerbNames[static_cast<int>(verb)]; }

Group::Group(Setup setup)
    : setup_(std::move(setup)), rank_(setup_.rank), ranks_(setup_.ranks), forks_at_start_(forks()), at_(AreaLayout::of(ranks_)), own_(rank_, at_.ring_bytes), common_(ranks_, at_.ring_bytes), inputs_(ranks_), factors_(ranks_, 1.0), weights_(ranks_, 1.0), outputs_(ranks_) {
  chosen_ = setup_.choices;
  const FileLayout file = FileLayout::of(setup_.host_ranks);
  if (setup_.area >= kAreas) throw Broken("shared memory: more than " + std::to_string(kAreas) + " groups were made in this job");
  mapping_ = std::make_unique<Mapping>(setup_.fd, file.areas + setup_.area * file.area_stride, at_.total);
  area_ = mapping_->data();
  mapping_->populate(0, at_.resident, false);
  Control& control = *reinterpret_cast<Control*>(area_);
  const auto waiting = [&](std::uint32_t& asleep, std::size_t sleepers) {
    return Waiter::Setup{&control.failure, &control.gone_on, &asleep, reinterpret_cast<Sleeper*>(area_ + sleepers), rank_, ranks_, setup_.pidfds, setup_.pids,
                         setup_.ranks_per_core, setup_.about_to_block, setup_.check_interrupt};
  };
  waiter_ = std::make_unique<Waiter>(waiting(control.sleepers, at_.sleepers));
  waiter_->name(setup_.name, &seq_);
  waiter_->needs_all([this](int r) { return is_in_call(r); });
  mailbox_ = std::make_unique<Mailbox>(area_, at_, waiting(control.mail_sleepers, at_.mail_sleepers), setup_.name, setup_.choices.offers_messages,
                                       [this](std::size_t offset, std::size_t bytes) { mapping_->populate(offset, bytes, false); });
  // The first exchange: everybody is here, and means the same group.
  Call hello{Verb::kBarrier};
  hello.numel = setup_.members;
  is_part_of(std::exchange(setup_.maker, {}));
  try {
    const Entry entry(*this, hello);
    publish(hello);
    if (setup_.look) waiter_->look_elsewhere_by([look = std::exchange(setup_.look, {})](int, const auto&) { look(); }, /*always=*/true);
    meet(hello);
    waiter_->look_elsewhere_by({}, false);
    if (ranks_ > 1) measure_line("new_group");
    is_part_of({});
  } catch (const Mismatch&) {
    throw;
  } catch (...) {  // who comes yet must not take what this rank has left there for a member
    waiter_->declare(FailureKind::kInterrupted, rank_);
    throw;
  }
}

Group::~Group() {
  close();
  if (is_in_child()) return;
  Control& control = *reinterpret_cast<Control*>(area_);
  if (__atomic_add_fetch(&control.forgotten, 1, __ATOMIC_ACQ_REL) == static_cast<std::uint32_t>(ranks_)) mapping_->release(0, at_.slots);
}

std::uint64_t Group::area_of_child(int leader, std::uint64_t key, const std::function<void()>& look) {
  // One line a leader is enough: it makes its next group after all members of this one have met in it, or somebody has given that up.
  Made& made = reinterpret_cast<Made*>(area_ + at_.made)[leader];
  if (leader == rank_) {
    const std::uint64_t area = setup_.heaps->take_area();
    store_release(made.key, 0);
    store_release(made.area, area);
    store_release(made.key, key);
    return area;
  }
  const std::int64_t deadline_ns = monotonic_ns() + setup_.timeout_ns;
  for (std::int64_t next_look_ns = 0;; usleep(50)) {
    const std::uint64_t area = load_acquire(made.area);
    if (load_acquire(made.key) == key && load_acquire(made.area) == area) return area;
    if (monotonic_ns() < next_look_ns) continue;
    next_look_ns = monotonic_ns() + kFirstNapNs;
    setup_.check_interrupt();
    if (look) look();
    const int pid = setup_.pids[leader];
    if (has_ended(setup_.pidfds[leader])) throw PeerLost("lost", waiter_->where("new_group"), leader, pid, exit_status(setup_.pidfds[leader], pid));
    if (monotonic_ns() > deadline_ns) throw Timeout("late", waiter_->where("new_group"), {leader, pid, setup_.timeout_ns});
  }
}

void Group::tell_making(const std::vector<int>& ranks, std::uint64_t key) {
  std::uint64_t members[kMaxRanks / 64] = {};
  for (const int r : ranks) members[r / 64] |= std::uint64_t{1} << r % 64;
  Made& made = reinterpret_cast<Made*>(area_ + at_.made)[rank_];
  store_release(made.making, 0);
  for (int word = 0; word < kMaxRanks / 64; ++word) store_release(made.members[word], members[word]);
  store_release(made.making, key);
}

std::pair<std::vector<int>, std::uint64_t> Group::made_by(int rank) const {
  const Made& made = reinterpret_cast<const Made*>(area_ + at_.made)[rank];
  const std::uint64_t key = load_acquire(made.making);
  std::vector<int> members;
  for (int r = 0; r < ranks_; ++r)
    if ((load_acquire(made.members[r / 64]) >> r % 64 & 1) != 0) members.push_back(r);
  if (key == 0 || load_acquire(made.making) != key) return {};  // it is just being written
  return {members, key};
}

std::vector<int> Group::ended() const {
  std::vector<int> found;
  for (int r = 0; r < ranks_; ++r)
    if (has_ended(setup_.pidfds[r])) found.push_back(r);
  return found;
}

bool Group::is_in_child() const { return forks() != forks_at_start_; }

void Group::set_name(const std::string& name) {
  setup_.name = name;
  waiter_->name(name, &seq_);
  mailbox_->set_name(name);
}

void Group::is_part_of(const Whole& whole) {
  waiter_->is_part_of(whole);
  mailbox_->is_part_of(whole);
}

void Group::look_elsewhere_by(const LookElsewhere& look, bool always) {
  waiter_->look_elsewhere_by(look, always);
  mailbox_->look_elsewhere_by(look, always);
}

void Group::tell_going_on() { store_relaxed(reinterpret_cast<Control*>(area_)->gone_on, 1u); }

void Group::close() {
  if (is_closed_) return;
  if (is_in_child()) {
    is_closed_ = true;
    (void)mailbox_.release();  // a forked child has nothing to leave, nor the helper thread that this would join
    return;
  }
  end_by_close();
  mailbox_->close();
  waiter_->leave();
  Control& control = *reinterpret_cast<Control*>(area_);
  if (__atomic_add_fetch(&control.left, 1, __ATOMIC_ACQ_REL) == static_cast<std::uint32_t>(ranks_))
    mapping_->release(at_.slots, at_.total - at_.slots);  // before it lies the word of groups made from this one
}

void Group::record_on(std::shared_ptr<Log> log) {
  log_ = std::move(log);
  waiter_->record_on(log_.get());
  mailbox_->record_on(log_.get());
}

Group::Entry::Entry(Group& group, const Call& call) : group_(group), step_(call.step) {
  if (step_ == Step::kEnd) return;  // it was entered when it was started
  const char* const verb = verb_name(call.verb);
  if (step_ == Step::kWhole) {
    if (!group.claim()) group.claim_after_waiters(verb);
    if (__builtin_expect(group.started_ != nullptr, 0)) group.end_before_another();
  }
  store_relaxed(group.seq_, group.seq_ + 1);  // where() reads it, for a second thread too
  group.deadline_ = Deadline{call.timeout_ns > 0 ? call.timeout_ns : group.setup_.timeout_ns};
  const bool is_child = group.is_in_child();
  if (__builtin_expect(!group.is_closed_ && !is_child && load_acquire(reinterpret_cast<Control*>(group.area_)->failure) == 0, 1)) {
    if (group.log_ != nullptr) {
      group.unrecorded_ = &call;
      group.entered_at_ = group.log_->ticks();
    }
    return;
  }
  if (step_ == Step::kWhole) group.unclaim();
  if (group.is_closed_) throw Misuse("closed by this rank", group.waiter_->where(verb));
  if (is_child) throw Misuse("forked", group.waiter_->where(verb));
  group.waiter_->throw_if_broken(verb);
}

void Group::record() {
  const Call& call = *std::exchange(unrecorded_, nullptr);
  const bool has_parts = call.verb == Verb::kAllGather || call.verb == Verb::kReduceScatter || call.verb == Verb::kGather || call.verb == Verb::kScatter;
  const std::size_t bytes = call.verb == Verb::kNewGroup ? 0 : call.numel * item_bytes(call.dtype) * static_cast<std::size_t>(has_parts ? ranks_ : 1);
  is_recorded_ = log_->begin({static_cast<std::uint8_t>(call.verb), static_cast<std::uint8_t>(call.op), static_cast<std::uint8_t>(call.dtype),
                              static_cast<std::uint8_t>(call.is_plan ? kIsPlan : 0), 0, call.root, call.numel, bytes}, seq_, entered_at_);
}

Group::Entry::~Entry() {
  if (step_ == Step::kStart) {
    if (group_.is_published()) return;
    group_.unrecorded_ = nullptr;
    store_relaxed(group_.seq_, group_.seq_ - 1);
    return;
  }
  if (group_.unrecorded_ != nullptr) group_.record();
  if (std::exchange(group_.is_recorded_, false)) group_.log_->end();
  // The slot that comes next was read by everybody two calls ago; asking for its lines now, as many as this call took, spares the
  // next call that wait.
  const unsigned char* const next = group_.slot(group_.rank_, group_.seq_ + 1);
  for (int line = 0; line <= group_.lines_; ++line) prefetch_for_write(next + line * kLine);
  if (step_ == Step::kWhole) group_.unclaim();
}

// -- the exchange ---------------------------------------------------------------------------------------------------------

void Group::publish(const Call& call) {
  Header& mine = header(rank_);
  mine.call = encode(call);
  mine.numel = call.numel;
  mine.factor = call.factor;
  store_release(mine.seq, seq_);
  waiter_->published();
  if (unrecorded_ != nullptr) record();  // while the header is on its way to the others
}

int Group::count_shared() const {
  int shared = 0;
  for (int r = 0; r < ranks_; ++r) shared += told<Places>(r).are_shared();
  return shared;
}

void Group::meet(const Call& call, std::size_t payload_bytes) {
  // To look at once takes the header's line from a rank that is about to write it, and who comes at the same time is: on two ranks of
  // Sapphire Rapids all_reduces of 256 B to 2 KiB take 0.8 of the time with a pause first, of 4 KiB 0.9.
  if (!take_turns()) pause();
  await_all([this](int r) -> std::uint64_t& { return header(r).seq; }, seq_, verb_name(call.verb), payload_bytes);
  const std::uint64_t mine = encode(call);
  bool agree = true;
  for (int r = 0; r < ranks_; ++r) agree &= header(r).call == mine && header(r).numel == call.numel;
  if (__builtin_expect(!agree, 0)) report_mismatch(call);
}

void Group::report_mismatch(const Call& call) {
  // Some ranks have staged and told of something for this call and some have not; all go on behind it.
  window_ += std::max(kMostSteps, kMostStarted) + 1;
  own_.restart();
  common_.restart();
  if (log_ != nullptr) log_->fail();
  // One of the calls may be that of a rank that has died since, another one that of a rank which goes on without it.
  check_lost(verb_name(call.verb));
  std::vector<std::pair<std::uint64_t, std::uint64_t>> calls;
  for (int r = 0; r < ranks_; ++r) calls.emplace_back(header(r).call, header(r).numel);
  throw Mismatch("calls", waiter_->where(verb_name(call.verb)), {}, std::move(calls));
}

void Group::report_splits(const Call& call, std::size_t from, std::size_t to, std::size_t sent, std::size_t expected) {
  if (log_ != nullptr) log_->fail();
  const auto as_number = [](std::size_t value) { return static_cast<std::int64_t>(value); };
  throw Mismatch("splits", waiter_->where(verb_name(call.verb)), {as_number(from), as_number(to), as_number(sent), as_number(expected)});
}

void Group::load_factors(const Call& call) {
  if (call.op != ReduceOp::kPremulSum) return;
  for (int r = 0; r < ranks_; ++r) factors_[r] = header(r).factor;
}

// -- windows --------------------------------------------------------------------------------------------------------------

void Group::populate(Ring& ring) {
  if (ring.is_populated) return;
  // The others' are populated by their owners before anything in them is published.
  or_tell([&] { mapping_->populate(at_.rings + ring.number() * at_.ring_bytes, at_.ring_bytes, at_.ring_bytes >= kHugePage); });
  ring.is_populated = true;
}

void Group::use_region() {
  if (has_region_) return;
  or_tell([&] { mapping_->populate(at_.regions + static_cast<std::size_t>(rank_) * kRegionBytes, kRegionBytes, false); });
  has_region_ = true;
}

void Group::publish_in_windows(const Call& call, const Load& load) {
  if (!load.has_met) publish(call, Places{});  // none: the header still holds what an earlier call left there
}

bool Group::meet_in_windows(const Call& call, const Load& load) {
  if (!load.has_met) meet(call);
  if (load.result != nullptr) load.result->begin();
  if (load.sending != nullptr) load.sending->begin();
  return !load.has_met && count_shared() == 0;
}

void Group::publish_window(std::uint64_t window) {
  store_release(published(rank_), window + 1);
  waiter_->published();
}

void Group::await_windows(const char* verb, std::uint64_t ahead, int spins) {
  await_all([this](int r) -> std::uint64_t& { return published(r); }, window_ + 1 - ahead, verb, 0, spins);
}

void Group::sync(const char* verb, int spins) {
  // What this rank has read of the others' buffers since they met is theirs only while nobody has given the call up.
  waiter_->throw_if_broken(verb);
  publish_window(window_);
  await_windows(verb, 0, spins);
  ++window_;
}

void Group::put(void* to, const void* from, std::size_t bytes, bool is_long) const {
  const bool by_pages = is_long && pages_win();
  if (stores_ == Stores::kStreamed && bytes >= kStreamFrom) return copy_streamed(to, from, bytes);
  if (stores_ == Stores::kStrings && bytes >= kString && !by_pages) return copy_by_strings(to, from, bytes);
  copy_by_blocks(to, from, bytes, by_pages);
}

void Group::keep(void* to, const void* from, std::size_t bytes, bool is_streamed) const {
  if (to == from || bytes == 0) return;  // a root's own buffer
  if (is_streamed) return copy_streamed(to, from, bytes);
  if (stores_ == Stores::kStrings && bytes >= kString) return copy_by_strings(to, from, bytes);
  if (bytes >= kKeptAtOnce) return keep_by_blocks(to, from, bytes);
  ask_to_write(to, bytes);
  copy_plain(to, from, bytes);
}

void Group::reduce_from(void* output, const void* const* inputs, std::size_t numel, const Call& call, bool streams) const {
  pycomm::reduce(output, inputs, ranks_, numel, call.dtype, call.op, factors_.data(), streams);
}

void Group::step_aside(std::uint32_t cpu) {
  // Ranks that take turns on a core never look busy to the system's load balancer for long, so it leaves three on one core
  // and one on the other, which doubles the time of a small call. Where there are too many, the last of them steps over to
  // the core with the fewest; its affinity stays what it was.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const int most = (ranks_ + CPU_COUNT(&allowed) - 1) / CPU_COUNT(&allowed);
  std::vector<int> ranks_on(CPU_SETSIZE, 0);
  int last = 0;
  for (int r = 0; r < ranks_; ++r) {
    const std::uint32_t its = r == rank_ ? cpu : load_relaxed(ping(r).cpu) % CPU_SETSIZE;
    ++ranks_on[its];
    if (its == cpu) last = r;
  }
  if (last != rank_ || ranks_on[cpu] <= most) return;
  int best = -1;
  for (int other = 0; other < CPU_SETSIZE; ++other)
    if (CPU_ISSET(other, &allowed) && (best < 0 || ranks_on[other] < ranks_on[best])) best = other;
  if (best < 0 || ranks_on[best] >= most) return;
  move_to(best, allowed);
}

void Group::settle(int core) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && core-- == 0 && cpu != sched_getcpu()) return move_to(cpu, allowed);
}

}  // namespace pycomm::shm
