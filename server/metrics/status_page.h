// SPDX-License-Identifier: Apache-2.0
// What people see of a server in a browser. History keeps samples of the last minutes for its charts, and
// StatusPage renders the pages out of them: / shows what the server holds and does, /heads/NAME shows one
// head. CheckpointLists reads which checkpoints a head has.
//
// All functions and classes are thread-safe.
#ifndef LOSSD_SERVER_METRICS_STATUS_PAGE_H_
#define LOSSD_SERVER_METRICS_STATUS_PAGE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/head/checkpoint_store.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics {

// The samples behind the charts of the status page. History holds what the server and each head did in the
// last 15 minutes, a sample every two seconds. Sampler takes the samples on a thread of its own.
//
// Both classes are thread-safe.

// Series of the server. Rates are of the time of Sampler::kRateWindow, quantiles of Sampler::kQuantileWindow;
// NaN: there was nothing to measure. The order is that of their names (SeriesName).
enum class Series : uint8_t {
  kRows,        // per second
  kBytesIn,     // tensor bytes of slices, per second
  kBytesOut,    // the same
  kErrors,      // calls that ended with an error, per second
  kDeviceBusy,  // share of the time, in [0, 1]
  kQueuedSlices,
  kQueuedRows,
  kOpenStreams,
  kStagingBytes,   // in use
  kPlannedBytes,   // of all purposes
  kResidentBytes,  // of the process
  // Quantiles 0.5, 0.95 and 0.99 of the time, in seconds, of a microbatch and of its slices' phases: three
  // series each, in this order.
  kMicrobatch,
  kReceive = kMicrobatch + 3,
  kQueue = kReceive + 3,
  kCompute = kQueue + 3,
  kSend = kCompute + 3,
  kEnd = kSend + 3,
};
inline constexpr size_t kSeries = static_cast<size_t>(Series::kEnd);
absl::string_view SeriesName(size_t series);  // e.g. "rows_per_second"

// Series of a head: its rate, and what the last step said that was closed since the sample before. NaN: no
// step was, or the head has none.
enum class HeadSeries : uint8_t { kRows, kLoss, kGradientNorm, kLearningRate };
inline constexpr size_t kHeadSeries = 4;
absl::string_view HeadSeriesName(size_t series);

using Values = std::array<float, kSeries>;
using HeadValues = std::array<float, kHeadSeries>;

// The last kSamples samples of the server and of each head.
//
// Memory: the ring has kSamples samples. Each sample has the values of all series of the server and of at
// most kMostHeads heads, four bytes a value: 60 KiB for the server, and 7 KiB for each head. The series of a
// head end with the head.
class History {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr size_t kSamples = 450;
  static constexpr size_t kMostHeads = 64;

  // Adds a sample of the time `time`. The series of heads that are not in `heads` end. If there are more than
  // kMostHeads heads, the heads that came last have no series.
  void Add(absl::Time time, const Values& values, const std::map<std::string, HeadValues>& heads)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The last sample; nullopt: there is none yet.
  std::optional<Values> Last() const ABSL_LOCKS_EXCLUDED(mutex_);

  // As /history.json answers (docs/watching.md): the samples with numbers above `after`; of the head `head`
  // only, if one is named. `incarnation` is of the server.
  std::string Json(uint64_t incarnation, uint64_t after, absl::string_view head) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Of a head; by slot, as samples_.
  using Track = std::vector<HeadValues>;
  struct Sample {
    absl::Time time;
    Values values;
  };

  static size_t SlotOf(uint64_t number) { return number % kSamples; }

  mutable absl::Mutex mutex_;
  std::vector<Sample> samples_ ABSL_GUARDED_BY(mutex_);  // by slot
  std::map<std::string, Track, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;  // number of the last sample; the first has 1
};

// Takes the samples of a History: what the server did since the samples before. It takes a sample once every
// History::kInterval, whether a page is open or not. So all viewers see the same rates, and the first viewer
// sees them at once. The sampler has a thread of its own from Start on, which ends with the object.
class Sampler {
 public:
  // Rates are means over so long, so that chunks that take seconds do not look like pauses.
  static constexpr absl::Duration kRateWindow = absl::Seconds(10);
  static constexpr absl::Duration kQuantileWindow = absl::Seconds(30);

