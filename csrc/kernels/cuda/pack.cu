// The idea: the bucket is cut into groups of eight elements, a thread takes a group, finds by bisection the tensor that it
// is of, and moves 16 bytes of 16-bit elements, or twice 16 of float32, at a time; at the seams between tensors, and where a
// tensor is not aligned, element by element. So a launch serves as many tensors as its arguments, 4 KiB, can describe,
// however small they are. A strided tensor has a launch of its own. Bytes moved per element: one item read, one written.
#include "../common/pack_elements.h"
#include "launch.h"
#include "pack.h"

#include <limits>

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;
constexpr int kGroup = 8;  // elements
constexpr int kMaxParts = 304, kMaxDims = 64;  // torch has no more dimensions

// Contiguous tensors that follow each other in the bucket.
struct Parts {
  char* data[kMaxParts];
  std::size_t begin, end;          // in the bucket
  std::uint32_t start[kMaxParts];  // from `begin` on
  std::uint8_t type[kMaxParts];
  int count;
};

struct Strided {
  std::int64_t shape[kMaxDims], strides[kMaxDims];
  char* data;
  std::size_t start, numel;
  PackType type;
  int ndim;
};
static_assert(sizeof(Parts) + 64 <= 4096 && sizeof(Strided) + 64 <= 4096);

struct Bucket {
  char* data;
  PackType type;
  float scale;
};

template <class Storage>
__device__ void copy_group(Storage* to, const Storage* from) {
  constexpr int kVectors = kGroup * sizeof(Storage) / 16;
  const bool is_from_aligned = is_aligned16(from), is_to_aligned = is_aligned16(to);
  union {
    uint4 vector[kVectors];
    Storage item[kGroup];
  } group;
  if (is_from_aligned) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) group.vector[j] = reinterpret_cast<const uint4*>(from)[j];
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) group.item[j] = from[j];
  }
  if (is_to_aligned) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) reinterpret_cast<uint4*>(to)[j] = group.vector[j];
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) to[j] = group.item[j];
  }
}

// One element, or a group of them.
template <class To, class From>
__device__ void convert_group(char* to, const char* from, float scale) {
  typename From::Storage loaded[kGroup];
  typename To::Storage stored[kGroup];
  copy_group(loaded, reinterpret_cast<const typename From::Storage*>(from));
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    float value = From::template decode<Scalar>(loaded[j]);
    if (scale != 1.0f) value = value * scale;
    stored[j] = To::template encode<Scalar>(value);
  }
  copy_group(reinterpret_cast<typename To::Storage*>(to), stored);
}

template <class To, class From>
__device__ void convert_one(char* to, const char* from, float scale) {
  float value = From::template decode<Scalar>(*reinterpret_cast<const typename From::Storage*>(from));
  if (scale != 1.0f) value = value * scale;
  *reinterpret_cast<typename To::Storage*>(to) = To::template encode<Scalar>(value);
}

// Moves a group (or one element) between a tensor's memory and the bucket's.
template <bool is_unpack, bool is_group>
__device__ void move_items(char* item, PackType type, char* place, const Bucket& bucket) {
  char* const to = is_unpack ? item : place;
  const char* const from = is_unpack ? place : item;
  const PackType to_type = is_unpack ? type : bucket.type, from_type = is_unpack ? bucket.type : type;
  const bool is_wide = type == PackType::kFloat32;
  if (keeps_bits(from_type, to_type, bucket.scale)) {
    if constexpr (is_group) {
      is_wide ? copy_group(reinterpret_cast<std::uint32_t*>(to), reinterpret_cast<const std::uint32_t*>(from))
              : copy_group(reinterpret_cast<std::uint16_t*>(to), reinterpret_cast<const std::uint16_t*>(from));
    } else if (is_wide) {
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      *reinterpret_cast<std::uint16_t*>(to) = *reinterpret_cast<const std::uint16_t*>(from);
    }
    return;
  }
  visit_pack_type(to_type, [&](auto to_element) {
    visit_pack_type(from_type, [&](auto from_element) {
      if constexpr (is_group) {
        convert_group<decltype(to_element), decltype(from_element)>(to, from, bucket.scale);
      } else {
        convert_one<decltype(to_element), decltype(from_element)>(to, from, bucket.scale);
      }
    });
  });
}

// The part that has the element `at`: the last whose start is at or before it. `starts` ascends strictly.
__device__ int find_part(const std::uint32_t* starts, int count, std::size_t at) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ std::size_t item_bytes_of(PackType type) { return type == PackType::kFloat32 ? 4 : 2; }

