#include "client/cli/watch_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

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
  const std::string picture = history.Render("host:7070", 80);
  EXPECT_THAT(picture, HasSubstr("lossd at host:7070  cuda  a card  up 3m 04s\n"));
  EXPECT_THAT(picture, HasSubstr("rows/s      4.56 k  █\n"));
  EXPECT_THAT(picture, HasSubstr("streams     3 of 64, 5 slices queued\n"));
  EXPECT_THAT(picture, HasSubstr("memory      1.00 GiB\n"));
  EXPECT_THAT(picture, HasSubstr("lm    512 x 50,257"));
  EXPECT_THAT(picture, Not(HasSubstr("microbatch"))) << "no metrics, no latency";
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
  const std::string picture = history.Render("host:7070", 80);
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
  EXPECT_EQ(history.Render("h:1", 80), "lossd at h:1\n\nconnection refused\n");
  history.Add(Sample(1, 5));
  EXPECT_THAT(history.Render("h:1", 80), Not(HasSubstr("refused")));
  history.Add(failed);
  EXPECT_THAT(history.Render("h:1", 80), HasSubstr("no answer: connection refused\n"));
  EXPECT_THAT(history.Render("h:1", 80), HasSubstr("512 x 50,257"));
  EXPECT_THAT(history.Line(), HasSubstr("no answer: connection refused\n"));
}

TEST(WatchViewTest, HistoryIsBoundedAndNarrowTerminalsAreFine) {
  WatchHistory history(10);
  for (int i = 0; i < 100; ++i) history.Add(Sample(i, i * 10));
  for (size_t width : {0, 10, 31, 35, 200}) {
    const std::string picture = history.Render("h:1", width);
    size_t blocks = 0;
    for (size_t at = picture.find("█"); at != std::string::npos; at = picture.find("█", at + 1)) ++blocks;
    EXPECT_LE(blocks, 10u);
    EXPECT_GE(blocks, 1u);
  }
}

}  // namespace
}  // namespace lossd::cli
