// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/agreement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/errors/field_error.h"

namespace lossd::ranks {
namespace {

const std::string* Find(const v1::Hello& hello, const std::string& name) {
  for (const v1::Setting& setting : hello.settings()) {
    if (setting.name() == name) return &setting.value();
  }
  return nullptr;
}

}  // namespace

Settings SettingsOf(const kernels::BackendInfo& backend) {
  // What comes before the first space is the number of the device or of the threads, of which there may be
  // one.
  const size_t space = std::min(backend.device.find(' '), backend.device.size());
  const std::string kind = absl::StrReplaceAll(backend.device.substr(space), {{" thread,", " threads,"}});
  return {{"backend", backend.name}, {"kind of device", kind}};
}

absl::Status CheckAgreement(const Settings& leader, const v1::Hello& worker) {
  for (const auto& [name, value] : leader) {
    const std::string* const got = Find(worker, name);
    if (got != nullptr && *got == value) continue;
    return errors::FieldError(absl::StrCat("rank ", worker.rank(), ": ", name),
                              absl::StrCat("be what rank 0 has, ", value), got == nullptr ? "nothing" : *got);
  }
  return absl::OkStatus();
}

absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout) {
  const bool one = missing.size() == 1;
  return absl::DeadlineExceededError(absl::StrCat(one ? "rank " : "ranks ", absl::StrJoin(missing, ", "),
                                                  " of ", ranks, one ? " has" : " have", " not come within ",
                                                  absl::FormatDuration(timeout), " (--rank_timeout)"));
}

}  // namespace lossd::ranks
