// pycomm._native: quantize, dequantize and topk over addresses. pycomm/ops checks the tensors; here is checked what would
// make the kernels read or write outside.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec_jobs.h"
#include "gil.h"
#include "pool.h"

namespace py = pybind11;

namespace pycomm {

ParallelFor parallel_for = nullptr;

namespace {

#if defined(PYCOMM_WITH_CUDA)
void scatter_add_on_cuda(std::uintptr_t flat, std::size_t numel, std::uintptr_t indices, std::uintptr_t values,
                         std::size_t count, float factor, std::uintptr_t flag, std::uintptr_t stream) {
  check_cuda("scatter_add_cuda",
             scatter_add_cuda(reinterpret_cast<float*>(flat), numel, reinterpret_cast<const std::int32_t*>(indices),
                              reinterpret_cast<const float*>(values), count, factor,
                              reinterpret_cast<std::uint32_t*>(flag), reinterpret_cast<void*>(stream)));
}
#endif

std::size_t scatter_add_on_cpu(std::uintptr_t flat, std::size_t numel, std::uintptr_t indices, std::uintptr_t values,
                               std::size_t count, float factor) {
  const WithoutGil released;
  const auto* const places = reinterpret_cast<const std::int32_t*>(indices);
  const std::size_t bad = find_bad_index(places, count, numel);
  if (bad == count) {
    scatter_add(reinterpret_cast<float*>(flat), places, reinterpret_cast<const float*>(values), count, factor);
  }
  return bad;
}

// Each part: the addresses of its indices and values, and how many there are.
using Parts = std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>;

std::optional<std::pair<std::size_t, std::size_t>> scatter_sum_on_cpu(std::uintptr_t flat, std::size_t numel,
                                                                      const Parts& given) {
  std::vector<SparsePart> parts;
  for (const auto& [indices, values, count] : given) {
    parts.push_back({reinterpret_cast<const std::int32_t*>(indices), reinterpret_cast<const float*>(values), count});
  }
  const WithoutGil released;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::size_t bad = find_disorder(parts[p], numel);
    if (bad != parts[p].count) return std::pair{p, bad};
  }
  run_in_pool(numel, 1, [flat, numel, &parts](std::size_t first, std::size_t last) {
    std::vector<SparsePart> mine = parts;
    scatter_sum(reinterpret_cast<float*>(flat), first, last, mine.data(), mine.size(), 4 * numel >= kStreamedBytes);
  });
  return std::nullopt;
}

}  // namespace

void bind_codecs(py::module_& m) {
  m.def(
      "use_parallel_for", [](std::uintptr_t address) { parallel_for = reinterpret_cast<ParallelFor>(address); },
      py::arg("address"), "Gives the kernels the threads of the caller: the address of torch_parallel_for, or 0.");
  m.def(
      "quantize",
      [](std::uintptr_t payload, std::size_t payload_bytes, std::uintptr_t flat, std::size_t numel, int format,
         std::size_t block_numel, bool is_stochastic, std::uint64_t seed, std::uint64_t offset, std::uintptr_t residual,
         std::optional<std::uintptr_t> stream) {
        const QuantizeJob job = quantize_job(payload, payload_bytes, flat, numel, format, block_numel, is_stochastic,
                                             seed, offset, residual);
        run_quantize(job, stream);
      },
      py::arg("payload"), py::arg("payload_bytes"), py::arg("flat"), py::arg("numel"), py::arg("format"),
      py::arg("block_numel"), py::arg("is_stochastic"), py::arg("seed"), py::arg("offset"), py::arg("residual"),
      py::arg("stream"),
      "Encodes float32; `residual` is 0 for none, `stream` None for the CPU. Raises ValueError, RuntimeError.");
  m.def(
      "dequantize",
      [](std::uintptr_t flat, std::size_t numel, std::uintptr_t payload, std::size_t payload_bytes, int format,
         std::size_t block_numel, float factor, bool is_added, bool is_part,
         std::optional<std::uintptr_t> stream) {
        const DequantizeJob job =
            dequantize_job(flat, numel, payload, payload_bytes, format, block_numel, factor, is_added, is_part);
        run_dequantize(job, stream);
      },
      py::arg("flat"), py::arg("numel"), py::arg("payload"), py::arg("payload_bytes"), py::arg("format"),
      py::arg("block_numel"), py::arg("factor"), py::arg("is_added"), py::arg("is_part"), py::arg("stream"),
      "Decodes to float32, or adds to it; `is_part`: of a result that no cache will hold. `stream` is None for the CPU. "
      "Raises ValueError, RuntimeError.");
  m.def("topk_workspace_bytes", &topk_workspace_bytes, py::arg("numel"), py::arg("k"));
  m.def(
      "topk",
      [](std::uintptr_t indices, std::uintptr_t values, std::size_t k, std::uintptr_t flat, std::size_t numel, std::uintptr_t residual,
         std::uintptr_t workspace, std::size_t workspace_bytes, std::uintptr_t report, std::optional<double> tolerance,
         std::optional<std::uintptr_t> stream) {
        run_topk(topk_job(indices, values, k, flat, numel, residual, workspace, workspace_bytes), report, tolerance, stream);
      },
      py::arg("indices"), py::arg("values"), py::arg("k"), py::arg("flat"), py::arg("numel"), py::arg("residual"), py::arg("workspace"),
      py::arg("workspace_bytes"), py::arg("report"), py::arg("tolerance"), py::arg("stream"),
      "Selects the k largest; what it did goes to `report` (0: nowhere), whose threshold is reused if there is a tolerance. `stream` is "
      "None for the CPU. Raises ValueError, RuntimeError.");
  m.def("scatter_add", &scatter_add_on_cpu, py::arg("flat"), py::arg("numel"), py::arg("indices"), py::arg("values"),
        py::arg("count"), py::arg("factor"),
        "Adds and returns `count`; or adds nothing and returns the position of the first index outside.");
  m.def("scatter_sum", &scatter_sum_on_cpu, py::arg("flat"), py::arg("numel"), py::arg("parts"),
        "Writes the sum and returns None; or nothing, and returns the part and the position of its first bad index.");
#if defined(PYCOMM_WITH_CUDA)
  m.def("scatter_add_cuda", &scatter_add_on_cuda, py::arg("flat"), py::arg("numel"), py::arg("indices"),
        py::arg("values"), py::arg("count"), py::arg("factor"), py::arg("flag"), py::arg("stream"),
        "As scatter_add, queued on a stream; a bad index makes all of `flat` NaN. `flag`: 4 bytes. Raises RuntimeError.");
#endif
}

}  // namespace pycomm
