// SPDX-License-Identifier: Apache-2.0
// Calls every method of the protocol on the linked server: as nobody, with a role that is too low, and with
// one that is high enough. So a method whose service forgets to ask who calls is found.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "server/rpc/access_control.h"
#include "tests/server/app/security_fixture.h"

namespace lossd::services_access_test {
namespace {

using access::Role;

class ServicesAccessTest : public SecurityFixture {
 protected:
  // What a call with one empty message ends with.
  grpc::Status Call(const rpc::MethodAccess& method, const std::string& token) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    const auto call =
        stub.PrepareCall(&context, absl::StrCat("/", method.service, "/", method.method), &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
      return ok;
    };
    call->StartCall(nullptr);
    wait();
    const grpc::Slice nothing;
    call->WriteLast(grpc::ByteBuffer(&nothing, 1), {}, nullptr);
    wait();
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    return status;
  }

  const std::unique_ptr<test::ServerProcess> server_ = Serve({TokenFlag()});
  const std::shared_ptr<grpc::Channel> channel_ =
      grpc::CreateChannel(server_->target(), grpc::InsecureChannelCredentials());
};

TEST_F(ServicesAccessTest, EveryMethodAsksWhoCallsAndWhatTheyMay) {
  const std::pair<Role, const char*> callers[] = {
      {Role::kReader, kReaderToken}, {Role::kTrainer, kTrainerToken}, {Role::kAdmin, kAdminToken}};
  for (const rpc::MethodAccess& method : rpc::MethodAccessTable()) {
    EXPECT_EQ(Call(method, "").error_code(), grpc::StatusCode::UNAUTHENTICATED) << method.method;
    EXPECT_EQ(Call(method, "of-nobody-0123456789").error_code(), grpc::StatusCode::UNAUTHENTICATED)
        << method.method;
    for (const auto& [role, token] : callers) {
      const grpc::Status status = Call(method, token);
      if (role < method.role) {
        EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method.method;
        EXPECT_NE(status.error_message().find(std::string(method.method)), std::string::npos);
      } else {
        EXPECT_NE(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method.method;
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method.method;
      }
    }
  }
}

TEST_F(ServicesAccessTest, HealthIsForEverybodyAndReflectionIsNotThere) {
  EXPECT_TRUE(Call({.service = "grpc.health.v1.Health", .method = "Check"}, "").ok());
  EXPECT_EQ(
      Call({.service = "grpc.reflection.v1alpha.ServerReflection", .method = "ServerReflectionInfo"}, "")
          .error_code(),
      grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace lossd::services_access_test
