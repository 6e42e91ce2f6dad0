// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/payload.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"

namespace lossd::errors {
namespace {

// Takes a text and its length off the front of `bytes`.
std::optional<std::string> TakeText(absl::string_view* bytes) {
  uint64_t size = 0;
  if (bytes->size() < sizeof(size)) return std::nullopt;
  std::memcpy(&size, bytes->data(), sizeof(size));
  bytes->remove_prefix(sizeof(size));
  if (size > bytes->size()) return std::nullopt;
  std::string text(bytes->substr(0, size));
  bytes->remove_prefix(size);
  return text;
}

}  // namespace

void SetTexts(absl::string_view type, absl::Span<const std::string> texts, absl::Status* status) {
  std::string bytes;
  for (const std::string& text : texts) {
    const uint64_t size = text.size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes.append(text);
  }
  status->SetPayload(type, absl::Cord(std::move(bytes)));
}

std::optional<std::vector<std::string>> GetTexts(absl::string_view type, const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(type);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  absl::string_view left = bytes;
  std::vector<std::string> texts;
  while (!left.empty()) {
    std::optional<std::string> text = TakeText(&left);
    if (!text.has_value()) return std::nullopt;
    texts.push_back(*std::move(text));
  }
  return texts;
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status result(status.code(), message);
  status.ForEachPayload(
      [&result](absl::string_view type, const absl::Cord& payload) { result.SetPayload(type, payload); });
  return result;
}

}  // namespace lossd::errors
