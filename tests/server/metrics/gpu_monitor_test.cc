// SPDX-License-Identifier: Apache-2.0
// The monitor on a management library of the tests' own.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <atomic>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics::gpu_monitor_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kUuid[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";
constexpr absl::Duration kLimit = absl::Minutes(2);

class GpuMonitorTest : public ::testing::Test {
 protected:
  GpuMonitorTest() : library_(dlopen(LOSSD_FAKE_NVML, RTLD_NOW)) {
    EXPECT_NE(library_, nullptr) << dlerror();
    Function<void(int)>("fake_nvml_result")(0);
    Function<void()>("fake_nvml_no_events")();
  }
  ~GpuMonitorTest() override { dlclose(library_); }

  template <typename Signature>
  Signature* Function(const char* name) {
    return reinterpret_cast<Signature*>(dlsym(library_, name));
  }
  void Set(const char* name, unsigned long long value) {
    Function<void(const char*, unsigned long long)>("fake_nvml_set")(name, value);
  }

  absl::StatusOr<std::unique_ptr<GpuMonitor>> Start(const std::string& uuid = kUuid,
                                                    const std::string& library = LOSSD_FAKE_NVML) {
    return GpuMonitor::Start({.library = library,
                              .uuid = uuid,
                              .interval = absl::Milliseconds(20),
                              .on_xid = [this](uint64_t xid) { last_xid_ = xid; },
                              .on_lost =
                                  [this](const absl::Status& status) {
                                    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
                                    ++losses_;
                                  },
                              .on_shared = [this](unsigned processes) { shared_ += processes; }});
  }
  static std::string Text(const GpuMonitor& monitor) {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, monitor.Collect());
    return out.str();
  }
  // "name{gpu=...} value"; `label`: one more, as 'kind="corrected"'.
  static std::string Line(const std::string& name, const std::string& value, const std::string& label = "") {
    return absl::StrCat("\n", name, "{gpu=\"", kUuid, "\"", label.empty() ? "" : ",", label, "} ", value);
  }
  static void ExpectBecomes(const GpuMonitor& monitor, const std::string& line) {
    const absl::Time limit = absl::Now() + kLimit;
    while (Text(monitor).find(line) == std::string::npos && absl::Now() < limit)
      absl::SleepFor(absl::Milliseconds(5));
    EXPECT_THAT(Text(monitor), HasSubstr(line));
  }

  void* const library_;
  std::atomic<uint64_t> last_xid_{0};
  std::atomic<int> losses_{0};
  std::atomic<unsigned> shared_{0};
};

TEST_F(GpuMonitorTest, WithoutTheLibraryOrTheGpu) {
  EXPECT_EQ(Start(kUuid, "/none/libnvidia-ml.so.1").status().code(), absl::StatusCode::kUnavailable);
  const absl::Status other = Start("GPU-other").status();
  EXPECT_EQ(other.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(other.message()),
              HasSubstr("nvmlDeviceGetHandleByUUID failed: Not Found (GPU-other)"));
}