  // All outlive the sampler.
  Sampler(const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics, History* history);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // Takes a sample now, and from now on the thread does. Called at most once.
  void Start();
  // Takes one sample, as of `now`, no earlier than the one before.
  void Sample(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Counters at one moment.
  struct Reading {
    absl::Time time;
    Totals totals;
    absl::Duration device_busy;
    std::map<std::string, int64_t> rows;            // by head
    std::map<std::string, absl::Time> last_closed;  // by head: when its last step was closed
  };
  struct LatencyReading {
    absl::Time time;
    Latencies latencies;
  };

  void Run() ABSL_LOCKS_EXCLUDED(stop_mutex_);
  // Whether `last`, the last step of the head, was closed since the sample before. It may be null.
  bool IsNews(const std::string& head, const HeadMetrics::Step* last) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Values ServerValues(const Reading& now, const engine::EngineStats& stats) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  Metrics* const metrics_;
  History* const history_;

  absl::Mutex mutex_;
  // The readings of the windows, the oldest first; a window begins with the first reading.
  std::deque<Reading> readings_ ABSL_GUARDED_BY(mutex_);
  std::deque<LatencyReading> latencies_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex stop_mutex_;
  bool stop_ ABSL_GUARDED_BY(stop_mutex_) = false;
  std::thread thread_;
};

// Text safe between tags and inside quoted attributes.
std::string EscapeHtml(absl::string_view text);

// "0 B", "512 B", "1.5 KiB", "3.2 GiB".
std::string FormatBytes(double bytes);
// The two largest units of a time since a start: "3 d 4 h", "4 h 12 min", "12 min 5 s".
std::string FormatUptime(absl::Duration uptime);
// "0", "35 us", "1.2 ms", "3.4 s"; "-" for NaN.
std::string FormatSeconds(double seconds);
// 1234567 as "1,234,567".
std::string Grouped(int64_t number);
// Three or four digits: "0.0123", "12.3", "1.23e-05".
std::string FormatNumber(double number);
// The time of day in UTC, with the date if it is not that of `now`.
std::string FormatTime(absl::Time time, absl::Time now);

// A row of a table out of HTML, and a table with a head that can be scrolled sideways.
std::string TableRow(const std::vector<std::string>& cells, absl::string_view tag = "td");
std::string Table(const std::vector<std::string>& header, absl::string_view rows);
// A figure with its name, both text.
std::string Fact(absl::string_view name, absl::string_view value);
// A bar from 0 to `most`.
std::string Bar(double value, double most);
// A place for a chart that the script of the page draws: `kind` is a name in page.js.
std::string Chart(absl::string_view kind, absl::string_view title);

// A whole document: `body` is HTML that the script renews every two seconds. `title` and `head` are text;
// `head` is the head that the page is about, empty for none.
std::string Document(absl::string_view title, absl::string_view head, absl::string_view body);

// The checkpoints of heads, as their pages list them. The object has a thread that reads the directory,
// because a disk may be slow and the thread that answers HTTP may not wait for it.
//
// What is read is bounded: names and times of at most kMostFolders folders, and the manifests of the kShown
// newest of them. The list of a head is read when a page asks for it, at most once in kFresh.
class CheckpointLists {
 public:
  static constexpr size_t kShown = 20;
  static constexpr size_t kMostFolders = 10'000;
  static constexpr size_t kMostHeads = 200;  // that are remembered
  static constexpr absl::Duration kFresh = absl::Seconds(2);
  static constexpr absl::Duration kOld = absl::Seconds(10);
  static constexpr absl::Duration kPatience = absl::Milliseconds(50);

  // Empty `directory`: the server has none.
  explicit CheckpointLists(std::string directory);
  ~CheckpointLists();
  CheckpointLists(const CheckpointLists&) = delete;
  CheckpointLists& operator=(const CheckpointLists&) = delete;

  // What was read last. A list older than kFresh is read anew, for the next look; for a list older than kOld,
  // or none, this look waits, for at most kPatience. nullopt: none was read yet.
  std::optional<absl::StatusOr<head::NewestCheckpoints>> Of(absl::string_view head)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::optional<absl::StatusOr<head::NewestCheckpoints>> list;
    absl::Time read_at = absl::InfinitePast();
    absl::Time asked_at = absl::InfinitePast();
    bool waits = false;  // to be read
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !queue_.empty(); }

  const std::string directory_;
  absl::Mutex mutex_;
  std::map<std::string, Entry, std::less<>> by_head_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

// What the pages say of the server, and where their checkpoints come from.
struct StatusPageOptions {
  std::string version;
  std::string grpc_address;
  absl::Time started;
  std::string collectives = {};            // that the devices of the server exchange by; empty: it has one
  CheckpointLists* checkpoints = nullptr;  // null: pages list none
};

// StatusPage renders the pages for people who look at a server: / shows what the server holds and does,
// /heads/NAME shows one head. CheckpointLists reads which checkpoints a head has. The functions before them
// write pieces of HTML, and numbers as people read them.
//
// A page is complete as the server sends it, so it can be read without scripts. In a browser, page/page.js
// draws the charts out of /history.json, and fetches the page again every two seconds to renew what has
// changed in it.
//
// Rendering takes no longer because of what happened before: tables have at most kMostRows rows.
//
// All functions and classes are thread-safe.

// Renders the pages.
class StatusPage {
 public:
  static constexpr size_t kMostRows = 100;
  static constexpr size_t kEventsShown = 12;  // the latest, on either page

  // All outlive the page.
  StatusPage(const StatusPageOptions& options, const engine::Engine* engine, const kernels::Backend* backend,
             Metrics* metrics, const History* history);

  // `trouble`: what keeps the server from work now, e.g. "draining"; "" if nothing does. Rates and latencies
  // are those of the last sample.
  std::string Render(absl::string_view trouble) const;
  // nullopt: there is no such head.
  std::optional<std::string> RenderHead(absl::string_view name) const;
  // The page that stands in place of the page of a head that does not exist.
  std::string RenderNoHead(absl::string_view name) const;

 private:
  std::string Summary(absl::string_view trouble) const;
  std::string HeadsTable() const;
  std::string MemoryTable() const;
  std::string LatencyTable() const;
  std::string EventsTable() const;

  const StatusPageOptions options_;
  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  Metrics* const metrics_;
  const History* const history_;
};

// Rows of events, the newest first; of one head, if one is named. `most` of them.
std::string EventRows(const EventLog& events, absl::string_view head, size_t most);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_STATUS_PAGE_H_
