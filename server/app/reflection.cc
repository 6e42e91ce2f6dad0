// SPDX-License-Identifier: Apache-2.0
#include "server/app/reflection.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lossd::app {
namespace {

// Linking its library adds it
// to every server already, where the library registers itself.
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
