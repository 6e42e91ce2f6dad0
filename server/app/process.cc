// SPDX-License-Identifier: Apache-2.0
#include "server/app/process.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/device_choice.h"
#include "server/log/log.h"

namespace lossd::app {

namespace {

// As many descriptors as the system lets the process have, up to what all connections together may take:
// 1,024, which shells and service managers give, is what the largest of their limits take alone.
void RaiseDescriptorLimit() {
  constexpr rlim_t kEnough = 65'536;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnough) return;
  limit.rlim_cur = std::min(kEnough, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

void PrepareProcess() {
  RaiseDescriptorLimit();
  BoundFreedMemory();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of the write, not the end of the server
  kernels::SetNcclDefaults();
}

namespace {

constexpr int kArenas = 8;
constexpr int kMappedBytes = 8 << 20;
constexpr int kKeptBytes = 8 << 20;  // at the end of each arena
constexpr size_t kFreeBytes = 16 << 20;

}  // namespace

void BoundFreedMemory() {
  mallopt(M_ARENA_MAX, kArenas);
  // Either of these also ends the adaptation.
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
}

void GiveBackFreedMemory() {
  if (mallinfo2().fordblks > kFreeBytes) malloc_trim(/*pad=*/0);
}

void EndWithin(absl::Duration limit, int status, std::string what) {
  std::thread([limit, status, what = std::move(what)] {
    std::this_thread::sleep_for(absl::ToChronoNanoseconds(limit));
    log::Log(log::LogLevel::kError, absl::StrCat(what, " does not end: leaving at once"),
             {{"status", status}});
    _exit(status);
  }).detach();
}

namespace {

// Linking the library of the reflection service adds the service to every server already, where the library
// registers itself. So the option removes that one first.
class Reflection final : public grpc::ServerBuilderOption {
 public:
  explicit Reflection(bool wanted) : wanted_(wanted) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    auto reflection = std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>();
    const std::string name = reflection->name();
    std::erase_if(*plugins, [&](const auto& plugin) { return plugin->name() == name; });
    if (wanted_) plugins->push_back(std::move(reflection));
  }

 private:
  const bool wanted_;
};

}  // namespace

void SetReflection(bool wanted, grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<Reflection>(wanted));
}

}  // namespace lossd::app
