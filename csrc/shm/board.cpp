#include "board.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "errors.h"
#include "mapping.h"
#include "process.h"
#include "stores.h"
#include "wait.h"

namespace pycomm::shm {
namespace {

constexpr double kWeight = 1.0 / 16;  // of the last call in the recent averages

constexpr int kClockTries = 5;

int make_memory() {
  const int fd = memfd_create("pycomm-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(BoardLayout::total)) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0) return fd;
  const int error = errno;
  if (fd >= 0) close(fd);
  throw Broken(std::string("the board: a memfd could not be made: ") + std::strerror(error));
}

void copy_text(char* to, std::size_t bytes, const std::string& text) {
  const std::size_t length = std::min(text.size(), bytes - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// Powers of four: class k holds up to 4**k bytes.
std::uint64_t size_class(std::uint64_t bytes) {
  return bytes <= 1 ? bytes == 0 ? 255 : 0 : static_cast<std::uint64_t>((64 - __builtin_clzll(bytes - 1) + 1) / 2);
}

}  // namespace

bool Board::has_tsc() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0;  // it counts evenly, whatever the core does
#else
  return false;
#endif
}

std::uint64_t Board::ticks(bool has_tsc) {
#if defined(__x86_64__)
  if (has_tsc) return __rdtsc();
#endif
  (void)has_tsc;
  return static_cast<std::uint64_t>(monotonic_ns());
}

Board::Board() : fd_(make_memory()), has_tsc_(has_tsc()) {
  try {
    mapping_ = std::make_unique<Mapping>(fd_, 0, BoardLayout::total);
    mapping_->populate(0, BoardLayout::total, false);
  } catch (...) {
    ::close(fd_);
    throw;
  }
  data_ = mapping_->data();
  BoardHeader& at = header();
  at.total_bytes = BoardLayout::total;
  at.pid = static_cast<std::uint64_t>(getpid());
  at.start = look_at(getpid()).start;
  at.has_tsc = has_tsc_;
  // One moment in both clocks: of a few tries the fastest, since a process can be stopped between two reads, for seconds.
  std::int64_t best_ns = INT64_MAX;
  for (int attempt = 0; attempt < kClockTries; ++attempt) {
    const std::int64_t before_ns = monotonic_ns();
    const std::uint64_t now = ticks(has_tsc_);
    const std::int64_t took_ns = monotonic_ns() - before_ns;
    if (took_ns >= best_ns) continue;
    best_ns = took_ns;
    at.ticks = now;
    at.monotonic_ns = static_cast<std::uint64_t>(before_ns + took_ns / 2);
  }
  at.epoch_ns = static_cast<std::uint64_t>(clock_ns(CLOCK_REALTIME));
  copy_text(name(0), kNameBytes, "native");
  store_release(at.magic, kBoardMagic);
}

Board::~Board() {
  mapping_.reset();
  ::close(fd_);
}

void Board::set_job(std::uint64_t job, std::uint32_t rank, std::uint32_t ranks) {
  header().rank = rank;
  header().ranks = ranks;
  store_release(header().job, job);
}

std::shared_ptr<Log> Board::add_group(const std::string& name, const std::string& transport, std::uint64_t members, std::uint32_t rank,
                                      std::uint32_t ranks) {
  // One that was never used, else the one that was closed first of those whose calls nobody will ask for: the first.
  for (const std::uint64_t wanted : {0u, 2u}) {
    for (std::size_t i = 0; i < kBoardGroups; ++i) {
      GroupEntry& entry = group(i);
      if (load_acquire(entry.state) != wanted) continue;
      entry = GroupEntry{};
      copy_text(entry.name, sizeof entry.name, name);
      copy_text(entry.transport, sizeof entry.transport, transport);
      entry.members = members;
      entry.rank = rank;
      entry.ranks = ranks;
      for (std::size_t c = 0; c < kClasses && wanted == 2; ++c) {  // what its former owner's calls cost is not this one's
        CallClass& each = reinterpret_cast<CallClass*>(data_ + BoardLayout::classes)[c];
        if ((each.key >> 32 & 0x7fffffff) == i && each.key != 0) std::memset(&each.calls, 0, sizeof each - sizeof each.key);
      }
      store_release(entry.state, 1);
      return std::make_shared<Log>(shared_from_this(), static_cast<std::uint16_t>(i));
    }
  }
  return nullptr;
}

std::uint8_t Board::intern(const std::string& text) {
  for (std::size_t i = 0; i < kNames; ++i) {
    if (name(i)[0] == '\0') copy_text(name(i), kNameBytes, text);
    if (std::strncmp(name(i), text.c_str(), kNameBytes - 1) == 0) return static_cast<std::uint8_t>(i);
  }
  return 255;
}

void Board::set_verdict(const std::string& text) {
  copy_text(header().verdict, kTextBytes, text);
  store_release(header().verdict_seq, header().verdict_seq + 1);
}

bool Board::await_question(std::int64_t timeout_ns) {
  BoardHeader& at = header();
  const std::uint32_t answered = __atomic_load_n(&at.answered, __ATOMIC_ACQUIRE);
  if (__atomic_load_n(&at.asked, __ATOMIC_ACQUIRE) != answered) return true;
  const struct timespec nap{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, &at.asked, FUTEX_WAIT, answered, &nap, nullptr, 0);
  return __atomic_load_n(&at.asked, __ATOMIC_ACQUIRE) != answered;
}

void Board::answer(const std::string& text) {
  BoardHeader& at = header();
  const std::uint32_t asked = __atomic_load_n(&at.asked, __ATOMIC_ACQUIRE);
  copy_text(at.answer, kTextBytes, text);
  __atomic_store_n(&at.answered, asked, __ATOMIC_RELEASE);
  syscall(SYS_futex, &at.answered, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool ask_board(int fd, std::int64_t timeout_ns) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || static_cast<std::size_t>(info.st_size) != BoardLayout::total)
    throw Broken("the board: the descriptor is none of this version of pycomm");
  Mapping mapping(fd, 0, sizeof(BoardHeader));
  auto& at = *reinterpret_cast<BoardHeader*>(mapping.data());
  const std::uint32_t wanted = __atomic_add_fetch(&at.asked, 1, __ATOMIC_ACQ_REL);
  syscall(SYS_futex, &at.asked, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  for (;;) {
    const std::uint32_t answered = __atomic_load_n(&at.answered, __ATOMIC_ACQUIRE);
    if (static_cast<std::int32_t>(answered - wanted) >= 0) return true;
    const std::int64_t left = deadline - monotonic_ns();
    if (left <= 0) return false;
    const struct timespec nap{left / 1'000'000'000, left % 1'000'000'000};
    syscall(SYS_futex, &at.answered, FUTEX_WAIT, answered, &nap, nullptr, 0);
  }
}

CallClass* Board::find_class(std::uint64_t key) {
  auto* const classes = reinterpret_cast<CallClass*>(data_ + BoardLayout::classes);
  for (std::size_t i = 0, at = key * 0x9e3779b97f4a7c15 >> 56; i < kClasses; ++i, ++at) {
    CallClass& each = classes[at % kClasses];
    std::uint64_t found = load_acquire(each.key);
    if (found == key) return &each;
    if (found == 0 && __atomic_compare_exchange_n(&each.key, &found, key, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return &each;
    if (found == key) return &each;  // another thread was a moment faster; then it is another group's, and this cannot be
  }
  return nullptr;
}

bool Log::begin(const Call& call, std::uint64_t seq, std::uint64_t start) {
  if (open_ != nullptr) {
    if (open_->seq == 0) {
      open_->seq = seq;
      store_release(entry_.seq, seq);
    }
    return false;
  }
  BoardHeader& header = board_->header();
  const std::uint64_t number = __atomic_fetch_add(&header.records, 1, __ATOMIC_RELAXED);
  Record& record = board_->record(number);
  store_release(record.stamp, 2 * number + 1);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  record.seq = seq;
  record.end = 0;
  record.numel = call.numel;
  record.bytes = call.bytes;
  record.verb = call.verb;
  record.op = call.op;
  record.dtype = call.dtype;
  record.flags = call.flags;
  record.root = call.root;
  record.group = group_;
  record.algorithm = call.algorithm;
  record.peer = kNobody;
  record.start = start;
  store_release(record.stamp, 2 * number + 2);
  entry_.latest = number + 1;
  if (seq != 0) store_release(entry_.seq, seq);
  open_ = &record;
  return true;
}

void Log::end(std::uint64_t wire_bytes) {
  if (open_ == nullptr) return;
  Record& record = *open_;
  open_ = nullptr;
  if ((record.flags & kFailed) == 0) record.peer = kNobody;  // else it goes on saying for whom the call waited in vain
  store_release(record.end, ticks());
  if (record.seq != 0) store_release(entry_.ended, record.seq);
  if ((record.flags & kFailed) == 0) tally(record, wire_bytes);
  prefetch_for_write(&board_->record(load_relaxed(board_->header().records)));
}

void Log::tally(const Record& record, std::uint64_t wire_bytes) {
  const std::uint64_t key = std::uint64_t{1} << 63 | static_cast<std::uint64_t>(group_) << 32 | static_cast<std::uint64_t>(record.algorithm) << 16 |
                            static_cast<std::uint64_t>(record.verb) << 8 | size_class(record.bytes);
  if (class_ == nullptr || class_->key != key) class_ = board_->find_class(key);
  if (class_ == nullptr) return;
  CallClass& each = *class_;
  const std::uint64_t ticks = record.end - record.start;
  each.calls += 1;
  each.bytes += record.bytes;
  each.wire_bytes += wire_bytes;
  each.ticks += ticks;
  if (ticks > each.most_ticks) each.most_ticks = ticks;
  each.recent_bytes += kWeight * (static_cast<double>(record.bytes) - each.recent_bytes);
  each.recent_ticks += kWeight * (static_cast<double>(ticks) - each.recent_ticks);
  each.buckets[bucket_of(ticks)] += 1;
}

void Log::awaits_mail(std::int32_t peer) {
  __atomic_store_n(&entry_.mail_peer, peer < 0 ? kAnybody : peer, __ATOMIC_RELAXED);
  store_release(entry_.mail_since, ticks());
}

}  // namespace pycomm::shm
