// reduce(), reduce_to_all() and the copies under the sanitizers: buffers of exact size on the heap, so that a byte too many is seen.
// Prints what differs, and returns the number of differences.
#include "kernels/copy.h"
#include "kernels/reduce.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using namespace pycomm;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int a, int b, std::size_t numel) {
  if (holds) return;
  ++failures;
  std::printf("differs: %s (%d, %d), numel %zu, %s\n", what, a, b, numel, cpu_isa());
}

// Bytes [offset, offset + bytes) of an allocation that ends there.
struct Buffer {
  std::unique_ptr<unsigned char[]> memory;
  std::size_t offset, bytes;

  Buffer(std::size_t bytes, std::size_t offset) : memory(new unsigned char[offset + bytes]()), offset(offset), bytes(bytes) {}
  unsigned char* data() const { return memory.get() + offset; }
};

Buffer random_buffer(std::size_t bytes, std::size_t offset, bool is_bool) {
  static std::mt19937 generator(7);
  Buffer buffer(bytes, offset);
  for (std::size_t i = 0; i < bytes; ++i) buffer.data()[i] = static_cast<unsigned char>(generator() & (is_bool ? 1 : 255));
  return buffer;
}

// One reduction with this instruction set, to a fresh buffer or (if `in_place`) to the first input's.
std::vector<unsigned char> run(const char* isa, const std::vector<Buffer>& inputs, std::size_t numel, DType dtype,
                               ReduceOp op, bool stream, bool in_place) {
  const double factors[] = {0.5, -1.25, 3.0};
  use_cpu_isa(isa);
  Buffer output(numel * item_bytes(dtype), inputs[0].offset);
  std::vector<const void*> pointers;
  for (const Buffer& input : inputs) pointers.push_back(input.data());
  if (in_place) {
    std::memcpy(output.data(), inputs[0].data(), output.bytes);
    pointers[0] = output.data();
  }
  reduce(output.data(), pointers.data(), static_cast<int>(inputs.size()), numel, dtype, op, factors, stream);
  return {output.data(), output.data() + output.bytes};
}

// The same to `num_outputs` outputs, the first of them the first input's buffer; all must be equal.
std::vector<unsigned char> run_to_all(const char* isa, const std::vector<Buffer>& inputs, std::size_t numel, DType dtype,
                                      ReduceOp op, int num_outputs, bool stream_others) {
  const double factors[] = {0.5, -1.25, 3.0};
  use_cpu_isa(isa);
  std::vector<Buffer> outputs;
  std::vector<void*> places;
  for (int o = 0; o < num_outputs; ++o) {
    outputs.emplace_back(numel * item_bytes(dtype), inputs[0].offset + o * item_bytes(dtype));
    places.push_back(outputs.back().data());
  }
  std::vector<const void*> pointers;
  for (const Buffer& input : inputs) pointers.push_back(input.data());
  std::memcpy(places[0], pointers[0], outputs[0].bytes);
  pointers[0] = places[0];
  reduce_to_all(places.data(), num_outputs, pointers.data(), static_cast<int>(inputs.size()), numel, dtype, op, factors,
                static_cast<int>(inputs.size()), stream_others);
  for (int o = 1; o < num_outputs; ++o) {
    expect(std::memcmp(places[o], places[0], outputs[0].bytes) == 0, "outputs", o, static_cast<int>(op), numel);
  }
  return {outputs[0].data(), outputs[0].data() + outputs[0].bytes};
}

void test_reduce(DType dtype, ReduceOp op) {
  const int dtype_code = static_cast<int>(dtype), op_code = static_cast<int>(op);
  for (const std::size_t numel : {0, 1, 7, 67, 1031}) {
    for (std::size_t num_inputs = 1; num_inputs <= 3; ++num_inputs) {
      const std::size_t offset = (num_inputs - 1) * item_bytes(dtype);
      std::vector<Buffer> inputs;
      for (std::size_t j = 0; j < num_inputs; ++j) {
        inputs.push_back(random_buffer(numel * item_bytes(dtype), offset, dtype == DType::kBool));
      }
      const auto expected = run("generic", inputs, numel, dtype, op, false, false);
      for (const char* isa : {"generic", "avx2", "avx512"}) {
        if (!use_cpu_isa(isa)) continue;
        for (const bool stream : {false, true}) {
          expect(run(isa, inputs, numel, dtype, op, stream, false) == expected, "reduce", dtype_code, op_code, numel);
          expect(run(isa, inputs, numel, dtype, op, stream, true) == expected, "in place", dtype_code, op_code, numel);
        }
        for (const int outputs : {1, 2, 3}) {
          for (const bool stream_others : {false, true}) {
            expect(run_to_all(isa, inputs, numel, dtype, op, outputs, stream_others) == expected, "to all", dtype_code, op_code, numel);
          }
        }
      }
    }
  }
}

// A value that is known, so that "all the same" cannot mean "all wrong".
void test_known_sum() {
  std::vector<float> a(1000), b(1000), sum(1000);
  for (int i = 0; i < 1000; ++i) a[i] = 0.25f * i, b[i] = 3.0f - i;
  const void* inputs[] = {a.data(), b.data()};
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!use_cpu_isa(isa)) continue;
    reduce(sum.data(), inputs, 2, sum.size(), DType::kFloat32, ReduceOp::kSum, nullptr, false);
    for (int i = 0; i < 1000; ++i) expect(sum[i] == 3.0f - 0.75f * i, "known sum", i, 0, sum.size());
  }
}

void test_copy() {
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!use_cpu_isa(isa)) continue;
    for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 255, 1000, 4099}) {
      for (const std::size_t offset : {0, 1, 17, 63}) {
        const Buffer source = random_buffer(bytes, (offset * 5) % 64, false);
        const Buffer destination(bytes, offset);
        copy_streamed(destination.data(), source.data(), bytes);
        expect(std::memcmp(destination.data(), source.data(), bytes) == 0, "copy", static_cast<int>(offset), 0, bytes);
      }
    }
  }
}

// Also where the target is a little ahead of the source within a page, which is copied in pieces.
void test_plain_copy() {
  constexpr std::size_t kPage = 4096, kMost = 3 * kPage;
  const Buffer source = random_buffer(2 * kPage + kMost, 0, false);
  const Buffer destination(2 * kPage + kMost, 0);
  const auto page_of = [](const Buffer& buffer) { return buffer.data() + -reinterpret_cast<std::uintptr_t>(buffer.data()) % kPage; };
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{2047}, std::size_t{2048}, std::size_t{2049}, kMost}) {
    for (const std::size_t ahead : {0, 1, 4, 31, 63, 64, 2048}) {
      std::memset(destination.data(), 0, destination.bytes);
      unsigned char* const to = page_of(destination) + ahead;
      copy_plain(to, page_of(source), bytes);
      expect(std::memcmp(to, page_of(source), bytes) == 0, "plain copy", static_cast<int>(ahead), 0, bytes);
      expect(to[bytes] == 0, "end of a plain copy", static_cast<int>(ahead), 0, bytes);
    }
  }
}

}  // namespace

int main() {
  int cases = 0;
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (int op = 0; op < kReduceOps; ++op) {
      if (!reduce_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op))) continue;
      test_reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      ++cases;
    }
  }
  test_known_sum();
  test_copy();
  test_plain_copy();
  std::printf("%d pairs of dtype and operator, %d failures\n", cases, failures);
  return failures == 0 ? 0 : 1;
}
