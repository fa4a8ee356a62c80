// reduce() for one instruction set. Compiled three times, by reduce_{avx512,avx2,generic}.cpp, which define
//   PYCOMM_ISA           the namespace, and the name that cpu_isa() gives
//   PYCOMM_VECTOR_BYTES  the width of a vector register
// and set the target. It has no include guard on purpose and includes nothing.
//
// The idea: a group of kGroup registers accumulates while the loop goes over the inputs, so that every input is read
// once and the output written once: (num_inputs + 1) * itemsize bytes an element, and no temporary. What does not fill
// a register is done an element at a time by the same functions, one lane wide: the bits do not depend on the position.

namespace pycomm::PYCOMM_ISA {

// Registers in flight. A group of four hides the latencies of loads and additions; wide decoders need the registers.
template <class Element>
inline constexpr int kGroup = std::is_same_v<typename Element::Storage, std::uint8_t> ? 2 : 4;

// Elements to a register: by their values, or by their codes for bfloat16, whose values take two registers. Products of
// complex numbers go one by one.
template <class Element>
inline constexpr int kLanes = PYCOMM_VECTOR_BYTES / sizeof(typename Element::Value);
template <>
inline constexpr int kLanes<BFloat16> = PYCOMM_VECTOR_BYTES / 2;
template <class T>
inline constexpr int kLanes<Complex<T>> = 1;

struct NoDivisor {
  explicit NoDivisor(int) {}
};
template <class Element, class Op>
using DivisorOf = std::conditional_t<Op::kAverages, Divisor<typename Element::Value>, NoDivisor>;

template <class W, class Element, class Op>
PYCOMM_HD auto read_input(const char* from, [[maybe_unused]] double factor) {
  const auto values = load_values<W, Element>(from);
  if constexpr (Op::kScalesInputs) {
    return scale(values, static_cast<typename Element::Value>(factor));
  } else {
    return values;
  }
}

// Where and how the result is written.
enum class Stores { kPlain, kStreamed, kToTwo, kToAll };

// Reads the pointers once, before any store could change them as far as the compiler knows.
template <Stores stores>
struct Outputs {
  explicit Outputs(const ReduceJob& job) : first(stores >= Stores::kToTwo ? job.outputs[0] : job.output - job.begin), job(job) {
    if constexpr (stores == Stores::kToTwo) second = job.outputs[1];
  }
  char* first;
  char* second = nullptr;
  const ReduceJob& job;
};

template <class W, class Element, class Op, Stores stores, class Values>
PYCOMM_HD void write_output(const Outputs<stores>& to, std::size_t offset, Values values,
                            [[maybe_unused]] const DivisorOf<Element, Op>& divisor) {
  if constexpr (Op::kAverages) values = divide(values, divisor);
  const auto stored = encode_values<W, Element>(values);
  if constexpr (stores == Stores::kStreamed && W::kLanes > 1) {
    store_streamed(to.first + offset, stored);
  } else {
    store(to.first + offset, stored);
  }
  if constexpr (stores == Stores::kToTwo) store(to.second + offset, stored);
  if constexpr (stores == Stores::kToAll) {
#pragma GCC unroll 1
    for (int o = 1; o < to.job.num_outputs; ++o) store(to.job.outputs[o] + offset, stored);
  }
}

// Reduces the `group * W::kLanes` elements that start at the byte `offset` of the inputs.
template <class W, class Element, class Op, int group, int inputs_known, Stores stores>
PYCOMM_HD void reduce_group(const ReduceJob& job, const Outputs<stores>& outputs, const char* const* inputs, std::size_t offset,
                            const DivisorOf<Element, Op>& divisor) {
  constexpr std::size_t kStep = W::kLanes * sizeof(typename Element::Storage);
  const int num_inputs = inputs_known != 0 ? inputs_known : job.num_inputs;
  decltype(load_values<W, Element>(nullptr)) total[group];
  const double first_factor = Op::kScalesInputs ? job.factors[0] : 1.0;
#pragma GCC unroll 4
  for (int k = 0; k < group; ++k) total[k] = read_input<W, Element, Op>(inputs[0] + offset + k * kStep, first_factor);
#pragma GCC unroll 1
  for (int j = 1; j < num_inputs; ++j) {
    const char* input = inputs[j] + offset;
    const double factor = Op::kScalesInputs ? job.factors[j] : 1.0;
#pragma GCC unroll 4
    for (int k = 0; k < group; ++k) {
      total[k] = combine<Op>(total[k], read_input<W, Element, Op>(input + k * kStep, factor));
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < group; ++k) write_output<W, Element, Op>(outputs, offset + k * kStep, total[k], divisor);
}

template <class Element, class Op, int inputs_known, Stores stores>
PYCOMM_HD void reduce_all(const ReduceJob job, const char* const* inputs) {  // a copy: no store can change it
  constexpr int lanes = kLanes<Element>;
  using W = std::conditional_t<lanes == 1, Scalar, Wide<lanes>>;
  constexpr std::size_t kItem = sizeof(typename Element::Storage), kVector = lanes * kItem;
  constexpr std::size_t kGroupBytes = kGroup<Element> * kVector;
  const DivisorOf<Element, Op> divisor(job.divisor);
  const Outputs<stores> outputs(job);
  const std::size_t end = job.end;
  std::size_t offset = job.begin;
  if constexpr (stores == Stores::kStreamed) {
    while (offset < end && reinterpret_cast<std::uintptr_t>(outputs.first + offset) % kVector != 0) {
      reduce_group<Scalar, Element, Op, 1, inputs_known>(job, outputs, inputs, offset, divisor);
      offset += kItem;
    }
  }
  for (; end - offset >= kGroupBytes; offset += kGroupBytes) {
    // Elements that are decoded first keep the processor from looking far enough ahead by itself: what another core has staged is
    // reduced in 0.7 to 0.9 of the time.
    if constexpr (inputs_known == 2 && kItem < sizeof(typename Element::Value)) {
      for (int j = 0; j < 2; ++j) ReadAhead{false}.fetch<kGroupBytes>(inputs[j] + offset);
    }
    reduce_group<W, Element, Op, kGroup<Element>, inputs_known>(job, outputs, inputs, offset, divisor);
  }
  if constexpr (lanes > 1) {
    for (; end - offset >= kVector; offset += kVector) {
      reduce_group<W, Element, Op, 1, inputs_known>(job, outputs, inputs, offset, divisor);
    }
  }
  for (; offset < end; offset += kItem) {
    reduce_group<Scalar, Element, Op, 1, inputs_known>(job, outputs, inputs, offset, divisor);
  }
}

// The cases that training spends its time in get loops of their own: for two inputs, whose addresses then stay in
// registers, for non-temporal stores, and for several outputs.
template <class Element, class Op>
inline constexpr bool kIsHot = (std::is_same_v<Element, Native<float>> || std::is_same_v<Element, BFloat16> ||
                                std::is_same_v<Element, Small<Float16Format>>) &&
                               (std::is_same_v<Op, Sum> || std::is_same_v<Op, Average>);

template <class Element, class Op, Stores stores>
void run_reduce(const ReduceJob& job) {
  if constexpr (kIsHot<Element, Op>) {
    if (job.num_inputs == 2) {
      const char* const inputs[2] = {job.inputs[0], job.inputs[1]};
      return reduce_all<Element, Op, 2, stores>(job, inputs);
    }
  }
  reduce_all<Element, Op, 0, stores>(job, job.inputs);
}

template <class Element, class Op>
void run_reduce_to_all(const ReduceJob& job) {
  if (job.num_outputs == 2) return run_reduce<Element, Op, Stores::kToTwo>(job);
  run_reduce<Element, Op, Stores::kToAll>(job);
}

template <class Element, class Op>
constexpr ReduceKernel make_kernel() {
  if constexpr (kIsHot<Element, Op>) {
    return {run_reduce<Element, Op, Stores::kPlain>, run_reduce<Element, Op, Stores::kStreamed>, run_reduce_to_all<Element, Op>};
  } else {
    return {run_reduce<Element, Op, Stores::kPlain>, nullptr, nullptr};
  }
}

// -- table ------------------------------------------------------------------------------------------------------------

constexpr Isa make_isa(const char* name, IsaLevel level) {
  Isa isa{name, level, {}, run_copy_streamed};
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (int op = 0; op < kReduceOps; ++op) {
      isa.reduce[dtype][op] =
          visit_case(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                     [](auto element, auto op_type) { return make_kernel<decltype(element), decltype(op_type)>(); });
    }
  }
  return isa;
}

}  // namespace pycomm::PYCOMM_ISA
