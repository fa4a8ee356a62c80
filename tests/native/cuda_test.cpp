// The CUDA kernels, run on a CPU by fake_cuda/cuda_runtime.h under the sanitizers, against the CPU's: the same bits.
#include "kernels/cuda/pack.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"
#include "kernels/cuda/topk.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace pycomm;

namespace {

int failures = 0, checks = 0;
std::mt19937 generator(7);

void expect(bool holds, const std::string& what) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("differs: %s\n", what.c_str());
}

// An array whose end is the end of its allocation; it begins `skew` items after an address that is aligned to 16 bytes.
template <class T>
struct Array {
  std::unique_ptr<unsigned char[]> memory;
  std::size_t count, skew;

  explicit Array(std::size_t count, std::size_t skew = 0)
      : memory(new unsigned char[(count + skew) * sizeof(T)]()), count(count), skew(skew) {}
  Array(const Array& other) : Array(other.count, other.skew) { std::memcpy(data(), other.data(), count * sizeof(T)); }
  T* data() const { return reinterpret_cast<T*>(memory.get()) + skew; }
  bool operator==(const Array& other) const {
    return count == other.count && std::memcmp(data(), other.data(), count * sizeof(T)) == 0;
  }
};

// Ordinary numbers, many equal ones, zeros, denormals, and any bits.
Array<float> random_floats(std::size_t count, std::size_t skew) {
  Array<float> x(count, skew);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = std::normal_distribution<float>()(generator);
    const unsigned kind = generator() % 64;
    const std::uint32_t raw = generator();
    x.data()[i] = kind == 0 ? 0.0f : kind == 1 ? 1e-40f : kind < 8 ? -2.5f : value;
    if (kind == 9 && i % 5 == 0) std::memcpy(x.data() + i, &raw, sizeof(raw));
  }
  return x;
}

// `kind` 0: as above; 1: all equal; 2: almost all in one bin of the first digit; 3: large ones where no sample looks.
Array<float> floats_to_select(std::size_t count, std::size_t skew, int kind) {
  Array<float> x = random_floats(count, skew);
  for (std::size_t i = 0; i < count; ++i) {
    if (kind == 1) x.data()[i] = i % 2 != 0 ? 3.0f : -3.0f;
    if (kind == 2) x.data()[i] = 1.0f + 1e-6f * static_cast<float>(generator() % 1000);
    if (kind == 3 && i > count / 2 && i % 7 == 0) x.data()[i] = 1e20f;
  }
  return x;
}

void test_topk(std::size_t numel, std::size_t k, bool has_residual, std::size_t skew, int kind, int modes = 4) {
  const Array<float> x = floats_to_select(numel, skew, kind), before = random_floats(numel, skew);
  std::int32_t exact_key = 0;
  for (int mode = 0; mode < modes; ++mode) {  // no guess; a good one; one too large, accepted; one far too large
    Array<std::int32_t> indices(k), there(k), report(3);
    Array<float> values(k), values_there(k), left(before), left_there(before);
    Array<std::uint64_t> room((topk_workspace_bytes(numel, k) + 7) / 8), room_there(room);
    TopkJob job{indices.data(), values.data(), x.data(), has_residual ? left.data() : nullptr, room.data(), numel, k, 0, k};
    if (mode == 1) job.guess = exact_key;
    if (mode == 2) job.guess = exact_key + (1 << 21), job.accepted = 1;
    if (mode == 3) job.guess = 0x7FF00000;
    const TopkResult result = topk(job);
    if (mode == 0) exact_key = result.threshold;
    report.data()[0] = job.guess;
    TopkJob other = job;
    other.indices = there.data(), other.values = values_there.data(), other.workspace = room_there.data();
    if (has_residual) other.residual = left_there.data();
    expect(topk_cuda(other, report.data(), true, nullptr) == 0, "topk's return code");
    const std::string what = "topk of " + std::to_string(numel) + ", k " + std::to_string(k) + ", mode " +
                             std::to_string(mode) + ", kind " + std::to_string(kind);
    expect(indices == there, what + ": indices");
    expect(values == values_there, what + ": values");
    expect(left == left_there, what + ": residual");
    const std::int32_t* const said = report.data();
    expect(said[0] == result.threshold && said[1] == static_cast<std::int32_t>(result.selected) &&
               said[2] == result.is_exact, what + ": report");
  }
}

