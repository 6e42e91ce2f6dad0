// SPDX-License-Identifier: Apache-2.0
#include "server/access/tokens.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/access/access_lines.h"

namespace lossd::access {
namespace {

bool IsVisible(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isgraph(c); });
}

}  // namespace

Tokens::Hash Tokens::HashOf(absl::string_view token) {
  Hash hash = {};
  EVP_Digest(token.data(), token.size(), hash.data(), nullptr, EVP_sha256(), nullptr);
  return hash;
}

absl::StatusOr<Tokens::Entry> Tokens::ParseLine(const AccessFile& file, size_t number,
                                                absl::string_view line) {
  const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
  if (parts.size() != 3) return AccessLineError(file, number, "have lines role:name:token");
  const std::optional<Role> role = ParseRole(parts[0]);
  if (!role.has_value()) return AccessLineError(file, number, "have a role reader, trainer or admin first");
  if (parts[1].empty() || parts[1].size() > kMaxNameBytes || !IsVisible(parts[1])) {
    return AccessLineError(
        file, number,
        absl::StrCat("have a name of 1 to ", kMaxNameBytes, " visible ASCII characters second"));
  }
  Entry entry{.principal = {.name = std::string(parts[1]), .role = *role}, .hash = {}};
  absl::string_view token = parts[2];
  if (absl::ConsumePrefix(&token, "sha256:")) {
    const bool hex = token.size() == 2 * entry.hash.size() &&
                     std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isxdigit(c); });
    if (!hex) return AccessLineError(file, number, "have 64 hexadecimal digits after sha256:");
    const std::string bytes = absl::HexStringToBytes(token);
    std::memcpy(entry.hash.data(), bytes.data(), entry.hash.size());
    return entry;
  }
  if (token.size() < kMinTokenBytes || token.size() > kMaxTokenBytes || !IsVisible(token)) {
    return AccessLineError(file, number,
                           absl::StrCat("have a token of ", kMinTokenBytes, " to ", kMaxTokenBytes,
                                        " visible ASCII characters third"));
  }
  entry.hash = HashOf(token);
  return entry;
}

absl::StatusOr<std::shared_ptr<const Tokens>> Tokens::Parse(const AccessFile& file, absl::string_view text) {
  auto tokens = std::make_shared<Tokens>();
  for (const AccessLine& line : AccessLines(text)) {
    if (tokens->size() == kMaxTokens)
      return AccessLineError(file, line.number, absl::StrCat("have at most ", kMaxTokens, " tokens"));
    absl::StatusOr<Entry> entry = ParseLine(file, line.number, line.text);
    if (!entry.ok()) return entry.status();
    const bool taken = std::any_of(tokens->entries_.begin(), tokens->entries_.end(),
                                   [&](const Entry& other) { return other.hash == entry->hash; });
    if (taken) return AccessLineError(file, line.number, "have each token once");
    tokens->entries_.push_back(*std::move(entry));
  }
  if (tokens->entries_.empty()) return AccessFileError(file, "have at least one line role:name:token");
  return std::shared_ptr<const Tokens>(std::move(tokens));
}

const Principal* Tokens::Find(absl::string_view token) const {
  if (token.size() > kMaxTokenBytes) return nullptr;
  const Hash hash = HashOf(token);
  const Principal* found = nullptr;
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0) found = &entry.principal;
  }
  return found;
}

}  // namespace lossd::access
