// csrc/shm and csrc/overlap as one unit: under a sanitizer most of the time goes into headers, once a file.
#include "overlap/agreement.cpp"
#include "overlap/progress.cpp"
#include "overlap/scheduler.cpp"
#include "shm/board.cpp"
#include "shm/chains.cpp"
#include "shm/collectives.cpp"
#include "shm/direct.cpp"
#include "shm/exchange_trials.cpp"
#include "shm/group.cpp"
#include "shm/heap.cpp"
#include "shm/mailbox.cpp"
#include "shm/mailbox_moves.cpp"
#ifdef __SANITIZE_THREAD__
#include "one_mapping.cpp"  // there a byte must have one address
#else
#include "shm/mapping.cpp"
#endif
#include "shm/measure.cpp"
#include "shm/memory.cpp"
#include "shm/moving.cpp"
#include "shm/process.cpp"
#include "shm/started.cpp"
#include "shm/stores.cpp"
#include "shm/wait.cpp"
#include "shm/windows.cpp"
