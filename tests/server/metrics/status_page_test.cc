// SPDX-License-Identifier: Apache-2.0
// Tests of status_page.h: HTML, the page itself, the history of samples and the sampler that fills it, by
// times of the tests' own, and lists of checkpoints.
#include "server/metrics/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/head/checkpoint.h"
#include "server/metrics/http_server.h"
#include "tests/support/temp_folder.h"

// ---- Status page ----

namespace lossd::metrics::status_page_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(HtmlTest, Escapes) {
  EXPECT_EQ(EscapeHtml("<script>alert(\"1\" & '2')</script>"),
            "&lt;script&gt;alert(&quot;1&quot; &amp; &#39;2&#39;)&lt;/script&gt;");
}

TEST(HtmlTest, FormatsForPeople) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(3.2 * (1 << 30)), "3.2 GiB");
  EXPECT_EQ(FormatSeconds(0), "0");
  EXPECT_EQ(FormatSeconds(35e-6), "35 us");
  EXPECT_EQ(FormatSeconds(0.0012), "1.2 ms");
  EXPECT_EQ(FormatSeconds(3.42), "3.4 s");
}

TEST(HtmlTest, UptimesOfMonthsCanBeRead) {
  EXPECT_EQ(FormatUptime(absl::Seconds(-1)), "0 s");
  EXPECT_EQ(FormatUptime(absl::Seconds(59.9)), "59 s");
  EXPECT_EQ(FormatUptime(absl::Seconds(3599)), "59 min 59 s");
  EXPECT_EQ(FormatUptime(absl::Hours(23) + absl::Minutes(5)), "23 h 5 min");
  EXPECT_EQ(FormatUptime(absl::Hours(24 * 1000 + 3)), "1,000 d 3 h");
}

class StatusPageTest : public testing::Test {
 protected:
  StatusPageTest() {
    // Names of clients are letters and digits; the engine takes any.
    EXPECT_TRUE(engine_->CreateHead("<b>main</b>", {.hidden_size = 8, .vocab_size = 7654}).ok());
    EXPECT_TRUE(engine_->PublishHead("<b>main</b>").ok());
  }
  HttpResponse Get(absl::string_view path, HttpParameters parameters = {}) const {
    return Ask("GET", path, std::move(parameters));
  }
  HttpResponse Post(absl::string_view path, HttpParameters parameters = {}) const {
    return Ask("POST", path, std::move(parameters));
  }
  HttpResponse Ask(absl::string_view method, absl::string_view path, HttpParameters parameters) const {
    HttpHandlers handlers;
    AddPages({.page = &page_,
              .history = &history_,
              .events = &metrics_.events(),
              .trace = &metrics_.trace(),
              .incarnation = 42,
              .trouble = [] { return ""; }},
             &handlers);
    return Route({.method = method,
                  .target = path,
                  .version = "HTTP/1.1",
                  .parameters = std::move(parameters),
                  .hosts = {"localhost"}},
                 handlers, HttpAudience::kLoopbackHosts);
  }

  mutable Metrics metrics_{{.version = "9.9"}};
  std::unique_ptr<kernels::Backend> backend_ = *kernels::CreateCpuBackend({.threads = 1});
  std::unique_ptr<engine::Engine> engine_ =
      *engine::Engine::Create({.slice_bytes = 1024, .staging_bytes = 8192}, backend_.get(), 42, {&metrics_});
  History history_;
  Sampler sampler_{engine_.get(), backend_.get(), &metrics_, &history_};
  StatusPage page_{{.version = "9.9 <x>", .grpc_address = "127.0.0.1:1", .started = clocks::SteadyNow()},
                   engine_.get(),
                   backend_.get(),
                   &metrics_,
                   &history_};
};

