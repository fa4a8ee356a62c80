// The least that an all_reduce of float32, or a broadcast, between two ranks takes from Python: one call of a C function, and in it nothing
// but the stores and loads that such a collective is made of. No checks, no header, no timeout, one element type. For limits.py.
//
// all_reduce
//   private  copies the buffer into a region, says so, awaits the other rank's and adds it. The regions change hands in the next call, so
//            that a line crosses once.
//   shared   of two buffers that both ranks reach: reads its half of both, writes the sum into both, between two meetings.
//   swapped  of long private buffers: region by region, each of which takes this rank's next bytes as soon as the other's have been added, a block
//            at a time (csrc/shm/swaps.h).
// broadcast
//   staged   the root copies it, window by window, to where the other one copies it from: by strings (csrc/shm/stores.h), the other one's
//            copy from 4 MiB on past the caches. Each begins at the same place, in lines that its root has just read where the roots take turns.
//   direct   each copies a half from memory to memory, the root by process_vm_writev, the other by process_vm_readv.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

namespace {

struct alignas(128) Word {
  std::atomic<unsigned long> value;
};
constexpr std::size_t kWindow = 16 << 10, kWindows = 128, kLong = 4 << 20;
constexpr std::size_t kRegion = 128 << 10, kStep = 16 << 10, kBlock = 1 << 10, kAhead = 8 << 10;
struct Memory {
  Word published[2], met[2], staged, taken, filled[2];
  int pids[2];
  char* targets[2];
  alignas(4096) float regions[2][1 << 18];
  alignas(4096) char windows[kWindows][kWindow];
  alignas(4096) char swapped[2][kRegion];
};
Memory* memory = nullptr;
int rank = 0;
unsigned long calls = 0, meetings = 0, windows = 0, swaps = 0, steps = 0;

void await(const Word& word, unsigned long value) {
  while (word.value.load(std::memory_order_acquire) < value) __builtin_ia32_pause();
}

void meet() {
  memory->met[rank].value.store(++meetings, std::memory_order_release);
  await(memory->met[1 - rank], meetings);
}

void add(float* __restrict__ to, const float* __restrict__ from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
}

void add_to_both(float* __restrict__ own, float* __restrict__ other, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) own[i] = other[i] = own[i] + other[i];
}

void copy_past_the_caches(char* to, const char* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 16) {
    if (at % 64 == 0) _mm_prefetch(from + at + 2048, _MM_HINT_T0);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  _mm_sfence();
}

