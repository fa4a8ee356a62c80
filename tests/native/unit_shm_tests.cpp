// The tests of csrc/shm as one unit, as unit_shm.cpp has what they test.
#ifdef __SANITIZE_THREAD__
#include "kept_blocks.cpp"
// The C++ library counts who holds an exception by atomics of its own, which ThreadSanitizer does not see: whoever lets go of it last
// destroys it.
extern "C" const char* __tsan_default_suppressions() { return "race:std::__exception_ptr::exception_ptr::_M_release\n"; }
#endif
#include "plain_reduce.cpp"
#include "shm_collectives_test.cpp"
#include "shm_direct_test.cpp"
#include "shm_failures_test.cpp"
#include "shm_groups_test.cpp"
#include "shm_messages_test.cpp"
#include "shm_started_test.cpp"
#include "shm_streams_test.cpp"
#include "shm_test.cpp"