TEST_F(StatusPageTest, ShowsHeadsMemoryAndThroughput) {
  const std::string first = page_.Render("");
  EXPECT_THAT(first, HasSubstr("&lt;b&gt;main&lt;/b&gt;"));
  EXPECT_THAT(first, Not(HasSubstr("<b>main</b>")));
  EXPECT_THAT(first, HasSubstr("9.9 &lt;x&gt;"));
  EXPECT_THAT(first, HasSubstr("<td>7,654</td>"));
  EXPECT_THAT(first, HasSubstr("8.0 KiB"));
  EXPECT_THAT(first, HasSubstr("href=\"/metrics\""));
  EXPECT_THAT(first, HasSubstr(">serving<"));
  metrics_.OnChunk({.head = "<b>main</b>", .rows = 1000});
  const std::string second = page_.Render("draining");
  EXPECT_THAT(second, HasSubstr("<b>1,000</b><span>rows computed"));
  EXPECT_THAT(second, HasSubstr("<span class=\"state warning\">draining<"));
  EXPECT_THAT(first, HasSubstr("<span class=\"state good\">serving<"));
  EXPECT_THAT(page_.Render("device lost"), HasSubstr("<span class=\"state error\">device lost<"));
  EXPECT_THAT(second, Not(HasSubstr("collectives"))) << "it has one device";
  const StatusPage several({.collectives = "gl<oo"}, engine_.get(), backend_.get(), &metrics_, &history_);
  EXPECT_THAT(several.Render(""), HasSubstr(" &middot; collectives gl&lt;oo"));
}

TEST_F(StatusPageTest, LoadsNothingFromElsewhereAndHasNothingInline) {
  for (const std::string& html :
       {page_.Render(""), *page_.RenderHead("<b>main</b>"), page_.RenderNoHead("x")}) {
    EXPECT_THAT(html, Not(HasSubstr("://")));
    EXPECT_THAT(html, Not(HasSubstr("<style")));
    EXPECT_THAT(html, Not(HasSubstr("style=")));
    EXPECT_THAT(html, HasSubstr("<script src=\"/page/page.js\" defer></script>"));
    EXPECT_EQ(html.find("<script"), html.rfind("<script"));
    EXPECT_THAT(html, HasSubstr("href=\"/page/page.css\""));
  }
}

TEST_F(StatusPageTest, RatesAreOfTheServerAndNotOfTheViewer) {
  const absl::Time now = clocks::SteadyNow();
  sampler_.Sample(now);
  metrics_.OnChunk({.head = "<b>main</b>", .rows = 24690});
  sampler_.Sample(now + absl::Seconds(2));
  for (int viewer = 0; viewer < 3; ++viewer) {
    EXPECT_THAT(page_.Render(""), HasSubstr("<b>12,345</b><span>rows/s"));
  }
}

TEST_F(StatusPageTest, AHeadHasAPage) {
  metrics_.OnChunk({.head = "<b>main</b>",
                    .rows = 4,
                    .gradients = kernels::Gradients::kFiltered,
                    .sums = {.dropped_mass = 0.5, .valid_rows = 4},
                    .accumulating = {.loss = 10.0, .valid_rows = 4}});
  metrics_.OnStep({.head = "<b>main</b>", .step = 6, .rows = 4, .grad_norm = 0.25, .learning_rate = 0.5});
  metrics_.OnChunk({.head = "<b>main</b>",
                    .rows = 4,
                    .gradients = kernels::Gradients::kSampled,
                    .sums = {.sampling_variance = 4e-4, .squared_gradient = 1.0, .valid_rows = 4},
                    .accumulating = {.loss = 12.0, .valid_rows = 4}});
  metrics_.OnStep({.head = "<b>main</b>", .step = 7, .rows = 4, .grad_norm = 0.25, .learning_rate = 0.5});
  metrics_.OnStep({.head = "<b>main</b>", .skipped = true, .step = 8});
  metrics_.saves().OnSaved("<b>main</b>",
                           {.checkpoint = "main/<i>", .step = 7, .bytes = 2048, .seconds = 0.5});
  metrics_.events().Add(EventLevel::kInfo, "k", "other", "of another head");
  const std::string html = *page_.RenderHead("<b>main</b>");
  EXPECT_THAT(html, Not(HasSubstr("<b>main</b>")));
  EXPECT_THAT(html, HasSubstr("<h1>&lt;b&gt;main&lt;/b&gt;</h1>"));
  EXPECT_THAT(html, HasSubstr("<td>2.5</td><td>0.25</td><td>12.5 % dropped</td><td>0.5</td><td>4</td>"));
  EXPECT_THAT(html, HasSubstr("<td>3</td><td>0.25</td><td>2 %</td><td>0.5</td><td>4</td>"));
  EXPECT_THAT(html, HasSubstr("skipped"));
  EXPECT_THAT(html, Not(HasSubstr("main/&lt;i&gt;"))) << "the directory has no such checkpoint";
  EXPECT_THAT(html, HasSubstr("not finite"));
  EXPECT_THAT(html, Not(HasSubstr("of another head")));
  EXPECT_FALSE(page_.RenderHead("other").has_value());
}

