// SPDX-License-Identifier: Apache-2.0
// How several processes start as one server: their settings, and which process is which (start.h).
#include "server/ranks/start.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::ranks {
namespace {

// Two sizes of memory count as the same if they differ by at most one part in kMemoryTolerance.
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

// The name of the worker in an error. If processes have several devices, it is the number of the process,
// because settings belong to processes; otherwise it is the rank.
std::string NameOf(const std::string& devices, const v1::Hello& worker, bool by_process) {
  uint32_t count = 1;
  if (!by_process) return absl::StrCat("rank ", worker.rank());
  if (!absl::SimpleAtoi(devices, &count) || count == 0) count = 1;
  return absl::StrCat("process ", worker.rank() / count);
}

// The rule that an error states: the setting must have the value of rank 0 (or process 0). Only an error for
// the log has the value itself.
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
  // The device's text begins with the number of the device or of the threads, which may differ between ranks.
  // So the number is dropped, and "thread" becomes "threads".
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

// ---- Which process this is ----

namespace {

// The environment variables of a launcher. Each list has alternatives; the first variable that is set counts.
// MASTER_PORT is not used, because torchrun's own store may listen at that port.
struct Launcher {
  const char* name;
  std::vector<const char*> rank;
  std::vector<const char*> ranks;
  std::vector<const char*> local_rank;
  std::vector<const char*> leader;
  bool leader_is_node_list;
};

const std::vector<Launcher>& Launchers() {
  static const auto* const launchers = new std::vector<Launcher>{
      {"torchrun", {"RANK"}, {"WORLD_SIZE"}, {"LOCAL_RANK"}, {"MASTER_ADDR"}, false},
      {"slurm",
       {"SLURM_PROCID"},
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
       {"SLURM_LOCALID"},
       {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"},
       true},
      {"lws", {"LWS_WORKER_INDEX"}, {"LWS_GROUP_SIZE"}, {}, {"LWS_LEADER_ADDRESS"}, false},
      {"jobset", {"JOB_COMPLETION_INDEX"}, {}, {}, {}, false},
  };
  return *launchers;
}

// A value and the name of the flag or variable that set it.
struct Number {
  int value = 0;
  std::string name;
};

using MaybeNumber = std::optional<Number>;

// The first of the variables that is set; null if none is.
const char* FirstSet(const std::vector<const char*>& names, const Environment& environment) {
  for (const char* name : names) {
    if (environment.count(name) != 0) return name;
  }
  return nullptr;
}

absl::StatusOr<MaybeNumber> ReadNumber(const std::vector<const char*>& names, const Environment& environment,
                                       int least, int most) {
  const char* const name = FirstSet(names, environment);
  if (name == nullptr) return MaybeNumber();
  const std::string& text = environment.at(name);
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return errors::FieldError(name, absl::StrCat("be a whole number in [", least, ", ", most, "]"), text);
  }
  return MaybeNumber(Number{value, name});
}

// The value of a flag, or of a variable if the flag is not given. If both are given, they must be equal.
absl::StatusOr<MaybeNumber> Agreed(const char* flag, std::optional<int> given, MaybeNumber variable) {
  if (!given.has_value()) return variable;
  if (variable.has_value() && variable->value != *given) {
    return errors::FieldError(flag, absl::StrCat("agree with ", variable->name, ", ", variable->value),
                              *given);
  }
  return MaybeNumber(Number{*given, flag});
}

absl::Status Missing(const char* flag, const char* what, const Launcher* launcher,
                     const std::vector<const char*>& names) {
  std::string rule = "be given";
  if (launcher != nullptr && !names.empty()) {
    rule =
        absl::StrCat("be given, or ", absl::StrJoin(names, " or "), " be set, as ", launcher->name, " does");
  }
  return errors::FieldError(flag, absl::StrCat(rule, ": ", what), "nothing");
}

absl::StatusOr<const Launcher*> FindLauncher(const std::string& name, const Environment& environment) {
  if (name == "none") return nullptr;
  const Launcher* found = nullptr;
  for (const Launcher& launcher : Launchers()) {
    if (name == launcher.name) return &launcher;
    if (name != "auto" || FirstSet(launcher.rank, environment) == nullptr) continue;
    // torchrun may run inside a job of Slurm or a pod. Then torchrun's variables count, because they are more
    // specific.
    if (found != nullptr && absl::string_view(found->name) != "torchrun") {
      return errors::FieldError(
          "launcher", absl::StrCat("say which of ", found->name, " and ", launcher.name, " is meant"), name);
    }
    if (found == nullptr) found = &launcher;
  }
  if (name == "auto") return found;
  return errors::FieldError("launcher", "be none, auto, torchrun, slurm, lws or jobset", name);
}

// The host in "host:port" or "host". A colon within the brackets of an IPv6 address begins no port.
std::string HostOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  const bool has_port =
      colon != absl::string_view::npos && address.find(']', colon) == absl::string_view::npos;
  return std::string(has_port ? address.substr(0, colon) : address);
}

bool HasPort(absl::string_view address) { return HostOf(address).size() != address.size(); }

absl::StatusOr<std::string> LeaderOf(const LaunchFlags& flags, const Launcher* launcher,
                                     const Environment& environment) {
  const std::vector<const char*> names = launcher == nullptr ? std::vector<const char*>() : launcher->leader;
  const char* const name = FirstSet(names, environment);
  std::string host;
  if (name != nullptr) {
    const std::string& text = environment.at(name);
    host = launcher->leader_is_node_list ? FirstHost(text) : text;
    if (host.empty()) return errors::FieldError(name, "name the host of the first rank", text);
  }
  if (flags.leader.empty() && host.empty()) {
    return Missing("leader", "where rank 0 is reached, host:port", launcher, names);
  }
  // The flag and the variable are not compared: they may name the same host in different ways.
  const std::string leader = flags.leader.empty() ? host : flags.leader;
  return HasPort(leader) ? leader : absl::StrCat(leader, ":", flags.port);
}

}  // namespace

