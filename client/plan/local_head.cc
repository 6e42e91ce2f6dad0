// SPDX-License-Identifier: Apache-2.0
#include "client/plan/local_head.h"

#include <algorithm>
#include <bit>

namespace lossd::plan {
namespace {

// Rows of a block of Liger's: so many blocks that their logits take about as much memory as the hidden
// states.
int64_t LigerRows(int64_t hidden, int64_t vocab, int64_t rows) {
  const int64_t each = CeilDiv(rows, CeilDiv(vocab, hidden));
  return std::min(rows, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(each))));
}

}  // namespace

absl::string_view Name(LocalMethod method) {
  switch (method) {
    case LocalMethod::kTorch:
      return "torch";
    case LocalMethod::kCompiled:
      return "compiled";
    case LocalMethod::kLiger:
      return "liger";
    case LocalMethod::kCce:
      return "cce";
  }
  return "";
}

int64_t PeakBytes(LocalMethod method, int64_t hidden, int64_t vocab, int64_t rows) {
  const int64_t gradients = kHalf * (vocab * hidden + rows * hidden);  // dW and dx
  switch (method) {
    case LocalMethod::kTorch:
      // Logits, their copy in fp32 and its softmax, or gradients of these: 12 bytes a logit. dW and dx come
      // when most of that is free again.
      return std::max(12 * rows * vocab, kHalf * rows * vocab + gradients);
    case LocalMethod::kCompiled:
      return kHalf * rows * vocab + gradients;  // the logits, in whose place their gradient comes
    case LocalMethod::kLiger:
      return kHalf * LigerRows(hidden, vocab, rows) * vocab + gradients;
    case LocalMethod::kCce:
      return gradients;
  }
  return 0;
}

int64_t StateBytes(int64_t hidden, int64_t vocab) { return 4 * int64_t{sizeof(float)} * hidden * vocab; }

int64_t LargestMicrobatch(LocalMethod method, int64_t hidden, int64_t vocab, int64_t bytes) {
  const auto fits = [&](int64_t rows) {
    // The gradients of the hidden states are among the peak.
    return StateBytes(hidden, vocab) + kHalf * rows * hidden + PeakBytes(method, hidden, vocab, rows) <=
           bytes;
  };
  if (!fits(1)) return 0;
  int64_t most = 1, fails = 2;
  while (fits(fails) && fails < int64_t{1} << 32) {
    most = fails;
    fails *= 2;
  }
  while (fails - most > 1) {
    const int64_t middle = most + (fails - most) / 2;
    (fits(middle) ? most : fails) = middle;
  }
  return most;
}

}  // namespace lossd::plan