TEST_F(StatusPageTest, GradientsAreThoseOfTheLastChunk) {
  const auto chunk = [this](kernels::Gradients gradients, bool accumulates) {
    metrics_.OnChunk({.head = "<b>main</b>",
                      .rows = 4,
                      .gradients = gradients,
                      .sums = {.dropped_mass = 0.5, .valid_rows = 4},
                      .accumulating = {.loss = 10.0, .valid_rows = accumulates ? 4 : 0}});
    return *page_.RenderHead("<b>main</b>");
  };
  EXPECT_THAT(*page_.RenderHead("<b>main</b>"), HasSubstr(" gradients exact "));
  EXPECT_THAT(chunk(kernels::Gradients::kExact, false), HasSubstr("<b>exact</b><span>gradient error"));
  EXPECT_THAT(chunk(kernels::Gradients::kSampled, false),
              HasSubstr(" gradients of the last chunk sampled, by default exact "));
  EXPECT_THAT(chunk(kernels::Gradients::kFiltered, true),
              HasSubstr(" last chunk filtered, by default exact "));
  const std::string evaluated = chunk(kernels::Gradients::kExact, false);
  EXPECT_THAT(evaluated, HasSubstr("last chunk filtered")) << "an evaluation has no gradients";
  EXPECT_THAT(evaluated, HasSubstr("<b>-</b><span>gradient error")) << "its step is not closed";
  metrics_.OnStep({.head = "<b>main</b>", .step = 0, .rows = 4});
  EXPECT_THAT(*page_.RenderHead("<b>main</b>"), HasSubstr("<b>12.5 % dropped</b><span>gradient error"));
  EXPECT_THAT(chunk(kernels::Gradients::kExact, true), HasSubstr("<b>exact</b><span>gradient error"));
}

