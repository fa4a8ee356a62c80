// pycomm._native: the native core as Python sees it. One file a noun; each checks, unwraps and calls.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace pycomm {
void bind_board(py::module_& m);
void bind_codec_cuts(py::module_& m);
void bind_codecs(py::module_& m);
void bind_frames(py::module_& m);
void bind_gloo_waits(py::module_& m);
void bind_kernels(py::module_& m);
void bind_overlap(py::module_& m);
void bind_pack(py::module_& m);
void bind_shm(py::module_& m);
void bind_verb(py::module_& m);
}  // namespace pycomm

PYBIND11_MODULE(_native, m) {
  m.doc() = "The native core of pycomm: reduction kernels and the shared-memory transport. Knows no framework.";
  m.attr("compiler") = __VERSION__;
#if defined(PYCOMM_WITH_CUDA)
  m.attr("cuda_archs") = PYCOMM_CUDA_ARCHS;
#else
  m.attr("cuda_archs") = py::none();
#endif
  pycomm::bind_kernels(m);
  pycomm::bind_codecs(m);
  pycomm::bind_codec_cuts(m);
  pycomm::bind_pack(m);
  pycomm::bind_board(m);
  pycomm::bind_frames(m);
  pycomm::bind_shm(m);
  pycomm::bind_overlap(m);
  pycomm::bind_gloo_waits(m);
  pycomm::bind_verb(m);
}
