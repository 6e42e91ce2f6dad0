// SPDX-License-Identifier: Apache-2.0
// Golden cases of addresses, and of what is found there.
#include <gtest/gtest.h>

#include <csignal>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/probe.h"
#include "kernels/clocks/clock.h"
#include "tests/client/cpp/golden.h"
#include "tests/client/cpp/listener.h"
#include "tests/support/test_pki.h"

namespace lossd::client::golden {
namespace {

// The certificate "server" of the authority "ca", and an authority "other" that has signed nothing.
const test::TestPki& Pki() {
  static const auto* const pki = [] {
    auto* made = new test::TestPki();
    made->MakeAuthority("other");
    return made;
  }();
  return *pki;
}

std::shared_ptr<const Credentials> CredentialsNamed(const std::string& client) {
  if (client == "plain") return Credentials::Insecure();
  const std::string ca = Pki().Certificate(client == "trusts" ? "ca" : "other");
  return Credentials::Create({.ca = ca, .cert = "", .key = "", .token = ""}).value();
}

absl::Status Connect(const std::string& target, const std::string& client, absl::Duration patience) {
  return Client::Connect({.target = target,
                          .credentials = CredentialsNamed(client),
                          .channels = 1,
                          .connect_timeout = patience})
      .status();
}

}  // namespace

void RunTargets(const json& c) {
  const std::string target = c.at("target");
  if (c.contains("fails")) {
    CheckMembers(c, {"target", "fails"});
    return CheckStatus(c, Client::Connect({.target = target}).status());
  }
  CheckMembers(c, {"target", "host", "port", "socket", "local"});
  EXPECT_EQ(internal::TargetProblem(target), "");
  EXPECT_EQ(json(internal::HostAndPortOf(target).host), c["host"]);
  EXPECT_EQ(json(internal::HostAndPortOf(target).port), c["port"]);
  EXPECT_EQ(json(internal::SocketPathOf(target)), c["socket"]);
  EXPECT_EQ(IsLocalTarget(target), c["local"]);
}

void RunListeners(const json& c) {
  std::signal(SIGPIPE, SIG_IGN);  // of the listener's TLS
  const bool silent = absl::StrContains(c.at("fails").at("says").get<std::string>(), "has not answered");
  const absl::Duration patience = silent ? absl::Seconds(2) : absl::Minutes(4);
  const absl::Time start = clocks::SteadyNow();
  if (c.contains("listens")) {
    CheckMembers(c, {"listens", "client", "fails"});
    std::string target;
    {
      const Listener gone("");
      target = gone.target();
    }
    CheckStatus(c, Connect(target, c["client"], patience));
  } else {
    CheckMembers(c, {"words", "tls", "client", "fails"});
    std::optional<std::string> words;
    if (!c["words"].is_null()) words = FromHex(c["words"]);
    std::pair<std::string, std::string> certificate;
    if (c["tls"]) certificate = {Pki().Certificate("server"), Pki().Key("server")};
    const Listener listener(words, certificate);
    CheckStatus(c, Connect(listener.target(), c["client"], patience));
  }
  EXPECT_LT(clocks::SteadyNow() - start, absl::Minutes(2)) << "it waited for its timeout";
}

}  // namespace lossd::client::golden
