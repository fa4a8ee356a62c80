// Where everything lies in the memory that the ranks of one host share.
//
// One memfd a job and host, sized once, sparse, and sealed against resizing. It holds
//
//   [ directory ]               how many areas are taken
//   [ area 0 | area 1 | ... ]   one area a group; area 0 is the world's
//   [ heap 0 | heap 1 | ... ]   one heap a rank: the buffers of pycomm.empty(..., shared=True)
//
// The file is far larger than any memory; only what is populated (see Mapping::populate) exists. So a group is made
// without a message and without a file descriptor crossing a process boundary: its first member takes the next area and
// leaves word in the area of the group that it is made from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pycomm::shm {

inline constexpr std::size_t kLine = 64;            // a cache line
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kHugePage = 2u << 20;
// Address space of one rank's heap, not memory. Not a power of two: buffers at one offset of two heaps, read side by side,
// must differ in the low address bits by which AMD's L1 cache predicts its way, or every access to one evicts the other.
inline constexpr std::size_t kHeapBytes = (std::size_t{256} << 30) + kHugePage;
inline constexpr std::uint64_t kAreas = 1u << 20;
inline constexpr int kMaxRanks = 128;
inline constexpr std::size_t kPieceBytes = 16u << 10, kPiecesEach = 16;  // of a channel; and of those that change hands, see pieces.h
inline constexpr std::size_t kRegionBytes = 128u << 10;  // of two that two ranks swap; see swaps.h

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// The length, in whole lines, of as few pieces of `total` bytes as are no longer than `most`, whole lines too. All alike: a last one
// of a few lines would cost as much waiting as the others.
constexpr std::size_t even_piece(std::size_t total, std::size_t most) {
  const std::size_t pieces = (total + most - 1) / most;
  return round_up((total + pieces - 1) / pieces, kLine);
}

// The first line of a rank's slot: what it calls, and the flag that says the slot is filled. The receiver reads this
// line anyway, so comparing what the ranks called costs no further cache miss.
struct alignas(kLine) Header {
  std::uint64_t seq;       // written last, with release; the slot belongs to collective number `seq`
  std::uint64_t call;      // verb | op << 8 | dtype << 16 | is_plan << 24 | root << 32
  std::uint64_t numel;
  double factor;           // of PREMUL_SUM
  unsigned char payload[32];  // a small message travels in the flag's own cache line
};
static_assert(sizeof(Header) == kLine);

// Counters of one rank, written by that rank alone, each on a line of its own.
struct alignas(2 * kLine) Counter {
  std::uint64_t value;
};

// One rank's part in measuring how far apart the cores are; see Group::measure_line.
struct alignas(2 * kLine) Ping {
  std::uint64_t count;
  std::uint32_t cpu;       // where it ran when it waited last
  std::uint32_t home;      // where it ran when the measurement began
  std::uint32_t line_ns;   // what this rank measured; 0 if it did not
  std::uint32_t exchange_ns[2];  // the same, by plain and by non-temporal stores; or of messages by two ways, see direct.h
  std::uint64_t refused;   // the last collective in which it could not reach another's memory
  std::uint64_t gate;      // between this rank and the root of the call; [Note: direct writes]
};

// What the first member of a new group leaves for the others in the area of the old one.
struct alignas(2 * kLine) Made {
  std::uint64_t key;       // which new group; 0 while this is being written
  std::uint64_t area;
  std::uint64_t making;    // the key of the new group that the rank is making, or waits for; 0 for none
  std::uint64_t members[kMaxRanks / 64];  // of that, a bit each
};

// A rank that sleeps says here for whom; see wait.h.
struct alignas(2 * kLine) Sleeper {
  std::uint32_t bell;      // futex
  std::uint32_t awaits;    // 1 + rank waited for, kAnyone, or 0 when awake
  std::uint32_t is_gone;   // the rank has closed the group
};
inline constexpr std::uint32_t kAnyone = 0xffffffffu;

// Read at every call, written almost never: stays in every core's cache.
struct alignas(2 * kLine) Control {
  std::uint64_t failure;   // 0, or what broke the group: kind | (1 + rank) << 8 | exit status << 32
  std::uint32_t sleepers, mail_sleepers;  // how many ranks sleep in a futex: in a collective, for a message
  std::uint32_t left;      // how many members have closed the group
  std::uint32_t forgotten; // how many have destroyed it, too
  std::uint32_t gone_on;   // a member makes a group of another one, which is broken: who waits in this one looks there
};

