// What `lossctl watch` shows, apart from terminals and servers: a history of samples and its picture.
//
// Thread-compatible.
#ifndef LOSSD_CLIENT_CLI_WATCH_VIEW_H_
#define LOSSD_CLIENT_CLI_WATCH_VIEW_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cli/metrics_text.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/server.pb.h"

namespace lossd::cli {

// One look at the server.
struct WatchSample {
  absl::Time time;
  absl::Status status;  // the rest holds if OK
  v1::ServerDescription server;
  std::vector<v1::HeadDescription> heads;
  double round_trip_seconds = 0;                     // of the call that fetched the heads
  std::optional<std::vector<MetricSample>> metrics;  // if the server's HTTP side answered
};

class WatchHistory {
 public:
  // Keeps rates of the last `length` intervals.
  explicit WatchHistory(size_t length = 60) : length_(length) {}

  void Add(WatchSample sample);

  // The picture, `width` columns wide, lines ending in "\n". `server` is its address.
  std::string Render(const std::string& server, size_t width) const;
  // One line for logs and pipes.
  std::string Line() const;

  // Rows per second over the last interval: of all heads, of one head.
  double RowsPerSecond() const { return rows_per_second_.empty() ? 0 : rows_per_second_.back(); }
  double RowsPerSecond(const std::string& head) const;

 private:
  std::string LatencyText() const;
  std::string TransferText() const;
  std::string ChunksText() const;  // by their gradients, over the last interval

  const size_t length_;
  std::optional<WatchSample> last_;      // the last one, whatever its status
  std::optional<WatchSample> good_;      // the last one with status OK
  std::optional<WatchSample> previous_;  // the one with status OK before that, of the same incarnation
  std::deque<double> rows_per_second_;
  std::map<std::string, double> head_rows_per_second_;
};

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_WATCH_VIEW_H_
