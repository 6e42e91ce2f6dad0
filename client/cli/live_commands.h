// SPDX-License-Identifier: Apache-2.0
// The commands events, top, trace and watch, which options.h declares, and two classes that make their
// pictures without a terminal or a server, so that tests can call them. WatchHistory makes the picture of
// `lossctl watch` from samples of the server's metrics. TopHistory makes the picture of `lossctl top`.
//
// Both classes are thread-compatible; functions are pure and thread-safe.
#ifndef LOSSD_CLIENT_CLI_LIVE_COMMANDS_H_
#define LOSSD_CLIENT_CLI_LIVE_COMMANDS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/format.h"
#include "client/cli/http.h"
#include "client/cli/live.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/server.pb.h"

namespace lossd::cli {

// What one LiveView::Look of `lossctl watch` has found.
struct WatchSample {
  absl::Time time;
  absl::Status status;  // the fields below are valid if OK
  v1::ServerDescription server;
  std::vector<v1::HeadDescription> heads;
  double round_trip_seconds = 0;                     // the time of the call that fetched the heads
  std::optional<std::vector<MetricSample>> metrics;  // if the HTTP side of the server answered
  std::string why_no_metrics;                        // if it did not answer
};

// The samples of one `lossctl watch`, and the rates and losses that follow from them.
class WatchHistory {
 public:
  // Keeps the rates of the last `length` intervals between samples, and the losses of the last `length`
  // steps.
  explicit WatchHistory(size_t length = 200) : length_(length) {}

  void Add(WatchSample sample);

  // The picture. `server` is the server's address. Texts from the server are shown without control
  // characters.
  std::string Render(const std::string& server, const Frame& frame) const;
  // One line for logs and pipes.
  std::string Line() const;
  nlohmann::ordered_json Json() const;

  // Rows per second over the last interval, of all heads or of one head.
  double RowsPerSecond() const { return rows_per_second_.empty() ? 0 : rows_per_second_.back(); }
  double RowsPerSecond(const std::string& head) const;
  // Share of the last interval in which the device had work; nullopt without metrics.
  std::optional<double> DeviceShare() const;

 private:
  struct HeadHistory {
    double rows_per_second = 0;
    std::optional<double> device_share;
    std::optional<double> step;  // the step of the last entry of `losses`
    std::deque<double> losses;
    absl::Time active = absl::InfinitePast();  // the last time that it was seen to compute rows
  };
  struct Field;

  // Computes what has changed between the last two good samples.
  void AddRates();
  void AddLosses();
  // How much the sum of a metric's samples grew over the last interval; nullopt if it is not known. If
  // `label` is given, only samples with this value of it count.
  std::optional<double> Growth(const std::string& metric, const std::string& label = "",
                               const std::string& value = "") const;
  double Seconds() const;  // between the last two good samples
  std::vector<Field> Fields(const Frame& frame) const;
  std::string HeadsPicture(const Frame& frame, size_t lines) const;
  // The `count` busiest heads, in the server's order: those that computed rows most recently, then those with
  // the most rows.
  std::vector<const v1::HeadDescription*> Busiest(size_t count) const;
  Table HeadsTable(const Frame& frame, const std::vector<const v1::HeadDescription*>& heads,
                   size_t trend) const;
  std::string LatencyText() const;
  std::string TransferText() const;
  std::string ChunksText() const;  // by their gradients, over the last interval

  const size_t length_;
  std::optional<WatchSample> last_;      // the last sample, of any status
  std::optional<WatchSample> good_;      // the last sample with status OK
  std::optional<WatchSample> previous_;  // the sample with status OK before good_, of the same incarnation
  std::deque<double> rows_per_second_;
  std::deque<double> device_share_;
  std::map<std::string, HeadHistory> heads_;
};

// The names of the metrics that watch shows.
inline constexpr char kMicrobatchSeconds[] = "lossd_microbatch_seconds";
inline constexpr char kPayloadBytes[] = "lossd_payload_bytes_total";
inline constexpr char kChunks[] = "lossd_chunks_total";
inline constexpr char kGradientErrorSum[] = "lossd_gradient_error_ratio_sum";
inline constexpr char kGradientErrorCount[] = "lossd_gradient_error_ratio_count";
inline constexpr char kBusySeconds[] = "lossd_device_busy_seconds_total";
inline constexpr char kHeadDeviceSeconds[] = "lossd_head_device_seconds_total";
inline constexpr char kHeadLoss[] = "lossd_head_loss";
inline constexpr char kHeadStep[] = "lossd_head_step";
inline constexpr char kDeviceLost[] = "lossd_device_lost";
inline constexpr char kStagingBytes[] = "lossd_staging_bytes";
inline constexpr char kStagingUsedBytes[] = "lossd_staging_used_bytes";

// The sum of the samples of this name, and with this label value if one is given; nullopt if there are none.
std::optional<double> ValueOf(const std::vector<MetricSample>& metrics, const std::string& name,
                              const std::string& label = "", const std::string& value = "");

uint64_t QueuedSlices(const WatchSample& sample);

// What `lossctl top` shows: which clients take how many rows, bytes, memory and time of a server, from two
// answers of ListStreams.
//
// Thread-compatible.

// The value by which the lists are sorted; the largest comes first.
enum class TopOrder : uint8_t { kRows, kBytes, kStaging, kWait };

const std::map<std::string, TopOrder>& TopOrders();  // rows, bytes, staging, wait

class TopHistory {
 public:
  explicit TopHistory(TopOrder order) : order_(order) {}

  // Adds an answer of ListStreams. An error is shown together with the last good answer.
  void Add(absl::StatusOr<v1::ListStreamsResponse> answer);
  void set_order(TopOrder order) { order_ = order; }
  // Whether the picture has clients that have no stream and have done nothing for a minute. JSON always has
  // them.
  void set_all(bool all) { all_ = all; }
  bool all() const { return all_; }
  // Whether there is something to show: rates, which need two answers, or an error.
  bool ready() const { return previous_.has_value() || !status_.ok(); }

  // The picture. `server` is the server's address. Texts from the server are shown without control
  // characters.
  std::string Render(const std::string& server, const Frame& frame) const;
  nlohmann::ordered_json Json() const;

  // The rates of one client, over the time between the two answers.
  struct PeerRates {
    double rows_per_second = 0;
    double received_per_second = 0;
    double sent_per_second = 0;
    double waiting_slices = 0;  // the mean number of slices that wait for the device
  };
  PeerRates RatesOf(const v1::PeerDescription& peer) const;

 private:
  double Seconds() const;
  std::vector<v1::PeerDescription> Peers(bool all) const;  // in order
  std::vector<v1::StreamDescription> Streams() const;      // in order
  std::string Summary() const;
  std::string PeersPicture(const Frame& frame, size_t lines) const;
  std::string StreamsPicture(const Frame& frame, size_t lines) const;

  TopOrder order_;
  bool all_ = false;
  absl::Status status_;
  std::optional<v1::ListStreamsResponse> now_;
  std::optional<v1::ListStreamsResponse> previous_;  // before now_, from the same server process
};

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_LIVE_COMMANDS_H_
