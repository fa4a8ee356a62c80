// pycomm._native.Packer: lists of torch tensors <-> a bucket. Reads the tensors through DLPack's C ABI, because asking
// each of them from Python for its address, shape and type takes longer than to copy a small one.
#include "../kernels/pack.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dlpack_abi.h"
#include "gil.h"
#include "pool.h"

#if defined(PYCOMM_WITH_CUDA)
#include "../kernels/cuda/pack.h"
#include "cuda_errors.h"
#endif

namespace py = pybind11;

namespace pycomm {
namespace {

// Positions in the list; what is not a position.
constexpr Py_ssize_t kDone = -1, kBadBucket = -2, kBadLength = -3;

class Packer {
 public:
  Packer(py::object tensor, py::object parameter)
      : tensor_(tensor),
        parameter_(parameter),
        is_neg_(tensor.attr("is_neg")),
        api_(dlpack::exchange_api(reinterpret_cast<PyTypeObject*>(tensor.ptr()))) {
    if (api_ == nullptr) throw std::runtime_error("pack: this torch has no C exchange API for DLPack; it needs 2.11");
  }

  // Moves all elements and returns kDone; or moves nothing and returns the position of a tensor that cannot be packed, or
  // what else is wrong. With a stream the tensors are those of the current GPU, and the moves are queued.
  template <bool is_unpack>
  Py_ssize_t run(py::handle bucket, py::handle tensors, float scale, std::optional<std::uintptr_t> stream) const {
    PackPart whole;
    Device device{stream ? dlpack::kCUDA : dlpack::kCPU, -1};
    if (!read(bucket.ptr(), whole, device) || !whole.is_contiguous || whole.ndim != 1) return kBadBucket;
    thread_local std::vector<PackPart> parts;  // keeps its memory from call to call
    parts.clear();
    const py::object list = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "a sequence of tensors"));
    if (!list) throw py::error_already_set();
    PyObject* const* const items = PySequence_Fast_ITEMS(list.ptr());
    std::size_t numel = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.ptr()); ++i) {
      PackPart part;
      if (!read(items[i], part, device) || overlap(whole, part)) return i;
      numel += part.numel;
      if (part.numel != 0) parts.push_back(part);
    }
    if (numel != whole.numel) return kBadLength;
    stream ? queue<is_unpack>(whole, parts, scale, *stream) : move<is_unpack>(whole, parts, scale);
    return kDone;
  }

 private:
  // Where all tensors of a call are; `id` is the bucket's once that is read, before it -1.
  struct Device {
    dlpack::DeviceType type;
    std::int32_t id;
  };

  bool read(PyObject* object, PackPart& part, Device& device) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != tensor_.ptr() && type != parameter_.ptr()) return false;  // subclasses may mean something else
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
      PyErr_Clear();  // sparse, meta, quantized, ...
      return false;
    }
    if (tensor.device_type != device.type || tensor.dtype.lanes != 1 || !type_of(tensor, part.type)) return false;
    if (device.id == -1) device.id = tensor.device_id;
    if (tensor.device_id != device.id) return false;
    part.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    part.ndim = tensor.ndim, part.shape = tensor.shape, part.strides = tensor.strides;
    std::int64_t expected = 1;
    part.is_contiguous = true;
    for (int dim = tensor.ndim - 1; dim >= 0; --dim) {
      const std::int64_t length = tensor.shape[dim];
      if (tensor.strides != nullptr && length != 1 && tensor.strides[dim] != expected) part.is_contiguous = false;
      expected *= length;
    }
    part.numel = static_cast<std::size_t>(expected);
    if (part.numel == 0) part.is_contiguous = true;
    return !is_negated(object, part);
  }

  static bool type_of(const dlpack::Tensor& tensor, PackType& type) {
    const bool is_float = tensor.dtype.code == dlpack::kFloat;
    if (is_float && tensor.dtype.bits == 32) return type = PackType::kFloat32, true;
    if (is_float && tensor.dtype.bits == 16) return type = PackType::kFloat16, true;
    if (tensor.dtype.code == dlpack::kBfloat && tensor.dtype.bits == 16) return type = PackType::kBFloat16, true;
    return false;
  }

  // The imaginary part of a conjugate is a view with a negation bit, which DLPack does not tell. It has stride 2, or one
  // element; only then torch has to be asked.
  bool is_negated(PyObject* object, const PackPart& part) const {
    if (part.is_contiguous && part.numel != 1) return false;
    const py::object answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), object));
    if (!answer) throw py::error_already_set();
    return answer.ptr() == Py_True;
  }

  // Whether an element of a part lies in the bucket's memory. Of one with gaps that may step over it each is looked at.
  static bool overlap(const PackPart& bucket, const PackPart& part) {
    const auto item_bytes = [](const PackPart& p) { return static_cast<std::int64_t>(kPackItemBytes[static_cast<int>(p.type)]); };
    const std::int64_t item = item_bytes(part);
    const char* const begin = bucket.data;
    const char* const end = begin + static_cast<std::int64_t>(bucket.numel) * item_bytes(bucket);
    const auto meets = [&](const char* data, std::int64_t items) { return data < end && begin < data + items * item; };
    if (part.numel == 0) return false;
    if (part.is_contiguous) return meets(part.data, static_cast<std::int64_t>(part.numel));
    std::int64_t last = 0;
    for (int dim = 0; dim < part.ndim; ++dim) last += (part.shape[dim] - 1) * part.strides[dim];
    if (!meets(part.data, last + 1)) return false;
    for (std::size_t element = 0; element < part.numel; ++element) {
      std::int64_t rest = static_cast<std::int64_t>(element), at = 0;
      for (int dim = part.ndim - 1; dim >= 0; rest /= part.shape[dim--]) at += rest % part.shape[dim] * part.strides[dim];
      if (meets(part.data + at * item, 1)) return true;
    }
    return false;
  }

  static PackJob job_of(const PackPart& bucket, const std::vector<PackPart>& parts, float scale) {
    PackJob job{};
    job.parts = parts.data(), job.num_parts = parts.size();
    job.bucket = bucket.data, job.type = bucket.type, job.scale = scale;
    job.begin = 0, job.end = bucket.numel;
    return job;
  }

  template <bool is_unpack>
  static void queue([[maybe_unused]] const PackPart& bucket, [[maybe_unused]] const std::vector<PackPart>& parts,
                    [[maybe_unused]] float scale, [[maybe_unused]] std::uintptr_t stream) {
#if defined(PYCOMM_WITH_CUDA)
    const PackJob job = job_of(bucket, parts, scale);
    check_cuda("pack_cuda", (is_unpack ? unpack_cuda : pack_cuda)(job, reinterpret_cast<void*>(stream)));
#else
    throw std::runtime_error("pack: this build has no kernels for CUDA");
#endif
  }

  template <bool is_unpack>
  static void move(const PackPart& bucket, const std::vector<PackPart>& parts, float scale) {
    PackJob job = job_of(bucket, parts, scale);
    const std::size_t bytes = bucket.numel * kPackItemBytes[static_cast<int>(bucket.type)];
    const auto body = [&job](std::size_t begin, std::size_t end) {
      PackJob range = job;
      range.begin = begin, range.end = end;
      is_unpack ? unpack(range) : pack(range);
    };
    if (bytes < kUnlockedBytes) return body(0, bucket.numel);
    const WithoutGil released;
    job.is_streamed = 2 * bytes >= kStreamedBytes;
    run_in_pool(bucket.numel, 1, body);
  }

  py::object tensor_, parameter_, is_neg_;
  const dlpack::ExchangeApi* api_;
};

}  // namespace

void bind_pack(py::module_& m) {
  py::class_<Packer>(m, "Packer", "Packs lists of torch's tensors. Takes the types torch.Tensor and Parameter.")
      .def(py::init<py::object, py::object>(), py::arg("tensor"), py::arg("parameter"))
      .def("pack", &Packer::run<false>, py::arg("bucket"), py::arg("tensors"), py::arg("scale"),
           py::arg("stream"),
           "Returns -1; or does nothing and returns the position of a tensor that cannot be packed, -2 if the bucket is "
           "not a flat tensor of float32, float16 or bfloat16, -3 if its length is not that of the tensors. `stream` is "
           "None for tensors of the CPU.")
      .def("unpack", &Packer::run<true>, py::arg("bucket"), py::arg("tensors"), py::arg("scale"),
           py::arg("stream"), "The way back.");
}

}  // namespace pycomm