TEST_F(GpuMonitorTest, Figures) {
  Set("power", 350'500);
  Set("temperature", 61);
  const auto monitor = Start();
  ASSERT_TRUE(monitor.ok()) << monitor.status();
  std::string text = Text(**monitor);
  EXPECT_THAT(text, HasSubstr(Line("lossd_gpu_power_watts", "350.5\n")));
  EXPECT_THAT(text, HasSubstr(Line("lossd_gpu_temperature_celsius", "61\n")));
  EXPECT_THAT(text, Not(HasSubstr("lossd_gpu_ecc_errors_total"))) << "this GPU reports none";
  EXPECT_THAT(text, HasSubstr(Line("lossd_gpu_last_xid", "0\n")));
  Set("utilization", 87);
  Set("memory_utilization", 40);
  Set("memory_used", 250);
  Set("corrected", 3);
  Set("uncorrected", 1);
  Set("throttled", 0x24);
  for (const std::string& line :
       {Line("lossd_gpu_utilization_ratio", "0.87"), Line("lossd_gpu_memory_utilization_ratio", "0.4"),
        Line("lossd_gpu_memory_used_bytes", "250\n"), Line("lossd_gpu_memory_total_bytes", "1000\n"),
        Line("lossd_gpu_ecc_errors_total", "3\n", "kind=\"corrected\""),
        Line("lossd_gpu_ecc_errors_total", "1\n", "kind=\"uncorrected\""),
        Line("lossd_gpu_throttled", "1\n", "reason=\"software_power_cap\""),
        Line("lossd_gpu_throttled", "1\n", "reason=\"software_thermal_slowdown\""),
        Line("lossd_gpu_throttled", "0\n", "reason=\"hardware_slowdown\"")}) {
    ExpectBecomes(**monitor, line);
  }
}

// Prometheus wants a family once, however many GPUs have samples in it.
TEST_F(GpuMonitorTest, FamiliesOfSeveralGpusAreOne) {
  const auto monitor = Start();
  ASSERT_TRUE(monitor.ok());
  std::vector<prometheus::MetricFamily> families = {Gauge("lossd_gpu_last_xid", "Another's.", 7)};
  AddFamilies((*monitor)->Collect(), 1, &families);
  const size_t count = families.size();
  EXPECT_EQ(count, (*monitor)->Collect().size() + 1) << "the first one was left alone";
  AddFamilies((*monitor)->Collect(), 1, &families);
  ASSERT_EQ(families.size(), count);
  for (size_t i = 1; i < count; ++i) {
    EXPECT_EQ(families[i].metric.size(), 2 * (*monitor)->Collect()[i - 1].metric.size()) << families[i].name;
  }
}

TEST_F(GpuMonitorTest, Events) {
  const auto monitor = Start();
  ASSERT_TRUE(monitor.ok());
  Function<void(unsigned long long)>("fake_nvml_event")(31);
  ExpectBecomes(**monitor, Line("lossd_gpu_xid_errors_total", "1\n"));
  Function<void(unsigned long long)>("fake_nvml_event")(43);
  ExpectBecomes(**monitor, Line("lossd_gpu_last_xid", "43\n"));
  ExpectBecomes(**monitor, Line("lossd_gpu_xid_errors_total", "2\n"));
  const absl::Time limit = absl::Now() + kLimit;
  while (last_xid_ != 43 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(last_xid_, 43u);
  EXPECT_EQ(losses_, 0);
}

// Each event of no interest would be a round of the thread: 20 ms apart there are 50 of them in a second.
TEST_F(GpuMonitorTest, EventsThatSayNothingDoNotKeepItBusy) {
  const auto monitor = Start();
  ASSERT_TRUE(monitor.ok());
  Function<void(unsigned long long)>("fake_nvml_event")(0);
  absl::SleepFor(absl::Milliseconds(500));
  const auto rounds = Function<unsigned long long(const char*)>("fake_nvml_get")("idle_events");
  EXPECT_GT(rounds, 0u);
  EXPECT_LT(rounds, 100u);
  // With some drivers a wait keeps a core busy until it ends.
  EXPECT_EQ(Function<unsigned long long(const char*)>("fake_nvml_get")("waits"), 0u);
}

TEST_F(GpuMonitorTest, OtherProgramsOnTheGpuAreToldOfOnce) {
  Set("processes", 1);
  const auto monitor = Start();
  ASSERT_TRUE(monitor.ok());
  EXPECT_THAT(Text(**monitor), HasSubstr(Line("lossd_gpu_processes", "1\n")));
  EXPECT_EQ(shared_, 0u) << "the server alone";
  Set("processes", 3);
  ExpectBecomes(**monitor, Line("lossd_gpu_processes", "3\n"));
  Set("processes", 2);
  ExpectBecomes(**monitor, Line("lossd_gpu_processes", "2\n"));
  EXPECT_EQ(shared_, 3u);
}

TEST_F(GpuMonitorTest, ALostGpuIsReportedOnce) {
  Set("power", 1000);
  for (const bool by_event : {false, true}) {
    Function<void(int)>("fake_nvml_result")(0);
    losses_ = 0;
    const auto monitor = Start();
    ASSERT_TRUE(monitor.ok());
    EXPECT_THAT(Text(**monitor), HasSubstr(Line("lossd_gpu_power_watts", "1")));
    if (by_event) {
      Function<void(unsigned long long)>("fake_nvml_event")(79);
    } else {
      Function<void(int)>("fake_nvml_result")(15);
    }
    const absl::Time limit = absl::Now() + kLimit;
    while (Text(**monitor).find("lossd_gpu_power_watts") != std::string::npos && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_THAT(Text(**monitor), Not(HasSubstr("lossd_gpu_power_watts"))) << "no stale figures";
    EXPECT_EQ(losses_, 1);
  }
}

}  // namespace
}  // namespace lossd::metrics::gpu_monitor_test
