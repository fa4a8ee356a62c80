#include "mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "errors.h"
#include "layout.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace pycomm::shm {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Broken(what + ": " + std::strerror(errno));
}

}  // namespace

Mapping::Mapping(int fd, std::size_t offset, std::size_t bytes) : fd_(fd), file_offset_(offset), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED)
    fail("shared memory: could not map " + std::to_string(bytes >> 20) + " MiB of address space (check `ulimit -v`)");
  data_ = static_cast<unsigned char*>(data);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

void Mapping::populate(std::size_t offset, std::size_t bytes, bool huge) {
  const std::size_t start = offset / kPage * kPage;
  const std::size_t length = round_up(offset + bytes, kPage) - start;
  if (huge) madvise(data_ + start, length, MADV_HUGEPAGE);
  if (madvise(data_ + start, length, MADV_POPULATE_WRITE) == 0) return;
  // Older kernels: allocate through the file (always small pages). Both report a lack of memory as an error.
  if (errno == EINVAL) {
    const int rc = posix_fallocate(fd_, static_cast<off_t>(file_offset_ + start), static_cast<off_t>(length));
    if (rc == 0) return;
    errno = rc;
  }
  if (errno == EFAULT) errno = ENOMEM;  // where touching the page would have been SIGBUS
  fail("shared memory: could not allocate " + std::to_string((length + 1023) >> 10) +
       " KiB; free memory or raise the memory limit of this job");
}

void Mapping::release(std::size_t offset, std::size_t bytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(file_offset_ + offset),
            static_cast<off_t>(bytes));
}

int create_memory(int ranks) {
  const int fd = memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("shared memory: memfd_create failed (Linux 3.17 or newer is needed)");
  if (ftruncate(fd, static_cast<off_t>(FileLayout::of(ranks).total)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("shared memory: could not size and seal the segment (check `ulimit -f`)");
  }
  return fd;
}

void check_memory(int fd, int ranks) {
  struct stat info {};
  if (fstat(fd, &info) != 0) fail("shared memory: the descriptor received is not usable");
  if (static_cast<std::size_t>(info.st_size) != FileLayout::of(ranks).total)
    throw Broken("shared memory: the segment received has " + std::to_string(info.st_size) + " bytes, expected " +
                 std::to_string(FileLayout::of(ranks).total) + "; all ranks must run the same version of pycomm");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw Broken("shared memory: the segment received is not sealed");
}

}  // namespace pycomm::shm
