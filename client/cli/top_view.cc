// SPDX-License-Identifier: Apache-2.0
#include "client/cli/top_view.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/json.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

constexpr double kIdleSeconds = 60;     // of a client that is left out
constexpr double kLongWaitSeconds = 5;  // of a client that should send or take something

const char* NameOfWait(v1::StreamWait wait) {
  switch (wait) {
    case v1::STREAM_WAIT_OPEN:
      return "opening";
    case v1::STREAM_WAIT_CLIENT:
      return "client";
    case v1::STREAM_WAIT_SERVER:
      return "server";
    case v1::STREAM_WAIT_SEND:
      return "sending";
    case v1::STREAM_WAIT_END:
      return "end";
    default:
      return "unknown";
  }
}

std::string ByteRate(double per_second) { return absl::StrCat(HumanBytes(per_second), "/s"); }

// Since a number that begins again is less than before.
double Growth(uint64_t now, uint64_t before) { return now < before ? 0 : static_cast<double>(now - before); }

std::string Line(absl::string_view text, const Frame& frame) {
  return absl::StrCat(Truncated(text, frame.columns), "\n");
}

// A client that works is never idle for long; how long, down to microseconds, would only flicker.
std::string IdleText(double seconds) {
  if (seconds < 1) return "";
  return seconds < 60 ? absl::StrFormat("%.0f s", std::floor(seconds)) : HumanSeconds(seconds);
}

std::string Counted(uint64_t count, absl::string_view what) {
  return absl::StrCat(HumanCount(count), " ", what, count == 1 ? "" : "s");
}

std::string NameOfPeer(const std::string& peer, const Frame& frame) {
  return TruncatedName(peer.empty() ? "(this process)" : Printable(peer), frame.columns < 60 ? 16 : 40);
}

Json StreamJson(const v1::StreamDescription& stream) {
  return {{"number", stream.number()},
          {"peer", stream.peer()},
          {"head", stream.head()},
          {"microbatch_id", stream.microbatch_id()},
          {"backward", stream.backward()},
          {"shared_memory", stream.shared_memory()},
          {"rows", stream.rows()},
          {"queued_rows", stream.queued_rows()},
          {"sent_rows", stream.sent_rows()},
          {"received_bytes", stream.received_bytes()},
          {"sent_bytes", stream.sent_bytes()},
          {"staging_bytes", stream.staging_bytes()},
          {"waits_for", NameOfWait(stream.waits_for())},
          {"wait_seconds", stream.wait_seconds()},
          {"age_seconds", stream.age_seconds()}};
}

}  // namespace

const std::map<std::string, TopOrder>& TopOrders() {
  static const auto* const orders = new std::map<std::string, TopOrder>{{"bytes", TopOrder::kBytes},
                                                                        {"rows", TopOrder::kRows},
                                                                        {"staging", TopOrder::kStaging},
                                                                        {"wait", TopOrder::kWait}};
  return *orders;
}

void TopHistory::Add(absl::StatusOr<v1::ListStreamsResponse> answer) {
  status_ = answer.status();
  if (!answer.ok()) return;
  previous_ = std::nullopt;
  if (now_.has_value() && now_->incarnation() == answer->incarnation()) previous_ = std::move(now_);
  now_ = *std::move(answer);
}

double TopHistory::Seconds() const {
  return previous_.has_value() ? now_->time_seconds() - previous_->time_seconds() : 0;
}

TopHistory::PeerRates TopHistory::RatesOf(const v1::PeerDescription& peer) const {
  if (Seconds() <= 0) return {};
  // One that has come since then began with nothing.
  v1::PeerDescription before;
  for (const v1::PeerDescription& each : previous_->peers()) {
    if (each.peer() == peer.peer()) before = each;
  }
  return {
      .rows_per_second = Growth(peer.rows(), before.rows()) / Seconds(),
      .received_per_second = Growth(peer.received_bytes(), before.received_bytes()) / Seconds(),
      .sent_per_second = Growth(peer.sent_bytes(), before.sent_bytes()) / Seconds(),
      .waiting_slices = std::max(0.0, peer.device_wait_seconds() - before.device_wait_seconds()) / Seconds()};
}

