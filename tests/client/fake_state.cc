// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_state.h"

#include <cstring>

namespace lossd::fake {

std::vector<float> ToFloats(const std::string& bytes, v1::DType dtype) {
  std::vector<float> values(bytes.size() / (dtype == v1::DTYPE_FP32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    if (dtype == v1::DTYPE_FP32) {
      std::memcpy(&bits, bytes.data() + 4 * i, 4);
    } else {
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, bytes.data() + 2 * i, 2);
    }
    std::memcpy(&values[i], &bits, 4);
  }
  return values;
}

std::string ToBytes(const std::vector<float>& values, v1::DType dtype) {
  std::string bytes(values.size() * (dtype == v1::DTYPE_FP32 ? 4 : 2), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const char* bits = reinterpret_cast<const char*>(&values[i]);
    if (dtype == v1::DTYPE_FP32) {
      std::memcpy(bytes.data() + 4 * i, bits, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, bits + 2, 2);
    }
  }
  return bytes;
}

}  // namespace lossd::fake