template <bool is_unpack>
__global__ void __launch_bounds__(kThreads)
    move_parts_kernel(const __grid_constant__ Bucket bucket, const __grid_constant__ Parts parts) {
  __shared__ std::uint32_t starts[kMaxParts];
  for (int part = threadIdx.x; part < parts.count; part += kThreads) starts[part] = parts.start[part];
  __syncthreads();
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  const std::size_t begin = parts.begin, width = item_bytes_of(bucket.type);
  const std::size_t last = (parts.end + kGroup - 1) / kGroup;  // groups are counted from the bucket's beginning
  for (std::size_t group = begin / kGroup + blockIdx.x * std::size_t{kThreads} + threadIdx.x; group < last;
       group += stride) {
    std::size_t at = group * kGroup < begin ? begin : group * kGroup;
    const std::size_t end = (group + 1) * kGroup < parts.end ? (group + 1) * kGroup : parts.end;
    for (int part = find_part(starts, parts.count, at - begin); at < end; ++part) {
      const std::size_t stop = part + 1 < parts.count ? min(begin + starts[part + 1], end) : end;
      const auto type = static_cast<PackType>(parts.type[part]);
      char* const item = parts.data[part] + (at - begin - starts[part]) * item_bytes_of(type);
      if (stop - at == kGroup) {
        move_items<is_unpack, true>(item, type, bucket.data + at * width, bucket);
        at = stop;
        continue;
      }
      for (std::size_t first = at; at < stop; ++at) {
        move_items<is_unpack, false>(item + (at - first) * item_bytes_of(type), type, bucket.data + at * width, bucket);
      }
    }
  }
}

template <bool is_unpack>
__global__ void __launch_bounds__(kThreads)
    move_strided_kernel(const __grid_constant__ Bucket bucket, const __grid_constant__ Strided part) {
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < part.numel; i += stride) {
    const std::int64_t offset = strided_offset(i, part.shape, part.strides, part.ndim);
    char* const item = part.data + offset * static_cast<std::int64_t>(item_bytes_of(part.type));
    move_items<is_unpack, false>(item, part.type, bucket.data + (part.start + i) * item_bytes_of(bucket.type), bucket);
  }
}

template <bool is_unpack>
cudaError_t launch_parts(const Bucket& bucket, const Parts& parts, void* stream) {
  unsigned blocks = 0;
  const std::size_t groups = (parts.end - parts.begin) / kGroup + 2;
  const cudaError_t error = count_blocks(groups, kBlocksPerMultiprocessor, &blocks);
  if (error != cudaSuccess) return error;
  return launch_kernel(&move_parts_kernel<is_unpack>, blocks, kThreads, stream, bucket, parts);
}

template <bool is_unpack>
cudaError_t launch_strided(const Bucket& bucket, const PackPart& part, std::size_t start, void* stream) {
  Strided strided{};
  std::copy_n(part.shape, part.ndim, strided.shape);
  std::copy_n(part.strides, part.ndim, strided.strides);
  strided.data = part.data, strided.start = start, strided.numel = part.numel;
  strided.type = part.type, strided.ndim = part.ndim;
  unsigned blocks = 0;
  const cudaError_t error = count_blocks(part.numel, kBlocksPerMultiprocessor, &blocks);
  if (error != cudaSuccess) return error;
  return launch_kernel(&move_strided_kernel<is_unpack>, blocks, kThreads, stream, bucket, strided);
}

template <bool is_unpack>
cudaError_t run(const PackJob& job, void* stream) {
  const Bucket bucket{job.bucket, job.type, job.scale};
  Parts parts{};
  std::size_t start = 0;
  cudaError_t error = cudaSuccess;
  const auto flush = [&] {
    if (parts.count != 0 && error == cudaSuccess) error = launch_parts<is_unpack>(bucket, parts, stream);
    parts.count = 0;
  };
  for (std::size_t i = 0; i < job.num_parts && error == cudaSuccess; ++i) {
    const PackPart& part = job.parts[i];
    if (part.numel == 0) continue;
    const bool is_near = start - parts.begin <= std::numeric_limits<std::uint32_t>::max();
    if (!part.is_contiguous || parts.count == kMaxParts || !is_near) flush();
    if (!part.is_contiguous) {
      if (error == cudaSuccess) error = launch_strided<is_unpack>(bucket, part, start, stream);
    } else {
      if (parts.count == 0) parts.begin = start;
      parts.data[parts.count] = part.data;
      parts.start[parts.count] = static_cast<std::uint32_t>(start - parts.begin);
      parts.type[parts.count++] = static_cast<std::uint8_t>(part.type);
      parts.end = start + part.numel;
    }
    start += part.numel;
  }
  flush();
  return error;
}

}  // namespace

int pack_cuda(const PackJob& job, void* stream) { return run<false>(job, stream); }
int unpack_cuda(const PackJob& job, void* stream) { return run<true>(job, stream); }

}  // namespace pycomm