// Byte offsets inside the area of a group of `ranks` members.
struct AreaLayout {
  int ranks;
  std::size_t slot_bytes;     // payload of one of a rank's two slots
  std::size_t short_bytes;    // up to here a collective's message goes through the slots, where ranks use the rings
  std::size_t ring_bytes;     // a rank's staging ring
  std::size_t window_bytes;   // the most that a rank stages at a time
  std::size_t channel_bytes;  // one point-to-point channel
  std::size_t pieces_each;    // that each of two ranks begins with; see pieces.h
  std::size_t published, reduced, pings, made, sleepers;  // one line or two a rank
  std::size_t mail_sleepers, mail_counters;               // the same for point-to-point messages
  std::size_t slots, slot_stride;
  std::size_t resident;                                  // up to here every rank populates; the rest when first needed
  std::size_t rings, regions;                            // of two ranks a third ring, which both fill
  std::size_t channels, pieces, total;

  static AreaLayout of(int ranks) {
    AreaLayout at{};
    at.ranks = ranks;
    at.slot_bytes = ranks <= 2 ? 2 * 1024 : 4 * 1024;
    // Of two ranks' rings the lines, which both have long left, are sooner written than those of a slot. For more ranks a second
    // exchange costs more than reading the whole message of each other rank.
    at.short_bytes = ranks <= 2 ? 512 : at.slot_bytes;
    // A ring that is larger than a core's L2 and, all rings together, smaller than L3; see [Note: the ring]. Where ranks
    // take turns on a core, large windows save turns.
    at.ring_bytes = ranks <= 2 ? 2u << 20 : ranks <= 4 ? 4u << 20 : ranks <= 8 ? 2u << 20 : 256u << 10;
    // A window and its results take at most 3/2 of this, and four such must fit the ring: then the last two windows lie
    // whole behind the place of the next, also where that starts over at 0 after windows of any lengths.
    at.window_bytes = at.ring_bytes / 7 / kPage * kPage;
    // As long as a ring where there are few, and for the same reason. (Two ranks on Zen 5: messages of 64 KiB to 256 KiB one after the other take
    // 0.62 of the time that they take by 256 KiB.)
    at.channel_bytes = ranks <= 2 ? 2u << 20 : ranks <= 4 ? 1u << 20 : ranks <= 8 ? 256 * 1024 : ranks <= 32 ? 64 * 1024 : 16 * 1024;
    const auto n = static_cast<std::size_t>(ranks);
    std::size_t end = round_up(sizeof(Control), kLine);
    const auto take = [&end](std::size_t bytes, std::size_t unit) {
      const std::size_t start = round_up(end, unit);
      end = start + bytes;
      return start;
    };
    at.published = take(n * sizeof(Counter), kLine);
    at.reduced = take(n * sizeof(Counter), kLine);
    at.pings = take(n * sizeof(Ping), kLine);
    at.made = take(n * sizeof(Made), kLine);
    at.sleepers = take(n * sizeof(Sleeper), kLine);
    at.mail_sleepers = take(n * sizeof(Sleeper), kLine);
    at.mail_counters = take(n * n * 3 * kLine, kLine);
    at.slot_stride = round_up(sizeof(Header) + at.slot_bytes, kPage);
    at.slots = take(n * 2 * at.slot_stride, kPage);
    at.resident = round_up(end, kPage);
    at.rings = take((n + (ranks == 2)) * at.ring_bytes, at.ring_bytes >= kHugePage ? kHugePage : kPage);
    at.regions = take(ranks == 2 ? 2 * kRegionBytes : 0, kPage);
    at.channels = take(n * n * at.channel_bytes, kPage);
    at.pieces_each = ranks <= 8 ? kPiecesEach : 0;
    at.pieces = take(n * n * 2 * at.pieces_each * kPieceBytes, kPage);
    at.total = round_up(end, kHugePage);
    return at;
  }
};

// The file of a host with `ranks` ranks: every group of any of them fits an area.
struct FileLayout {
  std::size_t areas, area_stride, heaps, total;

  static FileLayout of(int ranks) {
    FileLayout at{};
    at.areas = kHugePage;  // the directory has the first page
    for (int n = 1; n <= ranks; ++n) at.area_stride = std::max(at.area_stride, AreaLayout::of(n).total);
    at.heaps = round_up(at.areas + kAreas * at.area_stride, std::size_t{1} << 30);
    at.total = at.heaps + static_cast<std::size_t>(ranks) * kHeapBytes;
    return at;
  }
};

}  // namespace pycomm::shm
