// SPDX-License-Identifier: Apache-2.0
// Packets of the region socket. Whatever bytes come, what is taken for a request or an answer can be used as
// one, and means the same when it is sent on.
#include <google/protobuf/stubs/logging.h>

#include <string>

#include "proto/wire/region_packets.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

void CheckRequest(absl::string_view bytes) {
  const auto request = wire::ParseRegionRequest(bytes);
  if (!request.ok()) return;
  FUZZ_CHECK(request->bytes() > 0 && static_cast<int64_t>(request->bytes()) > 0, "a size that is none");
  FUZZ_CHECK(request->of_device() || request->device().empty(), "a device for memory of the host");
  const auto again = wire::ParseRegionRequest(request->SerializeAsString());
  FUZZ_CHECK(again.ok() && again->bytes() == request->bytes(), "another size");
  FUZZ_CHECK(again->of_device() == request->of_device() && again->device() == request->device(),
             "other memory");
}

void CheckAnswer(absl::string_view bytes) {
  const auto answer = wire::ParseRegionAnswer(bytes);
  if (!answer.ok()) return;
  FUZZ_CHECK(answer->has_opened() || answer->has_refused(), "an answer that says nothing");
  if (answer->has_refused()) return;
  FUZZ_CHECK(answer->opened().id().size() == wire::kRegionIdBytes, "an id of another size");
  FUZZ_CHECK(answer->opened().bytes() > 0, "a region of no bytes");
  FUZZ_CHECK(wire::ParseRegionAnswer(answer->SerializeAsString()).ok(),
             "what was taken is refused when it is sent on");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it would write a line for every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes = lossd::fuzz::AsText(data, size);
  lossd::fuzz::CheckRequest(bytes);
  lossd::fuzz::CheckAnswer(bytes);
  return 0;
}
