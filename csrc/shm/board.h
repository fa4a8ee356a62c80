// The board of a process: what its ranks call, written where others can read it while the job hangs.
//
// [Note: the board]
// A memfd of its own, sealed, without a name. The other ranks of the host open it through /proc/PID/fd when the job
// starts and keep it open, so it outlives its process; `pycomm doctor` and `pycomm top` open it through any process that
// holds it. It has
//   - a header: whose board it is, and the clock's zero;
//   - an entry for each group that this process is a rank of;
//   - the last kRecords calls, a cache line each;
//   - for each class of calls (group, verb, algorithm, size) what they cost so far.
// Writing it takes no lock and no system call: a call writes its own line and three counters, all of them lines that
// this core alone writes. One thread at a time is in a call of a group; several groups may be in calls at once, so
// lines are given out by one atomic counter.
//
// Who reads may see a line that is just being written: its stamp, odd while that goes on, tells.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "../types.h"
#include "mapping.h"

namespace pycomm::shm {

inline constexpr std::uint64_t kBoardMagic = 0x3230647262706d63;  // "cmpbrd02"
inline constexpr std::size_t kRecords = 4096;
inline constexpr std::size_t kBoardGroups = 128;
inline constexpr std::size_t kClasses = 256;
inline constexpr std::size_t kNames = 128;
inline constexpr std::size_t kNameBytes = 48;
inline constexpr std::size_t kTextBytes = 16 * 1024;
inline constexpr int kBuckets = 320;  // of durations in ticks, eight to an octave: each is at most 12.5 % wide

struct Record {  // one call
  std::uint64_t stamp;   // 2 * (1 + its number in this process), 1 less while it is being written
  std::uint64_t seq;     // its number in the group
  std::uint64_t start, end;  // ticks; end is 0 while the call is under way
  std::uint64_t numel;   // of one rank's part, as the ranks compare it
  std::uint64_t bytes;   // of the whole buffer
  std::uint8_t verb, op, dtype, flags;
  std::int32_t root;
  std::uint16_t group;   // entry of the board
  std::uint8_t algorithm, unused;  // its name is names[algorithm]
  std::int32_t peer;     // the rank waited for since `waiting` was set; kNobody, or kAnybody
};
static_assert(sizeof(Record) == 64);
inline constexpr std::int32_t kNobody = -1, kAnybody = -2;
enum RecordFlags : std::uint8_t { kFailed = 1, kIsPlan = 2 };

struct GroupEntry {  // written when a group is made; then `seq`, `ended` and `latest` by each call
  char name[kNameBytes];
  char transport[16];
  std::uint64_t members;       // hash of name and members: the same on every rank
  std::uint32_t rank, ranks;
  std::uint64_t state;         // 0 never used, 1 open, 2 closed
  std::uint64_t unused[5];
  std::uint64_t seq, ended;    // the last call begun, and the last that ended
  std::uint64_t latest;        // 1 + number of its record
  std::uint64_t mail_since;    // ticks since which a message is waited for, 0 if none is
  std::int32_t mail_peer;
  std::uint32_t unused_too[7];
};
static_assert(sizeof(GroupEntry) == 192);

struct CallClass {  // what the calls of one kind cost so far
  std::uint64_t key;           // 1 << 63 | group << 32 | algorithm << 16 | verb << 8 | size class
  std::uint64_t calls, bytes, wire_bytes, ticks, most_ticks;
  double recent_bytes, recent_ticks;  // weighted: the last call counts 1/16, the one before that 15/16 as much, ...
  std::uint32_t buckets[kBuckets];    // how many calls took how long
};
static_assert(sizeof(CallClass) == 64 + 4 * kBuckets);

struct BoardHeader {
  std::uint64_t magic, total_bytes;
  std::uint64_t pid, job;      // the job's number is the same on every rank
  std::uint32_t rank, ranks;   // in the group that init returned
  std::uint64_t ticks, monotonic_ns, epoch_ns;  // one moment on three clocks
  std::uint64_t start;         // of the process; see process.h
  std::uint64_t has_tsc;       // ticks are the processor's; else nanoseconds of CLOCK_MONOTONIC
  std::uint32_t asked, answered;  // futex: whoever wants to know where the process stands counts `asked` up
  std::uint64_t verdict_seq;   // of the verdict in `verdict`; 0 if there is none
  alignas(64) std::uint64_t records;  // calls so far
  alignas(64) char verdict[kTextBytes];
  char answer[kTextBytes];
};

// Where everything lies.
struct BoardLayout {
  static constexpr std::size_t names = sizeof(BoardHeader);
  static constexpr std::size_t groups = names + kNames * kNameBytes;
  static constexpr std::size_t records = groups + kBoardGroups * sizeof(GroupEntry);
  static constexpr std::size_t classes = records + kRecords * sizeof(Record);
  static constexpr std::size_t total = (classes + kClasses * sizeof(CallClass) + 4095) / 4096 * 4096;
};

class Log;

class Board : public std::enable_shared_from_this<Board> {
 public:
  Board();  // throws Broken
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int fd() const { return fd_; }
  void set_job(std::uint64_t job, std::uint32_t rank, std::uint32_t ranks);
  // The log of a new group; null if there is no free entry.
  std::shared_ptr<Log> add_group(const std::string& name, const std::string& transport, std::uint64_t members, std::uint32_t rank,
                                 std::uint32_t ranks);
  std::uint8_t intern(const std::string& name);  // the number of an algorithm's name; 255 if there are too many
  void set_verdict(const std::string& text);
  // Sleeps until somebody asks where this process stands, or for `timeout_ns`; says whether somebody has.
  bool await_question(std::int64_t timeout_ns);
  void answer(const std::string& text);

