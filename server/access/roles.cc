// SPDX-License-Identifier: Apache-2.0
#include "server/access/roles.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::access {

// ---- Roles ----

namespace {

constexpr Role kRoles[] = {Role::kReader, Role::kTrainer, Role::kAdmin};
constexpr absl::string_view kNames[] = {"reader", "trainer", "admin"};

}  // namespace

absl::string_view RoleName(Role role) { return kNames[static_cast<size_t>(role)]; }

std::optional<Role> ParseRole(absl::string_view name) {
  for (const Role role : kRoles) {
    if (name == RoleName(role)) return role;
  }
  return std::nullopt;
}

// ---- Files ----

namespace {

absl::Status CheckSecrecy(const AccessFile& file, const struct stat& info) {
  const bool for_others = (info.st_mode & S_IRWXO) != 0;
  const bool for_group = (info.st_mode & S_IRWXG) != 0;
  const bool of_root = info.st_uid == 0 && (info.st_mode & (S_IWGRP | S_IXGRP)) == 0;
  if (!for_others && (!for_group || of_root)) return absl::OkStatus();
  return AccessFileError(file, "be a file that its owner alone can read (chmod 600)");
}

absl::StatusOr<std::string> ReadAll(const AccessFile& file, int descriptor, size_t size) {
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t count = read(descriptor, content.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      return AccessFileError(file, absl::StrCat("be a readable file (", std::strerror(errno), ")"));
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  content.resize(done);
  if (content.empty()) return AccessFileError(file, "not be an empty file");
  return content;
}

}  // namespace

absl::Status AccessFileError(const AccessFile& file, absl::string_view rule) {
  return errors::FieldError(file.flag, rule, file.path);
}

absl::Status AccessLineError(const AccessFile& file, size_t line, absl::string_view rule) {
  return errors::FieldError(file.flag, rule, absl::StrCat(file.path, " line ", line));
}

absl::StatusOr<std::string> ReadAccessFile(const AccessFile& file, Secrecy secrecy) {
  // O_NONBLOCK: if the file is a pipe, do not wait for a writer.
  const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0)
    return AccessFileError(file, absl::StrCat("be a readable file (", std::strerror(errno), ")"));
  const absl::Cleanup closer = [descriptor] { close(descriptor); };
  struct stat info = {};
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode))
    return AccessFileError(file, "be a regular file");
  if (secrecy == Secrecy::kSecret) LOSSD_RETURN_IF_ERROR(CheckSecrecy(file, info));
  const auto size = static_cast<size_t>(info.st_size);
  if (size > kMaxAccessFileBytes)
    return AccessFileError(file, absl::StrCat("have at most ", errors::ExactBytes(kMaxAccessFileBytes)));
  return ReadAll(file, descriptor, size);
}

std::vector<AccessLine> AccessLines(absl::string_view text) {
  std::vector<AccessLine> lines;
  size_t number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty() && line.front() != '#') lines.push_back({number, line});
  }
  return lines;
}

// ---- Roles of certificates ----

namespace {

constexpr absl::string_view kKinds[] = {"dns:", "uri:", "email:", "ip:"};

bool IsName(absl::string_view text) {
  return std::any_of(std::begin(kKinds), std::end(kKinds), [text](absl::string_view kind) {
    return absl::StartsWith(text, kind) && text.size() > kind.size();
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CertificateRoles>> CertificateRoles::Parse(const AccessFile& file,
                                                                                absl::string_view text) {
  auto result = std::make_shared<CertificateRoles>();
  for (const AccessLine& line : AccessLines(text)) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line.text, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() != 2) return AccessLineError(file, line.number, "have lines \"role name\"");
    const std::optional<Role> role = ParseRole(words[0]);
    if (!role.has_value())
      return AccessLineError(file, line.number, "have a role reader, trainer or admin first");
    if (words[1] == "*") {
      result->any_ = std::max(result->any_.value_or(*role), *role);
      continue;
    }
    if (!IsName(words[1]))
      return AccessLineError(file, line.number, "have a name dns:, uri:, email: or ip: second, or *");
    if (result->roles_.size() == kMaxNames)
      return AccessLineError(file, line.number, absl::StrCat("have at most ", kMaxNames, " names"));
    if (!result->roles_.emplace(words[1], *role).second)
      return AccessLineError(file, line.number, "have each name once");
  }
  if (result->roles_.empty() && !result->any_.has_value())
    return AccessFileError(file, "have at least one line \"role name\"");
  return std::shared_ptr<const CertificateRoles>(std::move(result));
}

CertificateRoles::Match CertificateRoles::Find(const std::vector<std::string>& names) const {
  Match match{.name = names.empty() ? "without a name" : names.front(), .role = any_};
  for (const std::string& name : names) {
    const auto it = roles_.find(name);
    if (it == roles_.end()) continue;
    if (match.role.has_value() && it->second <= *match.role) continue;
    match = {.name = name, .role = it->second};
  }
  return match;
}

// ---- Tokens ----

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
    LOSSD_TRY(Entry entry, ParseLine(file, line.number, line.text));
    const bool taken = std::any_of(tokens->entries_.begin(), tokens->entries_.end(),
                                   [&](const Entry& other) { return other.hash == entry.hash; });
    if (taken) return AccessLineError(file, line.number, "have each token once");
    tokens->entries_.push_back(std::move(entry));
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
