// SPDX-License-Identifier: Apache-2.0
// Tests of status_page.h: HTML, the page itself, and its lists of checkpoints.
#include "server/metrics/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
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
