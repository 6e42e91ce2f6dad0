// SPDX-License-Identifier: Apache-2.0
// Tests of live_commands.h: what `lossctl watch` and `lossctl top` show.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/format.h"
#include "client/cli/live_commands.h"

// ---- lossctl top ----

namespace lossd::cli::top_view_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void AddPeer(v1::ListStreamsResponse* answer, const std::string& name, uint64_t rows, uint64_t bytes,
             uint64_t staging, double waited) {
  v1::PeerDescription* const peer = answer->add_peers();
  peer->set_peer(name);
  peer->set_open_streams(1);
  peer->set_rows(rows);
  peer->set_received_bytes(bytes);
  peer->set_staging_bytes(staging);
  peer->set_device_wait_seconds(waited);
}

void AddStream(v1::ListStreamsResponse* answer, uint64_t number, const std::string& peer, v1::StreamWait wait,
               double seconds) {
  v1::StreamDescription* const stream = answer->add_streams();
  stream->set_number(number);
  stream->set_peer(peer);
  stream->set_head("lm_head");
  stream->set_rows(1024);
  stream->set_queued_rows(512 + number);
  stream->set_waits_for(wait);
  stream->set_wait_seconds(seconds);
  stream->set_age_seconds(seconds + 1);
}

// `later`: the answer two seconds after the first.
v1::ListStreamsResponse Answer(bool later, uint64_t incarnation = 7) {
  v1::ListStreamsResponse answer;
  answer.set_incarnation(incarnation);
  answer.set_time_seconds(later ? 12 : 10);
  AddPeer(&answer, "dns:trainer-1", later ? 5000 : 1000, later ? 8192 : 0, 100, later ? 4 : 3);
  AddPeer(&answer, "dns:trainer-2", later ? 1100 : 1000, later ? 65536 : 0, 5000, later ? 9 : 3);
  AddStream(&answer, 1, "dns:trainer-1", v1::STREAM_WAIT_SERVER, 30);
  AddStream(&answer, 2, "dns:trainer-2", v1::STREAM_WAIT_SEND, 20);
  return answer;
}

TopHistory History(TopOrder order = TopOrder::kRows) {
  TopHistory history(order);
  history.Add(Answer(false));
  history.Add(Answer(true));
  return history;
}

TEST(TopViewTest, RatesAreThoseBetweenTwoAnswers) {
  TopHistory history(TopOrder::kRows);
  history.Add(Answer(false));
  EXPECT_FALSE(history.ready());
  history.Add(Answer(true));
  EXPECT_TRUE(history.ready());
  const auto json = history.Json();
  EXPECT_EQ(json["interval_seconds"], 2.0);
  EXPECT_EQ(json["peers"][0]["peer"], "dns:trainer-1");
  EXPECT_EQ(json["peers"][0]["rows_per_second"], 2000.0);
  EXPECT_EQ(json["peers"][0]["received_bytes_per_second"], 4096.0);
  EXPECT_EQ(json["peers"][1]["waiting_slices"], 3.0);
  history.Add(Answer(true, /*incarnation=*/8));
  EXPECT_FALSE(history.ready()) << "numbers of another process are not comparable";
}

TEST(TopViewTest, APeerThatWasForgottenHasNoNegativeRate) {
  TopHistory history(TopOrder::kRows);
  history.Add(Answer(true));
  v1::ListStreamsResponse answer = Answer(false);
  answer.set_time_seconds(14);
  history.Add(answer);
  for (const auto& peer : history.Json()["peers"]) EXPECT_GE(peer["rows_per_second"], 0.0);
}

TEST(TopViewTest, TheOrderIsTheOneThatWasAskedFor) {
  for (const TopOrder order : {TopOrder::kBytes, TopOrder::kStaging, TopOrder::kWait}) {
    EXPECT_EQ(History(order).Json()["peers"][0]["peer"], "dns:trainer-2");
  }
  EXPECT_EQ(History().Json()["streams"][0]["number"], 2) << "more rows queued";
  EXPECT_EQ(History(TopOrder::kWait).Json()["streams"][0]["number"], 1);
}

