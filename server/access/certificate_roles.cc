// SPDX-License-Identifier: Apache-2.0
#include "server/access/certificate_roles.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/access/access_lines.h"

namespace lossd::access {
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

}  // namespace lossd::access
