// pycomm._native.GlooMessage: a message of torch's gloo backend that can be waited for a while.
//
// Such a wait sleeps until gloo's thread wakes it: no way to get a message is shorter. But torch's Python module knows only
// how to wait to the end, without a look at signals or at who lives; a timeout ends the connections. In C++ a message has
// abort(), which ends the wait and nothing else: it may be waited for again. A clock calls it when a slice of waiting is over.
//
// This core is built without torch: pybind11's conduit gives the C++ object behind torch's handle, by its type's name, and
// the dynamic loader what belongs to it. Where one of them has changed, GlooMessage.of gives None.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <typeinfo>
#include <vector>

namespace py = pybind11;

namespace pycomm {
namespace {

using Time = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(5);
constexpr int kIdleTicks = 200;  // until the clock stops: to start it again costs a call more than its ticks do
constexpr auto kStopped = std::chrono::hours(24);

// What libtorch_cpu has of the messages of c10d::ProcessGroupGloo: RecvWork and SendWork.
class TorchMessages {
 public:
  struct Message {
    void* object = nullptr;
    void (*abort)(void*) = nullptr;
  };

  // The C++ side of Python's handle; null if it is no message of gloo's.
  static Message of(py::handle work) {
    static const TorchMessages found;
    void* const object = found.handle_ == nullptr ? nullptr : py::detail::try_raw_pointer_ephemeral_from_cpp_conduit(work, found.handle_);
    if (object != nullptr)
      for (const Kind& kind : found.kinds_)
        if (kind.abort != nullptr && *static_cast<const void* const* const*>(object) == kind.methods) return {object, kind.abort};
    return {};
  }

 private:
  struct Kind {
    const void* const* methods;  // what the first word of each of its objects points to
    void (*abort)(void*);
  };

  TorchMessages() {
    void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    handle_ = static_cast<const std::type_info*>(dlsym(library, "_ZTIN4c10d4WorkE"));  // of c10d::Work, the base of both
    kinds_[0] = look_up(library, "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE", "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv");
    kinds_[1] = look_up(library, "_ZTVN4c10d16ProcessGroupGloo8SendWorkE", "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv");
  }

  static Kind look_up(void* library, const char* table_name, const char* abort_name) {
    const auto* const table = static_cast<const void* const*>(dlsym(library, table_name));
    void* const abort = dlsym(library, abort_name);
    if (table == nullptr || abort == nullptr) return {};
    return {table + 2, reinterpret_cast<void (*)(void*)>(abort)};  // the table begins with an offset and a type
  }

  const std::type_info* handle_ = nullptr;
  Kind kinds_[2] = {};
};

using Message = TorchMessages::Message;

// Ends waits whose time is over. Its thread never touches Python, and lasts as long as the process.
class Clock {
 public:
  // This process's: a forked child has no thread of its parent's.
  static Clock& get() {
    static std::mutex mutex;
    static Clock* clock = nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (clock == nullptr || clock->pid_ != getpid()) {
      clock = new Clock;  // never destroyed: its thread may run while the process ends
      std::thread([mine = clock] { mine->run(); }).detach();
    }
    return *clock;
  }

  void add(const Message& message, Time::time_point end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back({message, end});
    if (end + kTick >= next_) return;  // as a rule: a call is over long before, and is not to wake a thread
    next_ = end;
    changed_.notify_one();
  }

  // Once this returns, the message is not touched.
  void remove(const Message& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(std::find_if(waits_.begin(), waits_.end(), [&](const Wait& wait) { return wait.message.object == message.object; }));
  }

 private:
  struct Wait {
    Message message;
    Time::time_point end;
  };

  [[noreturn]] void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int idle = 0;;) {
      const Time::time_point now = Time::now();
      idle = waits_.empty() ? idle + 1 : 0;
      next_ = now + (idle < kIdleTicks && waits_.empty() ? Time::duration(kTick) : Time::duration(kStopped));
      for (const Wait& wait : waits_) {
        if (wait.end <= now) wait.message.abort(wait.message.object);
        else next_ = std::min(next_, std::max(wait.end, now + kTick));
      }
      while (Time::now() < next_) {
        const Time::time_point next = next_;  // changes meanwhile
        changed_.wait_until(lock, next);
      }
    }
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Wait> waits_;
  Time::time_point next_ = Time::now();
};

// Ends the wait for `message` after `slice_s`.
class Slice {
 public:
  Slice(const Message& message, double slice_s) : clock_(Clock::get()), message_(message) {
    clock_.add(message_, Time::now() + std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(slice_s)));
  }
  ~Slice() { clock_.remove(message_); }
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;

 private:
  Clock& clock_;
  const Message message_;
};

class GlooMessage {
 public:
  static std::unique_ptr<GlooMessage> of(const py::object& work) {
    const Message message = TorchMessages::of(work);
    return message.object == nullptr ? nullptr : std::unique_ptr<GlooMessage>(new GlooMessage(work, message));
  }

  // A signal may raise as soon as this returns: so what torch says only once is kept.
  bool wait(py::handle timeout, double slice_s) {
    if (is_complete_) return true;
    const Slice slice(message_, slice_s);
    is_complete_ = py::cast<bool>(work_.attr("wait")(timeout));
    return is_complete_;
  }

  bool is_complete() const { return is_complete_; }

 private:
  GlooMessage(const py::object& work, const Message& message) : work_(work), message_(message) {}

  const py::object work_;
  const Message message_;
  bool is_complete_ = false;
};

}  // namespace

void bind_gloo_waits(py::module_& m);  // module.cpp

void bind_gloo_waits(py::module_& m) {
  py::class_<GlooMessage>(m, "GlooMessage", "A message of torch's gloo backend that can be waited for a while.")
      .def_static("of", &GlooMessage::of, py::arg("work"), "The message of torch's handle; None if it is of another kind.")
      .def("wait", &GlooMessage::wait, py::arg("timeout"), py::arg("slice_s"),
           "Waits until the message is complete, or for a slice; says whether it is. Beyond `timeout` torch ends the connections.")
      .def_property_readonly("is_complete", &GlooMessage::is_complete, "Whether a wait has found it so.");
}

}  // namespace pycomm
