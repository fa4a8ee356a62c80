// quantize(), dequantize(), topk(), scatter_add() and pack() under the sanitizers: buffers of exact size on the heap, so
// that a byte too many is seen; every instruction set against plain C++; a million damaged payloads for the decoders.
#include "kernels/common/select.h"
#include "kernels/pack.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using namespace pycomm;

namespace {

int failures = 0;
std::mt19937 generator(7);

void expect(bool holds, const char* what, int a, std::size_t b) {
  if (holds) return;
  ++failures;
  std::printf("differs: %s (%d, %zu), %s\n", what, a, b, cpu_isa());
}

// An array whose end is the end of its allocation.
template <class T>
struct Array {
  std::unique_ptr<unsigned char[]> memory;
  std::size_t count;

  explicit Array(std::size_t count) : memory(new unsigned char[count * sizeof(T)]()), count(count) {}
  Array(const Array& other) : Array(other.count) { std::memcpy(memory.get(), other.memory.get(), count * sizeof(T)); }
  T* data() const { return reinterpret_cast<T*>(memory.get()); }
  bool operator==(const Array& other) const {
    return count == other.count && std::memcmp(memory.get(), other.memory.get(), count * sizeof(T)) == 0;
  }
};

Array<float> random_floats(std::size_t count) {
  Array<float> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = std::normal_distribution<float>()(generator);
    const unsigned kind = generator() % 64;
    const std::uint32_t raw = generator();
    x.data()[i] = kind == 0 ? 0.0f : kind == 1 ? 1e-40f : value;
    if (kind == 2 && i % 5 == 0) std::memcpy(x.data() + i, &raw, sizeof(raw));  // any bits
  }
  return x;
}

void test_quantize(PayloadFormat format, std::size_t numel, std::size_t block_numel, bool is_stochastic, bool is_streamed) {
  const PayloadLayout layout(format, numel, block_numel);
  const Array<float> x = random_floats(numel), before = random_floats(numel);
  std::vector<Array<unsigned char>> payloads;
  std::vector<Array<float>> outputs;
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!use_cpu_isa(isa)) continue;
    Array<float> residual(before), flat(numel);
    payloads.emplace_back(layout.bytes);
    QuantizeJob job{payloads.back().data(), x.data(), residual.data(), 5, 11, format, is_stochastic, is_streamed,
                    numel, block_numel, 0, layout.num_blocks};
    quantize(job);
    DequantizeJob back{flat.data(), payloads.back().data(), 0.5f, format, false, is_streamed, numel, block_numel, 0,
                       layout.num_blocks};
    dequantize(back);
    back.is_added = true;
    dequantize(back);
    expect(payloads.back() == payloads[0], "payload", static_cast<int>(format), numel);
    outputs.push_back(residual);
    expect(outputs.back() == outputs[0], "residual", static_cast<int>(format), numel);
    outputs.push_back(flat);
    expect(outputs.back() == outputs[1], "decoded", static_cast<int>(format), numel);
  }
}

// Any bytes of the right length decode, to the same on every instruction set, and nothing outside is touched.
void test_damaged_payloads(int count) {
  for (int i = 0; i < count; ++i) {
    const auto format = static_cast<PayloadFormat>(generator() % kPayloadFormats);
    const std::size_t numel = generator() % 100, block_numel = 32;
    Array<unsigned char> payload(PayloadLayout(format, numel, block_numel).bytes);
    for (std::size_t at = 0; at < payload.count; at += 4) {
      const std::uint32_t raw = generator();
      std::memcpy(payload.data() + at, &raw, std::min<std::size_t>(4, payload.count - at));
    }
    const char* const names[] = {"generic", "avx2", "avx512"};
    use_cpu_isa(names[i % 3]);
    Array<float> flat(numel);
    dequantize({flat.data(), payload.data(), 1.0f, format, i % 2 == 0, false, numel, block_numel, 0,
                PayloadLayout(format, numel, block_numel).num_blocks});
    if (i % 8 != 0) continue;
    Array<std::int32_t> indices(8);  // a sparse payload: either all its indices are good, or none is used
    for (std::size_t j = 0; j < 8; ++j) indices.data()[j] = static_cast<std::int32_t>(generator() % (numel + 2));
    const Array<float> values(8);
    if (find_bad_index(indices.data(), 8, numel) == 8) scatter_add(flat.data(), indices.data(), values.data(), 8, 1.0f);
    SparsePart parts[] = {{indices.data(), values.data(), 8}, {indices.data(), values.data(), 8}};
    if (find_disorder(parts[0], numel) == 8) scatter_sum(flat.data(), 0, numel, parts, 2, i % 16 == 0);
  }
}