void copy_by_strings(char* to, const char* from, std::size_t bytes) { asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory"); }

float* pointer(PyObject* address) { return static_cast<float*>(PyLong_AsVoidPtr(address)); }

// join(address, rank): of as many bytes as `size` says, zeros, that both ranks reach.
PyObject* join(PyObject*, PyObject* const* args, Py_ssize_t) {
  memory = reinterpret_cast<Memory*>(pointer(args[0]));
  rank = static_cast<int>(PyLong_AsLong(args[1]));
  calls = meetings = windows = swaps = steps = 0;
  memory->pids[rank] = getpid();
  Py_RETURN_NONE;
}

// reduce_private(address, count)
PyObject* reduce_private(PyObject*, PyObject* const* args, Py_ssize_t) {
  float* const own = pointer(args[0]);
  const std::size_t count = PyLong_AsSize_t(args[1]);
  const unsigned long mine = (calls + static_cast<unsigned long>(rank)) % 2;
  std::memcpy(memory->regions[mine], own, count * sizeof(float));
  memory->published[rank].value.store(++calls, std::memory_order_release);
  await(memory->published[1 - rank], calls);
  add(own, memory->regions[1 - mine], count);
  Py_RETURN_NONE;
}

void ask_for(const char* block, std::size_t bytes) {
  for (std::size_t line = 0; line < bytes; line += 64) _mm_prefetch(block + line, _MM_HINT_T0);
}

void fill_block(char* to, const char* from) {
  ask_for(from + kAhead, kBlock);
  std::memcpy(to, from, kBlock);
}

// reduce_swapped(address, bytes): of whole steps.
PyObject* reduce_swapped(PyObject*, PyObject* const* args, Py_ssize_t) {
  char* const own = static_cast<char*>(PyLong_AsVoidPtr(args[0]));
  const std::size_t bytes = PyLong_AsSize_t(args[1]), region = std::min(bytes, kRegion);
  const auto fill_step = [&](std::size_t swap, std::size_t step, std::size_t offset, std::size_t at) {
    fill_block(memory->swapped[(swap + static_cast<std::size_t>(rank)) % 2] + at, own + offset + at);
    if ((at + kBlock) % kStep == 0) memory->filled[rank].value.store(step, std::memory_order_release);
  };
  for (std::size_t at = 0; at < region; at += kBlock) fill_step(swaps, steps + at / kStep + 1, 0, at);
  for (std::size_t offset = 0; offset < bytes; offset += region, ++swaps) {
    const char* const theirs = memory->swapped[(swaps + 1 + static_cast<std::size_t>(rank)) % 2];
    for (std::size_t at = 0; at < region; at += kBlock) {
      if (at % kStep == 0) await(memory->filled[1 - rank], ++steps), ask_for(theirs + at, 2 * kBlock);
      if (at % kStep + 2 * kBlock < kStep) ask_for(theirs + at + 2 * kBlock, kBlock);
      add(reinterpret_cast<float*>(own + offset + at), reinterpret_cast<const float*>(theirs + at), kBlock / sizeof(float));
      if (offset + region < bytes) fill_step(swaps + 1, steps + region / kStep, offset + region, at);
    }
  }
  Py_RETURN_NONE;
}

// reduce_shared(own address, other address, count)
PyObject* reduce_shared(PyObject*, PyObject* const* args, Py_ssize_t) {
  const std::size_t half = PyLong_AsSize_t(args[2]) / 2, start = rank == 0 ? 0 : half;
  meet();
  add_to_both(pointer(args[0]) + start, pointer(args[1]) + start, half);
  meet();
  Py_RETURN_NONE;
}

// broadcast_staged(address, bytes, root): of whole windows.
PyObject* broadcast_staged(PyObject*, PyObject* const* args, Py_ssize_t) {
  char* const data = static_cast<char*>(PyLong_AsVoidPtr(args[0]));
  const std::size_t bytes = PyLong_AsSize_t(args[1]);
  const bool is_root = PyLong_AsLong(args[2]) == rank;
  if (is_root) await(memory->taken, windows);
  for (std::size_t offset = 0; offset < bytes; offset += kWindow) {
    char* const window = memory->windows[offset / kWindow % kWindows];
    ++windows;
    if (is_root) {
      if (offset >= kWindows * kWindow) await(memory->taken, windows - kWindows);
      copy_by_strings(window, data + offset, kWindow);
      memory->staged.value.store(windows, std::memory_order_release);
    } else {
      await(memory->staged, windows);
      (bytes < kLong ? copy_by_strings : copy_past_the_caches)(data + offset, window, kWindow);
      memory->taken.value.store(windows, std::memory_order_release);
    }
  }
  Py_RETURN_NONE;
}

// broadcast_direct(address, bytes, root)
PyObject* broadcast_direct(PyObject*, PyObject* const* args, Py_ssize_t) {
  char* const data = static_cast<char*>(PyLong_AsVoidPtr(args[0]));
  const std::size_t half = PyLong_AsSize_t(args[1]) / 2;
  const bool is_root = PyLong_AsLong(args[2]) == rank;
  const int other = 1 - rank;
  memory->targets[rank] = data;
  meet();
  const iovec own{data + (is_root ? 0 : half), half}, others{memory->targets[other] + (is_root ? 0 : half), half};
  const auto move = is_root ? process_vm_writev : process_vm_readv;
  const bool could = move(memory->pids[other], &own, 1, &others, 1, 0) == static_cast<ssize_t>(half);
  meet();
  if (!could) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"join", method<join>(), METH_FASTCALL, nullptr},
    {"reduce_private", method<reduce_private>(), METH_FASTCALL, nullptr},
    {"reduce_swapped", method<reduce_swapped>(), METH_FASTCALL, nullptr},
    {"reduce_shared", method<reduce_shared>(), METH_FASTCALL, nullptr},
    {"broadcast_staged", method<broadcast_staged>(), METH_FASTCALL, nullptr},
    {"broadcast_direct", method<broadcast_direct>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "bare_exchange", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_bare_exchange() {
  PyObject* const module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddIntConstant(module, "size", sizeof(Memory));
  return module;
}
