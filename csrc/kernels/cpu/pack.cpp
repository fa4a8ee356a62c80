// pack() and unpack(): walks the parts; runs of contiguous elements are converted in place, others by way of a buffer in the
// L1 cache.
#include "../pack.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

namespace pycomm {
namespace {

constexpr std::size_t kBuffer = 1024;           // elements
constexpr std::size_t kStreamedNumel = 1024;    // a shorter run is written with plain stores
constexpr std::size_t kLongNumel = 256 * 1024;  // of a shorter one too much that is read ahead would lie behind its end
constexpr int kMaxDims = 64;                    // torch has no more

// Moves elements [first, first + count) of a strided tensor, in the order of its shape, to or from `run`.
template <class Item, bool to_tensor>
void move_strided(const PackPart& part, std::size_t first, std::size_t count, Item* run) {
  std::int64_t place[kMaxDims];
  std::int64_t offset = 0;
  for (int dim = part.ndim - 1; dim >= 0; --dim) {
    const auto length = static_cast<std::size_t>(part.shape[dim]);
    place[dim] = static_cast<std::int64_t>(first % length);
    offset += place[dim] * part.strides[dim];
    first /= length;
  }
  Item* const data = reinterpret_cast<Item*>(part.data);
  const int last = part.ndim - 1;
  const std::int64_t stride = part.strides[last];
  while (count > 0) {
    const std::size_t row = std::min(count, static_cast<std::size_t>(part.shape[last] - place[last]));
    for (std::size_t i = 0; i < row; ++i) {
      Item& item = data[offset + static_cast<std::int64_t>(i) * stride];
      if constexpr (to_tensor) {
        item = run[i];
      } else {
        run[i] = item;
      }
    }
    run += row, count -= row;
    offset += static_cast<std::int64_t>(row) * stride;
    place[last] += static_cast<std::int64_t>(row);
    for (int dim = last; dim > 0 && place[dim] == part.shape[dim]; --dim) {  // carry
      offset += part.strides[dim - 1] - place[dim] * part.strides[dim];
      place[dim] = 0;
      ++place[dim - 1];
    }
  }
}

template <bool to_tensor>
void move_items(const PackPart& part, std::size_t first, std::size_t count, char* run) {
  if (kPackItemBytes[static_cast<int>(part.type)] == 4) {
    move_strided<std::uint32_t, to_tensor>(part, first, count, reinterpret_cast<std::uint32_t*>(run));
  } else {
    move_strided<std::uint16_t, to_tensor>(part, first, count, reinterpret_cast<std::uint16_t*>(run));
  }
}

Run run_of(const PackJob& job, std::size_t count) {
  if (!job.is_streamed || count < kStreamedNumel) return Run::kCached;
  const std::size_t bytes = (job.end - job.begin) * kPackItemBytes[static_cast<int>(job.type)];
  return count >= kLongNumel && reads_by_pages(bytes) ? Run::kByPages : Run::kStreamed;
}

// Converts elements [first, first + count) of `part` from (or to, if `is_unpack`) the bucket at `bucket`.
template <bool is_unpack>
void convert_part(const PackJob& job, const PackPart& part, std::size_t first, std::size_t count, char* bucket) {
  const int inner = static_cast<int>(job.type), outer = static_cast<int>(part.type);
  const auto convert = is_unpack ? active_codecs().convert[outer][inner] : active_codecs().convert[inner][outer];
  const std::size_t item = kPackItemBytes[outer];
  if (part.is_contiguous) {
    char* const data = part.data + first * item;
    const Run run = run_of(job, count);
    return is_unpack ? convert(data, bucket, count, job.scale, run) : convert(bucket, data, count, job.scale, run);
  }
  alignas(64) char run[4 * kBuffer];
  for (std::size_t done = 0; done < count;) {
    const std::size_t now = std::min(kBuffer, count - done);
    char* const place = bucket + done * kPackItemBytes[inner];
    if constexpr (is_unpack) {
      convert(run, place, now, job.scale, Run::kCached);
      move_items<true>(part, first + done, now, run);
    } else {
      move_items<false>(part, first + done, now, run);
      convert(place, run, now, job.scale, Run::kCached);
    }
    done += now;
  }
}

template <bool is_unpack>
void run(const PackJob& job) {
  std::size_t start = 0;  // of the part, in the bucket
  for (std::size_t i = 0; i < job.num_parts && start < job.end; ++i) {
    const PackPart& part = job.parts[i];
    const std::size_t begin = std::max(job.begin, start), end = std::min(job.end, start + part.numel);
    if (begin < end) {
      char* const place = job.bucket + begin * kPackItemBytes[static_cast<int>(job.type)];
      convert_part<is_unpack>(job, part, begin - start, end - begin, place);
    }
    start += part.numel;
  }
  if (job.is_streamed) store_fence();
}

}  // namespace

void pack(const PackJob& job) { run<false>(job); }
void unpack(const PackJob& job) { run<true>(job); }

}  // namespace pycomm
