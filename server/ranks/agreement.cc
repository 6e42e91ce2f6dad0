// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/agreement.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <openssl/sha.h>

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/errors/field_error.h"

namespace lossd::ranks {
namespace {

// Sizes of memory that differ by less than this part of them are the same.
constexpr int64_t kMemoryTolerance = 100;

const std::string* Find(const v1::Hello& hello, const std::string& name) {
  for (const v1::Setting& setting : hello.settings()) {
    if (setting.name() == name) return &setting.value();
  }
  return nullptr;
}

std::string DevicesOf(const Settings& leader) {
  for (const auto& [name, value] : leader) {
    if (name == kDevices) return value;
  }
  return "1";
}

std::string DevicesOf(const v1::Hello& worker) {
  const std::string* const devices = Find(worker, kDevices);
  return devices == nullptr ? "1" : *devices;
}

// Settings are those of a process, which is several ranks where it has several devices.
std::string NameOf(const std::string& devices, const v1::Hello& worker, bool by_process) {
  uint32_t count = 1;
  if (!by_process) return absl::StrCat("rank ", worker.rank());
  if (!absl::SimpleAtoi(devices, &count) || count == 0) count = 1;
  return absl::StrCat("process ", worker.rank() / count);
}

// What the value of rank 0 (or process 0) is, for whom it concerns.
std::string Rule(absl::string_view whose, const std::string& value, Listener listener) {
  return absl::StrCat("be what ", whose, " 0 has", listener == Listener::kLog ? ", " : "",
                      listener == Listener::kLog ? value : " (its log says what that is)");
}

absl::Status CheckDevice(const kernels::RankTraits& leader, const v1::Hello& worker, Listener listener) {
  const int64_t more = std::max(leader.device_bytes, worker.device_bytes());
  const int64_t less = std::min(leader.device_bytes, worker.device_bytes());
  if (more - less <= more / kMemoryTolerance) return absl::OkStatus();
  return errors::FieldError(
      absl::StrCat("rank ", worker.rank(), ": memory of the device"),
      Rule("rank", absl::StrCat(leader.device_bytes, " bytes (give or take a hundredth)"), listener),
      worker.device_bytes());
}

}  // namespace

Settings SettingsOf(Settings flags, const kernels::BackendInfo& backend) {
  // What comes before the first space is the number of the device or of the threads, of which there may be
  // one.
  const size_t space = std::min(backend.device.find(' '), backend.device.size());
  const std::string kind = absl::StrReplaceAll(backend.device.substr(space), {{" thread,", " threads,"}});
  flags.emplace_back("backend", backend.name);
  flags.emplace_back("kind of device", absl::StripAsciiWhitespace(kind));
  return flags;
}

absl::Status CheckRank(const v1::Hello& worker, int ranks) {
  if (worker.rank() >= 1 && worker.rank() < static_cast<uint32_t>(ranks)) return absl::OkStatus();
  return errors::FieldError("rank", absl::StrCat("be in [1, ", ranks, ") for a worker"), worker.rank());
}

std::string ProtocolHash() {
  google::protobuf::FileDescriptorProto file;
  v1::Hello::descriptor()->file()->CopyTo(&file);
  const std::string bytes = file.SerializeAsString();
  unsigned char digest[SHA256_DIGEST_LENGTH] = {};
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  constexpr size_t kBytes = 8;
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), kBytes});
}

absl::Status CheckAgreement(const Settings& leader, const kernels::RankTraits& traits,
                            const v1::Hello& worker, Listener listener) {
  const std::string its_devices = DevicesOf(worker);
  const bool by_process = DevicesOf(leader) != "1" || its_devices != "1";
  for (const auto& [name, value] : leader) {
    const std::string* const got = Find(worker, name);
    if (got != nullptr && *got == value) continue;
    return errors::FieldError(absl::StrCat(NameOf(its_devices, worker, by_process), ": ", name),
                              Rule(by_process ? "process" : "rank", value, listener),
                              got == nullptr ? "nothing" : *got);
  }
  return CheckDevice(traits, worker, listener);
}

absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout,
                     const absl::Status& refusal) {
  const bool one = missing.size() == 1;
  std::string message = absl::StrCat(one ? "rank " : "ranks ", absl::StrJoin(missing, ", "), " of ", ranks,
                                     one ? " has" : " have", " not come within ",
                                     absl::FormatDuration(timeout), " (--rank_timeout)");
  if (!refusal.ok()) absl::StrAppend(&message, "; the last that was refused: ", refusal.message());
  return absl::DeadlineExceededError(message);
}

}  // namespace lossd::ranks
