// Whether another process lives, and what became of it, by its pidfd.
#pragma once

namespace pycomm::shm {

bool is_dead(int pidfd);  // whether the process has ended; false for -1

// How the process ended, as waitpid(2) encodes it; -1 if the kernel does not tell this process. While its parent has not
// collected it, /proc tells; from then on the pidfd does (PIDFD_GET_INFO, Linux 6.15).
int exit_status(int pidfd, int pid);

}  // namespace pycomm::shm
