// SPDX-License-Identifier: Apache-2.0
// safetensors files. In one that is taken, the tensors follow each other from the end of the header to the
// end of the file, every byte and row can be read and none outside, and writing the same tensors gives a file
// that reads the same.
#include <string>
#include <vector>

#include "proto/tensorfile/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using formats::SafetensorsInfo;
using formats::SafetensorsReader;

constexpr int64_t kMemoryPerByte = 64;

std::string ReadTensor(const SafetensorsReader& reader, const SafetensorsInfo& tensor) {
  std::string bytes(static_cast<size_t>(tensor.bytes), '\0');
  const auto out = absl::MakeSpan(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size());
  const absl::Status status = reader.ReadBytes(tensor, 0, out);
  FUZZ_CHECK(status.ok(), status.ToString());
  if (tensor.dtype != formats::DType::kOther) {
    std::string rows(bytes.size(), '\0');
    const auto rows_out = absl::MakeSpan(reinterpret_cast<uint8_t*>(rows.data()), rows.size());
    const absl::Status read = reader.ReadRows(tensor, 0, tensor.rows(), rows_out);
    FUZZ_CHECK(read.ok(), read.ToString());
    FUZZ_CHECK(rows == bytes, "the rows differ from the bytes");
  }
  return bytes;
}

void CheckRefusals(const SafetensorsReader& reader, const SafetensorsInfo& tensor) {
  uint8_t byte = 0;
  FUZZ_CHECK(!reader.ReadBytes(tensor, tensor.bytes, absl::MakeSpan(&byte, 1)).ok(),
             "a byte behind the tensor");
  FUZZ_CHECK(!reader.ReadBytes(tensor, -1, absl::MakeSpan(&byte, 1)).ok(), "a byte before the tensor");
  FUZZ_CHECK(!reader.ReadRows(tensor, tensor.rows(), 1, absl::MakeSpan(&byte, 1)).ok(),
             "a row behind the tensor");
}

void CheckWritten(const SafetensorsReader& reader) {
  std::vector<formats::SafetensorsSpec> specs;
  std::string data;
  for (const SafetensorsInfo& tensor : reader.tensors()) {
    if (tensor.dtype == formats::DType::kOther) continue;
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
    data += ReadTensor(reader, tensor);
  }
  std::string content;
  const auto writer = formats::CreateSafetensors("written", specs, reader.metadata(), Into(&content));
  FUZZ_CHECK(writer.ok(), writer.status().ToString());
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  FUZZ_CHECK((*writer)->Append(bytes).ok() && (*writer)->Finish().ok(), "writing the tensors");
  MemoryFile file;
  file.Write(content);
  const auto again = SafetensorsReader::Open(file.path());
  FUZZ_CHECK(again.ok(), again.status().ToString());
  FUZZ_CHECK((*again)->metadata() == reader.metadata(), "other metadata");
  FUZZ_CHECK((*again)->tensors().size() == specs.size(), "another number of tensors");
  for (const formats::SafetensorsSpec& spec : specs) {
    const auto tensor = (*again)->Find(spec.name);
    FUZZ_CHECK(tensor.ok() && (*tensor)->dtype == spec.dtype && (*tensor)->shape == spec.shape, spec.name);
    const auto before = reader.Find(spec.name);
    FUZZ_CHECK(before.ok() && ReadTensor(**again, **tensor) == ReadTensor(reader, **before), spec.name);
  }
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  const auto reader = fuzz::OpenFile<formats::SafetensorsReader>(data, size, fuzz::kMemoryPerByte);
  if (!reader.ok()) return 0;
  int64_t end = -1;
  for (const formats::SafetensorsInfo& tensor : (*reader)->tensors()) {
    FUZZ_CHECK(end < 0 || tensor.begin == end, absl::StrCat("tensor at ", tensor.begin, ", not ", end));
    end = tensor.begin + tensor.bytes;
    fuzz::ReadTensor(**reader, tensor);
    fuzz::CheckRefusals(**reader, tensor);
  }
  FUZZ_CHECK(end < 0 || end == static_cast<int64_t>(size), "bytes behind the last tensor");
  fuzz::CheckWritten(**reader);
  return 0;
}
