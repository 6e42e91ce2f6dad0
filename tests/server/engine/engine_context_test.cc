// SPDX-License-Identifier: Apache-2.0
#include "server/engine/engine_context.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"

namespace lossd::engine::engine_context_test {
namespace {

using ::testing::HasSubstr;

// Each part of the memory is too much once.
TEST(EngineContextTest, MemoryThatCannotBeHadIsAnError) {
  constexpr int64_t kMebibyte = int64_t{1} << 20;
  EngineOptions fits;
  fits.slice_bytes = 8192;
  fits.staging_bytes = fits.retained_bytes = fits.ledger_bytes = kMebibyte;
  EngineOptions staging = fits, retained = fits, ledger = fits;
  staging.staging_bytes = retained.retained_bytes = ledger.ledger_bytes = 64 * kMebibyte;
  for (const EngineOptions& options : {fits, staging, retained, ledger}) {
    auto backend = kernels::CreateCpuBackend({.threads = 1, .memory_limit_bytes = 8 * kMebibyte});
    ASSERT_TRUE(backend.ok()) << backend.status();
    const auto engine = Engine::Create(options, backend->get(), 42, {});
    const bool large = options.staging_bytes + options.retained_bytes + options.ledger_bytes > 8 * kMebibyte;
    EXPECT_EQ(engine.status().code(), large ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk)
        << engine.status();
    EXPECT_THAT(std::string(engine.status().message()), HasSubstr(large ? "memory" : ""));
  }
}

}  // namespace
}  // namespace lossd::engine::engine_context_test
