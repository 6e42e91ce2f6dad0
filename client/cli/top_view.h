// SPDX-License-Identifier: Apache-2.0
// What `lossctl top` shows, apart from terminals and servers: who takes rows, bytes, memory and time of a
// server, from two answers of ListStreams.
//
// Thread-compatible.
#ifndef LOSSD_CLIENT_CLI_TOP_VIEW_H_
#define LOSSD_CLIENT_CLI_TOP_VIEW_H_

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/live.h"
#include "lossd/v1/server.pb.h"

namespace lossd::cli {

// What comes first: the most of it.
enum class TopOrder : uint8_t { kRows, kBytes, kStaging, kWait };

const std::map<std::string, TopOrder>& TopOrders();  // rows, bytes, staging, wait

class TopHistory {
 public:
  explicit TopHistory(TopOrder order) : order_(order) {}

  // An error is shown with what was seen last.
  void Add(absl::StatusOr<v1::ListStreamsResponse> answer);
  void set_order(TopOrder order) { order_ = order; }
  // Whether clients are shown that have no stream and have done nothing for a minute. Documents have them.
  void set_all(bool all) { all_ = all; }
  bool all() const { return all_; }
  // Whether there are rates.
  bool ready() const { return previous_.has_value() || !status_.ok(); }

  // `server` is its address. Whatever the server has sent is shown without control characters.
  std::string Render(const std::string& server, const Frame& frame) const;
  nlohmann::ordered_json Json() const;

  // Of one client, over the time between the two answers.
  struct PeerRates {
    double rows_per_second = 0;
    double received_per_second = 0;
    double sent_per_second = 0;
    double waiting_slices = 0;  // on the average, for the device
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
  std::optional<v1::ListStreamsResponse> previous_;  // of the same process
};

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_TOP_VIEW_H_
