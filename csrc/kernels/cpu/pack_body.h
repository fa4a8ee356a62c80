// The conversion of a run of elements for one instruction set: see codec_body.h, which includes this. pack.cpp uses it.

namespace pycomm::PYCOMM_ISA {

template <class W, class Element>
PYCOMM_HD auto read_element(const char* from) {
  if constexpr (kUsesF16C<W, Element>) {
    return load_values<W, Element>(from);
  } else {
    return Element::template decode<W>(load<typename W::template Of<typename Element::Storage>>(from));
  }
}

template <class W, class Element, class V>
PYCOMM_HD auto write_element(V value) {
  if constexpr (kUsesF16C<W, Element>) {
    return encode_values<W, Element>(value);
  } else {
    return Element::template encode<W>(value);
  }
}

// One vector, or one element.
template <class W, class To, class From, bool is_scaled, bool is_streamed>
PYCOMM_HD void convert_lanes_of(char* to, const char* from, float scale) {
  auto value = read_element<W, From>(from);
  if constexpr (is_scaled) value = value * scale;
  const auto stored = write_element<W, To>(value);
  if constexpr (is_streamed) {
    store_streamed(to, stored);
  } else {
    store(to, stored);
  }
}

template <class To, class From, bool is_scaled, Run run>
void convert_all(char* to, const char* from, std::size_t numel, float scale) {
  constexpr std::size_t kTo = sizeof(typename To::Storage), kFrom = sizeof(typename From::Storage);
  constexpr bool is_streamed = run != Run::kCached;
  constexpr ReadAhead ahead{run == Run::kByPages};
  std::size_t i = 0;
  if constexpr (is_streamed) {
    while (i < numel && reinterpret_cast<std::uintptr_t>(to + i * kTo) % (kLanesOfFloat * kTo) != 0) {
      convert_lanes_of<Scalar, To, From, is_scaled, false>(to + i * kTo, from + i * kFrom, scale);
      ++i;
    }
  }
  constexpr std::size_t kStep = 4 * kLanesOfFloat;
  for (; i + kStep <= numel; i += kStep) {
    ahead.fetch<kStep * kFrom>(from + i * kFrom);
#pragma GCC unroll 4
    for (std::size_t j = i; j < i + kStep; j += kLanesOfFloat) {
      convert_lanes_of<Floats, To, From, is_scaled, is_streamed>(to + j * kTo, from + j * kFrom, scale);
    }
  }
  for (; i + kLanesOfFloat <= numel; i += kLanesOfFloat) {
    convert_lanes_of<Floats, To, From, is_scaled, is_streamed>(to + i * kTo, from + i * kFrom, scale);
  }
  for (; i < numel; ++i) convert_lanes_of<Scalar, To, From, is_scaled, false>(to + i * kTo, from + i * kFrom, scale);
}

template <PackType to_type, PackType from_type, Run run>
void convert_run(char* to, const char* from, std::size_t numel, float scale) {
  using To = PackElement<to_type>;
  using From = PackElement<from_type>;
  if (scale != 1.0f) return convert_all<To, From, true, run>(to, from, numel, scale);
  if constexpr (to_type != from_type) {
    convert_all<To, From, false, run>(to, from, numel, scale);
  } else if constexpr (run == Run::kCached) {
    copy_plain(to, from, numel * sizeof(typename To::Storage));
  } else {
    copy_past_caches<run == Run::kByPages>(to, from, numel * sizeof(typename To::Storage));
  }
}

template <PackType to, PackType from>
void run_convert(char* data, const char* source, std::size_t numel, float scale, Run run) {
  // To stream from a misaligned item would never reach an aligned vector.
  if (reinterpret_cast<std::uintptr_t>(data) % sizeof(typename PackElement<to>::Storage) != 0) run = Run::kCached;
  if (run == Run::kByPages) return convert_run<to, from, Run::kByPages>(data, source, numel, scale);
  if (run == Run::kStreamed) return convert_run<to, from, Run::kStreamed>(data, source, numel, scale);
  convert_run<to, from, Run::kCached>(data, source, numel, scale);
}

template <PackType to>
constexpr void fill_row(Codecs& codecs) {
  codecs.convert[static_cast<int>(to)][0] = run_convert<to, PackType::kFloat32>;
  codecs.convert[static_cast<int>(to)][1] = run_convert<to, PackType::kFloat16>;
  codecs.convert[static_cast<int>(to)][2] = run_convert<to, PackType::kBFloat16>;
}

constexpr void fill_conversions(Codecs& codecs) {
  fill_row<PackType::kFloat32>(codecs);
  fill_row<PackType::kFloat16>(codecs);
  fill_row<PackType::kBFloat16>(codecs);
}

}  // namespace pycomm::PYCOMM_ISA
