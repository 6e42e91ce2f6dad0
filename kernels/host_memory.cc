// SPDX-License-Identifier: Apache-2.0
// Parses /proc and the files of control groups (host_memory.h).
#include "kernels/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

using Bound = HostMemory::Bound;

constexpr int64_t kNoLimit = int64_t{1} << 60;  // a limit above this means that there is no limit

std::string Human(int64_t bytes) { return errors::HumanBytes(static_cast<double>(bytes)); }

std::vector<std::string> Lines(const std::string& path) {
  constexpr size_t kMost = 10'000;
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; lines.size() < kMost && std::getline(file, line);) lines.push_back(std::move(line));
  return lines;
}

std::vector<absl::string_view> Words(absl::string_view line) {
  return absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
}

// The number that follows `name` in a file with a name and a number in each line.
std::optional<int64_t> Figure(const std::string& path, absl::string_view name) {
  for (const std::string& line : Lines(path)) {
    const std::vector<absl::string_view> words = Words(line);
    int64_t value = 0;
    if (words.size() >= 2 && words[0] == name && absl::SimpleAtoi(words[1], &value)) return value;
  }
  return std::nullopt;
}

std::optional<int64_t> FigureKib(const std::string& path, absl::string_view name) {
  const std::optional<int64_t> kib = Figure(path, name);
  if (!kib.has_value()) return std::nullopt;
  return *kib << 10;
}

// The number in a file that has only one number. Nullopt if the file has "max" instead, or does not exist.
std::optional<int64_t> OnlyFigure(const std::string& path) {
  const std::vector<std::string> lines = Lines(path);
  int64_t value = 0;
  if (lines.empty() || !absl::SimpleAtoi(lines[0], &value) || value >= kNoLimit) return std::nullopt;
  return value;
}

void TakeLess(const std::optional<Bound>& bound, std::optional<Bound>* least) {
  if (!bound.has_value()) return;
  if (!least->has_value() || bound->bytes < (*least)->bytes) *least = bound;
}

// ---- Control groups ----

// The names of the files in a control-group hierarchy, v1 or v2.
struct Hierarchy {
  std::vector<std::string> limits;
  std::string usage;
  // The names of the entries of memory.stat that are page cache; page cache counts as free.
  std::vector<std::string> reclaimable;
};

const Hierarchy& V1() {
  static const auto* const names = new Hierarchy{
      {"memory.limit_in_bytes"}, "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
  return *names;
}

const Hierarchy& V2() {
  static const auto* const names =
      new Hierarchy{{"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
  return *names;
}

std::optional<Bound> OfGroup(const std::string& folder, const std::string& group, const Hierarchy& names) {
  std::optional<int64_t> limit;
  for (const std::string& file : names.limits) {
    const std::optional<int64_t> bytes = OnlyFigure(absl::StrCat(folder, "/", file));
    if (bytes.has_value()) limit = std::min(limit.value_or(*bytes), *bytes);
  }
  const std::optional<int64_t> usage = OnlyFigure(absl::StrCat(folder, "/", names.usage));
  if (!limit.has_value() || !usage.has_value()) return std::nullopt;
  int64_t used = *usage;
  for (const std::string& figure : names.reclaimable) {
    used -= Figure(absl::StrCat(folder, "/memory.stat"), figure).value_or(0);
  }
  used = std::max<int64_t>(used, 0);
  return Bound{*limit - used, absl::StrCat("the control group ", group, " may have ", Human(*limit),
                                           " and uses ", Human(used))};
}

// The tightest bound of the group at `path` and its parent groups.
std::optional<Bound> OfGroups(const std::string& mount, std::string path, const Hierarchy& names) {
  std::optional<Bound> least;
  while (true) {
    TakeLess(OfGroup(mount + path, path.empty() ? "/" : path, names), &least);
    if (path.empty()) return least;
    path.resize(path.rfind('/'));
  }
}

// Where a control-group hierarchy is mounted (`point`), and which group is the root of this mount (`group`).
struct Mount {
  std::string point;
  std::string group;
};

std::optional<Mount> FindMount(const std::string& root, absl::string_view type,
                               absl::string_view controller) {
  for (const std::string& line : Lines(root + "/proc/self/mountinfo")) {
    const std::vector<absl::string_view> words =
        Words(line);  // a line is "id parent device group point options ... - type source super_options"
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 4 || dash[1] != type) continue;
    const std::vector<absl::string_view> options = absl::StrSplit(dash[3], ',');
    if (!controller.empty() && std::find(options.begin(), options.end(), controller) == options.end())
      continue;
    return Mount{absl::StrCat(root, words[4]), std::string(words[3])};
  }
  return std::nullopt;
}

std::optional<Bound> OfHierarchy(const std::string& root, absl::string_view type,
                                 absl::string_view controller, absl::string_view group,
                                 const Hierarchy& names) {
  const std::optional<Mount> mount = FindMount(root, type, controller);
  if (!mount.has_value()) return std::nullopt;
  // In a container the mount may begin at the container's group, but the group's path is the path on the
  // host. So the container's group is removed from the path.
  absl::string_view path = group;
  if (mount->group != "/" && !absl::ConsumePrefix(&path, mount->group)) path = "";
  path = absl::StripSuffix(path, "/");
  if (!absl::StartsWith(path, "/") || absl::StrContains(path, "..")) path = "";
  return OfGroups(mount->point, std::string(path), names);
}

std::optional<Bound> OfControlGroups(const std::string& root) {
  std::optional<Bound> least;
  for (const std::string& line : Lines(root + "/proc/self/cgroup")) {  // a line is "number:controllers:path"
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[0] == "0" && parts[1].empty())
      TakeLess(OfHierarchy(root, "cgroup2", "", parts[2], V2()), &least);
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (std::find(controllers.begin(), controllers.end(), "memory") == controllers.end()) continue;
    TakeLess(OfHierarchy(root, "cgroup", "memory", parts[2], V1()), &least);
  }
  return least;
}

// ---- Limits of the process ----

std::optional<Bound> OfProcessLimit(const std::string& root, absl::string_view limit,
                                    absl::string_view field) {
  const std::optional<int64_t> used = FigureKib(root + "/proc/self/status", absl::StrCat(field, ":"));
  if (!used.has_value()) return std::nullopt;
  // A line is "name soft_limit hard_limit unit".
  for (const std::string& line : Lines(root + "/proc/self/limits")) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, limit)) continue;
    const std::vector<absl::string_view> words = Words(rest);
    int64_t bytes = 0;
    if (words.empty() || !absl::SimpleAtoi(words[0], &bytes)) continue;  // unlimited
    return Bound{bytes - *used, absl::StrCat("\"", limit, "\" of the process is ", Human(bytes), " and ",
                                             Human(*used), " are in use")};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Bound> HostMemory::Available() const {
  std::optional<Bound> least;
  if (const auto bytes = FigureKib(root_ + "/proc/meminfo", "MemAvailable:"); bytes.has_value()) {
    least = Bound{*bytes, absl::StrCat("the system has ", Human(*bytes), " available")};
  }
  TakeLess(OfControlGroups(root_), &least);
  TakeLess(OfProcessLimit(root_, "Max address space", "VmSize"), &least);
  TakeLess(OfProcessLimit(root_, "Max data size", "VmData"), &least);
  return least;
}

int64_t HostMemory::ResidentBytes() const {
  return FigureKib(root_ + "/proc/self/status", "RssAnon:").value_or(0);
}

}  // namespace lossd::kernels
