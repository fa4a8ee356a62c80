// Under ThreadSanitizer long blocks are kept for whoever wants about as much next. What it keeps of an address is made page by page,
// each time with an interrupt of the other cores: with blocks that go back to the system that is half of the whole test's time.
#include <malloc.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr std::size_t kKeptFrom = 64u << 10;

struct Kept {
  std::mutex mutex;
  std::multimap<std::size_t, void*> blocks;  // by size
};

Kept& kept() {
  static auto* const kept = new Kept;  // threads may end after statics have
  return *kept;
}

}  // namespace

void* operator new(std::size_t bytes) {
  if (bytes >= kKeptFrom) {
    const std::lock_guard<std::mutex> lock(kept().mutex);
    auto& blocks = kept().blocks;
    if (const auto it = blocks.lower_bound(bytes); it != blocks.end() && it->first <= 2 * bytes) {
      void* const block = it->second;
      blocks.erase(it);
      return block;
    }
  }
  void* const block = std::malloc(bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void operator delete(void* block) noexcept {
  const std::size_t bytes = malloc_usable_size(block);
  if (bytes < kKeptFrom) return std::free(block);
  const std::lock_guard<std::mutex> lock(kept().mutex);
  kept().blocks.emplace(bytes, block);
}

void operator delete(void* block, std::size_t) noexcept { operator delete(block); }
