// pycomm._native.CodecCuts: quantize and dequantize of the user's own tensors, without a look at each of their properties from Python, which
// takes longer than to encode 64 Ki elements.
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
    if (!residual.is_none() && !is_like(residual, both.flat, kept)) return false;
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
    if (!tensors_.read_anywhere(flat.ptr(), both.flat) || !tensors_.read_anywhere(payload.ptr(), both.payload)) return false;
    return is_flat(both.flat, DType::kFloat32) && is_flat(both.payload, DType::kUInt8) && is_beside(both.payload, both.flat) &&
           both.payload.numel == PayloadLayout(known, both.flat.numel, both.block_numel).bytes && find_stream(both.flat, both.stream);
  }

  bool is_like(py::handle object, const Flat& other, Flat& flat) const {
    return tensors_.read_anywhere(object.ptr(), flat) && is_flat(flat, other.dtype) && is_beside(flat, other) && flat.numel == other.numel;
  }

  static std::uintptr_t address(const Flat& flat) { return reinterpret_cast<std::uintptr_t>(flat.data); }

  static bool is_flat(const Flat& flat, DType dtype) { return flat.ndim == 1 && flat.dtype == dtype; }
  static bool is_beside(const Flat& flat, const Flat& other) {
    return flat.device_type == other.device_type && flat.device_id == other.device_id;
  }

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
  py::class_<CodecCuts>(m, "CodecCuts", "Short cuts of quantize and dequantize. Takes the types torch.Tensor and Parameter.")
      .def(py::init<py::object, py::object>(), py::arg("tensor"), py::arg("parameter"))
      .def("quantize", &CodecCuts::quantize, py::arg("payload"), py::arg("flat"), py::arg("residual"), py::arg("format"), py::arg("block_numel"),
           py::arg("is_stochastic"), py::arg("seed"), py::arg("offset"), "Does it and returns True; or nothing, and returns False.")
      .def("dequantize", &CodecCuts::dequantize, py::arg("flat"), py::arg("payload"), py::arg("format"), py::arg("block_numel"),
           py::arg("factor"), py::arg("is_added"), py::arg("is_part"), "The way back.");
}

}  // namespace pycomm
