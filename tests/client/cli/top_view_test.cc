// SPDX-License-Identifier: Apache-2.0
#include "client/cli/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/format.h"

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
