// The tests of csrc/shm as one unit, as unit_shm.cpp has what they test.
#ifdef __SANITIZE_THREAD__
#include "kept_blocks.cpp"
#endif
#include "plain_reduce.cpp"
#include "shm_collectives_test.cpp"
#include "shm_direct_test.cpp"
#include "shm_failures_test.cpp"
#include "shm_groups_test.cpp"
#include "shm_messages_test.cpp"
#include "shm_streams_test.cpp"
#include "shm_test.cpp"