TEST_F(StatusPageTest, AHeadsPageListsItsCheckpoints) {
  test::TempFolder folder;
  const kernels::HeadConfig config{.hidden_size = 2, .vocab_size = 3};
  const auto zeros = [](kernels::TensorId, int64_t, int64_t, absl::Span<uint8_t> out) {
    std::fill(out.begin(), out.end(), uint8_t{0});
    return absl::OkStatus();
  };
  ASSERT_TRUE(engine_->CreateHead("lm", config).ok() && engine_->PublishHead("lm").ok());
  for (uint64_t step = 1; step <= 22; ++step) {
    ASSERT_TRUE(head::SaveCheckpoint(folder.path(), absl::StrCat("s", step),
                                     {.head = "lm", .config = config, .step = 1000 + step}, zeros)
                    .ok());
  }
  metrics_.saves().OnSaved("lm", {.checkpoint = "lm/s22", .step = 1022, .bytes = 9, .seconds = 0.25});
  metrics_.saves().OnSaved("lm", {.checkpoint = "lm/s21", .step = 5, .bytes = 9, .seconds = 0.5});
  std::filesystem::create_directories(folder.File("lm/bad"));
  test::WriteWholeFile(folder.File("lm/bad/manifest.json"), "<x>");
  CheckpointLists lists(folder.path());
  const StatusPage page({.checkpoints = &lists}, engine_.get(), backend_.get(), &metrics_, &history_);
  std::string html;
  for (int i = 0; i < 600 && html.find("lm/s22") == std::string::npos; ++i) {
    html = *page.RenderHead("lm");
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_THAT(html, HasSubstr("lm/s22</td><td>1,022</td>"));
  EXPECT_THAT(html, HasSubstr("<td>250.0 ms</td>"));
  EXPECT_THAT(html, Not(HasSubstr("500.0 ms"))) << "another checkpoint had this name";
  EXPECT_THAT(html, HasSubstr("a client"));
  EXPECT_THAT(html, HasSubstr("damaged"));
  EXPECT_THAT(html, Not(HasSubstr("<x>")));
  EXPECT_THAT(html, HasSubstr("And 3 older."));
  EXPECT_THAT(html, Not(HasSubstr(folder.path())));
}

TEST_F(StatusPageTest, EventsAndErrorsAreShown) {
  EXPECT_THAT(page_.Render(""), HasSubstr("None since the start"));
  metrics_.CountError("ApplyStep", "NOT_FOUND");
  metrics_.CountError("ApplyStep", "NOT_FOUND");
  metrics_.CountLimit("max_streams");
  metrics_.OnDeviceError(absl::InternalError("<i>bad</i>"));
  metrics_.OnDeviceError(absl::UnavailableError("gone"));
  const std::string html = page_.Render("");
  EXPECT_THAT(html, HasSubstr("ApplyStep ended with NOT_FOUND</span></td><td></td><td>2</td>"));
  EXPECT_THAT(html, HasSubstr("--max_streams was reached"));
  EXPECT_THAT(html, HasSubstr("&lt;i&gt;bad&lt;/i&gt;"));
  EXPECT_LT(html.find("gone"), html.find("max_streams")) << "the newest first";
}

TEST_F(StatusPageTest, AnswersOfThePaths) {
  EXPECT_EQ(Get("/").status, 200);
  EXPECT_EQ(Get("/heads/<b>main<").status, 404);
  EXPECT_THAT(Get("/heads/<i>").body, HasSubstr("&lt;i&gt;"));
  EXPECT_EQ(Get("/page/page.js").content_type, "text/javascript; charset=utf-8");
  EXPECT_THAT(Get("/page/page.js").body, HasSubstr("\"use strict\""));
  EXPECT_THAT(Get("/page/page.css").body, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(Get("/page/icon.svg").body, HasSubstr("<svg"));
  sampler_.Sample(clocks::SteadyNow());
  metrics_.events().Add(EventLevel::kInfo, "k", "", "text");
  EXPECT_EQ(nlohmann::json::parse(Get("/history.json").body)["last"], 1);
  EXPECT_EQ(nlohmann::json::parse(Get("/history.json", {{"after", "1"}, {"head", "x"}}).body)["times"].size(),
            0);
  EXPECT_EQ(nlohmann::json::parse(Get("/events.json").body)["events"].size(), 1);
  EXPECT_EQ(nlohmann::json::parse(Get("/events.json", {{"after", "1"}}).body)["events"].size(), 0);
}

TEST_F(StatusPageTest, ATraceIsBegunAndTaken) {
  EXPECT_EQ(Post("/trace", {{"seconds", "30"}}).body, "{\"recording\":1,\"seconds\":30}\n");
  EXPECT_EQ(Post("/trace", {{"seconds", "1"}}).status, 409);
  EXPECT_EQ(Post("/trace.json", {{"recording", "1"}}).status, 409);
  EXPECT_EQ(Post("/trace.json", {{"recording", "2"}}).status, 404);
  EXPECT_EQ(Post("/trace.json").status, 404);
  for (const char* path : {"/trace", "/trace.json"}) EXPECT_EQ(Get(path).status, 405) << path;
}

TEST_F(StatusPageTest, BadParametersAreNamed) {
  const auto error = [&](absl::string_view path, HttpParameters parameters) {
    const char* const method = path == "/trace" ? "POST" : "GET";
    const HttpResponse response = Ask(method, path, std::move(parameters));
    EXPECT_EQ(response.status, 400) << path;
    return response.body;
  };
  EXPECT_EQ(error("/events.json", {{"after", "-1"}}), "after must be a number without sign, got -1\n");
  EXPECT_THAT(error("/events.json", {{"after", ""}}), HasSubstr("after must be a number"));
  EXPECT_THAT(error("/history.json", {{"after", "99999999999999999999"}}), HasSubstr("after must be"));
  EXPECT_THAT(error("/history.json", {{"after", "1"}, {"after", "2"}}), HasSubstr("is given twice"));
  EXPECT_EQ(error("/trace", {}), "seconds must be a number, got \"\"\n");
  EXPECT_EQ(error("/trace", {{"seconds", "nan"}}), "seconds must be a number, got nan\n");
  EXPECT_EQ(error("/trace", {{"seconds", "31"}}), "seconds must be above 0 and at most 30, got 31\n");
  EXPECT_THAT(error("/history.json", {{"since", "1"}}), HasSubstr("must be one of after, head"));
}

}  // namespace
}  // namespace lossd::metrics::status_page_test

