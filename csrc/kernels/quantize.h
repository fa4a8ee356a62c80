// float32 <-> a payload of a few bits an element, scaled block by block. common/payload.h has the layout,
// pycomm/ops/quantize.py says what is computed. Allocates nothing, throws nothing.
#pragma once

#include "common/payload.h"

namespace pycomm {

// Encodes the blocks [first_block, last_block). Calls on disjoint ranges may run at the same time. Bytes moved per element:
// 4 read and kCodeBits / 8 written; with a residual 8 read and 4 more written.
struct QuantizeJob {
  unsigned char* payload;  // of layout.bytes; the padding after the scales belongs to the last block
  const float* flat;
  float* residual;  // null: none. Else flat + residual is encoded, and residual becomes what was not sent
  std::uint64_t seed, offset;
  PayloadFormat format;
  bool is_stochastic;  // not with kSign
  bool is_streamed;    // non-temporal stores: right when nobody on this core reads the payload soon
  std::size_t numel, block_numel, first_block, last_block;
};
void quantize(const QuantizeJob& job);

// Decodes the blocks [first_block, last_block). Any bytes decode to something.
struct DequantizeJob {
  float* flat;
  const unsigned char* payload;  // of PayloadLayout(...).bytes
  float factor;                  // scales are multiplied by it
  PayloadFormat format;
  bool is_added;     // to what `flat` holds; else it is overwritten
  bool is_streamed;  // as above, for `flat`
  std::size_t numel, block_numel, first_block, last_block;
};
void dequantize(const DequantizeJob& job);

}  // namespace pycomm