void test_scatter_add(std::size_t numel, std::size_t count) {
  for (const bool is_bad : {false, true}) {
    Array<float> flat = random_floats(numel, 0);
    const Array<float> flat_there(flat), values = random_floats(count, 0);
    Array<std::int32_t> indices(count);
    Array<std::uint32_t> flag(1);
    for (std::size_t i = 0; i < count; ++i) indices.data()[i] = static_cast<std::int32_t>(i * numel / count);
    if (is_bad) indices.data()[count / 2] = static_cast<std::int32_t>(generator() % 2 != 0 ? numel : -1);
    flag.data()[0] = 5;
    scatter_add_cuda(flat_there.data(), numel, indices.data(), values.data(), count, 0.5f, flag.data(), nullptr);
    bool is_right = true;
    if (is_bad) {
      for (std::size_t i = 0; i < numel; ++i) is_right = is_right && flat_there.data()[i] != flat_there.data()[i];
    } else {
      scatter_add(flat.data(), indices.data(), values.data(), count, 0.5f);
      is_right = flat == flat_there;
    }
    expect(is_right, "scatter_add");
  }
}

void test_quantize(PayloadFormat format, std::size_t numel, std::size_t block_numel, bool is_stochastic, std::size_t skew) {
  const PayloadLayout layout(format, numel, block_numel);
  const Array<float> x = random_floats(numel, skew), before = random_floats(numel, skew);
  for (const bool has_residual : {false, true}) {
    Array<unsigned char> payload(layout.bytes), there(layout.bytes, skew);
    const Array<float> left(before), left_there(before);
    QuantizeJob job{payload.data(), x.data(), has_residual ? left.data() : nullptr, 5, (1ull << 34) + numel % 2 * (block_numel / 32 * 2 + 9), format,
                    is_stochastic, false, numel, block_numel, 0, layout.num_blocks};
    quantize(job);
    job.payload = there.data();
    if (has_residual) job.residual = left_there.data();
    expect(quantize_cuda(job, nullptr) == 0, "quantize's return code");
    const std::string what = "format " + std::to_string(static_cast<int>(format)) + " of " + std::to_string(numel);
    expect(payload == there, what + ": payload");
    expect(left == left_there, what + ": residual");
    for (const bool is_added : {false, true}) {
      const Array<float> flat(before), flat_there(before);
      DequantizeJob back{flat.data(), there.data(), 0.7f, format, is_added, false, numel, block_numel, 0, layout.num_blocks};
      dequantize(back);
      back.flat = flat_there.data();
      dequantize_cuda(back, nullptr);
      expect(flat == flat_there, what + ": decoded");
    }
  }
}

// Tensors of all types and lengths, some strided, more than one launch takes.
void test_pack(PackType type, float scale, int count) {
  std::vector<Array<unsigned char>> memory;
  std::vector<std::vector<std::int64_t>> shapes, strides;
  std::vector<PackPart> parts;
  memory.reserve(static_cast<std::size_t>(count));  // so that no array moves
  std::size_t total = 0;
  for (int i = 0; i < count; ++i) {
    const auto own = static_cast<PackType>(generator() % kPackTypes);
    const std::size_t item = kPackItemBytes[static_cast<int>(own)], rows = generator() % 40, columns = 1 + generator() % 9;
    const std::size_t numel = rows * columns;
    const bool is_strided = i % 11 == 5;
    memory.emplace_back(numel * item, item * (generator() % 5));
    for (std::size_t j = 0; j < memory[i].count; ++j) memory[i].data()[j] = static_cast<unsigned char>(generator());
    const auto signed_rows = static_cast<std::int64_t>(rows), signed_columns = static_cast<std::int64_t>(columns);
    shapes.push_back({signed_rows, signed_columns});
    strides.push_back(is_strided ? std::vector<std::int64_t>{1, signed_rows} : std::vector<std::int64_t>{signed_columns, 1});
    parts.push_back({reinterpret_cast<char*>(memory[i].data()), numel, own, !is_strided, 2, nullptr, nullptr});
    total += numel;
  }
  for (int i = 0; i < count; ++i) parts[i].shape = shapes[i].data(), parts[i].strides = strides[i].data();
  const std::size_t item = kPackItemBytes[static_cast<int>(type)];
  const Array<unsigned char> bucket(total * item), there(total * item);
  PackJob job{parts.data(), parts.size(), reinterpret_cast<char*>(bucket.data()), type, scale, false, 0, total};
  pack(job);
  PackJob other = job;
  other.bucket = reinterpret_cast<char*>(there.data());
  expect(pack_cuda(other, nullptr) == 0, "pack's return code");
  expect(bucket == there, "pack");
  unpack(job);
  const std::vector<Array<unsigned char>> filled(memory);
  for (Array<unsigned char>& each : memory) std::memset(each.data(), 0x55, each.count);
  unpack_cuda(other, nullptr);
  expect(memory == filled, "unpack");
}

