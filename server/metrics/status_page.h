// SPDX-License-Identifier: Apache-2.0
// The status pages that the server shows in a browser. StatusPage renders the pages: / shows what the server
// holds and does, /heads/NAME shows one head. History keeps samples of the last minutes for the charts of the
// pages, and Sampler takes the samples. CheckpointLists reads the list of a head's checkpoints from the disk.
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

// The samples for the charts of the status page. History holds samples of the server and of each head, one
// every two seconds, for the last 15 minutes. Sampler takes the samples on a thread of its own.
//
// Both classes are thread-safe.

// The series of the server. Rates are means over Sampler::kRateWindow; quantiles are over
// Sampler::kQuantileWindow. NaN: there was nothing to measure. SeriesName has the names in the same order.
enum class Series : uint8_t {
  kRows,        // per second
  kBytesIn,     // tensor bytes of slices, per second
  kBytesOut,    // tensor bytes of results, per second
  kErrors,      // calls that ended with an error, per second
  kDeviceBusy,  // share of the time, in [0, 1]
  kQueuedSlices,
  kQueuedRows,
  kOpenStreams,
  kStagingBytes,   // in use
  kPlannedBytes,   // planned for all purposes
  kResidentBytes,  // of the process
  // Quantiles of the latency in seconds, of microbatches and of each phase of slices. Each has three series:
  // the quantiles 0.5, 0.95 and 0.99.
  kMicrobatch,
  kReceive = kMicrobatch + 3,
  kQueue = kReceive + 3,
  kCompute = kQueue + 3,
  kSend = kCompute + 3,
  kEnd = kSend + 3,
};
inline constexpr size_t kSeries = static_cast<size_t>(Series::kEnd);
absl::string_view SeriesName(size_t series);  // e.g. "rows_per_second"

// The series of a head: rows per second, and three values of the last step closed since the previous sample.
// NaN: no step was closed since then, or the step lacks the value.
enum class HeadSeries : uint8_t { kRows, kLoss, kGradientNorm, kLearningRate };
inline constexpr size_t kHeadSeries = 4;
absl::string_view HeadSeriesName(size_t series);

using Values = std::array<float, kSeries>;
using HeadValues = std::array<float, kHeadSeries>;

// The last kSamples samples of the server and of each head.
//
// Memory: the ring has kSamples samples. Each sample has the values of all series of the server and of at
// most kMostHeads heads, four bytes a value: 60 KiB for the server, and 7 KiB for each head. The series of a
// head end when the head is deleted.
class History {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr size_t kSamples = 450;
  static constexpr size_t kMostHeads = 64;

  // Adds a sample of the time `time`. The series of heads that are not in `heads` end. If there are more than
  // kMostHeads heads, the newest heads have no series.
  void Add(absl::Time time, const Values& values, const std::map<std::string, HeadValues>& heads)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The last sample; nullopt: there is none yet.
  std::optional<Values> Last() const ABSL_LOCKS_EXCLUDED(mutex_);

  // The body of the answer to /history.json (docs/watching.md): the samples with numbers above `after`. If
  // `head` is not empty, the body has only the series of that head. `incarnation`: the number of the server
  // process.
  std::string Json(uint64_t incarnation, uint64_t after, absl::string_view head) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The values of one head, by slot like samples_.
  using Track = std::vector<HeadValues>;
  struct Sample {
    absl::Time time;
    Values values;
  };

  static size_t SlotOf(uint64_t number) { return number % kSamples; }

  mutable absl::Mutex mutex_;
  std::vector<Sample> samples_ ABSL_GUARDED_BY(mutex_);  // by slot
  std::map<std::string, Track, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;  // the number of the last sample; the first one is 1
};

// Takes the samples of a History, one every History::kInterval, even if no page is open. So all viewers see
// the same rates, and the first viewer sees them at once. From Start on the sampler has a thread of its own,
// which ends with the object.
class Sampler {
 public:
  // The time over which rates are averaged. It is long, so that chunks that take seconds do not look like
  // pauses.
  static constexpr absl::Duration kRateWindow = absl::Seconds(10);
  static constexpr absl::Duration kQuantileWindow = absl::Seconds(30);

