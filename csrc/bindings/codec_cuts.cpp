// pycomm._native.CodecCuts: quantize, dequantize and topk of the user's own tensors, without a look at each of their properties from
// Python, which takes longer than to encode 64 Ki elements.
//
// As the short cuts of collectives do: True if the call is done; False, with nothing touched, if an argument is not as plain as this
// path wants it. The ordinary path then does it, or words the error.
#include <pybind11/pybind11.h>

#include <optional>

#include "codec_jobs.h"
#include "plain_tensor.h"

namespace py = pybind11;

namespace pycomm {
namespace {

class CodecCuts {
 public:
  CodecCuts(const py::object& tensor, const py::object& parameter) : tensors_(tensor, parameter) {}

  bool quantize(py::handle payload, py::handle flat, py::handle residual, int format, py::handle length, bool is_stochastic,
                py::handle seed, py::handle offset) const {
    Both both;
    Flat kept{};
    std::uint64_t first_seed = 0, first = 0;
    if (!read(payload, flat, format, length, both)) return false;
    if (!is_none_or_beside(residual, both.flat, DType::kFloat32, both.flat.numel, kept)) return false;
    if (is_stochastic && static_cast<PayloadFormat>(format) == PayloadFormat::kSign) return false;
    if (!read_number(seed, 63, first_seed) || !read_number(offset, 62, first)) return false;
    run_quantize(quantize_job(address(both.payload), both.payload.numel, address(both.flat), both.flat.numel, format, both.block_numel,
                              is_stochastic, first_seed, first, address(kept)), both.stream);
    return true;
  }

  bool dequantize(py::handle flat, py::handle payload, int format, py::handle length, float factor, bool is_added, bool is_part) const {
    Both both;
    if (!read(payload, flat, format, length, both)) return false;
    run_dequantize(dequantize_job(address(both.flat), both.flat.numel, address(both.payload), both.payload.numel, format, both.block_numel,
                                  factor, is_added, is_part), both.stream);
    return true;
  }

  bool topk(py::handle indices, py::handle values, py::handle flat, py::handle residual, py::handle report, py::handle tolerance,
            py::handle workspace) const {
    Flat input, places, chosen, room, left{}, told{};
    if (!tensors_.can_read() || !tensors_.read_anywhere(flat.ptr(), input) || !is_flat(input, DType::kFloat32)) return false;
    if (!is_beside(indices, input, DType::kInt32, places) || !is_beside(values, input, DType::kFloat32, chosen)) return false;
    if (!is_beside(workspace, input, DType::kUInt8, room)) return false;
    const std::size_t k = places.numel;
    if (chosen.numel != k || k < 1 || k > input.numel || input.numel >> 31 != 0) return false;
    if (room.numel < topk_workspace_bytes(input.numel, k) || address(room) % 8 != 0) return false;
    if (!is_none_or_beside(residual, input, DType::kFloat32, input.numel, left)) return false;
    if (!is_none_or_beside(report, input, DType::kInt32, 3, told)) return false;
    std::optional<double> allowed;
    if (!tolerance.is_none()) {
      if (report.is_none() || !PyFloat_CheckExact(tolerance.ptr())) return false;
      allowed = PyFloat_AS_DOUBLE(tolerance.ptr());
      if (!(*allowed >= 0 && *allowed < 1)) return false;
    }
    std::optional<std::uintptr_t> stream;
    if (!find_stream(input, stream)) return false;
    run_topk(topk_job(address(places), address(chosen), k, address(input), input.numel, address(left), address(room), room.numel),
             address(told), allowed, stream);
    return true;
  }

 private:
  // What both ways take.
  struct Both {
    Flat flat, payload;
    std::uint64_t block_numel;
    std::optional<std::uintptr_t> stream;
  };

  // Whether both are flat, on one device that can be used as it is, and of the format's types and lengths.
  bool read(py::handle payload, py::handle flat, int format, py::handle length, Both& both) const {
    if (!tensors_.can_read() || format < 0 || format >= kPayloadFormats || !read_number(length, 62, both.block_numel)) return false;
    const auto known = static_cast<PayloadFormat>(format);
    if (!is_block(known, both.block_numel)) return false;
    if (!tensors_.read_anywhere(flat.ptr(), both.flat) || !is_flat(both.flat, DType::kFloat32)) return false;
    return is_beside(payload, both.flat, DType::kUInt8, both.payload) &&
           both.payload.numel == PayloadLayout(known, both.flat.numel, both.block_numel).bytes && find_stream(both.flat, both.stream);
  }

  // Whether it is flat, of this type, and on the device of the other one.
  bool is_beside(py::handle object, const Flat& other, DType dtype, Flat& flat) const {
    return tensors_.read_anywhere(object.ptr(), flat) && is_flat(flat, dtype) && flat.device_type == other.device_type &&
           flat.device_id == other.device_id;
  }

  bool is_none_or_beside(py::handle object, const Flat& other, DType dtype, std::size_t numel, Flat& flat) const {
    return object.is_none() || (is_beside(object, other, dtype, flat) && flat.numel == numel);
  }

  static std::uintptr_t address(const Flat& flat) { return reinterpret_cast<std::uintptr_t>(flat.data); }

  static bool is_flat(const Flat& flat, DType dtype) { return flat.ndim == 1 && flat.dtype == dtype; }

  // An integer of 0 .. 2^bits - 1.
  static bool read_number(py::handle object, int bits, std::uint64_t& number) {
    if (!PyLong_CheckExact(object.ptr())) return false;
    number = PyLong_AsUnsignedLongLong(object.ptr());
    if (PyErr_Occurred()) PyErr_Clear(), number = UINT64_MAX;
    return number >> bits == 0;
  }

  // None for the CPU; for the current GPU the stream that torch works on.
  bool find_stream(const Flat& flat, [[maybe_unused]] std::optional<std::uintptr_t>& stream) const {
    if (flat.device_type == dlpack::kCPU) return true;
#if defined(PYCOMM_WITH_CUDA)
    void* current = nullptr;
    const dlpack::ExchangeApi& api = *tensors_.api();
    if (flat.device_type != dlpack::kCUDA || flat.device_id != cuda_current_device() || api.current_work_stream == nullptr) return false;
    if (api.current_work_stream(flat.device_type, flat.device_id, &current) != 0) return PyErr_Clear(), false;
    stream = reinterpret_cast<std::uintptr_t>(current);
    return true;
#else
    return false;
#endif
  }

  PlainTensors tensors_;
};

}  // namespace

void bind_codec_cuts(py::module_& m) {
  py::class_<CodecCuts>(m, "CodecCuts", "Short cuts of quantize, dequantize and topk. Takes the types torch.Tensor and Parameter.")
      .def(py::init<py::object, py::object>(), py::arg("tensor"), py::arg("parameter"))
      .def("quantize", &CodecCuts::quantize, py::arg("payload"), py::arg("flat"), py::arg("residual"), py::arg("format"), py::arg("block_numel"),
           py::arg("is_stochastic"), py::arg("seed"), py::arg("offset"), "Does it and returns True; or nothing, and returns False.")
      .def("dequantize", &CodecCuts::dequantize, py::arg("flat"), py::arg("payload"), py::arg("format"), py::arg("block_numel"),
           py::arg("factor"), py::arg("is_added"), py::arg("is_part"), "The way back.")
      .def("topk", &CodecCuts::topk, py::arg("indices"), py::arg("values"), py::arg("flat"), py::arg("residual"), py::arg("report"),
           py::arg("tolerance"), py::arg("workspace"), "As pycomm.ops.topk_, with a workspace.");
}

}  // namespace pycomm
