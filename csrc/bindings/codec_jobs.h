// The jobs of quantize, dequantize and topk as Python asks for them: what would make a kernel read or write outside is checked, and each goes
// to a stream, or to the caller's threads.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "../kernels/quantize.h"
#include "../kernels/topk.h"
#include "gil.h"
#include "pool.h"

#if defined(PYCOMM_WITH_CUDA)
#include "../kernels/cuda/quantize.h"
#include "../kernels/cuda/topk.h"
#include "cuda_errors.h"
#endif

namespace pycomm {

inline bool is_block(PayloadFormat format, std::size_t block_numel) {
  return block_numel != 0 && block_numel % 32 == 0 && (!is_mx(format) || block_numel == 32);
}

inline void check_payload(int format, std::size_t numel, std::size_t block_numel, std::size_t payload_bytes) {
  if (format < 0 || format >= kPayloadFormats) throw pybind11::value_error("quantize: no format " + std::to_string(format));
  const auto known = static_cast<PayloadFormat>(format);
  if (!is_block(known, block_numel)) {
    throw pybind11::value_error("quantize: a block cannot have " + std::to_string(block_numel) + " elements");
  }
  const PayloadLayout layout(known, numel, block_numel);
  if (payload_bytes != layout.bytes) {
    throw pybind11::value_error("quantize: expected a payload of " + std::to_string(layout.bytes) + " bytes, got " +
                                std::to_string(payload_bytes));
  }
}

inline QuantizeJob quantize_job(std::uintptr_t payload, std::size_t payload_bytes, std::uintptr_t flat, std::size_t numel,
                                int format, std::size_t block_numel, bool is_stochastic, std::uint64_t seed,
                                std::uint64_t offset, std::uintptr_t residual) {
  check_payload(format, numel, block_numel, payload_bytes);
  QuantizeJob job{};
  job.payload = reinterpret_cast<unsigned char*>(payload);
  job.flat = reinterpret_cast<const float*>(flat);
  job.residual = reinterpret_cast<float*>(residual);
  job.seed = seed, job.offset = offset;
  job.format = static_cast<PayloadFormat>(format);
  job.is_stochastic = is_stochastic;
  job.numel = numel, job.block_numel = block_numel;
  return job;
}

inline DequantizeJob dequantize_job(std::uintptr_t flat, std::size_t numel, std::uintptr_t payload, std::size_t payload_bytes,
                                    int format, std::size_t block_numel, float factor, bool is_added, bool is_part) {
  check_payload(format, numel, block_numel, payload_bytes);
  DequantizeJob job{};
  job.flat = reinterpret_cast<float*>(flat);
  job.payload = reinterpret_cast<const unsigned char*>(payload);
  job.factor = factor;
  job.format = static_cast<PayloadFormat>(format);
  job.is_added = is_added;
  job.is_streamed = is_part;
  job.numel = numel, job.block_numel = block_numel;
  return job;
}

// Runs `kernel` on parts of the job's blocks, in the caller's threads.
template <class Job>
void run_on_cpu(void (*kernel)(const Job&), Job job) {
  const WithoutGil released;
  const PayloadLayout layout(job.format, job.numel, job.block_numel);
  if (4 * job.numel + layout.bytes >= kStreamedBytes) job.is_streamed = true;
  run_in_pool(layout.num_blocks, job.block_numel, [kernel, &job](std::size_t first, std::size_t last) {
    Job part = job;
    part.first_block = first, part.last_block = last;
    kernel(part);
  });
}

// On a stream, if one is given.
inline void run_quantize(const QuantizeJob& job, [[maybe_unused]] std::optional<std::uintptr_t> stream) {
#if defined(PYCOMM_WITH_CUDA)
  if (stream) return check_cuda("quantize_cuda", quantize_cuda(job, reinterpret_cast<void*>(*stream)));
#endif
  run_on_cpu(quantize, job);
}
inline void run_dequantize(const DequantizeJob& job, [[maybe_unused]] std::optional<std::uintptr_t> stream) {
#if defined(PYCOMM_WITH_CUDA)
  if (stream) return check_cuda("dequantize_cuda", dequantize_cuda(job, reinterpret_cast<void*>(*stream)));
#endif
  run_on_cpu(dequantize, job);
}

inline TopkJob topk_job(std::uintptr_t indices, std::uintptr_t values, std::size_t k, std::uintptr_t flat, std::size_t numel,
                        std::uintptr_t residual, std::uintptr_t workspace, std::size_t workspace_bytes) {
  if (k < 1 || k > numel || numel >= (std::size_t{1} << 31) || workspace_bytes < topk_workspace_bytes(numel, k)) {
    throw pybind11::value_error("topk: expected 1 <= k <= numel < 2**31 and a workspace of workspace_bytes(numel, k)");
  }
  TopkJob job{};
  job.indices = reinterpret_cast<std::int32_t*>(indices);
  job.values = reinterpret_cast<float*>(values);
  job.flat = reinterpret_cast<const float*>(flat);
  job.residual = reinterpret_cast<float*>(residual);
  job.workspace = reinterpret_cast<void*>(workspace);
  job.numel = numel, job.k = job.accepted = k;
  return job;
}

// `report` (0: none) gets what was done. With a `tolerance`, at least 0 and below 1, the threshold that it has is the guess.
inline void run_topk(TopkJob job, std::uintptr_t report, std::optional<double> tolerance, [[maybe_unused]] std::optional<std::uintptr_t> stream) {
  auto* const told = reinterpret_cast<std::int32_t*>(report);
  const bool is_reusing = tolerance.has_value();
  if (is_reusing && !(told != nullptr && *tolerance >= 0 && *tolerance < 1)) {
    throw pybind11::value_error("topk: expected a report, and 0 <= tolerance < 1");
  }
  if (is_reusing) job.accepted = static_cast<std::size_t>(std::ceil((1 - *tolerance) * static_cast<double>(job.k)));
#if defined(PYCOMM_WITH_CUDA)
  if (stream) return check_cuda("topk_cuda", topk_cuda(job, told, is_reusing, reinterpret_cast<void*>(*stream)));
#endif
  const WithoutGil released;
  if (is_reusing) job.guess = told[0];
  const TopkResult result = topk(job);
  if (told == nullptr) return;
  told[0] = result.threshold, told[1] = static_cast<std::int32_t>(result.selected), told[2] = result.is_exact;
}

}  // namespace pycomm