void test_topk(std::size_t numel, std::size_t k, bool has_residual) {
  const Array<float> x = random_floats(numel), before = random_floats(numel);
  std::vector<Array<std::int32_t>> chosen;
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!use_cpu_isa(isa)) continue;
    for (const std::int32_t guess : {0, 0x3F800000, 0x7F000000}) {
      Array<float> residual(before), values(k);
      Array<std::uint64_t> workspace((topk_workspace_bytes(numel, k) + 7) / 8);
      chosen.emplace_back(k);
      const TopkResult result = topk({chosen.back().data(), values.data(), x.data(),
                                      has_residual ? residual.data() : nullptr, workspace.data(), numel, k, guess, k});
      expect(result.is_exact && result.selected == k, "topk is exact", static_cast<int>(k), numel);
      expect(chosen.back() == chosen[0], "topk", static_cast<int>(k), numel);
    }
  }
  // The law: nothing left out is larger than what was chosen.
  if (has_residual) return;
  std::vector<std::int32_t> all(numel);
  std::memcpy(all.data(), x.data(), 4 * numel);
  for (std::int32_t& bits : all) bits &= 0x7FFFFFFF;
  std::vector<std::int32_t> sorted(all);
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  for (std::size_t i = 0; i < k; ++i) {
    expect(all[static_cast<std::size_t>(chosen[0].data()[i])] >= sorted[k - 1], "topk's law", static_cast<int>(k), numel);
  }
}

// A matrix whose columns differ in scale: the guess of a sample holds, and finds about as many as it expects.
void test_sample(std::size_t columns) {
  constexpr std::size_t kNumel = 1 << 18, k = kNumel / 10;
  std::normal_distribution<double> normal;
  std::vector<double> scales(columns);
  for (double& scale : scales) scale = std::exp(2 * normal(generator));
  std::vector<double> x(kNumel), sample;
  for (std::size_t i = 0; i < kNumel; ++i) x[i] = std::fabs(normal(generator)) * scales[i % columns];
  const SamplePlan plan(kNumel, k, 2 * 1024);
  for (std::size_t i = 0; i < plan.count; ++i) sample.push_back(x[plan.index(i)]);
  std::sort(sample.begin(), sample.end(), std::greater<>());
  const double guess = sample[plan.rank - 1];
  const auto found = static_cast<std::size_t>(std::count_if(x.begin(), x.end(), [guess](double each) { return each >= guess; }));
  const std::size_t expected = kNumel * plan.rank / plan.count;
  expect(found >= k && found < 3 * expected / 2, "the guess of a sample", static_cast<int>(columns), found);
}

void test_pack(std::size_t numel, bool is_streamed) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(numel), 3}, strides[] = {1, static_cast<std::int64_t>(numel)};
  for (int outer = 0; outer < kPackTypes; ++outer) {
    for (int inner = 0; inner < kPackTypes; ++inner) {
      const std::size_t item = kPackItemBytes[outer], total = 4 * numel;
      Array<unsigned char> one(numel * item), three(3 * numel * item);
      for (std::size_t i = 0; i < three.count; ++i) three.data()[i] = static_cast<unsigned char>(generator() & 63);
      const auto type = static_cast<PackType>(outer);
      const PackPart parts[] = {{reinterpret_cast<char*>(one.data()), numel, type, true, 1, nullptr, nullptr},
                                {reinterpret_cast<char*>(three.data()), 3 * numel, type, false, 2, shape, strides}};
      std::vector<Array<unsigned char>> buckets;
      for (const char* isa : {"generic", "avx2", "avx512"}) {
        if (!use_cpu_isa(isa)) continue;
        buckets.emplace_back(total * kPackItemBytes[inner]);
        PackJob job{parts, 2, reinterpret_cast<char*>(buckets.back().data()), static_cast<PackType>(inner), 0.5f,
                    is_streamed, 0, total};
        pack(job);
        expect(buckets.back() == buckets[0], "pack", 10 * outer + inner, numel);
        const Array<unsigned char> kept_one(one), kept_three(three), back(buckets.back());
        job.scale = 1.0f, job.bucket = reinterpret_cast<char*>(back.data());
        pack(job);
        std::memset(one.data(), 0, one.count);
        std::memset(three.data(), 0, three.count);
        unpack(job);
        const bool is_whole = inner == outer || inner == 0;  // nothing is rounded
        if (is_whole) expect(one == kept_one && three == kept_three, "unpack", 10 * outer + inner, numel);
        std::memcpy(one.data(), kept_one.data(), one.count);
        std::memcpy(three.data(), kept_three.data(), three.count);
      }
    }
  }
}

}  // namespace

int main() {
  for (int format = 0; format < kPayloadFormats; ++format) {
    const auto known = static_cast<PayloadFormat>(format);
    for (const std::size_t numel : {0, 1, 31, 32, 33, 255, 257, 2049, 5000}) {
      for (const std::size_t block_numel : {32, 96, 256, 4096}) {
        if (is_mx(known) && block_numel != 32) continue;
        for (const bool is_streamed : {false, true}) {
          test_quantize(known, numel, block_numel, false, is_streamed);
          if (known != PayloadFormat::kSign) test_quantize(known, numel, block_numel, true, is_streamed);
        }
      }
    }
  }
  for (const std::size_t numel : {1, 15, 17, 1000, 40000}) {
    for (const std::size_t k : {std::size_t{1}, (numel + 99) / 100, (numel + 1) / 2, numel}) {
      for (const bool has_residual : {false, true}) test_topk(numel, k, has_residual);
    }
  }
  for (const std::size_t columns : {1, 64, 512, 512, 512, 512, 768, 4096}) test_sample(columns);  // others each time
  for (const std::size_t numel : {1, 7, 33, 1500}) {
    for (const bool is_streamed : {false, true}) test_pack(numel, is_streamed);
  }
  constexpr int kDamaged = 1000000;
  test_damaged_payloads(kDamaged);
  std::printf("%d damaged payloads, %d failures\n", kDamaged, failures);
  return failures == 0 ? 0 : 1;
}