  // The arguments outlive the sampler.
  Sampler(const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics, History* history);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // Takes a sample now, and starts the thread of the sampler. Call at most once.
  void Start();
  // Takes one sample for the time `now`, which is not before the previous sample.
  void Sample(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The counters at one moment.
  struct Reading {
    absl::Time time;
    Totals totals;
    absl::Duration device_busy;
    std::map<std::string, int64_t> rows;            // by head
    std::map<std::string, absl::Time> last_closed;  // by head: the time when its last step was closed
  };
  struct LatencyReading {
    absl::Time time;
    Latencies latencies;
  };

  void Run() ABSL_LOCKS_EXCLUDED(stop_mutex_);
  // Whether `last`, the last step of the head or null, was closed since the previous sample.
  bool IsNews(const std::string& head, const HeadMetrics::Step* last) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Values ServerValues(const Reading& now, const engine::EngineStats& stats) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  Metrics* const metrics_;
  History* const history_;

  absl::Mutex mutex_;
  // The readings in the window of rates and in that of quantiles, the oldest first. A window begins at its
  // first reading.
  std::deque<Reading> readings_ ABSL_GUARDED_BY(mutex_);
  std::deque<LatencyReading> latencies_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex stop_mutex_;
  bool stop_ ABSL_GUARDED_BY(stop_mutex_) = false;
  std::thread thread_;
};

// Escapes text, so that it is safe between tags and inside quoted attributes.
std::string EscapeHtml(absl::string_view text);

// "0 B", "512 B", "1.5 KiB", "3.2 GiB".
std::string FormatBytes(double bytes);
// An uptime in its two largest units: "3 d 4 h", "4 h 12 min", "12 min 5 s".
std::string FormatUptime(absl::Duration uptime);
// "0", "35 us", "1.2 ms", "3.4 s"; "-" for NaN.
std::string FormatSeconds(double seconds);
// 1234567 as "1,234,567".
std::string Grouped(int64_t number);
// A number with three or four digits: "0.0123", "12.3", "1.23e-05".
std::string FormatNumber(double number);
// The time of day in UTC, with the date if it is not the date of `now`.
std::string FormatTime(absl::Time time, absl::Time now);

// TableRow makes a row of a table from cells of HTML. Table makes a table with a header, which can be
// scrolled sideways.
std::string TableRow(const std::vector<std::string>& cells, absl::string_view tag = "td");
std::string Table(const std::vector<std::string>& header, absl::string_view rows);
// A value with its name, both given as text.
std::string Fact(absl::string_view name, absl::string_view value);
// A bar from 0 to `most`.
std::string Bar(double value, double most);
// A placeholder for a chart, which the script of the page draws. `kind` is a name in page.js.
std::string Chart(absl::string_view kind, absl::string_view title);

// A whole HTML document. `body` is HTML, which the script renews every two seconds. `title` and `head` are
// text; `head` is the head that the page is about, empty for none.
std::string Document(absl::string_view title, absl::string_view head, absl::string_view body);

// Lists of the checkpoints of heads, for the heads' pages. A thread of the object reads the directory,
// because a disk may be slow and the thread that answers HTTP must not wait for it.
//
// Reading is bounded: the thread reads names and times of at most kMostFolders folders, and the manifests of
// the kShown newest folders. The list of a head is read when a page asks for it, at most once in kFresh.
class CheckpointLists {
 public:
  static constexpr size_t kShown = 20;
  static constexpr size_t kMostFolders = 10'000;
  static constexpr size_t kMostHeads = 200;  // heads whose lists are kept
  static constexpr absl::Duration kFresh = absl::Seconds(2);
  static constexpr absl::Duration kOld = absl::Seconds(10);
  static constexpr absl::Duration kPatience = absl::Milliseconds(50);

  // `directory` is empty if the server has no checkpoint directory.
  explicit CheckpointLists(std::string directory);
  ~CheckpointLists();
  CheckpointLists(const CheckpointLists&) = delete;
  CheckpointLists& operator=(const CheckpointLists&) = delete;

  // The last list that was read for a head. If the list is older than kFresh, the thread reads it again for
  // the next call. If the list is older than kOld, or missing, this call waits for the thread, for at most
  // kPatience. nullopt: no list has been read yet.
  std::optional<absl::StatusOr<head::NewestCheckpoints>> Of(absl::string_view head)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::optional<absl::StatusOr<head::NewestCheckpoints>> list;
    absl::Time read_at = absl::InfinitePast();
    absl::Time asked_at = absl::InfinitePast();
    bool waits = false;  // waits in queue_ to be read
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

// Texts about the server for the pages, and the source of their lists of checkpoints.
struct StatusPageOptions {
  std::string version;
  std::string grpc_address;
  absl::Time started;
  // The library by which the devices of the server exchange data; empty: the server has one device.
  std::string collectives = {};
  CheckpointLists* checkpoints = nullptr;  // null: pages list no checkpoints
};

// Renders the pages: / shows what the server holds and does, /heads/NAME shows one head.
//
// A page is complete as the server sends it, so it can be read without scripts. In a browser, page/page.js
// draws the charts from /history.json, and fetches the page again every two seconds to renew the parts that
// have changed.
//
// The time to render a page is bounded: tables have at most kMostRows rows.
//
// Thread-safe.

// Renders the pages.
class StatusPage {
 public:
  static constexpr size_t kMostRows = 100;
  static constexpr size_t kEventsShown = 12;  // the latest events, on both kinds of page

  // The arguments outlive the page.
  StatusPage(const StatusPageOptions& options, const engine::Engine* engine, const kernels::Backend* backend,
             Metrics* metrics, const History* history);

  // `trouble`: why the server does not work now, e.g. "draining"; empty if it works. Rates and latencies come
  // from the last sample.
  std::string Render(absl::string_view trouble) const;
  // The page of a head. nullopt: there is no such head.
  std::optional<std::string> RenderHead(absl::string_view name) const;
  // The page that is sent in place of the page of a head that does not exist.
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

// Table rows of the `most` newest events, the newest first. If `head` is not empty, only events of that head.
std::string EventRows(const EventLog& events, absl::string_view head, size_t most);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_STATUS_PAGE_H_
