// Whether another process lives, and what became of it, by its pidfd and /proc.
//
// [Note: dying]
// The pidfd tells that a process has ended. Between the signal that kills it and that lies the kernel's work of taking
// its memory apart, and of a process that has torch loaded and gigabytes mapped this takes 10 to 80 ms. But with the
// first step of it the process's main thread is marked as exiting, and what ends the process stands there, too, in
// /proc/PID/task/PID/stat: no instruction of the process runs any more. So this is looked at as well. Only where the
// status is not 0, though: a main thread that ended by itself (pthread_exit) looks like one that ends well, and the
// process lives on.
#pragma once

#include <cstdint>

namespace pycomm::shm {

// What /proc tells of a process, by its main thread.
struct Process {
  char state = '\0';         // as proc(5) has it; 0 if there is no such process
  bool is_exiting = false;
  int status = 0;            // as waitpid(2) encodes it; 0 while it lives
  std::uint64_t start = 0;   // when it was started, in clock ticks since boot: tells it from a later one of the same pid

  bool is_being_ended() const { return is_exiting && status != 0; }  // [Note: dying]
  bool has_ended() const { return state == 'Z' || state == 'X'; }
};
Process look_at(int pid);

bool has_ended(int pidfd);  // false for -1

// Counts the forks that led from the process that loaded this library to this one: a child inherits the mapping, but it is not a rank.
int forks();

// Whether the process has ended or is being ended; [Note: dying]. Costs some 10 us, where `has_ended` costs one.
bool is_dead(int pidfd, int pid);

// How the process ended, as waitpid(2) encodes it; -1 if the kernel does not tell this process. While its parent has not
// collected it, /proc tells; from then on the pidfd does (PIDFD_GET_INFO, Linux 6.15).
int exit_status(int pidfd, int pid);

}  // namespace pycomm::shm
