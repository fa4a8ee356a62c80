// Point-to-point messages of a group: a channel, a ring of bytes, for each ordered pair of ranks.
//
// A message is a frame (length, tag) and its bytes, streamed through the channel of its pair, however long. The receiver
// matches by tag; what nobody has asked for yet is set aside, so that one tag does not block another. Some lie in memory that goes over to the
// receiver with them ([Note: pieces that change hands]), longer ones the receiver may fetch where they lie ([Note: offers]). Bytes move when
// somebody waits for a message of this mailbox, or when a helper thread of the mailbox (started by the first message that
// does not complete at once) finds that nobody has called for a while.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"
#include "exchange_trials.h"
#include "layout.h"
#include "memory.h"
#include "offer.h"
#include "pieces.h"
#include "results.h"
#include "stores.h"
#include "wait.h"

namespace pycomm::shm {

// The last tag that users may give a message. Those of higher ones are parts of a collective, which fails as a whole.
inline constexpr std::int64_t kLastTag = 32758;

struct Message {
  Message(bool is_send_, int peer_, std::int64_t tag_, unsigned char* data_, std::size_t bytes_)
      : is_send(is_send_), peer(peer_), tag(tag_), data(data_), bytes(bytes_) {}

  bool is_send;
  int peer;                  // -1: from anyone; then the sender, once it is known
  std::int64_t tag;
  unsigned char* data;
  std::size_t bytes, moved = 0;
  bool is_framed = false;    // its frame is in the ring
  bool is_offered = false;   // and says where the bytes lie; [Note: offers]
  bool is_done = false;
  std::exception_ptr error;  // what went wrong, if anything; read once it is done
};

class Mailbox {
 public:
  // Allocates [offset, offset + bytes) of the area, before its first use.
  using Populate = std::function<void(std::size_t, std::size_t)>;

  // `area` is the group's memory, laid out as `at`. `offers`: whether messages that are exchanged are, where that is not to be tried.
  Mailbox(unsigned char* area, const AreaLayout& at, Waiter::Setup setup, std::string group, std::optional<bool> offers, Populate populate);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Starts a message; the bytes stay the caller's and untouched until it is done.
  std::shared_ptr<Message> send(const void* data, std::size_t bytes, int peer, std::int64_t tag);
  std::shared_ptr<Message> receive(void* data, std::size_t bytes, int peer, std::int64_t tag);
  // Takes back a receive, or a send that has not begun; what has come of a message goes to who asks next. False for a send that has begun.
  bool give_up(const std::shared_ptr<Message>& message);
  // Moves what can be moved; true once `message` is done. Throws what went wrong with it.
  bool test(const std::shared_ptr<Message>& message);
  // Blocks until it is done. Throws Mismatch, PeerLost, Timeout; and Late, after which it is under way still.
  void wait(const std::shared_ptr<Message>& message, std::int64_t timeout_ns);
  void record_on(Log* log) { log_ = log; }  // tells the board whose message is waited for
  void look_elsewhere_by(LookElsewhere look, bool always) { waiter_.look_elsewhere_by(std::move(look), always); }
  void is_part_of(Whole whole) { waiter_.is_part_of(std::move(whole)); }
  void set_name(const std::string& group) { waiter_.name(group, &messages_); }  // as the errors call it
  // Every message under way fails; later ones too.
  void close();

 private:
  // Where a message's bytes lie: in the ring; in pieces, whose Numbers follow the frame; or in the sender's memory, at a Place that follows,
  // and in the ring if the offer comes to nothing.
  enum class Where : std::uint32_t { kRing, kPieces, kOffered };
  struct Frame {
    std::uint64_t bytes;
    std::int32_t tag;
    Where where;
  };
  struct Place {
    Source source;
    std::uint64_t offer;     // its number
  };
  static_assert(sizeof(Frame) + std::max(sizeof(Place), sizeof(Pieces::Numbers)) <= kLine);
  struct Aside {  // a message that arrived before it was asked for
    Frame frame;
    std::vector<unsigned char> data;
  };
  struct Outbound {  // what goes to one rank, in the order in which it was started
    int to;
    ChannelWriter channel;
    Offer offer;
    std::deque<std::shared_ptr<Message>> messages;
    Pieces::Numbers numbers{};        // of the first one, which lies in them if it `is_in_pieces`
    bool is_in_pieces = false;
    bool is_populated = false;
    bool may_offer = true;            // until the kernel refuses
    ExchangeTrials trials{};
    std::size_t turn = kString;       // so much of the last message goes before what comes has its turn
    std::uint64_t offers = 0;         // so many were made
    int looks = 0;                    // at the last one
  };
  struct Inbound {  // what comes from one rank
    ChannelReader channel;
    Offer offer;
    bool is_open = false;             // a frame has been read, its bytes are not all here
    std::optional<Result> result{};   // how they are written
    Frame frame{};
    Place place{};                    // of an offer
    Pieces::Numbers numbers{};        // of what lies in pieces
    std::size_t moved = 0;
    std::shared_ptr<Message> target;  // where they go; if null, to `aside`, or nowhere if `is_dropped`
    bool is_dropped = false;
    std::vector<unsigned char> aside;
    std::deque<Aside> set_aside;
  };

