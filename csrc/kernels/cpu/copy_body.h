// copy_streamed() for one instruction set: a part of reduce_body.h and codec_body.h, which see.

namespace pycomm::PYCOMM_ISA {

// What lies in another core's caches takes so long, and comes to this one's L2: into L1 no more than its 16 or so buffers hold are
// under way, which the stores need too. (Two ranks on Sapphire Rapids, a broadcast of 4 to 16 MiB: 0.93 of the time.)
inline constexpr std::size_t kInsideAhead = 4096;

// With `by_pages` it asks for what lies behind the end of the source too: no other core may be writing there.
template <bool by_pages>
void copy_past_caches(char* destination, const char* source, std::size_t bytes) {
  using V = VectorOf<char, PYCOMM_VECTOR_BYTES>::type;
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(destination) % sizeof(V);
  if (misaligned != 0) {
    const std::size_t head = std::min(bytes, sizeof(V) - misaligned);
    std::memcpy(destination, source, head);
    destination += head, source += head, bytes -= head;
  }
  for (; bytes >= 4 * sizeof(V); destination += 4 * sizeof(V), source += 4 * sizeof(V), bytes -= 4 * sizeof(V)) {
    if constexpr (by_pages) {
      ReadAhead{true}.fetch<4 * sizeof(V)>(source);
    } else if (bytes >= kInsideAhead + 4 * sizeof(V)) {
      ReadAhead{false}.fetch<4 * sizeof(V), kInsideAhead, /*is_written=*/false, kToL2>(source);
    }
    V block[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) block[k] = load<V>(source + k * sizeof(V));
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) store_streamed(destination + k * sizeof(V), block[k]);
  }
  for (; bytes >= sizeof(V); destination += sizeof(V), source += sizeof(V), bytes -= sizeof(V)) {
    store_streamed(destination, load<V>(source));
  }
  std::memcpy(destination, source, bytes);
}

inline void run_copy_streamed(char* destination, const char* source, std::size_t bytes) {
  copy_past_caches<false>(destination, source, bytes);
}

}  // namespace pycomm::PYCOMM_ISA