void test_reduce(DType dtype, ReduceOp op, std::size_t numel, std::size_t skew) {
  if (!reduce_supported(dtype, op)) return;
  const std::size_t item = item_bytes(dtype);
  std::vector<Array<unsigned char>> inputs;
  std::vector<const void*> addresses;
  inputs.reserve(3);
  for (int i = 0; i < 3; ++i) {
    inputs.emplace_back(numel * item, skew * item);
    for (std::size_t j = 0; j < inputs[i].count; ++j) inputs[i].data()[j] = static_cast<unsigned char>(generator() & 0x3F);
    addresses.push_back(inputs[i].data());
  }
  const Array<unsigned char> output(numel * item, skew * item), there(output);
  const double factors[] = {0.5, 0.25, 2.0};
  reduce(output.data(), addresses.data(), 3, numel, dtype, op, factors, false);
  expect(reduce_cuda(there.data(), addresses.data(), 3, numel, dtype, op, factors, nullptr) == 0, "reduce's return code");
  expect(output == there, "reduce of type " + std::to_string(static_cast<int>(dtype)) + ", op " +
                              std::to_string(static_cast<int>(op)));
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const std::size_t numel : {1, 129, 5000}) {
    const std::size_t shares[] = {1, (numel + 99) / 100, (numel + 1) / 2, numel};
    for (int i = 0; i < 4; ++i) test_topk(numel, shares[i], i % 2 == 0, i == 0 ? 1 : 0, i);
  }
  // More than there is room for candidates, so that a bad guess means to look again.
  for (int kind = 0; kind < 4; ++kind) test_topk(70001, 701, kind % 2 != 0, kind == 2 ? 1 : 0, kind, kind % 3 == 0 ? 4 : 2);
  test_topk(500'001, 5000, false, 0, 1, 1);  // far more than the workspace has room for reach the guess
  for (const std::size_t numel : {1, 300, 5000}) test_scatter_add(numel, (numel + 2) / 3);
  for (int format = 0; format < kPayloadFormats; ++format) {
    const auto known = static_cast<PayloadFormat>(format);
    std::size_t turn = 0;
    for (const std::size_t numel : {1, 31, 33, 257, 9001, 9008}) {
      // Each format's own length is among them, whose aligned whole blocks the GPU takes by tiles: of 9008. Other lengths
      // meet every second one, and the next length the others.
      for (const std::size_t block_numel : {32, 64, 96, 128, 256, 1024, 4096}) {
        if (is_mx(known) ? block_numel != 32 : turn++ % 2 != 0 && numel != 9008) continue;
        test_quantize(known, numel, block_numel, false, numel % 2);
        if (known != PayloadFormat::kSign) test_quantize(known, numel, block_numel, true, 0);
      }
    }
  }
  for (int type = 0; type < kPackTypes; ++type) {
    for (const float scale : {1.0f, 0.3f}) {
      for (const int count : {1, 3, 400}) test_pack(static_cast<PackType>(type), scale, count);
    }
  }
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (int op = 0; op < kReduceOps; ++op) {
      for (const std::size_t skew : {0, 1}) test_reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), 1001, skew);
    }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
