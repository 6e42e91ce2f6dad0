// SPDX-License-Identifier: Apache-2.0
// What comes of a TLS handshake on a connection of a probe (probe.h), and what is in files of certificates.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_PROBE_TLS_H_
#define LOSSD_CLIENT_CPP_PROBE_TLS_H_

#include <optional>
#include <string>

#include "client/cpp/probe.h"

namespace lossd::client::internal {

enum class TlsEnd {
  kNoTls,      // the other side does not speak it, or hung up
  kSilent,     // it says nothing
  kRefused,    // it ended the handshake with an alert
  kHandshake,  // the handshake is complete
};

struct TlsTalk {
  TlsEnd end = TlsEnd::kNoTls;
  std::string distrust;              // why its certificate is not trusted; empty if it is, or if none came
  std::optional<std::string> words;  // kHandshake: see FirstWords()
};

// Greets a server as a client of `host` would.
TlsTalk TalkTls(int descriptor, const std::string& host, const TlsFiles& files);

// What keeps these files from being used, and which it is ("ca", "cert" or "key"); an empty option if
// nothing.
struct FileProblem {
  std::string option;
  std::string problem;
};
FileProblem ProblemOf(const TlsFiles& files);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PROBE_TLS_H_
