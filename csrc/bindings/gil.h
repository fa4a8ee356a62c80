// Letting Python's lock go, and taking it back also where the interpreter has ended meanwhile.
//
// A thread that asks for the lock then is ended by pthread_exit (before Python 3.14): its stack is unwound, through frames
// that may not throw, and std::terminate ends the process with SIGABRT at the end of a job that had gone well. So such a
// thread waits here instead, as Python 3.14 has it wait, until the process is gone.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstddef>

namespace pycomm {

// Of the tensor that a call works on: from here on other threads are let run meanwhile. To let the lock go and take it back costs 50 ns (two
// ranks on Zen 5, an all_reduce of 16 KiB: a twelfth of the time); to work on less takes some microseconds, and who waits longer lets it go.
inline constexpr std::size_t kUnlockedBytes = 128 * 1024;

// Runs `take`, which takes the lock.
template <class Take>
auto or_wait_for_the_end(Take take) -> decltype(take()) {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// While this is in scope, other Python threads run.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    or_wait_for_the_end([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// While this is in scope, a thread that runs without Python's lock has it.
class WithGil {
 public:
  WithGil() : state_(or_wait_for_the_end([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace pycomm