std::string FirstHost(const std::string& node_list) {
  std::string host;
  size_t i = 0;
  while (i < node_list.size() && node_list[i] != ',') {
    if (node_list[i] != '[') {
      host += node_list[i++];
      continue;
    }
    const size_t end = node_list.find(']', i);
    if (end == std::string::npos) return "";
    const std::string range = node_list.substr(i + 1, end - i - 1);
    host += range.substr(0, range.find_first_of("-,"));
    i = end + 1;
  }
  return host;
}

absl::StatusOr<Launch> ReadLaunch(const LaunchFlags& flags, const Environment& environment) {
  LOSSD_TRY(const Launcher* const launcher, FindLauncher(flags.launcher, environment));
  const Launcher none = {"none", {}, {}, {}, {}, false};
  const Launcher& variables = launcher == nullptr ? none : *launcher;

  auto ranks = ReadNumber(variables.ranks, environment, 1, kMostRanks);
  if (ranks.ok()) ranks = Agreed("ranks", flags.ranks, *ranks);
  if (!ranks.ok()) return ranks.status();
  if (ranks->has_value() && ((*ranks)->value < 1 || (*ranks)->value > kMostRanks)) {
    return errors::FieldError("ranks", absl::StrCat("be in [1, ", kMostRanks, "]"), (*ranks)->value);
  }
  auto rank = ReadNumber(variables.rank, environment, 0, kMostRanks - 1);
  if (rank.ok()) rank = Agreed("rank", flags.rank, *rank);
  if (!rank.ok()) return rank.status();
  if (!ranks->has_value() && !rank->has_value() && launcher == nullptr) return Launch();  // one process
  if (!ranks->has_value()) return Missing("ranks", "how many processes there are", launcher, variables.ranks);
  Launch launch;
  launch.ranks = (*ranks)->value;
  if (!rank->has_value() && launch.ranks > 1) {
    return Missing("rank", "which of the processes this is", launcher, variables.rank);
  }
  launch.rank = rank->has_value() ? (*rank)->value : 0;
  if (launch.rank < 0 || launch.rank >= launch.ranks) {
    return errors::FieldError(
        (*rank)->name, absl::StrCat("be in [0, ", launch.ranks, "), by ", (*ranks)->name), launch.rank);
  }
  if (launch.ranks == 1) return launch;
  LOSSD_TRY(auto local, ReadNumber(variables.local_rank, environment, 0, kMostRanks - 1));
  if (local.has_value()) launch.local_rank = local->value;
  LOSSD_TRY(launch.leader, LeaderOf(flags, launcher, environment));
  return launch;
}

}  // namespace lossd::ranks
