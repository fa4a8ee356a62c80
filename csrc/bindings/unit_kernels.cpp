// What Python sees of the rest, and the module itself: see unit_shm.cpp.
#include "codec_cuts.cpp"
#include "codecs.cpp"
#include "gloo_waits.cpp"
#include "kernels.cpp"
#include "module.cpp"
#include "pack.cpp"
#include "verb.cpp"
