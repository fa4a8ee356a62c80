// From what csrc/shm throws to the Python exceptions of pycomm.errors.
#pragma once

#include <Python.h>

#include <exception>

namespace pycomm {

// Thrown by check_interrupt when a signal handler raised: the Python error is set already.
struct PythonError : std::exception {};

// Sets the Python error for the C++ exception being handled. Needs the GIL.
void set_python_error();

// Runs pending signal handlers (Ctrl-C); throws PythonError if one of them raised. Called without the GIL.
void check_interrupt();

}  // namespace pycomm