std::vector<v1::PeerDescription> TopHistory::Peers(bool all) const {
  std::vector<v1::PeerDescription> peers;
  for (const v1::PeerDescription& peer : now_->peers()) {
    if (all || peer.open_streams() > 0 || peer.idle_seconds() < kIdleSeconds) peers.push_back(peer);
  }
  const auto key = [this](const v1::PeerDescription& peer) {
    const PeerRates rates = RatesOf(peer);
    switch (order_) {
      case TopOrder::kRows:
        return rates.rows_per_second;
      case TopOrder::kBytes:
        return rates.received_per_second + rates.sent_per_second;
      case TopOrder::kStaging:
        return static_cast<double>(peer.staging_bytes());
      case TopOrder::kWait:
        return rates.waiting_slices;
    }
    return 0.0;
  };
  std::stable_sort(peers.begin(), peers.end(), [&](const auto& a, const auto& b) { return key(a) > key(b); });
  return peers;
}

std::vector<v1::StreamDescription> TopHistory::Streams() const {
  std::vector<v1::StreamDescription> streams(now_->streams().begin(), now_->streams().end());
  const auto key = [this](const v1::StreamDescription& stream) {
    switch (order_) {
      case TopOrder::kRows:
        return static_cast<double>(stream.queued_rows());
      case TopOrder::kBytes:
        return static_cast<double>(stream.received_bytes() + stream.sent_bytes());
      case TopOrder::kStaging:
        return static_cast<double>(stream.staging_bytes());
      case TopOrder::kWait:
        return stream.wait_seconds();
    }
    return 0.0;
  };
  std::stable_sort(streams.begin(), streams.end(),
                   [&](const auto& a, const auto& b) { return key(a) > key(b); });
  return streams;
}

std::string TopHistory::Summary() const {
  double rows = 0;
  for (const v1::PeerDescription& peer : now_->peers()) rows += RatesOf(peer).rows_per_second;
  const uint64_t streams = static_cast<uint64_t>(now_->streams_size()) + now_->streams_left_out();
  std::string order;
  for (const auto& [name, each] : TopOrders()) {
    if (each == order_) order = name;
  }
  return absl::StrCat("  ", HumanRate(rows), " rows/s  ", Counted(streams, "open stream"), "  by ", order);
}

std::string TopHistory::PeersPicture(const Frame& frame, size_t lines) const {
  const std::vector<v1::PeerDescription> peers = Peers(all_);
  Table table({{"CLIENT"},
               {"ROWS/S", Align::kRight},
               {"IN", Align::kRight, 3},
               {"OUT", Align::kRight, 4},
               {"STAGING", Align::kRight, 2},
               {"WAITING", Align::kRight, 5},
               {"STREAMS", Align::kRight, 1},
               {"IDLE", Align::kRight, 6},
               {"ALL ROWS", Align::kRight, 7}});
  const size_t shown = std::min(peers.size(), lines);
  for (size_t i = 0; i < shown; ++i) {
    const v1::PeerDescription& peer = peers[i];
    const PeerRates rates = RatesOf(peer);
    table.AddRow({NameOfPeer(peer.peer(), frame), HumanRate(rates.rows_per_second),
                  ByteRate(rates.received_per_second), ByteRate(rates.sent_per_second),
                  HumanBytes(peer.staging_bytes()), absl::StrFormat("%.1f", rates.waiting_slices),
                  HumanCount(peer.open_streams()), IdleText(peer.idle_seconds()), HumanCount(peer.rows())});
  }
  std::string text = peers.empty() ? "" : table.ToString(frame.style, frame.columns);
  if (shown < peers.size()) {
    absl::StrAppend(&text, Line(absl::StrCat("and ", Counted(peers.size() - shown, "more client")), frame));
  }
  if (const size_t idle = static_cast<size_t>(now_->peers_size()) - peers.size(); idle > 0) {
    const std::string line = absl::StrCat(Counted(idle, "client"), " idle for over a minute");
    absl::StrAppend(&text, frame.style.Paint(Tone::kFaint, Truncated(line, frame.columns)), "\n");
  }
  return text;
}