  unsigned char* ring(int from, int to) const;
  Pieces pieces_with(int other) const;
  void prepare_to_send(const Message& message);  // allocates what that may need
  static bool is_apart(const Frame& frame);
  static std::size_t next_piece(const Message& message, const ChannelWriter& channel);
  std::shared_ptr<Message> start(std::shared_ptr<Message> message);
  // Takes mutex_, for which another thread may have to copy first. Throws Misuse in a forked child, where nobody might give it back.
  std::unique_lock<std::mutex> enter();
  // Until the message is done, or no other thread drives the messages on.
  void look_on(std::unique_lock<std::mutex>& lock, const Message& message, Deadline& deadline);
  // Looks for signals, deaths and the time; `lock` is free meanwhile.
  void look_around(std::unique_lock<std::mutex>& lock, const Message& message, Deadline& deadline);
  // The part of it without signals; what it throws leaves `lock` free.
  // All of these are called with mutex_ held. The bool ones say whether a byte moved.
  bool progress();
  bool push(Outbound& outbound, bool by_turns);
  Going way_of(Outbound& outbound, const std::shared_ptr<Message>& message);
  void write_frame(Outbound& outbound);  // of the next message
  bool is_offer_open(Outbound& outbound, Message& message);  // else it is done, or its bytes go through the channel
  void retract(Outbound& outbound);
  bool pull(int from, bool by_turns);
  void open_inbound(int from);
  void take_offer(int from);
  void close_inbound(Inbound& inbound);
  bool take_aside(Message& message);
  void forget_receive(const Message& message);
  void accept(Message& message, const Frame& frame, int from);  // `frame` is for `message`
  bool is_awaited(int from) const;
  // What has not come fails. Whoever leaves has done before all that is his part: that has come.
  void break_off(const std::exception_ptr& error);
  void fail_all(const std::exception_ptr& error);
  bool is_anything_new();
  void help();
  static void throw_if_failed(const Message& message);
  bool has_work() const { return sends_ > 0 || !receives_.empty(); }

  struct alignas(kLine) LineCounter {
    std::uint64_t value;
  };

  unsigned char* area_;
  const AreaLayout at_;
  int rank_, ranks_, spins_, forks_at_start_;
  Patience patience_;  // the driving thread's
  std::vector<int> pids_, pidfds_;
  Waiter waiter_;
  Log* log_ = nullptr;
  const std::optional<bool> offers_;
  Populate populate_;

  std::mutex mutex_;                      // guards everything below
  std::condition_variable changed_;       // a message that others wait for, or who drives them on
  std::condition_variable called_;        // the helper
  Results results_;                       // of all messages; those that are on their way tell it at their end
  std::vector<Outbound> outbound_;
  std::vector<Inbound> inbound_;
  std::vector<Pieces> pieces_;            // of this rank and each other one
  std::size_t sends_ = 0;                              // under way, of all outbounds
  std::vector<std::shared_ptr<Message>> receives_;     // under way, in the order they were started
  std::vector<int> receivers_, senders_;               // whom progress() moves bytes to and from
  std::uint64_t messages_ = 0;
  std::exception_ptr broken_;             // why nothing works any more
  bool is_driven_ = false;                // some thread is inside wait's loop,
  int onlookers_ = 0;                     // and so many wait for it
  std::uint64_t calls_ = 0;               // of this class
  std::int64_t looked_ns_ = 0;            // when test() last looked for lost ranks
  bool helper_rests_ = false;             // until it is called
  bool is_closed_ = false;
  std::thread helper_;
};

}  // namespace pycomm::shm