TEST(TopViewTest, ThePictureHasClientsAndStreams) {
  const std::string picture =
      History().Render("h:1", {.columns = 120, .lines = 24, .style = {.color = true}});
  EXPECT_THAT(picture, HasSubstr("dns:trainer-1  2.00 k"));
  EXPECT_THAT(picture, HasSubstr("4.00 KiB/s"));
  EXPECT_LT(picture.find("dns:trainer-1"), picture.find("dns:trainer-2"));
  EXPECT_THAT(picture, HasSubstr("\033[33msending 20.0 s\033[0m")) << "the client takes no answers";
  EXPECT_THAT(picture, HasSubstr("server 30.0 s"));
  EXPECT_THAT(picture, Not(HasSubstr("\033[33mserver")));
  EXPECT_THAT(picture, HasSubstr("514/1,024"));
}

TEST(TopViewTest, PicturesFitTheTerminal) {
  TopHistory history(TopOrder::kRows);
  v1::ListStreamsResponse many = Answer(true);
  for (uint64_t i = 0; i < 50; ++i) {
    AddPeer(&many, absl::StrCat("token:a_client_with_quite_a_long_name_\033[2J", i), i, i, i, 0);
    AddStream(&many, i + 10, "token:a_client_with_quite_a_long_name", v1::STREAM_WAIT_CLIENT, 1);
  }
  many.set_streams_left_out(7);
  history.Add(Answer(false));
  history.Add(many);
  for (const size_t columns : {0, 40, 80, 200}) {
    for (const size_t lines : {0, 10, 24, 60}) {
      const std::string picture = history.Render("host:7070", {.columns = columns, .lines = lines});
      const std::vector<std::string> shown = absl::StrSplit(picture, '\n');
      if (lines >= 10) {
        EXPECT_LE(shown.size() - 1, lines) << picture;
      }
      for (const std::string& line : shown) EXPECT_LE(DisplayWidth(line), columns) << line;
      EXPECT_THAT(picture, Not(HasSubstr("\033[2J")));
    }
  }
  EXPECT_THAT(history.Render("h", {.columns = 80, .lines = 24}), HasSubstr("more clients\n"));
}

TEST(TopViewTest, ClientsThatAreIdleAreCounted) {
  v1::ListStreamsResponse answer = Answer(true);
  for (int i = 0; i < 3; ++i) {
    AddPeer(&answer, absl::StrCat("token:gone-", i), 10, 0, 0, 0);
    v1::PeerDescription& peer = *answer.mutable_peers(answer.peers_size() - 1);
    peer.set_open_streams(i == 2 ? 1 : 0);
    peer.set_idle_seconds(61);
  }
  TopHistory history(TopOrder::kRows);
  history.Add(Answer(false));
  history.Add(answer);
  const std::string picture = history.Render("h:1", {.columns = 120, .lines = 24});
  EXPECT_THAT(picture, Not(HasSubstr("token:gone-0")));
  EXPECT_THAT(picture, HasSubstr("token:gone-2")) << "it has a stream";
  EXPECT_THAT(picture, HasSubstr("\n2 clients idle for over a minute\n"));
  EXPECT_EQ(history.Json()["peers"].size(), 5u);
  history.set_all(true);
  EXPECT_THAT(history.Render("h:1", {.columns = 120, .lines = 24}), HasSubstr("token:gone-0"));
  TopHistory idle(TopOrder::kRows);
  answer.clear_streams();
  answer.mutable_peers()->DeleteSubrange(0, 2);
  answer.mutable_peers()->DeleteSubrange(1, 2);
  idle.Add(answer);
  EXPECT_THAT(idle.Render("h:1", {.columns = 120, .lines = 24}),
              HasSubstr("\n\n1 client idle for over a minute\n\nno stream is open\n"));
}

TEST(TopViewTest, TheTitleSumsUp) {
  EXPECT_THAT(History().Render("h:1", {.columns = 120, .lines = 24}),
              ::testing::StartsWith("lossd at h:1  2.05 k rows/s  2 open streams  by rows\n"));
  EXPECT_THAT(History(TopOrder::kWait).Render("h:1", {.columns = 120, .lines = 24}),
              HasSubstr("  by wait\n"));
}