std::string TopHistory::StreamsPicture(const Frame& frame, size_t lines) const {
  const std::vector<v1::StreamDescription> streams = Streams();
  Table table({{"STREAM", Align::kRight, 4},
               {"CLIENT"},
               {"HEAD", Align::kLeft, 2},
               {"MICROBATCH", Align::kRight, 6},
               {"ROWS QUEUED", Align::kRight, 1},
               {"STAGING", Align::kRight, 3},
               {"WAITS FOR"},
               {"AGE", Align::kRight, 5},
               {"KIND", Align::kLeft, 7}});
  const size_t shown = std::min(streams.size(), lines);
  for (size_t i = 0; i < shown; ++i) {
    const v1::StreamDescription& stream = streams[i];
    std::string wait = NameOfWait(stream.waits_for());
    if (stream.wait_seconds() >= 0.1) absl::StrAppend(&wait, " ", HumanSeconds(stream.wait_seconds()));
    const bool late =
        stream.waits_for() != v1::STREAM_WAIT_SERVER && stream.wait_seconds() > kLongWaitSeconds;
    table.AddRow({absl::StrCat(stream.number()), NameOfPeer(stream.peer(), frame), Printable(stream.head()),
                  absl::StrCat(stream.microbatch_id()),
                  absl::StrCat(HumanCount(stream.queued_rows()), "/", HumanCount(stream.rows())),
                  HumanBytes(stream.staging_bytes()), late ? frame.style.Paint(Tone::kWarning, wait) : wait,
                  HumanSeconds(stream.age_seconds()),
                  absl::StrCat(stream.backward() ? "backward" : "forward",
                               stream.shared_memory() ? ", shared memory" : "")});
  }
  std::string text = table.ToString(frame.style, frame.columns);
  const uint64_t left_out = streams.size() - shown + now_->streams_left_out();
  if (left_out > 0) {
    absl::StrAppend(&text, Line(absl::StrCat("and ", Counted(left_out, "more stream")), frame));
  }
  return text;
}

std::string TopHistory::Render(const std::string& server, const Frame& frame) const {
  std::string title = absl::StrCat("lossd at ", server);
  if (now_.has_value()) absl::StrAppend(&title, Summary());
  std::string text = absl::StrCat(frame.style.Paint(Tone::kTitle, Truncated(title, frame.columns)), "\n");
  size_t used = 2;
  if (!status_.ok()) {
    const std::string line = absl::StrCat("no answer: ", Printable(status_.message()));
    absl::StrAppend(&text, frame.style.Paint(Tone::kBad, Truncated(line, frame.columns)), "\n");
    ++used;
  }
  if (!now_.has_value()) return text;
  absl::StrAppend(&text, "\n");
  if (now_->peers().empty()) return absl::StrCat(text, Line("no client has sent rows", frame));
  // Each table has a line of titles, and may have one of what is left out; that of clients one of idle ones.
  const size_t room = frame.lines > used + 6 ? frame.lines - used - 6 : 2;
  const size_t peers = Peers(all_).size();
  const auto streams = static_cast<size_t>(now_->streams_size());
  const size_t for_peers = std::min(peers, std::max(room - std::min(streams, room / 2), room / 2));
  absl::StrAppend(&text, PeersPicture(frame, std::max<size_t>(1, for_peers)));
  if (streams == 0) return absl::StrCat(text, "\n", Line("no stream is open", frame));
  return absl::StrCat(text, "\n",
                      StreamsPicture(frame, std::max<size_t>(1, room - std::min(room, for_peers))));
}

nlohmann::ordered_json TopHistory::Json() const {
  if (!status_.ok()) return {{"error", status_.message()}};
  nlohmann::ordered_json json = {{"incarnation", HumanIncarnation(now_->incarnation())},
                                 {"server_seconds", now_->time_seconds()},
                                 {"interval_seconds", Seconds()},
                                 {"peers", nlohmann::ordered_json::array()},
                                 {"streams", nlohmann::ordered_json::array()},
                                 {"streams_left_out", now_->streams_left_out()}};
  for (const v1::PeerDescription& peer : Peers(/*all=*/true)) {
    const PeerRates rates = RatesOf(peer);
    json["peers"].push_back({{"peer", peer.peer()},
                             {"rows_per_second", rates.rows_per_second},
                             {"received_bytes_per_second", rates.received_per_second},
                             {"sent_bytes_per_second", rates.sent_per_second},
                             {"waiting_slices", rates.waiting_slices},
                             {"staging_bytes", peer.staging_bytes()},
                             {"open_streams", peer.open_streams()},
                             {"streams", peer.streams()},
                             {"rows", peer.rows()},
                             {"received_bytes", peer.received_bytes()},
                             {"sent_bytes", peer.sent_bytes()},
                             {"device_wait_seconds", peer.device_wait_seconds()},
                             {"idle_seconds", peer.idle_seconds()}});
  }
  for (const v1::StreamDescription& stream : Streams()) json["streams"].push_back(StreamJson(stream));
  return json;
}

}  // namespace lossd::cli
