// SPDX-License-Identifier: Apache-2.0
// A whole server in this process, on a free loopback port, with a folder of its own; gone with the object.
#ifndef LOSSD_TESTS_SERVER_SERVICE_TEST_SERVER_H_
#define LOSSD_TESTS_SERVER_SERVICE_TEST_SERVER_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/app/server.h"
#include "server/log/log.h"
#include "tests/server/service/service_client.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing {

inline ServerOptions SmallServer() {
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.http = "";
  options.version = "test";
  options.threads = 1;
  options.slice_bytes = 64 << 10;
  options.staging_bytes = 1 << 20;
  options.retained_bytes = 256 << 10;
  options.workspace_bytes = 1 << 20;
  return options;
}

class TestServer {
 public:
  explicit TestServer(ServerOptions options = SmallServer()) {
    options.checkpoint_directory = folder_.File("checkpoints");
    log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
    auto server = Server::Start(options);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  Server& server() { return *server_; }
  std::string target() const { return server_->grpc_address(); }
  std::string checkpoint_directory() const { return folder_.File("checkpoints"); }
  std::unique_ptr<TestClient> Connect() const { return TestClient::Connect(target()); }
  void Stop() { server_.reset(); }

 private:
  test::TempFolder folder_;
  std::unique_ptr<Server> server_;
};

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_TEST_SERVER_H_
