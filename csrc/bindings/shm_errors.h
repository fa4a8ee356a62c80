// From what csrc/shm throws to the Python exceptions of pycomm.errors.
#pragma once

#include <Python.h>

#include <exception>
#include <functional>

namespace pycomm {

// Thrown when what was called in a wait (a signal handler, `look` below) raised: the Python error is set already.
struct PythonError : std::exception {};

// Sets the Python error for the C++ exception being handled. Needs the GIL.
void set_python_error();

// Runs pending signal handlers (Ctrl-C); throws PythonError if one of them raised. Called without the GIL, which it takes
// to ask, unless WithoutSignals is in scope.
void check_interrupt();

// Returns what calls `look`, a Python function without arguments, and throws PythonError if that raises; of None, nothing.
std::function<void()> asking(PyObject* look);

// Is in scope in a thread that is not Python's main one: signal handlers never run there, so there is nothing to ask for.
class WithoutSignals {
 public:
  WithoutSignals();
  ~WithoutSignals();
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;
};

// Lets other Python threads run from the first long wait on, or from the start if `now`, until this goes out of scope.
// A call that is over in a microsecond never touches the lock, which would cost it a tenth of its time.
class LazyGilRelease {
 public:
  explicit LazyGilRelease(bool now);
  ~LazyGilRelease();
  LazyGilRelease(const LazyGilRelease&) = delete;
  LazyGilRelease& operator=(const LazyGilRelease&) = delete;

  // The wait turns long (Waiter::Setup::about_to_block). Does nothing in a thread that has no LazyGilRelease.
  static void about_to_block();

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace pycomm