TEST(TopViewTest, AnErrorIsShownWithWhatWasSeenLast) {
  TopHistory history = History();
  history.Add(absl::UnavailableError("connection refused"));
  const std::string picture = history.Render("h:1", {});
  EXPECT_THAT(picture, HasSubstr("no answer: connection refused\n"));
  EXPECT_THAT(picture, HasSubstr("dns:trainer-1"));
  EXPECT_EQ(history.Json()["error"], "connection refused");
  TopHistory none(TopOrder::kRows);
  none.Add(v1::ListStreamsResponse());
  EXPECT_THAT(none.Render("h:1", {}), HasSubstr("no client has sent rows\n"));
}

}  // namespace
}  // namespace lossd::cli::top_view_test

// ---- lossctl watch ----

namespace lossd::cli::watch_view_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

WatchSample Sample(double seconds, uint64_t rows, uint64_t incarnation = 7) {
  WatchSample sample;
  sample.time = absl::UnixEpoch() + absl::Seconds(seconds);
  sample.server.set_incarnation(incarnation);
  sample.server.set_backend("cuda");
  sample.server.set_device("a card");
  sample.server.set_uptime_seconds(184);
  sample.server.set_max_streams(64);
  sample.server.set_open_streams(3);
  sample.server.mutable_memory()->set_weights(1 << 30);
  v1::HeadDescription head;
  head.mutable_spec()->set_name("lm");
  head.mutable_spec()->set_hidden_size(512);
  head.mutable_spec()->set_vocab_size(50257);
  head.set_total_rows(rows);
  head.set_queued_slices(5);
  sample.heads.push_back(head);
  sample.round_trip_seconds = 0.001;
  return sample;
}

// With a step's loss and the device's busy time.
WatchSample Trained(int second, double loss) {
  WatchSample sample = Sample(second, static_cast<uint64_t>(1000 * second));
  sample.metrics = ParseMetrics(absl::StrCat(
      "lossd_head_step{head=\"lm\"} ", second, "\nlossd_head_loss{head=\"lm\"} ", loss,
      "\nlossd_device_busy_seconds_total ", 0.5 * second, "\nlossd_head_device_seconds_total{head=\"lm\"} ",
      0.25 * second, "\nlossd_staging_bytes 1048576\nlossd_staging_used_bytes 1048576\n"));
  return sample;
}

std::string Picture(const WatchHistory& history, size_t columns = 80, size_t lines = 24) {
  return history.Render("host:7070", {.columns = columns, .lines = lines});
}

TEST(WatchViewTest, RatesComeFromTwoSamples) {
  WatchHistory history;
  history.Add(Sample(0, 1000));
  EXPECT_EQ(history.RowsPerSecond(), 0);
  history.Add(Sample(2, 5000));
  EXPECT_DOUBLE_EQ(history.RowsPerSecond(), 2000);
  EXPECT_DOUBLE_EQ(history.RowsPerSecond("lm"), 2000);
  EXPECT_DOUBLE_EQ(history.RowsPerSecond("other"), 0);
  history.Add(Sample(3, 10, /*incarnation=*/8));
  EXPECT_DOUBLE_EQ(history.RowsPerSecond("lm"), 0) << "counters of another process are not comparable";
  history.Add(Sample(4, 30, 8));
  EXPECT_DOUBLE_EQ(history.RowsPerSecond(), 20);
}

// The one that trains must not be among "and 9 more heads".
TEST(WatchViewTest, WhereNotAllHeadsHaveRoomThoseThatComputeAreShown) {
  WatchHistory history;
  for (int second = 0; second < 3; ++second) {
    WatchSample sample = Sample(second, 1000);
    sample.heads.clear();
    for (int i = 0; i < 30; ++i) {
      v1::HeadDescription head;
      head.mutable_spec()->set_name(absl::StrCat("head-", i));
      head.set_total_rows(i == 27 || i == 3 ? 10 * static_cast<uint64_t>(second) : i == 20 ? 1'000'000 : 1);
      sample.heads.push_back(head);
    }
    history.Add(sample);
  }
  const std::string picture = Picture(history, 80, 14);
  EXPECT_THAT(picture, ::testing::ContainsRegex("\nhead-3 [^\n]*\n(head[^\n]*\n)*head-27 ")) << picture;
  EXPECT_THAT(picture, HasSubstr("more heads\n"));
  EXPECT_THAT(Picture(history, 80, 16), HasSubstr("\nhead-20 ")) << "then those with most rows";
}

