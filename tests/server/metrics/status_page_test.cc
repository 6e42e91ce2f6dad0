#include "server/metrics/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"

namespace lossd::metrics {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(StatusPageTest, Escapes) {
  EXPECT_EQ(EscapeHtml("<script>alert(\"1\" & '2')</script>"),
            "&lt;script&gt;alert(&quot;1&quot; &amp; &#39;2&#39;)&lt;/script&gt;");
}

TEST(StatusPageTest, FormatsForPeople) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(3.2 * (1 << 30)), "3.2 GiB");
  EXPECT_EQ(FormatSeconds(0), "0");
  EXPECT_EQ(FormatSeconds(35e-6), "35 us");
  EXPECT_EQ(FormatSeconds(0.0012), "1.2 ms");
  EXPECT_EQ(FormatSeconds(3.42), "3.4 s");
}

TEST(StatusPageTest, ShowsHeadsMemoryAndThroughput) {
  Metrics metrics({.version = "9.9"});
  const auto backend = *kernels::CreateCpuBackend({.threads = 1});
  const auto engine =
      *engine::Engine::Create({.slice_bytes = 1024, .staging_bytes = 8192}, backend.get(), 42, {&metrics});
  ASSERT_TRUE(engine->CreateHead("<b>main</b>", {.hidden_size = 8, .vocab_size = 1234567}).ok());
  ASSERT_TRUE(engine->PublishHead("<b>main</b>").ok());
  StatusPage page({.version = "9.9 <x>", .grpc_address = "127.0.0.1:1", .started = absl::Now()}, engine.get(),
                  backend.get(), &metrics);
  const std::string first = page.Render(false);
  EXPECT_THAT(first, HasSubstr("&lt;b&gt;main&lt;/b&gt;"));
  EXPECT_THAT(first, Not(HasSubstr("<b>main</b>")));
  EXPECT_THAT(first, HasSubstr("9.9 &lt;x&gt;"));
  EXPECT_THAT(first, HasSubstr("<td>1,234,567</td>"));
  EXPECT_THAT(first, HasSubstr("8.0 KiB"));
  EXPECT_THAT(first, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(first, HasSubstr("href=\"/metrics\""));
  EXPECT_THAT(first, Not(HasSubstr("(draining)")));
  EXPECT_THAT(first, Not(HasSubstr("http://")));
  EXPECT_THAT(first, Not(HasSubstr("<script")));
  metrics.OnChunk({.head = "<b>main</b>", .rows = 1000});
  const std::string second = page.Render(true);
  EXPECT_THAT(second, HasSubstr("<b>1,000</b><span>rows computed"));
  EXPECT_THAT(second, HasSubstr("(draining)"));
}

}  // namespace
}  // namespace lossd::metrics
