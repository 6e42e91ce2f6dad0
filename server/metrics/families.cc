// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/families.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace lossd::metrics {
namespace {

// Fields of /proc/self/stat counted from the one after the command name (proc(5), where it is field 3).
constexpr size_t kUserTicks = 14 - 3;
constexpr size_t kSystemTicks = 15 - 3;
constexpr size_t kStartTicks = 22 - 3;
constexpr size_t kVirtualBytes = 23 - 3;
constexpr size_t kResidentPages = 24 - 3;

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

double Number(absl::string_view text) {
  double value = 0.0;
  return absl::SimpleAtod(text, &value) ? value : 0.0;
}

double BootTimeSeconds() {
  const std::string stat = ReadFile("/proc/stat");
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    if (line.substr(0, 6) == "btime ") return Number(line.substr(6));
  }
  return 0.0;
}

int64_t CountOpenFiles() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return 0;
  return std::distance(entries, std::filesystem::directory_iterator()) - 1;  // less the listing's own
}

}  // namespace

std::optional<ProcessStats> ReadProcessStats() {
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(')');  // the command name may hold anything, spaces included
  if (name_end == std::string::npos || name_end + 2 > stat.size()) return std::nullopt;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(stat).substr(name_end + 2), ' ');
  if (fields.size() <= kResidentPages) return std::nullopt;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  ProcessStats stats;
  stats.cpu_seconds = (Number(fields[kUserTicks]) + Number(fields[kSystemTicks])) / ticks;
  stats.start_time_seconds = BootTimeSeconds() + Number(fields[kStartTicks]) / ticks;
  stats.virtual_bytes = static_cast<int64_t>(Number(fields[kVirtualBytes]));
  stats.resident_bytes = static_cast<int64_t>(Number(fields[kResidentPages])) * sysconf(_SC_PAGESIZE);
  stats.open_fds = CountOpenFiles();
  return stats;
}

std::vector<prometheus::MetricFamily> CollectProcess() {
  const std::optional<ProcessStats> stats = ReadProcessStats();
  if (!stats.has_value()) return {};
  std::vector<prometheus::MetricFamily> families;
  families.push_back(Single("process_cpu_seconds_total", "User and system CPU time spent by the process.",
                            prometheus::MetricType::Counter, stats->cpu_seconds));
  families.push_back(Gauge("process_start_time_seconds",
                           "When the process started, in seconds since the epoch.",
                           stats->start_time_seconds));
  families.push_back(Gauge("process_virtual_memory_bytes", "Virtual memory of the process.",
                           static_cast<double>(stats->virtual_bytes)));
  families.push_back(Gauge("process_resident_memory_bytes", "Resident memory of the process.",
                           static_cast<double>(stats->resident_bytes)));
  families.push_back(
      Gauge("process_open_fds", "Open file descriptors.", static_cast<double>(stats->open_fds)));
  return families;
}

void AddSharedMemoryFamilies(const std::vector<SharedMemoryUse>& uses,
                             std::vector<prometheus::MetricFamily>* families) {
  const auto add = [&](const char* name, const char* help, int64_t SharedMemoryUse::*value) {
    prometheus::MetricFamily family = MakeFamily(name, help, prometheus::MetricType::Gauge);
    for (const SharedMemoryUse& use : uses)
      AddSample(&family, {{"device", use.device}}, static_cast<double>(use.*value));
    families->push_back(std::move(family));
  };
  add("lossd_region_bytes", "Memory that clients of the host share with the server, by device.",
      &SharedMemoryUse::used_bytes);
  add("lossd_region_limit_bytes", "What that may be, by device.", &SharedMemoryUse::limit_bytes);
}

}  // namespace lossd::metrics
