// SPDX-License-Identifier: Apache-2.0
// .npy files. One that is taken has as many elements as bytes follow its header, all can be read, and writing
// the same array gives a file that reads the same.
#include <string>
#include <vector>

#include "proto/tensorfile/npy.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

constexpr int64_t kMemoryPerByte = 16;

std::vector<uint8_t> ReadAll(const formats::NpyReader& reader) {
  std::vector<uint8_t> bytes(static_cast<size_t>(reader.elements() * formats::SizeOf(reader.dtype())));
  const absl::Status status = reader.Read(0, reader.elements(), absl::MakeSpan(bytes));
  FUZZ_CHECK(status.ok(), status.ToString());
  return bytes;
}

void CheckRefusals(const formats::NpyReader& reader) {
  std::vector<uint8_t> element(static_cast<size_t>(formats::SizeOf(reader.dtype())));
  FUZZ_CHECK(!reader.Read(reader.elements(), 1, absl::MakeSpan(element)).ok(), "an element behind the last");
  FUZZ_CHECK(!reader.Read(-1, 1, absl::MakeSpan(element)).ok(), "an element before the first");
}

void CheckWritten(const formats::NpyReader& reader, const std::vector<uint8_t>& elements) {
  std::string content;
  const auto writer = formats::CreateNpy("written", reader.dtype(), reader.shape(), Into(&content));
  FUZZ_CHECK(writer.ok(), writer.status().ToString());
  FUZZ_CHECK((*writer)->Append(elements).ok() && (*writer)->Finish().ok(), "writing the elements");
  MemoryFile file;
  file.Write(content);
  const auto again = formats::NpyReader::Open(file.path());
  FUZZ_CHECK(again.ok(), again.status().ToString());
  FUZZ_CHECK((*again)->dtype() == reader.dtype() && (*again)->shape() == reader.shape(), "another array");
  FUZZ_CHECK(ReadAll(**again) == elements, "other elements");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  const auto reader = fuzz::OpenFile<formats::NpyReader>(data, size, fuzz::kMemoryPerByte);
  if (!reader.ok()) return 0;
  const std::vector<uint8_t> elements = fuzz::ReadAll(**reader);
  FUZZ_CHECK(elements.size() < size, "more elements than bytes");
  fuzz::CheckRefusals(**reader);
  fuzz::CheckWritten(**reader, elements);
  return 0;
}
