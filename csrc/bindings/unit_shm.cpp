// What Python sees of shared memory. pybind11 costs three seconds of every file that is compiled by itself, thrice what is
// in the file: so the bindings are compiled as two, this one and unit_kernels.cpp.
#include "batch_kinds.cpp"
#include "board.cpp"
#include "frames.cpp"
#include "handle.cpp"
#include "overlap.cpp"
#include "shm.cpp"
#include "shm_errors.cpp"
#include "shm_fast.cpp"
#include "shm_messages.cpp"
