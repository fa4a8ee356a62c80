#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pycomm::shm {
namespace {

// <linux/pidfd.h> of Linux 6.15; older headers lack it.
struct PidfdInfo {
  std::uint64_t mask, cgroup;
  std::uint32_t ids[11];
  std::int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kInfoExit = 1u << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);

constexpr int kUnknown = -1;
constexpr unsigned long kExiting = 0x4;  // PF_EXITING, stable since Linux 2.6
constexpr int kFlagsField = 9, kStartField = 22, kExitCodeField = 52;  // of /proc/PID/stat, as proc(5) counts them

std::atomic<int> forks_so_far{0};
[[maybe_unused]] const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int forks() { return forks_so_far.load(std::memory_order_relaxed); }

Process look_at(int pid) {
  char path[48], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t bytes = read(file, text, sizeof text - 1);
  close(file);
  text[std::max<ssize_t>(bytes, 0)] = '\0';
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  if (at == nullptr) return {};
  at += 2;
  Process found;
  found.state = *at;
  for (int field = 3; at != nullptr; ++field) {
    if (field == kFlagsField) found.is_exiting = (std::strtoul(at, nullptr, 10) & kExiting) != 0;
    if (field == kStartField) found.start = std::strtoull(at, nullptr, 10);
    if (field == kExitCodeField) found.status = std::atoi(at);
    at = std::strchr(at, ' ');
    if (at != nullptr) ++at;
  }
  return found;
}

bool has_ended(int pidfd) {
  struct pollfd entry{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&entry, 1, 0) == 1;
}

bool is_dead(int pidfd, int pid) {
  if (pidfd < 0) return false;
  const Process found = look_at(pid);
  return has_ended(pidfd) || found.is_being_ended();  // in this order: its pid was still its own when it was looked at
}

int exit_status(int pidfd, int pid) {
  // First /proc: if the process is collected in between, the pidfd knows.
  const Process found = look_at(pid);
  if (found.has_ended() || found.is_being_ended()) return found.status;
  PidfdInfo info{};
  info.mask = kInfoExit;
  if (pidfd >= 0 && ioctl(pidfd, kGetInfo, &info) == 0 && (info.mask & kInfoExit) != 0) return info.exit_code;
  return kUnknown;
}

}  // namespace pycomm::shm