  static std::uint64_t ticks(bool has_tsc);
  static bool has_tsc();

 private:
  friend class Log;
  BoardHeader& header() const { return *reinterpret_cast<BoardHeader*>(data_); }
  char* name(std::size_t i) const { return reinterpret_cast<char*>(data_ + BoardLayout::names + i * kNameBytes); }
  GroupEntry& group(std::size_t i) const { return reinterpret_cast<GroupEntry*>(data_ + BoardLayout::groups)[i]; }
  Record& record(std::uint64_t number) const { return reinterpret_cast<Record*>(data_ + BoardLayout::records)[number % kRecords]; }
  CallClass* find_class(std::uint64_t key);  // null if the table is full

  int fd_;
  std::unique_ptr<Mapping> mapping_;
  unsigned char* data_;
  bool has_tsc_;
};

// Asks the process of a board where it stands; false if it does not answer in time. `fd` is the board's.
bool ask_board(int fd, std::int64_t timeout_ns);

// What a group writes its calls with.
class Log {
 public:
  struct Call {
    std::uint8_t verb, op, dtype, flags, algorithm;
    std::int32_t root;
    std::uint64_t numel, bytes;
  };

  Log(std::shared_ptr<Board> board, std::uint16_t group) : board_(std::move(board)), entry_(board_->group(group)), group_(group) {}
  ~Log() { close(); }

  // A call begins. Inside another one (a plan's exchange, inside the plan) this answers false, and writes nothing but the
  // number of the call, if that was begun without one (0). `start` are the ticks at which it began.
  bool begin(const Call& call, std::uint64_t seq, std::uint64_t start);
  std::uint64_t ticks() const { return Board::ticks(board_->has_tsc_); }  // now
  void end(std::uint64_t wire_bytes = 0);
  void fail() { if (open_ != nullptr) open_->flags |= kFailed; }
  // The call under way waits for rank `peer` from here on.
  void waits_for(std::int32_t peer) { if (open_ != nullptr) __atomic_store_n(&open_->peer, peer < 0 ? kAnybody : peer, __ATOMIC_RELAXED); }
  void waits_no_more() { if (open_ != nullptr) __atomic_store_n(&open_->peer, kNobody, __ATOMIC_RELAXED); }
  // A message is waited for: from rank `peer`, or from anybody (-1). Several threads may; the last one shows.
  void awaits_mail(std::int32_t peer);
  void awaits_no_mail() { __atomic_store_n(&entry_.mail_since, 0, __ATOMIC_RELAXED); }
  // Its place is another group's from then on, so only the first time counts.
  void close() { if (std::exchange(is_open_, false)) entry_.state = 2; }

 private:
  void tally(const Record& record, std::uint64_t wire_bytes);

  std::shared_ptr<Board> board_;
  GroupEntry& entry_;
  Record* open_ = nullptr;
  CallClass* class_ = nullptr;  // of the last call
  std::uint16_t group_;
  bool is_open_ = true;
};

// The bucket of a duration in ticks: eight to each power of two.
inline int bucket_of(std::uint64_t ticks) {
  if (ticks < 8) return static_cast<int>(ticks);
  const int octave = 63 - __builtin_clzll(ticks);
  const int bucket = (octave - 2) * 8 + static_cast<int>(ticks >> (octave - 3) & 7);
  return bucket < kBuckets ? bucket : kBuckets - 1;
}

}  // namespace pycomm::shm