TEST(WatchViewTest, ALostDeviceIsSaid) {
  WatchHistory history;
  history.Add(Trained(1, 2.0));
  EXPECT_THAT(Picture(history), Not(HasSubstr("device is lost")));
  WatchSample lost = Trained(2, 2.0);
  lost.metrics->push_back({.name = "lossd_device_lost", .labels = {}, .value = 1});
  history.Add(lost);
  EXPECT_THAT(Picture(history), HasSubstr("\nthe device is lost: the server has to be started again\n"));
}

TEST(WatchViewTest, RecreatedHeadHasNoNegativeRate) {
  WatchHistory history;
  history.Add(Sample(0, 1000));
  history.Add(Sample(1, 10));
  EXPECT_GE(history.RowsPerSecond(), 0);
}

TEST(WatchViewTest, PictureShowsServerHeadsAndRates) {
  WatchHistory history;
  history.Add(Sample(0, 0));
  history.Add(Sample(1, 4560));
  const std::string picture = Picture(history);
  EXPECT_THAT(picture, StartsWith("lossd at host:7070  up 3m 04s  cuda  a card\n"));
  EXPECT_THAT(picture, HasSubstr("rows/s      4.56 k     █\n"));
  EXPECT_THAT(picture, HasSubstr("queue       5 slices queued, 3 of 64 streams\n"));
  EXPECT_THAT(picture, HasSubstr("memory      1.00 GiB\n"));
  EXPECT_THAT(picture, HasSubstr("512 x 50,257"));
  EXPECT_THAT(picture, Not(HasSubstr("microbatch"))) << "no metrics, no latency";
  EXPECT_THAT(picture, Not(HasSubstr("LOSS"))) << "nor losses";
}

TEST(WatchViewTest, LossesAndTheDevicesShareComeFromMetrics) {
  WatchHistory history;
  for (int i = 0; i < 8; ++i) history.Add(Trained(i, 4.0 - i * 0.25));
  history.Add(Trained(7, 2.25));  // the same step
  const std::string picture = Picture(history, 100);
  EXPECT_THAT(picture, HasSubstr("HEAD  LOSS "));
  EXPECT_THAT(picture, HasSubstr("lm    2.25   █▇▆▅▄▃▂▁ "));
  EXPECT_THAT(picture, HasSubstr("staging     1.00 MiB of 1.00 MiB\n"));
  EXPECT_FALSE(history.DeviceShare().has_value()) << "no time has passed";
  WatchHistory busy;
  busy.Add(Trained(1, 3));
  busy.Add(Trained(3, 3));
  EXPECT_DOUBLE_EQ(*busy.DeviceShare(), 0.5);
  EXPECT_THAT(Picture(busy), HasSubstr("device      50 % busy  █\n"));
  const auto json = busy.Json();
  EXPECT_EQ(json["device_share"], 0.5);
  EXPECT_EQ(json["heads"][0]["loss"], 3.0);
  EXPECT_EQ(json["heads"][0]["device_share"], 0.25);
}

TEST(WatchViewTest, WhatNeedsALookHasAColour) {
  WatchHistory history;
  history.Add(Trained(1, std::nan("")));
  const Frame frame{.columns = 100, .lines = 24, .style = {.color = true}};
  const std::string picture = history.Render("h:1", frame);
  EXPECT_THAT(picture, HasSubstr("\033[33m1.00 MiB of 1.00 MiB\033[0m")) << "slices wait for memory";
  EXPECT_THAT(picture, HasSubstr("\033[1;31mnan"));
  WatchSample failed;
  failed.status = absl::UnavailableError("gone\033[2J");
  history.Add(failed);
  EXPECT_THAT(history.Render("h:1", frame), HasSubstr("\033[1;31mno answer: gone?[2J\033[0m"));
}

