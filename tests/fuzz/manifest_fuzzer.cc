// SPDX-License-Identifier: Apache-2.0
// Manifests of checkpoints, as they lie on the disk and with a checksum that matches. What is taken is
// written and read back as the same.
#include <nlohmann/json.hpp>
#include <string>

#include "server/head/manifest.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMemoryPerByte = 64;

absl::StatusOr<head::Manifest> Decode(absl::string_view text) {
  const HeapWatch heap;
  absl::StatusOr<head::Manifest> manifest = head::DecodeManifest(text);
  heap.Check(text.size(), kMemoryPerByte);
  return manifest;
}

void CheckTaken(absl::string_view text) {
  const absl::StatusOr<head::Manifest> manifest = Decode(text);
  if (!manifest.ok()) return;
  int64_t next = 0;
  for (const head::ManifestShard& shard : manifest->shards) {
    FUZZ_CHECK(shard.classes.begin == next && shard.classes.end > next, shard.classes.Text());
    FUZZ_CHECK(shard.file.find('/') == std::string::npos, shard.file);
    next = shard.classes.end;
  }
  FUZZ_CHECK(next == manifest->subject.config.vocab_size, "classes are missing");
  FUZZ_CHECK(head::ShardBytes(*manifest) >= 0, "files of a negative size");
  const std::string encoded = head::EncodeManifest(*manifest);
  const absl::StatusOr<head::Manifest> again = head::DecodeManifest(encoded);
  FUZZ_CHECK(again.ok(), again.status().ToString());
  FUZZ_CHECK(head::EncodeManifest(*again) == encoded, encoded);
}

// The text with the checksum that a manifest of this content has; empty if it is no JSON object.
std::string Sealed(absl::string_view text) {
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return "";
  json.erase("checksum");
  const std::string content = json.dump();
  head::Checksum checksum;
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(content.data()), content.size()));
  json["checksum"] = checksum.Digest();
  return json.dump();
}

// Deeper than a manifest nests: the reader is to refuse it, however deep it is.
constexpr int kDeep = 8;

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text = lossd::fuzz::AsText(data, size);
  lossd::fuzz::CheckTaken(text);
  const lossd::fuzz::Nesting nesting = lossd::fuzz::DeepestArray(text);
  if (nesting.depth > lossd::fuzz::kDeep) {
    const absl::StatusOr<lossd::head::Manifest> deep =
        lossd::head::DecodeManifest(lossd::fuzz::Deepened(text, nesting));
    FUZZ_CHECK(!deep.ok(), "a manifest that nests deep is taken");
    return 0;
  }
  const std::string sealed = lossd::fuzz::Sealed(text);
  if (!sealed.empty()) lossd::fuzz::CheckTaken(sealed);
  return 0;
}