// ---- History and sampler ----

namespace lossd::metrics::history_test {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

Values ValuesWith(float rows) {
  Values values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  values[0] = rows;
  return values;
}

HeadValues HeadWith(float loss) { return {1.0f, loss, 0.5f, 1e-4f}; }

class HistoryTest : public testing::Test {
 protected:
  void Add(float rows, const std::map<std::string, HeadValues>& heads = {}) {
    history_.Add(absl::FromUnixSeconds(1'000'000'000 + 2 * added_++), ValuesWith(rows), heads);
  }
  nlohmann::json Json(uint64_t after = 0, absl::string_view head = "") const {
    return nlohmann::json::parse(history_.Json(42, after, head));
  }

  History history_;
  int64_t added_ = 0;
};

TEST_F(HistoryTest, BeginsEmpty) {
  EXPECT_FALSE(history_.Last().has_value());
  const nlohmann::json json = Json();
  EXPECT_EQ(json["incarnation"], "000000000000002a");
  EXPECT_EQ(json["interval_seconds"], 2);
  EXPECT_EQ(json["last"], 0);
  EXPECT_THAT(json["times"], SizeIs(0));
  EXPECT_THAT(json["server"], SizeIs(kSeries));
  EXPECT_THAT(json["heads"], SizeIs(0));
}

TEST_F(HistoryTest, AReaderGoesOnFromTheLastSampleItHas) {
  for (int i = 0; i < 5; ++i) Add(static_cast<float>(i));
  EXPECT_EQ(Json()["server"]["rows_per_second"], nlohmann::json({0, 1, 2, 3, 4}));
  EXPECT_EQ(Json()["server"]["queued_rows"], nlohmann::json({nullptr, nullptr, nullptr, nullptr, nullptr}));
  const nlohmann::json later = Json(3);
  EXPECT_EQ(later["last"], 5);
  EXPECT_EQ(later["times"], nlohmann::json({1'000'000'006.0, 1'000'000'008.0}));
  EXPECT_EQ(later["server"]["rows_per_second"], nlohmann::json({3, 4}));
  EXPECT_THAT(Json(5)["times"], SizeIs(0));
  EXPECT_THAT(Json(std::numeric_limits<uint64_t>::max())["times"], SizeIs(0));
  EXPECT_EQ((*history_.Last())[0], 4.0f);
}

TEST_F(HistoryTest, KeepsSoManySamples) {
  const auto samples = static_cast<int>(History::kSamples);
  for (int i = 0; i < samples + 7; ++i) Add(static_cast<float>(i), {{"lm", HeadWith(static_cast<float>(i))}});
  const nlohmann::json json = Json();
  EXPECT_THAT(json["times"], SizeIs(samples));
  EXPECT_EQ(json["server"]["rows_per_second"].front(), 7);
  EXPECT_EQ(json["server"]["rows_per_second"].back(), samples + 6);
  EXPECT_EQ(json["heads"]["lm"]["loss"].front(), 7);
  EXPECT_EQ(json["heads"]["lm"]["loss"].back(), samples + 6);
  EXPECT_LT(history_.Json(42, 0, "").size(), 100'000);
}

TEST_F(HistoryTest, HeadsComeAndGo) {
  Add(0);
  Add(0, {{"a", HeadWith(3)}, {"b", HeadWith(std::numeric_limits<float>::quiet_NaN())}});
  nlohmann::json heads = Json()["heads"];
  EXPECT_EQ(heads["a"]["loss"], nlohmann::json({nullptr, 3}));
  EXPECT_EQ(heads["b"]["loss"], nlohmann::json({nullptr, nullptr}));
  EXPECT_EQ(heads["b"]["gradient_norm"], nlohmann::json({nullptr, 0.5}));
  EXPECT_THAT(Json(0, "a")["heads"], SizeIs(1));
  EXPECT_THAT(Json(0, "c")["heads"], SizeIs(0));
  Add(0, {{"b", HeadWith(1)}});
  EXPECT_FALSE(Json()["heads"].contains("a"));
  Add(0, {{"a", HeadWith(9)}});  // another one of this name
  EXPECT_EQ(Json()["heads"]["a"]["loss"], nlohmann::json({nullptr, nullptr, nullptr, 9}));
}

TEST_F(HistoryTest, SoManyHeadsHaveSeries) {
  std::map<std::string, HeadValues> heads;
  for (size_t i = 0; i < History::kMostHeads + 5; ++i)
    heads["head-" + std::to_string(1000 + i)] = HeadWith(1);
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
  heads.erase("head-1000");
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
}

// ---- Sampler ----
// Samples of a server without calls, by times of the test's own.

class SamplerTest : public testing::Test {
 protected:
  SamplerTest() {
    EXPECT_TRUE(engine_->CreateHead("lm", {.hidden_size = 8, .vocab_size = 16}).ok());
    EXPECT_TRUE(engine_->PublishHead("lm").ok());
  }
  void SampleAfter(int seconds) { sampler_.Sample(now_ += absl::Seconds(seconds)); }
  float Last(Series series, size_t offset = 0) const {
    return (*history_.Last())[static_cast<size_t>(series) + offset];
  }
  nlohmann::json Head() const { return nlohmann::json::parse(history_.Json(1, 0, ""))["heads"]["lm"]; }

  Metrics metrics_{{.version = "1"}};
  std::unique_ptr<kernels::Backend> backend_ = *kernels::CreateCpuBackend({.threads = 1});
  std::unique_ptr<engine::Engine> engine_ =
      *engine::Engine::Create({.slice_bytes = 1024, .staging_bytes = 8192}, backend_.get(), 42, {&metrics_});
  History history_;
  Sampler sampler_{engine_.get(), backend_.get(), &metrics_, &history_};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(SamplerTest, RatesAreMeansOfTheWindow) {
  SampleAfter(0);
  EXPECT_EQ(Last(Series::kRows), 0);
  metrics_.OnChunk({.head = "lm", .rows = 1000});
  metrics_.AddPayloadIn(4096);
  SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 500);
  EXPECT_EQ(Last(Series::kBytesIn), 2048);
  for (int i = 0; i < 4; ++i) SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 100) << "ten seconds after the first sample";
  EXPECT_EQ(Head()["rows_per_second"].back(), 100);
  SampleAfter(2);
  EXPECT_EQ(Last(Series::kRows), 0) << "the rows are older than the window";
}

TEST_F(SamplerTest, QuantilesAreOfTheWindow) {
  SampleAfter(0);
  EXPECT_TRUE(std::isnan(Last(Series::kMicrobatch)));
  for (int i = 0; i < 99; ++i) metrics_.ObserveMicrobatch(0.002);
  metrics_.ObserveMicrobatch(4.0);
  SampleAfter(2);
  EXPECT_GT(Last(Series::kMicrobatch), 0.001);
  EXPECT_LE(Last(Series::kMicrobatch), 0.0025);
  EXPECT_LE(Last(Series::kMicrobatch, 2), 0.0025);
  EXPECT_TRUE(std::isnan(Last(Series::kReceive)));
  metrics_.ObserveMicrobatch(4.0);
  SampleAfter(2);
  EXPECT_GT(Last(Series::kMicrobatch, 2), 2.5);
  for (int i = 0; i < 16; ++i) SampleAfter(2);
  EXPECT_TRUE(std::isnan(Last(Series::kMicrobatch)));
}

TEST_F(SamplerTest, TheDeviceIsBusyWhileItWorks) {
  SampleAfter(0);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(engine_->ZeroGradients("lm", 0).ok());
  EXPECT_GT(engine_->stats().device_busy, absl::ZeroDuration());
  SampleAfter(2);
  EXPECT_GT(Last(Series::kDeviceBusy), 0);
  EXPECT_LE(Last(Series::kDeviceBusy), 1);
  // The thread may still be ending the last piece of its work.
  for (int i = 0; i < 1000 && Last(Series::kDeviceBusy) > 0; ++i) {
    absl::SleepFor(absl::Milliseconds(5));
    SampleAfter(2);
  }
  EXPECT_EQ(Last(Series::kDeviceBusy), 0) << "nothing was done in the window";
}

TEST_F(SamplerTest, HeadsSayWhatTheirLastStepSaid) {
  SampleAfter(0);
  EXPECT_TRUE(Head()["loss"].back().is_null());
  metrics_.OnChunk({.head = "lm", .rows = 4, .accumulating = {.loss = 10.0, .valid_rows = 4}});
  metrics_.OnStep({.head = "lm", .step = 1, .rows = 4, .grad_norm = 0.25, .learning_rate = 0.5});
  SampleAfter(2);
  EXPECT_EQ(Head()["loss"].back(), 2.5);
  EXPECT_EQ(Head()["gradient_norm"].back(), 0.25);
  EXPECT_EQ(Head()["learning_rate"].back(), 0.5);
  ASSERT_TRUE(engine_->DeleteHead("lm").ok());
  metrics_.ForgetHead("lm");
  SampleAfter(2);
  EXPECT_TRUE(Head().is_null());
  EXPECT_GT(Last(Series::kResidentBytes), 0);
  EXPECT_GT(Last(Series::kPlannedBytes), 0);
}

TEST_F(SamplerTest, ASampleWithoutAStepSaysNothingOfSteps) {
  const auto step = [this](uint64_t number, double norm) {
    metrics_.OnStep({.head = "lm", .step = number, .rows = 4, .grad_norm = norm, .learning_rate = 0.5});
  };
  step(0, 0.25);
  SampleAfter(0);
  SampleAfter(2);
  step(1, 0.5);
  step(2, 0.75);
  SampleAfter(2);
  SampleAfter(2);
  metrics_.ForgetHead("lm");  // another head of the same name follows
  step(2, 1.0);
  SampleAfter(2);
  EXPECT_EQ(Head()["gradient_norm"], nlohmann::json({0.25, nullptr, 0.75, nullptr, 1.0}));
  EXPECT_EQ(Head()["learning_rate"], nlohmann::json({0.5, nullptr, 0.5, nullptr, 0.5}));
  EXPECT_EQ(Head()["rows_per_second"], nlohmann::json({0, 0, 0, 0, 0}));
}

TEST_F(SamplerTest, AHeadThatWasMadeAnewBeginsAtZero) {
  metrics_.OnChunk({.head = "lm", .rows = 1000});
  SampleAfter(0);
  metrics_.ForgetHead("lm");
  metrics_.OnChunk({.head = "lm", .rows = 10});
  SampleAfter(2);
  EXPECT_EQ(Head()["rows_per_second"].back(), 0);
}

TEST_F(SamplerTest, SamplesByItself) {
  sampler_.Start();
  EXPECT_TRUE(history_.Last().has_value());
}

}  // namespace
}  // namespace lossd::metrics::history_test

// ---- Checkpoint lists ----

namespace lossd::metrics::checkpoint_lists_test {
namespace {

namespace fs = std::filesystem;

class CheckpointListsTest : public testing::Test {
 protected:
  void Save(uint64_t step) {
    const head::CheckpointSubject subject{
        .head = "lm", .config = {.hidden_size = 2, .vocab_size = 3}, .step = step};
    const auto zeros = [](kernels::TensorId, int64_t, int64_t, absl::Span<uint8_t> out) {
      std::fill(out.begin(), out.end(), uint8_t{0});
      return absl::OkStatus();
    };
    const auto saved = head::SaveCheckpoint(folder_.path(), "", subject, zeros);
    ASSERT_TRUE(saved.ok()) << saved.status();
    // Seconds apart.
    fs::last_write_time(
        folder_.File(absl::StrCat("lm/", saved->name, "/manifest.json")),
        fs::file_time_type::clock::now() - std::chrono::hours(1) + std::chrono::seconds(step));
  }
  // Waits until the list is as it should be, or some time has passed.
  head::NewestCheckpoints Await(CheckpointLists& lists, const std::string& head, size_t count) {
    for (int i = 0; i < 600; ++i) {
      const auto list = lists.Of(head);
      if (list.has_value() && list->ok() && (*list)->checkpoints.size() == count) return **list;
      absl::SleepFor(absl::Milliseconds(20));
    }
    ADD_FAILURE() << "there never were " << count;
    return {};
  }