TEST(WatchViewTest, LatencyTransferAndGradientsComeFromMetrics) {
  WatchHistory history;
  WatchSample first = Sample(0, 0), second = Sample(2, 10);
  first.metrics = ParseMetrics(
      "lossd_microbatch_seconds_bucket{le=\"1\"} 100\n"
      "lossd_microbatch_seconds_bucket{le=\"2\"} 100\n"
      "lossd_microbatch_seconds_bucket{le=\"+Inf\"} 100\n"
      "lossd_chunks_total{gradients=\"exact\"} 9\n"
      "lossd_chunks_total{gradients=\"filtered\"} 1\n"
      "lossd_payload_bytes_total{direction=\"in\"} 0\n"
      "lossd_payload_bytes_total{direction=\"out\"} 5\n");
  second.metrics = ParseMetrics(
      "lossd_microbatch_seconds_bucket{le=\"1\"} 100\n"
      "lossd_microbatch_seconds_bucket{le=\"2\"} 110\n"
      "lossd_microbatch_seconds_bucket{le=\"+Inf\"} 110\n"
      "lossd_chunks_total{gradients=\"exact\"} 10\n"
      "lossd_chunks_total{gradients=\"filtered\"} 4\n"
      "lossd_chunks_total{gradients=\"sampled\"} 6\n"
      "lossd_gradient_error_ratio_sum 0.036\n"
      "lossd_gradient_error_ratio_count 6\n"
      "lossd_payload_bytes_total{direction=\"in\"} 4096\n"
      "lossd_payload_bytes_total{direction=\"out\"} 5\n");
  history.Add(first);
  history.Add(second);
  const std::string picture = Picture(history);
  EXPECT_THAT(picture, HasSubstr("p50 1.50 s, p99 1.99 s"));
  EXPECT_THAT(picture, HasSubstr("2.00 KiB/s in, 0 B/s out"));
  EXPECT_THAT(picture,
              HasSubstr("chunks      10 % exact, 30 % filtered, 60 % sampled (predicted error 0.006)\n"));
}

TEST(WatchViewTest, AnUnreachableServerIsShownWithWhatWasLastSeen) {
  WatchHistory history;
  WatchSample failed;
  failed.time = absl::UnixEpoch();
  failed.status = absl::UnavailableError("connection refused");
  history.Add(failed);
  EXPECT_EQ(Picture(history), "lossd at host:7070\n\nconnection refused\n");
  history.Add(Sample(1, 5));
  EXPECT_THAT(Picture(history), Not(HasSubstr("refused")));
  history.Add(failed);
  EXPECT_THAT(Picture(history), HasSubstr("no answer: connection refused\n"));
  EXPECT_THAT(Picture(history), HasSubstr("512 x 50,257"));
  EXPECT_THAT(history.Line(), HasSubstr("no answer: connection refused\n"));
}

TEST(WatchViewTest, PicturesFitTheTerminal) {
  WatchHistory history(50);
  for (int i = 0; i < 100; ++i) {
    WatchSample sample = Trained(i, 3.0 / (i + 1));
    for (int head = 0; head < 30; ++head) {
      sample.heads.push_back(sample.heads.front());
      sample.heads.back().mutable_spec()->set_name(absl::StrCat("a_head_with_a_long_name_", head));
    }
    history.Add(std::move(sample));
  }
  for (const size_t columns : {0, 10, 31, 40, 80, 200}) {
    for (const size_t lines : {0, 1, 10, 24, 50}) {
      const std::string picture = Picture(history, columns, lines);
      std::vector<std::string> shown = absl::StrSplit(picture, '\n', absl::SkipEmpty());
      for (const std::string& line : shown) EXPECT_LE(DisplayWidth(line), columns) << line;
      if (lines >= 10) {
        EXPECT_LE(std::count(picture.begin(), picture.end(), '\n'), static_cast<long>(lines)) << picture;
      }
    }
  }
  EXPECT_THAT(Picture(history, 40), HasSubstr("rows/s "));
  EXPECT_THAT(Picture(history, 40), HasSubstr("lm"));
  EXPECT_THAT(Picture(history, 40), HasSubstr(" more heads\n"));
  EXPECT_THAT(Picture(history, 40), Not(HasSubstr("HIDDEN x VOCAB")));
  EXPECT_THAT(Picture(history, 200), HasSubstr("HIDDEN x VOCAB"));
}

}  // namespace
}  // namespace lossd::cli::watch_view_test
