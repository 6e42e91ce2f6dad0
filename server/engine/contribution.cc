#include "server/engine/contribution.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// The index of the first element whose exponent bits are all set (an infinity or NaN), else -1.
template <typename Bits>
int64_t FirstNonFinite(absl::Span<const uint8_t> values, Bits exponent) {
  constexpr int64_t kBlock = 4096;  // looked at without branches
  const int64_t count = static_cast<int64_t>(values.size() / sizeof(Bits));
  const auto is_finite = [&](int64_t i) {
    Bits bits;  // elements may be unaligned
    std::memcpy(&bits, values.data() + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    return (bits & exponent) != exponent;
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    bool all = true;
    for (int64_t i = begin; i < end; ++i) all &= is_finite(i);
    for (int64_t i = begin; !all && i < end; ++i) {
      if (!is_finite(i)) return i;
    }
  }
  return -1;
}

int64_t FirstNonFinite(kernels::DType dtype, absl::Span<const uint8_t> values) {
  switch (dtype) {
    case kernels::DType::kFloat32:
      return FirstNonFinite<uint32_t>(values, 0x7f800000u);
    case kernels::DType::kFloat16:
      return FirstNonFinite<uint16_t>(values, 0x7c00u);
    case kernels::DType::kBFloat16:
      return FirstNonFinite<uint16_t>(values, 0x7f80u);
  }
  return -1;
}

}  // namespace

absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values) {
  const int64_t bad = FirstNonFinite(contribution.terms.dtype, values);
  if (bad < 0) return absl::OkStatus();
  return FieldError(
      absl::StatusCode::kOutOfRange,
      absl::StrCat("payload row ", rows.begin + bad / contribution.cols, " column ", bad % contribution.cols),
      "must be finite; nothing of its slice was added", "a value that is not finite");
}

std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes) {
  const auto size = static_cast<size_t>(row_bytes);
  std::vector<uint64_t> checksums(values.size() / size);
  for (size_t row = 0; row < checksums.size(); ++row) {
    const uint64_t hash = XXH3_64bits(values.data() + row * size, size);
    checksums[row] = hash == 0 ? 1 : hash;
  }
  return checksums;
}

}  // namespace lossd::engine
