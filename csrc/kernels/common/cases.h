// Which (dtype, op) pairs exist, and which element and operator each is computed with. CPU and CUDA ask here.
#pragma once

#include "../../types.h"
#include "operators.h"

namespace pycomm {

// Calls visit(Element{}, Op{}) for the pair and returns its answer, or a default one if `op` is not defined on `dtype`.
// Pairs that differ only in name share a case: sums of int32 and uint32, bitwise operators of equal width, sums of
// complex numbers and of their parts (so the size of an Element may be half that of the dtype).
template <class Visit>
constexpr auto visit_case(DType dtype, ReduceOp op, Visit visit) -> decltype(visit(Native<float>{}, Sum{}));

namespace detail {

template <class T, class Visit>
constexpr auto visit_integer(ReduceOp op, Visit visit) -> decltype(visit(Native<T>{}, Sum{})) {
  using Unsigned = Native<std::make_unsigned_t<T>>;
  switch (op) {
    case ReduceOp::kSum: return visit(Unsigned{}, Sum{});
    case ReduceOp::kProduct: return visit(Unsigned{}, Product{});
    case ReduceOp::kMin: return visit(Native<T>{}, Min{});
    case ReduceOp::kMax: return visit(Native<T>{}, Max{});
    case ReduceOp::kBand: return visit(Unsigned{}, And{});
    case ReduceOp::kBor: return visit(Unsigned{}, Or{});
    case ReduceOp::kBxor: return visit(Unsigned{}, Xor{});
    default: return {};
  }
}

template <class Visit>
constexpr auto visit_bool(ReduceOp op, Visit visit) -> decltype(visit(Bool{}, Or{})) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor: return visit(Bool{}, Or{});
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand: return visit(Bool{}, And{});
    case ReduceOp::kBxor: return visit(Bool{}, Xor{});
    default: return {};
  }
}

template <class Element, class Visit>
constexpr auto visit_float(ReduceOp op, Visit visit) -> decltype(visit(Element{}, Sum{})) {
  switch (op) {
    case ReduceOp::kSum: return visit(Element{}, Sum{});
    case ReduceOp::kProduct: return visit(Element{}, Product{});
    case ReduceOp::kMin: return visit(Element{}, Min{});
    case ReduceOp::kMax: return visit(Element{}, Max{});
    case ReduceOp::kAvg: return visit(Element{}, Average{});
    case ReduceOp::kPremulSum: return visit(Element{}, PremulSum{});
    default: return {};
  }
}

template <class T, class Visit>
constexpr auto visit_complex(ReduceOp op, Visit visit) -> decltype(visit(Complex<T>{}, Product{})) {
  switch (op) {
    case ReduceOp::kSum: return visit(Native<T>{}, Sum{});
    case ReduceOp::kProduct: return visit(Complex<T>{}, Product{});
    case ReduceOp::kAvg: return visit(Native<T>{}, Average{});
    case ReduceOp::kPremulSum: return visit(Native<T>{}, PremulSum{});
    default: return {};
  }
}

}  // namespace detail

template <class Visit>
constexpr auto visit_case(DType dtype, ReduceOp op, Visit visit) -> decltype(visit(Native<float>{}, Sum{})) {
  switch (dtype) {
    case DType::kUInt8: return detail::visit_integer<std::uint8_t>(op, visit);
    case DType::kInt8: return detail::visit_integer<std::int8_t>(op, visit);
    case DType::kUInt16: return detail::visit_integer<std::uint16_t>(op, visit);
    case DType::kInt16: return detail::visit_integer<std::int16_t>(op, visit);
    case DType::kUInt32: return detail::visit_integer<std::uint32_t>(op, visit);
    case DType::kInt32: return detail::visit_integer<std::int32_t>(op, visit);
    case DType::kUInt64: return detail::visit_integer<std::uint64_t>(op, visit);
    case DType::kInt64: return detail::visit_integer<std::int64_t>(op, visit);
    case DType::kBool: return detail::visit_bool(op, visit);
    case DType::kFloat16: return detail::visit_float<Small<Float16Format>>(op, visit);
    case DType::kBFloat16: return detail::visit_float<BFloat16>(op, visit);
    case DType::kFloat32: return detail::visit_float<Native<float>>(op, visit);
    case DType::kFloat64: return detail::visit_float<Native<double>>(op, visit);
    case DType::kComplex64: return detail::visit_complex<float>(op, visit);
    case DType::kComplex128: return detail::visit_complex<double>(op, visit);
    case DType::kFloat8E4M3FN: return detail::visit_float<Small<E4M3FNFormat>>(op, visit);
    case DType::kFloat8E5M2: return detail::visit_float<Small<E5M2Format>>(op, visit);
    case DType::kFloat8E4M3FNUZ: return detail::visit_float<Small<E4M3FNUZFormat>>(op, visit);
    case DType::kFloat8E5M2FNUZ: return detail::visit_float<Small<E5M2FNUZFormat>>(op, visit);
  }
  return {};
}

}  // namespace pycomm