  test::TempFolder folder_;
};

TEST_F(CheckpointListsTest, TheNewestAndHowManyMore) {
  for (uint64_t step = 1; step <= CheckpointLists::kShown + 3; ++step) Save(step);
  fs::create_directories(folder_.File("lm/no-checkpoint"));
  fs::create_directories(folder_.File("lm/.tmp-x-1"));
  CheckpointLists lists(folder_.path());
  const head::NewestCheckpoints newest = Await(lists, "lm", CheckpointLists::kShown);
  EXPECT_EQ(newest.checkpoints.front().name, absl::StrCat("lm/step-00000000", CheckpointLists::kShown + 3));
  EXPECT_EQ(newest.checkpoints.back().name, "lm/step-0000000004");
  EXPECT_EQ(newest.left_out, 3u);
  EXPECT_FALSE(newest.and_more);
  EXPECT_TRUE(Await(lists, "other", 0).checkpoints.empty());
}

// However many newer ones there are; and however many are damaged, the newest are listed.
TEST_F(CheckpointListsTest, DamagedOnesAreNotHidden) {
  for (uint64_t step = 1; step <= 6; ++step) Save(step);
  const auto names = [this] {
    std::string text;
    const auto newest = head::ListNewest(folder_.path(), "lm", 4, 100);
    for (const head::CheckpointInfo& info : newest->checkpoints) {
      text += info.status.ok() ? absl::StrCat(info.subject.step, " ") : "damaged ";
    }
    return absl::StrCat(text, "and ", newest->left_out);
  };
  EXPECT_EQ(names(), "6 5 4 3 and 2");
  test::WriteWholeFile(folder_.File("lm/step-0000000001/manifest.json"), "{}");  // read before as whole
  EXPECT_EQ(names(), "6 5 4 damaged and 2");
  for (const char* step : {"2", "3", "4"}) {
    test::WriteWholeFile(folder_.File(absl::StrCat("lm/step-000000000", step, "/manifest.json")), "{}");
  }
  EXPECT_EQ(names(), "6 5 damaged damaged and 2");
  test::WriteWholeFile(folder_.File("lm/step-0000000005/manifest.json"), "{}");
  EXPECT_EQ(names(), "6 damaged damaged damaged and 2");
}

TEST_F(CheckpointListsTest, FollowsWhatChanges) {
  CheckpointLists lists(folder_.path());
  EXPECT_TRUE(Await(lists, "lm", 0).checkpoints.empty());
  Save(1);
  EXPECT_EQ(Await(lists, "lm", 1).checkpoints[0].subject.step, 1u);
  fs::remove_all(folder_.File("lm"));
  EXPECT_TRUE(Await(lists, "lm", 0).checkpoints.empty());
}

// However long nobody has looked.
TEST_F(CheckpointListsTest, AnOldListIsNotShown) {
  CheckpointLists lists(folder_.path());
  Save(1);
  Await(lists, "lm", 1);
  fs::remove_all(folder_.File("lm"));
  absl::SleepFor(CheckpointLists::kOld + absl::Seconds(1));
  const auto list = lists.Of("lm");
  ASSERT_TRUE(list.has_value() && list->ok());
  EXPECT_TRUE((*list)->checkpoints.empty());
}

TEST_F(CheckpointListsTest, WhatIsReadIsBounded) {
  for (int i = 0; i < 30; ++i) fs::create_directories(folder_.File(absl::StrCat("lm/x", i)));
  Save(1);
  const auto some = head::ListNewest(folder_.path(), "lm", 20, 10);
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_TRUE(some->and_more);
  EXPECT_LE(some->checkpoints.size(), 1u);
  EXPECT_EQ(head::ListNewest(folder_.path(), "..", 20, 10).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CheckpointListsTest, OfManyHeadsAndOfNoDirectory) {
  CheckpointLists none("");
  EXPECT_TRUE((*none.Of("lm"))->checkpoints.empty());
  CheckpointLists lists(folder_.path());
  for (size_t i = 0; i < CheckpointLists::kMostHeads + 50; ++i) lists.Of(absl::StrCat("head", i));
  EXPECT_TRUE(Await(lists, "head0", 0).checkpoints.empty());
}

}  // namespace
}  // namespace lossd::metrics::checkpoint_lists_test
