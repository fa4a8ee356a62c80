#include "process.h"

#include <poll.h>
#include <sys/ioctl.h>

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
constexpr int kFieldsToExitCode = 49;  // from the state (field 3) to exit_code (field 52) of /proc/PID/stat

int status_of_zombie(int pid) {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* const file = std::fopen(path, "re");
  if (file == nullptr) return kUnknown;
  const std::size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[bytes] = '\0';
  const char* field = std::strrchr(text, ')');  // the name before it may hold anything
  if (field == nullptr || (field[2] != 'Z' && field[2] != 'X')) return kUnknown;
  field += 2;
  for (int i = 0; i < kFieldsToExitCode && field != nullptr; ++i) {
    field = std::strchr(field, ' ');
    if (field != nullptr) ++field;
  }
  return field == nullptr ? kUnknown : std::atoi(field);
}

}  // namespace

bool is_dead(int pidfd) {
  struct pollfd entry{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&entry, 1, 0) == 1;
}

int exit_status(int pidfd, int pid) {
  // First /proc: if the process is collected in between, the pidfd knows.
  const int status = status_of_zombie(pid);
  if (status != kUnknown) return status;
  PidfdInfo info{};
  info.mask = kInfoExit;
  if (pidfd >= 0 && ioctl(pidfd, kGetInfo, &info) == 0 && (info.mask & kInfoExit) != 0) return info.exit_code;
  return kUnknown;
}

}  // namespace pycomm::shm
