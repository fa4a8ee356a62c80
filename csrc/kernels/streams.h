// Whether a kernel writes past the caches.
#pragma once

#include <cstddef>

namespace pycomm {

// [Note: writing past the caches]
// A line that is written by a non-temporal store is not read first, and pushes no other out of the caches: what they do not hold goes
// to memory in 0.55 to 0.7 of the time. What they do hold would be there already, and for whoever reads it next: Zen 3 and Zen 5
// dequantize 1 Mi, 4 MiB, in 0.6 of the time by plain stores. The bound is where all that a kernel reads and writes no longer
// fits. The sizes of caches do not tell it (virtual machines have a part of one, and may be told of several), so it is tried.

// Whether a kernel that reads and writes so many bytes in all does so faster. Found out once a process, in about 20 ms, when it first matters.
bool streams(std::size_t bytes);

}  // namespace pycomm
